# SPDX-License-Identifier: Apache-2.0
"""The flags of `dschat data`: check, preview and prepare."""

from dataclasses import dataclass
from typing import Literal

from dschat.base.errors import UserError
from dschat.data.hub import DATA_VARIABLE, KNOWN_SETS
from dschat.data.prepared.folder import SKIPPED
from dschat.settings.commands import ResultFlags
from dschat.settings.common import ColumnFlags, DataFlags, OptimisationFlags
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, BELOW_1, REQUIRED, Range, check_values, flag, like
from dschat.settings.macro_actions import MacroActionsOptions
from dschat.settings.plan import PlanOptions
from dschat.settings.rewards import ProgramFlags, SandboxLevel
from dschat.settings.rollouts import SamplingFlags
from dschat.settings.supervised import ModelFlags, SFTFlags

PATH_HELP = (
    "a .jsonl, .json, .csv (each also as .gz) or .parquet file, a folder with train* files or from save_to_disk, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)
AT_LEAST_2: Range = (lambda number: number >= 2, "a whole number of at least 2")


@dataclass(kw_only=True)
class RowOptions:
    """The flags of all three commands."""

    paths: list[str] = flag(PATH_HELP, positional=True, path=True)
    tokenizer: str | None = flag("folder or hub id of the model, for lengths in tokens", None, path=True)
    end_of_conversation_token: str | None = like(DataFlags, "end_of_conversation_token")
    prompt_key: str = like(ColumnFlags, "prompt_key")
    chosen_key: str = like(ColumnFlags, "chosen_key")
    rejected_key: str = like(ColumnFlags, "rejected_key")
    response_key: str = like(ColumnFlags, "response_key")
    messages_key: str = like(ColumnFlags, "messages_key")
    apply_chat_template: bool = like(ColumnFlags, "apply_chat_template")
    seed: int = like(OptimisationFlags, "seed", help="seed of the splits")

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        check_values(self)
        token = self.end_of_conversation_token
        if token is not None and self.tokenizer is None:
            raise UserError(f"--end_of_conversation_token {token}: give the model's --tokenizer, too.")


@dataclass(kw_only=True)
class LookOptions(RowOptions):
    """Those of check and preview."""

    max_seq_len: int = like(ModelFlags, "max_seq_len", help="longest prompt and response (steps 1, 2)")
    max_prompt_seq_len: int = like(SamplingFlags, "max_prompt_seq_len", help="longest prompt (step 3)")
    train_on: Literal["all", "last"] = like(SFTFlags, "train_on")


@dataclass(kw_only=True)
class CheckOptions(LookOptions):
    """Look at data before training: columns, counts, what is dropped and why, shares, duplicates, lengths."""

    data_split: str | None = like(DataFlags, "data_split")
    run_solutions: int = flag(
        "run the reference solutions of so many rows of APPS, the first, on their tests", 0, AT_LEAST_0
    )
    sandbox_level: SandboxLevel = like(ProgramFlags, "sandbox_level")


@dataclass(kw_only=True)
class PreviewOptions(LookOptions):
    """Show the first rows as training sees them, with prompt, response and padding."""

    rows: int = flag("number of rows", 3, AT_LEAST_1, aliases=["-n"])
    step: Literal[1, 2, 3] | None = like(
        PlanOptions, "step", help="training step; the first that the rows suit if not given", choices=(1, 2, 3)
    )
    colour: Literal["auto", "always", "never"] = like(
        MacroActionsOptions, "colour", "auto", "mark parts", aliases=["--color"]
    )


@dataclass(kw_only=True)
class PrepareOptions(RowOptions):
    """Filter, split and encode data once, into a folder that training takes as --data_path."""

    output: str = flag("folder to write; training takes it as --data_path", path=True)
    tokenizer: str = like(RowOptions, "tokenizer", REQUIRED, "folder or hub id of the model to train")
    stage: Literal["finetune", "preference"] = flag("finetune: for step 1; preference: for step 2 and DPO", "finetune")
    max_length: int = flag("tokens of prompt and response; the rest is cut", 512, AT_LEAST_2)
    max_prompt_length: int = flag("longest prompt; rows with a longer one are left out", 512, AT_LEAST_1)
    minimum_response_length: int = flag("shortest response; rows with a shorter one are left out", 5, AT_LEAST_0)
    length_unit: Literal["tokens", "characters"] = flag("what the two limits above count", "tokens")
    remove_same_inputs: bool = flag("leave out rows whose prompt and (chosen) response were there before", True)
    remove_same_responses: bool = flag("leave out pairs of equal texts", True)
    num_samples: int | None = like(
        ResultFlags, "num_samples", help="of training and of test rows, only the first so many"
    )
    mask_prompt: bool = flag("step 1 is to learn from responses alone", True)
    validation_percentage: float = flag("part of the training rows for validation, 0.1 = a tenth", 0.1, BELOW_1)
    data_split: str | None = like(
        DataFlags,
        "data_split",
        help="parts of the rows for finetune and preference; if not given, each gets half of a published set (1,1,0)"
        " and all rows of other data",
    )
    shuffle: bool = flag("draw these parts by the seed, as training does; else they follow each other", True)
    save_skipped: bool = flag(f"write the rows that are left out to {SKIPPED}", False)
    format: Literal["arrow", "pt"] = flag(
        "of the files: arrow, as the library datasets saves them, or pt as SheepRL's", "arrow"
    )
    overwrite: bool = like(ResultFlags, "overwrite", help="replace a prepared folder")

    def __post_init__(self) -> None:
        """Refuses several sources. Raises UserError."""
        super().__post_init__()
        if len(self.paths) > 1:
            raise UserError(f"prepare takes one source, not {len(self.paths)}: give each an --output of its own.")
