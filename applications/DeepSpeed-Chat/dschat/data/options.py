# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat data`: check, preview and prepare."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dschat.data.hub import DATA_VARIABLE, KNOWN_SETS
from dschat.data.prepared.folder import SKIPPED
from dschat.settings.commands import OverwriteFlags
from dschat.settings.common import SEED, ColumnFlags, OptimisationFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, BELOW_1, NOT_EMPTY, Range, default_of, flag
from dschat.settings.rewards import SandboxLevel
from dschat.settings.rules import Rule, Rules

PATH_HELP = (
    "a .jsonl, .json, .csv (each also as .gz) or .parquet file, a folder with train* files or from save_to_disk, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)
AT_LEAST_2: Range = (lambda number: number >= 2, "a whole number of at least 2")


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class RowFlags:
    """The sources, and the tokenizer that reads them."""

    paths: list[str] = flag(PATH_HELP, positional=True, path=True)
    tokenizer: str | None = flag("folder or hub id of the model to train", path=True)
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None, NOT_EMPTY)
    seed: int = flag("seed of the splits", default_of(OptimisationFlags, "seed"), SEED)


@dataclass(kw_only=True, frozen=True)
class LengthFlags:
    """Limits that training puts on rows."""

    max_seq_len: int = flag("longest prompt and response (steps 1, 2)", 1024, AT_LEAST_1)
    max_prompt_seq_len: int = flag("longest prompt (step 3)", 512, AT_LEAST_1)
    train_on: Literal["all", "last"] = flag(
        "which assistant messages of a conversation are trained on: all, or only the last", "last"
    )


@dataclass(kw_only=True, frozen=True)
class CheckFlags:
    """What a check looks at besides."""

    data_split: str | None = flag(
        "fractions of the rows for steps 1, 2 and 3, such as 2,4,4; if not given, 2,4,4 for the published data sets"
        " (tldr, hh, webgpt, apps), and all rows in every step for any other source",
        None,
    )
    run_solutions: int = flag(
        "run the reference solutions of so many rows of APPS, the first, on their tests", 0, AT_LEAST_0
    )
    sandbox_level: SandboxLevel = flag("minimum isolation level of the sandbox for programs", "namespaces")


@dataclass(kw_only=True, frozen=True)
class PreviewFlags:
    """Which rows are shown, and how."""

    rows: int = flag("number of rows", 3, AT_LEAST_1, aliases=["-n"])
    step: Literal[1, 2, 3] | None = flag(
        "training step; the first that the rows suit if not given", None, choices=(1, 2, 3)
    )
    colour: Literal["auto", "always", "never"] = flag("mark parts", "auto", aliases=["--color"])


@dataclass(kw_only=True, frozen=True)
class PrepareFlags:
    """What is left out, what is cut, and what is written."""

    output: str = flag("folder to write; training takes it as --data_path", path=True)
    stage: Literal["finetune", "preference"] = flag("finetune: for step 1; preference: for step 2 and DPO", "finetune")
    max_length: int = flag("tokens of prompt and response; the rest is cut", 512, AT_LEAST_2)
    max_prompt_length: int = flag("longest prompt; rows with a longer one are left out", 512, AT_LEAST_1)
    minimum_response_length: int = flag("shortest response; rows with a shorter one are left out", 5, AT_LEAST_0)
    length_unit: Literal["tokens", "characters"] = flag("what the two limits above count", "tokens")
    remove_same_inputs: bool = flag("leave out rows whose prompt and (chosen) response were there before", True)
    remove_same_responses: bool = flag("leave out pairs of equal texts", True)
    num_samples: int | None = flag("of training and of test rows, only the first so many", None, AT_LEAST_1)
    mask_prompt: bool = flag("step 1 is to learn from responses alone", True)
    validation_percentage: float = flag("part of the training rows for validation, 0.1 = a tenth", 0.1, BELOW_1)
    data_split: str | None = flag(
        "parts of the rows for finetune and preference; if not given, each gets half of a published set (1,1,0)"
        " and all rows of other data",
        None,
    )
    shuffle: bool = flag("draw these parts by the seed, as training does; else they follow each other", True)
    save_skipped: bool = flag(f"write the rows that are left out to {SKIPPED}", False)
    format: Literal["arrow", "pt"] = flag(
        "of the files: arrow, as the library datasets saves them, or pt as SheepRL's", "arrow"
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
    helps: ClassVar[dict[str, str]] = {"tokenizer": "folder or hub id of the model, for lengths in tokens"}

    lengths: LengthFlags


class CheckOptions(LookOptions):
    """Look at data before training: columns, counts, what is dropped and why, shares, duplicates, lengths."""

    check: CheckFlags


class PreviewOptions(LookOptions):
    """Show the first rows as training sees them, with prompt, response and padding."""

    preview: PreviewFlags


class PrepareOptions(RowOptions):
    """Filter, split and encode data once, into a folder that training takes as --data_path."""

    helps: ClassVar[dict[str, str]] = {"overwrite": "replace a prepared folder"}
    rules: ClassVar[Rules] = (
        *ROW_RULES,
        Rule(
            lambda options: len(options.source.paths) > 1,
            "prepare takes one source, not {count}: give each an --output of its own.",
            words=lambda options: {"count": len(options.source.paths)},
        ),
    )

    prepared: PrepareFlags
    result: OverwriteFlags
