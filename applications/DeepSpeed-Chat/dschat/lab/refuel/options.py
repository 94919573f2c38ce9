# SPDX-License-Identifier: Apache-2.0
"""The flags of the commands that make REFUEL's data sets."""

from dataclasses import dataclass
from pathlib import Path

from dschat.base.errors import UserError
from dschat.data.options import PrepareOptions
from dschat.lab.generate_options import (
    MODEL_HELP,
    TEMPERATURE,
    ComputeFlags,
    Engine,
    InferenceOptions,
    PolicyOptions,
    PromptFlags,
    QuietFlags,
    ScoredOptions,
)
from dschat.lab.options import AskingOptions
from dschat.settings.commands import PushOptions
from dschat.settings.common import OptimisationFlags, OutputFlags
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, REQUIRED, flag, like
from dschat.settings.refuel import DialogueFlags
from dschat.settings.rollouts import RolloutFlags, SamplingFlags

ULTRAINTERACT = "openbmb/UltraInteract_pair"
LLAMA_USER = "meta-llama/Meta-Llama-3.1-70B-Instruct"


@dataclass(kw_only=True)
class RefuelOutputFlags(QuietFlags):
    """Where a command that makes REFUEL's data puts them."""

    output_repo: str = flag("gets the data set: a folder, or owner/name on the Hugging Face hub", path=True)
    output_dir: Path | None = like(
        OutputFlags,
        "output_dir",
        None,
        "folder for unfinished rows, and for the data set before it is pushed (--output_repo where that is a folder, "
        "else its name)",
    )
    public: bool = like(PushOptions, "public", help="let everybody see a data set that is pushed")
    overwrite: bool = like(PolicyOptions, "overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_repo.strip("/"):
            raise UserError("--output_repo is empty: give a folder, or owner/name on the hub.")


@dataclass(kw_only=True)
class GenerateOptions(RefuelOutputFlags, ComputeFlags):
    """Roll out dialogues of a policy with a simulated user, and each of them once more from one of its turns on.

    Writes train.jsonl: trajectory, trajectory_sampled_h_from_sampled_len, sampled_len_from_5,
    sampled_h_from_sampled_len. Killed and started again with the same flags, it goes on where it stood. The key of a
    server comes from OPENAI_API_KEY.
    """

    model: str = like(InferenceOptions, "model", REQUIRED, MODEL_HELP)
    prompts: str = flag(
        "first messages of users: a file, folder or data set of the hub, with a column messages, trajectory or prompt",
        ULTRAINTERACT,
        path=True,
    )
    num_data: int = flag("dialogues, 0 = one for each first message", 0, AT_LEAST_0)
    num_turns: int = flag("turns of a dialogue", 5, AT_LEAST_1)
    temperature: float = like(SamplingFlags, "temperature", 0.8, "of policy and user, 0 = greedy", TEMPERATURE)
    top_p: float = like(RolloutFlags, "top_p")
    max_new_tokens: int = like(
        PromptFlags, "max_new_tokens", 1024, "longest reply and longest message of the user, in tokens"
    )
    seed: int = like(OptimisationFlags, "seed", 0, "of the draws, and of the turns that are compared")
    batch_size: int = like(PromptFlags, "batch_size", 64, "dialogues at once; a kill loses so many at most")
    rollout_engine: Engine = like(PromptFlags, "rollout_engine")
    user_model: str = flag(
        "who plays the user: with --user_server the name of its model, else a folder or hub id",
        LLAMA_USER,
        path=True,
    )
    user_server: str | None = flag("address of an OpenAI-compatible server that has --user_model", None)
    user_function: str | None = flag(
        "module.py:function in the user's place: dialogues → next messages", None, path=True
    )
    concurrency: int = like(AskingOptions, "concurrency", 32, "requests to the server at the same time")
    timeout: float = like(AskingOptions, "timeout", 600.0, "seconds to wait for an answer of the server")
    max_tries: int = like(AskingOptions, "max_tries")

    top_k = 0  # all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user_server and self.user_function:
            raise UserError("--user_server and --user_function both play the user: drop one of them.")


@dataclass(kw_only=True)
class RankOptions(RefuelOutputFlags, ComputeFlags):
    """Score the dialogues of `dschat refuel-data generate` with a reward model, as they stand at the end of each turn.

    Writes train.jsonl: the columns it read, and the rewards of both dialogues; what could not be scored is -99999.
    Killed and started again with the same flags, it goes on where it stood.
    """

    prompts: str = like(
        GenerateOptions, "prompts", REQUIRED, "what `refuel-data generate` wrote: a folder, or owner/name"
    )
    reward_model: str | None = like(ScoredOptions, "reward_model", None)
    reward_function: str | None = like(
        DialogueFlags,
        "reward_function",
        help="module.py:function in its place: dialogues → numbers, None for failures",
    )
    max_length: int = like(
        PrepareOptions,
        "max_length",
        4096,
        "longest dialogue in the reward model's tokens; longer ones fail",
        AT_LEAST_1,
    )
    batch_size: int = like(PromptFlags, "batch_size", 8, "dialogues that the reward model reads at once")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reward_model is None) == (self.reward_function is None):
            raise UserError("give either --reward_model or --reward_function: one of them scores the dialogues.")


@dataclass(kw_only=True)
class MaskOptions(RefuelOutputFlags):
    """Make pairs of tokens and masks from the scored dialogues of `dschat refuel-data rank`, for `dschat refuel`.

    Writes train.parquet and test.parquet: chosen, reject, and of each _token, _mask and _reward.
    """

    input_repo: str = flag("what `refuel-data rank` wrote: a folder, or owner/name on the hub", path=True)
    model: str = like(
        InferenceOptions,
        "model",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "folder or hub id of the policy, for its tokenizer",
        aliases=["--tokenizer"],
    )
    total_length: int = flag("most tokens of a dialogue; all rows are padded to it", 2048, AT_LEAST_1)
    test_rows: int = flag("pairs held out, one in ten at most", 500, AT_LEAST_0)
    # Draws no tokens, so that it may be any whole number from 0.
    seed: int = like(OptimisationFlags, "seed", 0, "of the choice of pairs that are held out", AT_LEAST_0)
