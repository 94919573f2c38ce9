# SPDX-License-Identifier: Apache-2.0
"""The flags of `python -m dschat.data prepare`, and its report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.common.atomic import recover_folder
from dschat.common.script import flag
from dschat.data.formats.rows import DataKeys
from dschat.data.prepared.folder import PLOT, SKIPPED, STAGES, lock_of
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMATS = ("parquet", "pt")
UNITS = ("tokens", "characters")


@dataclass(frozen=True)
class PrepareOptions:
    """Those of prepare."""

    output: str = flag("folder to write; training takes it as --data_path")
    tokenizer: str = flag("folder or hub id of the model to train")
    stage: str = flag("finetune: for step 1; preference: for step 2 and DPO", "finetune", choices=STAGES)
    max_length: int = flag("tokens of prompt and response; the rest is cut", 512)
    max_prompt_length: int = flag("longest prompt; rows with a longer one are left out", 512)
    minimum_response_length: int = flag("shortest response; rows with a shorter one are left out", 5)
    length_unit: str = flag("what the two limits above count: tokens or characters", "tokens", choices=UNITS)
    remove_same_inputs: bool = flag("leave out rows whose prompt and (chosen) response were there before", True)
    remove_same_responses: bool = flag("leave out pairs of equal texts", True)
    num_samples: int | None = flag("of training and of test rows, only the first so many", None)
    mask_prompt: bool = flag("step 1 is to learn from responses alone", True)
    validation_percentage: float = flag("part of the training rows for validation, 0.1 = a tenth", 0.1)
    data_split: str = flag("parts of the rows for finetune and preference", "1,1,0")
    shuffle: bool = flag("draw these parts by the seed, as training does; else they follow each other", True)
    seed: int = flag("of the shuffle", 1234)
    save_skipped: bool = flag(f"write the rows that are left out to {SKIPPED}", False)
    format: str = flag("of the files: parquet, or pt as SheepRL's", "parquet", choices=FORMATS)
    overwrite: bool = flag("replace a prepared folder", False)
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None)
    prompt_key: str = flag("for 'prompt'", DataKeys.prompt)
    chosen_key: str = flag("for 'chosen'", DataKeys.chosen)
    rejected_key: str = flag("for 'rejected'", DataKeys.rejected)
    response_key: str = flag("for 'response'", DataKeys.response)
    messages_key: str = flag("for 'messages'", DataKeys.messages)


def run_prepare(
    path: str, arguments: argparse.Namespace, keys: DataKeys, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> str:
    """Prepares a source; returns what was made of it, in lines.

    Raises:
        UserError: a flag out of range; another process writes the folder; or see `dschat.data.prepared.make.prepare`.
    """
    from dschat.data.prepared.filters import Limits
    from dschat.data.prepared.make import Preparation, Target, prepare

    _check(arguments)
    limits = Limits(
        arguments.max_length,
        arguments.max_prompt_length,
        arguments.minimum_response_length,
        arguments.length_unit,
        arguments.remove_same_inputs,
        arguments.remove_same_responses,
    )
    preparation = Preparation(
        arguments.stage,
        limits,
        arguments.data_split,
        arguments.shuffle,
        arguments.seed,
        arguments.num_samples,
        arguments.validation_percentage,
        arguments.mask_prompt,
        keys,
    )
    target = Target(Path(arguments.output), arguments.format, arguments.save_skipped, arguments.overwrite)
    with closing(lock_of(target.folder, "--output")):
        recover_folder(target.folder.resolve())
        info = prepare(path, preparation, target, tokenizer, arguments.tokenizer, end_id)
    return "\n".join([f"{path} is prepared in {target.folder}", *(f"  {line}" for line in summary_of(info))])


def _check(arguments: argparse.Namespace) -> None:
    least = {"max_length": 2, "max_prompt_length": 1, "minimum_response_length": 0, "num_samples": 1}
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise UserError(f"--{name} {value}: give a whole number of at least {smallest}.")
    part = arguments.validation_percentage
    if not 0 <= part < 1:
        raise UserError(f"--validation_percentage {part}: give a part from 0 to below 1; a tenth is 0.1.")


def summary_of(info: Mapping[str, Any]) -> list[str]:
    """Lines on what a folder holds and what was left out."""
    kept = ", ".join(f"{number:,} {split}" for split, number in info["kept"].items())
    limits, unit = info["arguments"]["limits"], info["arguments"]["limits"]["unit"]
    lines = [
        f"for        {info['stage']}, tokenizer {info['tokenizer']['name']}, {info['format']} files, {PLOT}",
        f"rows       {kept}",
        f"limits     {limits['max_length']} tokens in all, prompts of at most {limits['max_prompt_length']} and "
        f"responses of at least {limits['minimum_response_length']} {unit}",
    ]
    for split, number in info["read"].items():
        if number:
            counts = ", ".join(f"{reason}: {count:,}" for reason, count in info["left_out"][split].items())
            total = sum(info["left_out"][split].values())
            lines.append(f"left out   {total:,} of {number:,} {split} rows{f' ({counts})' if counts else ''}")
    for reason, count in info["unusable"].items():
        lines.append(f"skipped    {count:,} rows of the source ({reason})")
    if not info["mask_prompt"]:
        lines.append("trained    prompts, too: step 1 needs --sft_on_prompt")
    return lines
