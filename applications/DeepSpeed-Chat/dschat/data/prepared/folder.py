# SPDX-License-Identifier: Apache-2.0
"""The layout of a prepared folder.

It holds `prepared.json`, the splits as `DatasetDict.save_to_disk` writes them (or `finetune_train.pt`, …) and, if
asked for, `skipped.jsonl`. A folder with `.pt` files alone, as SheepRL's preparation leaves it, is a prepared folder,
too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.data.rows import Row, in_words

Stage = Literal["finetune", "preference"]
STAGES: tuple[Stage, ...] = ("finetune", "preference")
SPLITS = ("train", "validation", "test")
INFO = "prepared.json"
ARGUMENTS = "args.json"  # SheepRL's
SKIPPED = "skipped.jsonl"
PREPARE_COMMAND = "`dschat data prepare SOURCE --output FOLDER --tokenizer MODEL`"


@dataclass(frozen=True)
class PreparedExample:
    """A row of a prepared folder. Ids of responses include the token that ends them, unless they were cut."""

    prompt: str  # as the model reads it; a conversation as its chat template writes it
    chosen: str  # the response, or the better one
    rejected: str | None  # the worse response; None in data for fine-tuning
    prompt_ids: list[int]  # including BOS
    chosen_ids: list[int]
    rejected_ids: list[int] | None
    row: Row = field(repr=False)  # row of the data

    @property
    def origin(self) -> str:
        """File and row of the data, for messages."""
        return self.row.origin

    def __len__(self) -> int:
        """Tokens of prompt and longer response."""
        rejected_ids = self.rejected_ids or ()
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(rejected_ids))


@dataclass(frozen=True)
class PreparedFolder:
    """A prepared folder that was opened."""

    path: Path
    stage: Stage
    format: Literal["arrow", "pt"]
    files: dict[str, list[Path]]  # split → its files
    mask_prompt: bool  # whether step 1 is to train on the responses alone
    tokenizer_name: str  # the tokenizer that the folder was made with
    info: dict[str, Any]  # the content of `prepared.json`; empty without that file

    @property
    def applied_chat_template(self) -> bool:
        """Whether prompts of plain text were written as messages (`--apply_chat_template`)."""
        return bool(self.info) and bool(self.info["flags"]["apply_chat_template"])


def open_prepared(path: str | Path) -> PreparedFolder | None:
    """The prepared folder at a path; None if there is none.

    Raises:
        UserError: the folder is damaged, or lacks a file.
    """
    folder = Path(path)
    if not (folder / INFO).is_file():
        return _open_undescribed(folder)
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        files = {}
        for split in info["kept"]:
            files[split] = _split_files(folder, info["stage"], split, info["format"])
        prepared = PreparedFolder(
            folder,
            info["stage"],
            info["format"],
            files,
            mask_prompt=info["flags"]["mask_prompt"],
            tokenizer_name=info["tokenizer"]["name"],
            info=info,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--data_path {folder}: {INFO} cannot be read ({reason}); prepare the data again.") from error
    for split, split_files in files.items():
        if not split_files:
            raise UserError(f"--data_path {folder}: its files of {split} rows are missing; prepare the data again.")
    return prepared


def _open_undescribed(folder: Path) -> PreparedFolder | None:
    """A folder with SheepRL's files alone. Raises UserError if they are of two stages."""
    stages = [stage for stage in STAGES if _split_files(folder, stage, "train", "pt")]
    if not stages:
        return None
    if len(stages) > 1:
        names = " and ".join(f"{stage}_*.pt" for stage in stages)
        raise UserError(f"--data_path {folder}: it holds {names}; leave the files of one stage in a folder.")
    files = {}
    for split in SPLITS:
        split_files = _split_files(folder, stages[0], split, "pt")
        if split_files:
            files[split] = split_files
    arguments = read_object(folder / ARGUMENTS)
    return PreparedFolder(
        folder,
        stages[0],
        "pt",
        files,
        mask_prompt=bool(arguments.get("mask_prompt", True)),
        tokenizer_name=str(arguments.get("tokenizer_name", "unknown")),
        info={},
    )


def _split_files(folder: Path, stage: Stage, split: str, file_format: str) -> list[Path]:
    """The files of a split that are there, such as train/data-….arrow or finetune_train.pt."""
    pattern = f"{split}/*.arrow" if file_format == "arrow" else f"{stage}_{split}.pt"
    return sorted(folder.glob(pattern))


def find_prepared(paths: Sequence[str]) -> list[PreparedFolder]:
    """The prepared folders that a `--data_path` names; empty if it names other data.

    Raises:
        UserError: it names both kinds, or a folder is damaged.
    """
    folders = []
    other_paths = []
    for path in paths:
        folder = open_prepared(path)
        if folder is None:
            other_paths.append(path)
        else:
            folders.append(folder)
    if folders and other_paths:
        raise UserError(
            f"--data_path: {folders[0].path} is a prepared folder and {other_paths[0]} is not; give data of one kind, "
            f"or prepare the other as well ({PREPARE_COMMAND})."
        )
    return folders


def summary_of(info: Mapping[str, Any]) -> list[str]:
    """Lines that say what a folder holds and what was left out. `info`: the content of `prepared.json`."""
    flags = info["flags"]
    lines = [
        f"for        {info['stage']}, tokenizer {info['tokenizer']['name']}, {info['format']} files",
        f"rows       {in_words(info['kept'])}",
        f"limits     {flags['max_length']} tokens in all, prompts of at most {flags['max_prompt_length']} and "
        f"responses of at least {flags['minimum_response_length']} {flags['length_unit']}",
    ]
    for split, left_out in info["left_out"].items():
        reasons = f" ({in_words(left_out)})" if left_out else ""
        lines.append(f"left out   {sum(left_out.values())} of {info['read'][split]} {split} rows{reasons}")
    if info["unusable"]:
        lines.append(f"skipped    rows of the source ({in_words(info['unusable'])})")
    if not flags["mask_prompt"]:
        lines.append("trained    prompts, too: step 1 needs --sft_on_prompt")
    return lines
