# SPDX-License-Identifier: Apache-2.0
"""The layout of a prepared folder.

It holds `prepared.json`, the splits as `DatasetDict.save_to_disk` writes them (or `finetune_train.pt`, …) and, if
asked for, `skipped.jsonl`. A folder with `.pt` files alone, as SheepRL's preparation leaves it, is a prepared folder,
too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.data.rows import in_words

Stage = Literal["finetune", "preference"]
STAGES: tuple[Stage, ...] = ("finetune", "preference")
SPLITS = ("train", "validation", "test")
INFO = "prepared.json"
NEEDED = {"stage", "format", "flags", "tokenizer", "template", "end_id", "kept"}  # fields of INFO that training reads
ARGUMENTS = "args.json"  # SheepRL's
SKIPPED = "skipped.jsonl"
PREPARE_COMMAND = "`dschat data prepare SOURCE --output FOLDER --tokenizer MODEL`"


@dataclass(frozen=True)
class PreparedFolder:
    """A prepared folder that was opened. Its rows are of `dschat.data.examples.EncodedRow`."""

    path: Path
    files: dict[str, list[Path]]  # split → its files
    info: dict[str, Any]  # the content of `prepared.json`; without that file, what is known of it

    @property
    def stage(self) -> Stage:
        """The training that it is for."""
        stage: Stage = self.info["stage"]
        return stage

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer that it was made with."""
        return str(self.info["tokenizer"]["name"])

    @property
    def is_described(self) -> bool:
        """Whether `prepared.json` says what the folder was made from."""
        return "kept" in self.info


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
        missing = NEEDED.difference(info)
        if missing:
            raise KeyError(", ".join(sorted(missing)))
        files = {}
        for split in info["kept"]:
            files[split] = _split_files(folder, info["stage"], split, info["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--data_path {folder}: {INFO} cannot be read ({reason}); prepare the data again.") from error
    for split, split_files in files.items():
        if not split_files:
            raise UserError(f"--data_path {folder}: its files of {split} rows are missing; prepare the data again.")
    return PreparedFolder(folder, files, info)


def _open_undescribed(folder: Path) -> PreparedFolder | None:
    """A folder with SheepRL's files alone. Raises UserError if they are of two stages."""
    stages = [stage for stage in STAGES if _split_files(folder, stage, "train", "pt")]
    if not stages:
        return None
    if len(stages) > 1:
        names = " and ".join(f"{stage}_*.pt" for stage in stages)
        raise UserError(f"--data_path {folder}: it holds {names}; leave the files of one stage in a folder.")
    files = {split: _split_files(folder, stages[0], split, "pt") for split in SPLITS}
    arguments = read_object(folder / ARGUMENTS)
    info = {
        "stage": stages[0],
        "format": "pt",
        "flags": {"mask_prompt": bool(arguments.get("mask_prompt", True)), "apply_chat_template": False},
        "tokenizer": {"name": str(arguments.get("tokenizer_name", "unknown"))},
    }
    return PreparedFolder(folder, {split: paths for split, paths in files.items() if paths}, info)


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
    """Lines that say what a folder holds and what was left out.

    `info`: the content of `prepared.json`, or what is known of it.
    """
    flags = info["flags"]
    lines = [
        f"for        {info['stage']}, tokenizer {info['tokenizer']['name']}, {info['format']} files",
        f"rows       {in_words(info['kept'])}",
    ]
    if "read" not in info:
        return lines
    lines += [
        f"limits     {flags['max_length']} tokens in all, prompts of at most {flags['max_prompt_length']} and "
        f"responses of at least {flags['minimum_response_length']} {flags['length_unit']}"
    ]
    for split, left_out in info["left_out"].items():
        reasons = f" ({in_words(left_out)})" if left_out else ""
        lines.append(f"left out   {sum(left_out.values())} of {info['read'][split]} {split} rows{reasons}")
    if info["unusable"]:
        lines.append(f"skipped    rows of the source ({in_words(info['unusable'])})")
    if not flags["mask_prompt"]:
        lines.append("trained    prompts, too: step 1 needs --sft_on_prompt")
    return lines
