# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat data`: check, preview and prepare."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dschat.data.known_sets import DATA_VARIABLE, KNOWN_SETS
from dschat.data.prepared.folder import SKIPPED
from dschat.settings.common import ColumnFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, BELOW_1, NOT_EMPTY, Range, flag
from dschat.settings.rewards import SIMULATED_USER
from dschat.settings.rules import Check, Rule, Rules, check_function_path

PATH_HELP = (
    "data: a .jsonl, .json, .csv (also .gz) or .parquet file, a folder with train* files or from save_to_disk, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)
AT_LEAST_2: Range = (lambda number: number >= 2, "a whole number of at least 2")


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class RowFlags:
    """The sources, and the tokenizer that reads them."""

    paths: list[str] = flag(PATH_HELP, positional=True, path=True)
    tokenizer: str | None = flag("model to train, whose tokenizer is used: folder or hub id", path=True)
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None, NOT_EMPTY)


@dataclass(kw_only=True, frozen=True)
class LengthFlags:
    """Limits that training puts on rows."""

    max_seq_len: int = flag(
        "maximum length of prompt and response together, in tokens (steps 1 and 2)", 1024, AT_LEAST_1
    )
    max_prompt_seq_len: int = flag("maximum prompt length in tokens (step 3)", 512, AT_LEAST_1)
    train_on: Literal["all", "last"] = flag(
        "which assistant messages of a conversation are trained on: all, or only the last", "last"
    )


@dataclass(kw_only=True, frozen=True)
class CheckFlags:
    """Further settings of a check."""

    data_split: str | None = flag(
        "fractions of the rows for steps 1, 2 and 3, such as 2,4,4; if not given, 2,4,4 for the published data sets"
        " (tldr, hh, webgpt, apps), and all rows in every step for any other source",
        None,
    )


@dataclass(kw_only=True, frozen=True)
class PreviewFlags:
    """Rows to show, and colours."""

    rows: int = flag("number of rows", 3, AT_LEAST_1, aliases=["-n"])
    step: Literal[1, 2, 3] | None = flag(
        "training step to show; the first one that the rows suit if not given", None, choices=(1, 2, 3)
    )
    colour: Literal["auto", "always", "never"] = flag(
        "colour prompt and response; auto: in a terminal", "auto", aliases=["--color"]
    )
    environment: str | None = flag(
        "module.py:Class, as in step 3: show the messages with which it begins the episodes of these rows",
        None,
        path=True,
    )


@dataclass(kw_only=True, frozen=True)
class PrepareFlags:
    """Filters, length limits, and output of a preparation."""

    output: str = flag("new folder to write, which training takes as --data_path", path=True)
    stage: Literal["finetune", "preference"] = flag(
        "training that the data are for: step 1 (finetune), or step 2 and DPO (preference)", "finetune"
    )
    max_length: int = flag(
        "maximum length of prompt and response together, in tokens; longer ones are truncated", 512, AT_LEAST_2
    )
    max_prompt_length: int = flag("maximum prompt length; rows with a longer prompt are dropped", 512, AT_LEAST_1)
    minimum_response_length: int = flag(
        "minimum response length; rows with a shorter response are dropped", 5, AT_LEAST_0
    )
    length_unit: Literal["tokens", "characters"] = flag(
        "unit of max_prompt_length and minimum_response_length", "tokens"
    )
    remove_same_inputs: bool = flag("drop rows whose prompt and (chosen) response occurred in an earlier row", True)
    remove_same_responses: bool = flag("drop pairs whose two responses are equal", True)
    num_samples: int | None = flag("use only the first N training rows and the first N test rows", None, AT_LEAST_1)
    mask_prompt: bool = flag("train step 1 on response tokens only, not on the prompt", True)
    validation_percentage: float = flag("fraction of the training rows held out for validation", 0.1, BELOW_1)
    data_split: str | None = flag(
        "fractions of the rows for finetune and preference, such as 1,1; if not given, half each of a published data"
        " set (1,1,0), and all rows of other data",
        None,
    )
    shuffle: bool = flag(
        "choose these fractions at random, as training does, instead of in the order of the rows", True
    )
    save_skipped: bool = flag(f"write dropped rows to {SKIPPED}", False)
    format: Literal["arrow", "pt"] = flag(
        "file format: Arrow files of the library datasets (arrow), or SheepRL's .pt files (pt)", "arrow"
    )


# -- commands

ROW_RULES: "tuple[Rule[RowOptions], ...]" = (
    Rule(
        lambda options: options.source.end_of_conversation_token is not None and options.source.tokenizer is None,
        "--end_of_conversation_token {end_of_conversation_token}: give the model's --tokenizer, too.",
    ),
)


class RowOptions(Config):
    """Flags of all three commands."""

    rules: ClassVar[Rules] = ROW_RULES

    source: RowFlags
    columns: ColumnFlags


class LookOptions(RowOptions):
    """Flags of check and preview."""

    defaults: ClassVar[dict[str, Any]] = {"tokenizer": None}
    helps: ClassVar[dict[str, str]] = {"tokenizer": "model whose tokenizer counts tokens: folder or hub id"}

    lengths: LengthFlags


class CheckOptions(LookOptions):
    """Check data before training: columns, counts, dropped rows and why, splits, duplicates, lengths."""

    check: CheckFlags


def _check_environment(options: "PreviewOptions") -> None:
    if options.preview.environment is not None:
        check_function_path("environment", options.preview.environment)


class PreviewOptions(LookOptions):
    """Show the first rows as training sees them: prompt and response."""

    rules: ClassVar[Rules] = (
        *ROW_RULES,
        Rule(
            lambda options: options.preview.environment == SIMULATED_USER,
            "--environment simulated_user begins with the prompts of the rows as they are: drop the flag.",
        ),
        Check(_check_environment),
        Rule(
            lambda options: options.preview.environment is not None and options.preview.step in (1, 2),
            "--environment with --step {step}: only step 3 has environments. Drop one of them.",
        ),
    )

    preview: PreviewFlags


class PrepareOptions(RowOptions):
    """Filter, split and encode data once, into a folder that training takes as --data_path."""

    rules: ClassVar[Rules] = (
        *ROW_RULES,
        Rule(
            lambda options: len(options.source.paths) > 1,
            "prepare takes one source, not {count}: run it once per source, each with another --output.",
            words=lambda options: {"count": len(options.source.paths)},
        ),
    )

    prepared: PrepareFlags
