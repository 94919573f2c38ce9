# SPDX-License-Identifier: Apache-2.0
"""The flags of the scripts that make REFUEL's data, checked before anything slow is imported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat.common.script import flag
from dschat.config.rollouts import engine_name
from dschat.errors import UserError
from dschat.inference.options import DTYPES, ENGINES
from dschat.inference.values import check_known, flag_of

ULTRAINTERACT = "openbmb/UltraInteract_pair"
LLAMA_USER = "meta-llama/Meta-Llama-3.1-70B-Instruct"


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the result goes. A field is a flag: its name, type, default and help line."""

    output_repo: str = flag("gets the data set: a folder, or owner/name on the Hugging Face hub")
    output_dir: Path | None = flag(
        "folder for unfinished rows, and for the data set before it is pushed (--output-repo where that is a folder, "
        "else its name)",
        None,
    )
    public: bool = flag("let everybody see a data set that is pushed", False)
    overwrite: bool = flag("start anew, dropping a finished data set or a run begun without this flag", False)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        if not self.output_repo.strip("/"):
            raise UserError("--output-repo is empty: give a folder, or owner/name on the hub.")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where models compute."""

    device: str | None = flag("cpu, cuda or cuda:N (a GPU where there is one)", None)
    dtype: str | None = flag("of the models: fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)", None)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PlaceOptions, DeviceOptions):
    """What generate.py is told."""

    model: str = flag("policy: folder or hub id, with or without /actor")
    prompts: str = flag(
        "first messages of users: a file, folder or data set of the hub, with a column messages, trajectory or prompt "
        "(%(default)s)",
        ULTRAINTERACT,
    )
    num_data: int = flag("dialogues, 0 = one for each first message (%(default)s)", 0)
    num_turns: int = flag("turns of a dialogue (%(default)s)", 5)
    temperature: float = flag("of policy and user, 0 = greedy (%(default)s)", 0.8)
    top_p: float = flag("draw from the likeliest tokens of this share, 1 = all (%(default)s)", 1.0)
    max_new_tokens: int = flag("longest reply and longest message of the user, in tokens (%(default)s)", 1024)
    seed: int = flag("of the draws, and of the turns that are compared (%(default)s)", 0)
    batch_size: int = flag("dialogues at once; a kill loses so many at most (%(default)s)", 64)
    rollout_engine: str = flag("what draws: continuous or generate (%(default)s)", "continuous")
    user_model: str = flag(
        "who plays the user: with --user-server the name of its model, else a folder or hub id (%(default)s)",
        LLAMA_USER,
    )
    user_server: str | None = flag("address of an OpenAI-compatible server that has --user-model", None)
    user_function: str | None = flag("module.py:function in the user's place: dialogues → next messages", None)
    concurrency: int = flag("requests to the server at the same time (%(default)s)", 32)
    timeout: float = flag("seconds to wait for an answer of the server (%(default)s)", 600.0)
    max_tries: int = flag("times to send a request (%(default)s)", 8)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        _check_compute(self, ["num_turns", "max_new_tokens", "batch_size", "concurrency", "max_tries"])
        object.__setattr__(self, "rollout_engine", engine_name(self.rollout_engine))
        check_known("rollout_engine", self.rollout_engine, ENGINES)
        if self.num_data < 0:
            raise UserError(f"--num-data {self.num_data}: must be 0 (all) or more.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed}: must be between 0 and {2**32 - 1}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature {self.temperature}: must be 0 (greedy) or a positive number, such as 0.8.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1 (all tokens).")
        if not 0 < self.timeout < math.inf:
            raise UserError(f"--timeout {self.timeout}: must be a number of seconds above 0.")
        if self.user_server and self.user_function:
            raise UserError("--user-server and --user-function both play the user: drop one of them.")


@dataclass(frozen=True, kw_only=True)
class RankOptions(PlaceOptions, DeviceOptions):
    """What rank.py is told."""

    prompts: str = flag("what generate.py wrote: a folder, or owner/name on the hub")
    reward_model: str | None = flag("folder or hub id of a sequence classifier with one label", None)
    reward_function: str | None = flag("module.py:function in its place: dialogues → numbers, None for failures", None)
    max_length: int = flag("longest dialogue in the reward model's tokens; longer ones fail (%(default)s)", 4096)
    batch_size: int = flag("dialogues that the reward model reads at once (%(default)s)", 8)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        _check_compute(self, ["max_length", "batch_size"])
        if (self.reward_model is None) == (self.reward_function is None):
            raise UserError("give either --reward-model or --reward-function: one of them scores the dialogues.")


@dataclass(frozen=True, kw_only=True)
class MaskOptions(PlaceOptions):
    """What tokenize_masks.py is told."""

    input_repo: str = flag("what rank.py wrote: a folder, or owner/name on the hub")
    model: str = flag("folder or hub id of the policy, for its tokenizer (%(default)s)",
                      "meta-llama/Meta-Llama-3-8B-Instruct", also="tokenizer")  # fmt: skip
    total_length: int = flag("most tokens of a dialogue; all rows are padded to it (%(default)s)", 2048)
    test_rows: int = flag("pairs held out, one in ten at most (%(default)s)", 500)
    seed: int = flag("of the choice of pairs that are held out (%(default)s)", 0)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        _at_least_1(self, ["total_length"])
        for name in ("test_rows", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{flag_of(name)} {getattr(self, name)}: must be 0 or more.")


def _check_compute(options: DeviceOptions, counts: Sequence[str]) -> None:
    check_known("dtype", options.dtype, (None, *DTYPES))
    _at_least_1(options, counts)


def _at_least_1(options: object, names: Sequence[str]) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise UserError(f"{flag_of(name)} {getattr(options, name)}: must be at least 1.")
