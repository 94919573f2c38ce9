# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands that make REFUEL's data sets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dschat.evaluation.generate_options import MODEL_HELP, TEMPERATURE, ComputeFlags, GenerationFlags, ModelOptions
from dschat.evaluation.options import RequestFlags
from dschat.settings.common import SEED
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, UP_TO_1, flag
from dschat.settings.rules import Rule, Rules
from dschat.turns.user_settings import ONE_USER, UserFlags

ULTRAINTERACT = "openbmb/UltraInteract_pair"
LLAMA_USER = "meta-llama/Meta-Llama-3.1-70B-Instruct"


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class RefuelOutputFlags:
    """Working folder and destination of a data set."""

    output_repo: str = flag("where to write the data set: a folder, or owner/name on the Hugging Face hub", path=True)
    output_dir: Path | None = flag(
        "folder for unfinished rows, and for the data set before it is uploaded; if not given, --output_repo"
        " if it is a folder, else a folder of its name",
        None,
    )
    public: bool = flag("create a public data set on the hub", False)
    overwrite: bool = flag(
        "replace a finished result, or an incomplete one that was begun without this flag or with other settings",
        False,
    )


@dataclass(kw_only=True, frozen=True)
class DialogueSamplingFlags:
    """The policy, its first messages, and how dialogues are sampled."""

    model: str = flag(MODEL_HELP, path=True)
    prompts: str = flag(
        "first user messages: a file, folder or data set of the hub with a column messages, trajectory or prompt",
        ULTRAINTERACT,
        path=True,
    )
    num_data: int = flag("number of dialogues; 0 = one per first message", 0, AT_LEAST_0)
    num_turns: int = flag("turns per dialogue", 5, AT_LEAST_1)
    temperature: float = flag("sampling temperature of policy and user; 0 = greedy decoding", 0.8, TEMPERATURE)
    top_p: float = flag("sample from the most likely tokens whose probabilities add up to this; 1 = all", 1.0, UP_TO_1)
    seed: int = flag("random seed of sampling, and of the choice of the turns that are compared", 0, SEED)


@dataclass(kw_only=True, frozen=True)
class RankFlags:
    """The dialogues to score, and what scores them."""

    prompts: str = flag("data set that `refuel-data generate` wrote: a folder, or owner/name on the hub", path=True)
    reward_model: str | None = flag(
        "reward model that scores dialogues: folder or hub id of a sequence classifier with one label", None, path=True
    )
    reward_function: str | None = flag(
        "function that scores dialogues instead: module.py:function, called with (dialogues, rows), which returns one"
        " number per dialogue; None marks a failure",
        None,
        path=True,
    )
    max_length: int = flag(
        "maximum dialogue length in the reward model's tokens; longer dialogues get no score", 4096, AT_LEAST_1
    )
    batch_size: int = flag("dialogues per forward pass of the reward model", 8, AT_LEAST_1)


@dataclass(kw_only=True, frozen=True)
class TokenPairFlags:
    """The scored dialogues, and the pairs of tokens made from them."""

    input_repo: str = flag("data set that `refuel-data rank` wrote: a folder, or owner/name on the hub", path=True)
    model: str = flag(
        "policy whose tokenizer is used: folder or hub id",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        path=True,
        aliases=["--tokenizer"],
    )
    total_length: int = flag(
        "maximum tokens per dialogue, to which all rows are padded; longer dialogues are dropped", 2048, AT_LEAST_1
    )
    test_rows: int = flag("number of pairs to hold out for evaluation, at most one in ten", 500, AT_LEAST_0)


# -- commands

OUTPUT_RULE: "Rule[DataSetOptions]" = Rule(
    lambda options: not options.output.output_repo.strip("/"),
    "--output_repo is empty: give a folder, or owner/name on the hub.",
)


class DataSetOptions(ModelOptions):
    """Flags of every command that makes one of REFUEL's data sets."""

    rules: ClassVar[Rules] = (OUTPUT_RULE,)

    output: RefuelOutputFlags


class GenerateOptions(DataSetOptions):
    """Roll out dialogues of a policy with a simulated user, and each of them once more from one of its turns on.

    Writes train.jsonl: trajectory, trajectory_sampled_h_from_sampled_len, sampled_len_from_5,
    sampled_h_from_sampled_len. If it is interrupted, the same command continues it. The key of a
    server comes from USER_API_KEY.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "user_model": LLAMA_USER,
        "max_new_tokens": 1024,
        "batch_size": 64,
        "concurrency": 32,
        "timeout": 600.0,
    }
    helps: ClassVar[dict[str, str]] = {
        "max_new_tokens": "maximum length of a reply and of a user message, in tokens",
        "batch_size": "dialogues that are sampled together; those of an interrupted batch are sampled again",
        "concurrency": "number of concurrent requests to the server",
        "timeout": "time-out of a request to the server, in seconds",
        "user_model": "model that plays the user: a folder or hub id, or with --user_server the model's name on the"
        " server",
        "user_server": "address of an OpenAI-compatible server that runs --user_model",
        "user_function": "function that plays the user instead: module.py:function from dialogues to their next user"
        " messages",
    }
    rules: ClassVar[Rules] = (
        OUTPUT_RULE,
        ONE_USER,
        Rule(
            lambda options: not options.user.user_model and not options.user.user_function,
            "--user_model is empty: give the model that plays the user, or --user_function.",
        ),
    )

    dialogues: DialogueSamplingFlags
    user: UserFlags
    generation: GenerationFlags
    requests: RequestFlags
    compute: ComputeFlags


class RankOptions(DataSetOptions):
    """Score the dialogues of `dschat refuel-data generate` with a reward model, as they stand at the end of each turn.

    Writes train.jsonl: the columns it read, and the rewards of both dialogues; what could not be scored is -99999.
    If it is interrupted, the same command continues it.
    """

    rules: ClassVar[Rules] = (
        OUTPUT_RULE,
        Rule(
            lambda options: (options.ranking.reward_model is None) == (options.ranking.reward_function is None),
            "give either --reward_model or --reward_function: one of them scores the dialogues.",
        ),
    )

    ranking: RankFlags
    compute: ComputeFlags


class MaskOptions(DataSetOptions):
    """Make pairs of tokens and masks from the scored dialogues of `dschat refuel-data rank`, for `dschat refuel`.

    Writes train.parquet and test.parquet: chosen, reject, and of each _token, _mask and _reward.
    """

    pairs: TokenPairFlags
