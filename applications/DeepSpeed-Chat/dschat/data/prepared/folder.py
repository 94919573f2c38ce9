# SPDX-License-Identifier: Apache-2.0
"""The layout of a prepared folder.

It holds `prepared.json`, the splits as `DatasetDict.save_to_disk` writes them (or `finetune_train.pt`, …) and, if
asked for, `skipped.jsonl`. A folder with `.pt` files alone, as SheepRL's preparation leaves it, is a prepared folder,
too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from dschat.base.atomic import recover_folder, replaced_by
from dschat.base.errors import UserError
from dschat.base.jsonl import parse_json
from dschat.base.lock import Lock
from dschat.data.rows import Row

Stage = Literal["finetune", "preference"]
STAGES: tuple[Stage, ...] = ("finetune", "preference")
SPLITS = ("train", "validation", "test")
INFO = "prepared.json"
ARGUMENTS = "args.json"  # SheepRL's
EXAMPLE_PROMPT = "example_prompt.pt"
SKIPPED = "skipped.jsonl"
# Paths, relative to a prepared folder, of the files that `prepare` writes.
WRITTEN_FILES = re.compile(
    r"(prepared|args|dataset_dict)\.json|example_prompt\.pt|skipped\.jsonl|"
    r"(finetune|preference)_(train|validation|test)\.pt|"
    r"(train|validation|test)/(state\.json|dataset_info\.json|data-\d+-of-\d+\.arrow)"
)
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
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids or ()))


@dataclass(frozen=True)
class PreparedFolder:
    """A prepared folder that was opened."""

    path: Path
    stage: Stage
    files: dict[str, list[Path]]  # split → its files
    info: dict[str, Any]  # the content of `prepared.json`; empty without that file

    @property
    def format(self) -> str:
        """Suffix of the files: arrow or pt."""
        return self.files["train"][0].suffix.removeprefix(".")

    @property
    def mask_prompt(self) -> bool:
        """Whether step 1 is to train on the responses alone."""
        settings = self.info or self._arguments()
        return bool(settings.get("mask_prompt", True))

    @property
    def applied_chat_template(self) -> bool:
        """Whether prompts of plain text were written as messages (`--apply_chat_template`)."""
        return bool(self.info) and bool(self.info["arguments"]["keys"]["apply_chat_template"])

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer that the folder was made with."""
        if self.info:
            return str(self.info["tokenizer"]["name"])
        return str(self._arguments().get("tokenizer_name", "unknown"))

    def _arguments(self) -> dict[str, Any]:
        file = self.path / ARGUMENTS
        content = parse_json(file.read_bytes(), str(file)) if file.exists() else {}
        return content if isinstance(content, dict) else {}


def lock_of(folder: Path, flag: str, waits: bool = False) -> Lock:
    """The lock for writing a prepared folder, see `Lock`. `flag`: the command-line flag that named the folder."""
    resolved = folder.resolve()
    return Lock(resolved.with_name(f".{resolved.name}.lock"), f"{flag} {folder}", waits)


def open_prepared(path: str | Path) -> PreparedFolder | None:
    """The prepared folder at a path; None if there is none.

    A folder that was put aside by a `prepare --overwrite` that was killed is put back first.

    Raises:
        UserError: the folder is damaged, or lacks a file.
    """
    folder = Path(path)
    if not folder.exists() and replaced_by(folder.resolve()).exists():
        with closing(lock_of(folder, "--data_path", waits=True)):
            recover_folder(folder.resolve())
    prepared = _open_described(folder) if (folder / INFO).is_file() else _open_undescribed(folder)
    if prepared is None:
        return None
    for file in chain.from_iterable(prepared.files.values()):
        if not file.is_file():
            raise UserError(f"--data_path {folder}: {file.relative_to(folder)} is missing; prepare the data again.")
    return prepared


def _open_described(folder: Path) -> PreparedFolder:
    """A folder that has a `prepared.json`. Raises UserError if that cannot be read."""
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        stage = info["stage"]
        files = {}
        for split in info["kept"]:
            files[split] = split_files(folder, stage, split, info["format"])
        prepared = PreparedFolder(folder, stage, files, info)
        # Keys that are read later.
        info["tokenizer"]["fingerprint"], info["template"]["fingerprint"], info["end_id"], info["mask_prompt"]
        info["arguments"]["keys"]["apply_chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--data_path {folder}: {INFO} cannot be read ({reason}); prepare the data again.") from error
    return prepared


def _open_undescribed(folder: Path) -> PreparedFolder | None:
    """A folder with `.pt` files alone. Raises UserError if they are of two stages."""
    stages: list[Stage] = []
    for stage in STAGES:
        (train_file,) = split_files(folder, stage, "train", "pt")
        if train_file.is_file():
            stages.append(stage)
    if not stages:
        return None
    if len(stages) > 1:
        names = " and ".join(f"{stage}_*.pt" for stage in stages)
        raise UserError(f"--data_path {folder}: it holds {names}; leave the files of one stage in a folder.")
    files = {}
    for split in SPLITS:
        (split_file,) = split_files(folder, stages[0], split, "pt")
        if split_file.is_file():
            files[split] = [split_file]
    return PreparedFolder(folder, stages[0], files, {})


def foreign_entry(folder: Path) -> Path | None:
    """A file or folder that replacing a prepared folder would delete, though `prepare` did not write it.

    The folder itself if it is not a prepared one, even a damaged one; None if nothing would be lost, as in an empty
    folder.
    """
    if not folder.is_dir():
        return folder
    files = sorted(entry for entry in folder.rglob("*") if not entry.is_dir() or entry.is_symlink())
    names = [file.relative_to(folder).as_posix() for file in files]
    is_prepared = INFO in names or any(f"{stage}_train.pt" in names for stage in STAGES)
    if any(folder.iterdir()) and not is_prepared:
        return folder
    for name, file in zip(names, files, strict=True):
        if not WRITTEN_FILES.fullmatch(name):
            return file
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in SPLITS:
            return entry
    return None


def split_files(folder: Path, stage: str, split: str, kind: str) -> list[Path]:
    """The files of a split, such as train/data-….arrow or finetune_train.pt; at least one, even if it is missing."""
    if kind == "arrow":
        return sorted((folder / split).glob("*.arrow")) or [folder / split / "data-00000-of-00001.arrow"]
    return [folder / f"{stage}_{split}.pt"]


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
    rows = ", ".join(f"{number:,} {split}" for split, number in info["kept"].items())
    limits = info["arguments"]["limits"]
    lines = [
        f"for        {info['stage']}, tokenizer {info['tokenizer']['name']}, {info['format']} files",
        f"rows       {rows}",
        f"limits     {limits['max_length']} tokens in all, prompts of at most {limits['max_prompt_length']} and "
        f"responses of at least {limits['minimum_response_length']} {limits['unit']}",
    ]
    for split, num_rows in info["read"].items():
        if not num_rows:
            continue
        left_out = info["left_out"][split]
        line = f"left out   {sum(left_out.values()):,} of {num_rows:,} {split} rows"
        if left_out:
            line += f" ({', '.join(f'{reason}: {count:,}' for reason, count in left_out.items())})"
        lines.append(line)
    for reason, count in info["unusable"].items():
        lines.append(f"skipped    {count:,} rows of the source ({reason})")
    if not info["mask_prompt"]:
        lines.append("trained    prompts, too: step 1 needs --sft_on_prompt")
    return lines
