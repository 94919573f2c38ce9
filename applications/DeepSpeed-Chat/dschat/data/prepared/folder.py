# SPDX-License-Identifier: Apache-2.0
"""The layout of a prepared folder, and what it says of itself.

`prepared.json`, one file per split (`train.parquet`, …, or `finetune_train.pt`, …), `lengths.png` and, if asked for,
`skipped.jsonl`. A folder with `.pt` files alone, as SheepRL's preparation leaves it, is one, too.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dschat.common.atomic import made_way, recover_folder
from dschat.common.jsonl import parse_json
from dschat.common.lock import Lock
from dschat.data.formats.rows import Row
from dschat.errors import UserError

Stage = Literal["finetune", "preference"]
STAGES = ("finetune", "preference")
SPLITS = ("train", "validation", "test")
INFO = "prepared.json"
ARGUMENTS = "args.json"  # SheepRL's
EXAMPLE_PROMPT = "example_prompt.pt"
PLOT, SKIPPED = "lengths.png", "skipped.jsonl"


@dataclass(frozen=True)
class PreparedExample:
    """A row of a prepared folder.

    Attributes:
        prompt: text as the model reads it; a conversation as its chat template writes it.
        chosen: the response, or the better one.
        rejected: the worse response; None in data for fine-tuning.
        prompt_ids: ids, BOS included.
        chosen_ids, rejected_ids: ids of the responses, with the token that ends them unless they were cut.
        row: the data row.
    """

    prompt: str
    chosen: str
    rejected: str | None
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int] | None
    row: Row = field(repr=False)

    def __len__(self) -> int:
        """Tokens of prompt and longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids or ()))


@dataclass(frozen=True)
class PreparedFolder:
    """A folder and what it says of itself.

    Attributes:
        path: of the folder.
        stage: finetune or preference.
        files: split → its file.
        info: what `prepared.json` holds; empty where there is none.
    """

    path: Path
    stage: Stage
    files: dict[str, Path]
    info: dict[str, Any]

    @property
    def format(self) -> str:
        """The suffix of its files: parquet or pt."""
        return self.files["train"].suffix.removeprefix(".")

    @property
    def mask_prompt(self) -> bool:
        """Whether step 1 is to learn from the responses alone."""
        return bool((self.info or self._arguments()).get("mask_prompt", True))

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer was called when the folder was made."""
        if self.info:
            return str(self.info["tokenizer"]["name"])
        return str(self._arguments().get("tokenizer_name", "unknown"))

    def _arguments(self) -> dict[str, Any]:
        file = self.path / ARGUMENTS
        content = parse_json(file.read_bytes(), str(file)) if file.exists() else {}
        return content if isinstance(content, dict) else {}


def lock_of(folder: Path, flag: str, waits: bool = False) -> Lock:
    """The lock of whoever writes a prepared folder, see `Lock`; `flag` named it."""
    place = folder.resolve()
    return Lock(place.with_name(f".{place.name}.lock"), f"{flag} {folder}", waits)


def open_prepared(path: str | Path) -> PreparedFolder | None:
    """The prepared folder at a path; None where there is none.

    One that made way for a newer one whose `prepare` was killed comes back first.

    Raises:
        UserError: it lacks a file that it should have.
    """
    folder = Path(path)
    if not folder.exists() and made_way(folder.resolve()):
        with closing(lock_of(folder, "--data_path", waits=True)):
            recover_folder(folder.resolve())
    if (folder / INFO).is_file():
        try:
            info = json.loads((folder / INFO).read_text(encoding="utf-8"))
            stage, kind, splits = info["stage"], info["format"], list(info["kept"])
            info["tokenizer"]["fingerprint"], info["end_id"], info["mask_prompt"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"--data_path {folder}: {INFO} cannot be read ({reason}); prepare the data again."
            ) from error
        prepared = PreparedFolder(
            folder, stage, {name: split_file(folder, stage, name, kind) for name in splits}, info
        )
    else:
        found = [stage for stage in STAGES if split_file(folder, stage, "train", "pt").is_file()]
        if not found:
            return None
        if len(found) > 1:
            names = " and ".join(f"{stage}_*.pt" for stage in found)
            raise UserError(f"--data_path {folder}: it holds {names}; leave the files of one stage in a folder.")
        files = {name: split_file(folder, found[0], name, "pt") for name in SPLITS}
        there = {name: file for name, file in files.items() if file.is_file()}
        prepared = PreparedFolder(folder, "preference" if found[0] == "preference" else "finetune", there, {})
    for file in prepared.files.values():
        if not file.is_file():
            raise UserError(f"--data_path {folder}: {file.name} is missing; prepare the data again.")
    return prepared


def foreign_entry(folder: Path) -> Path | None:
    """What a folder to be replaced holds that is no part of a prepared one; the folder itself if it is none.

    A damaged prepared folder is one all the same. None where nothing would be lost: also in an empty folder.
    """
    if not folder.is_dir():
        return folder
    entries = sorted(folder.iterdir())
    parquet = [split_file(folder, "", split, "parquet") for split in SPLITS]
    pt = [split_file(folder, stage, split, "pt") for stage in STAGES for split in SPLITS]
    marks = {folder / INFO, *(split_file(folder, stage, "train", "pt") for stage in STAGES)}
    if entries and not marks & set(entries):
        return folder
    known = {*parquet, *pt, *(folder / name for name in (INFO, ARGUMENTS, EXAMPLE_PROMPT, PLOT, SKIPPED))}
    return next((entry for entry in entries if entry not in known or entry.is_dir()), None)


def split_file(folder: Path, stage: str, split: str, kind: str) -> Path:
    """The file of a split: train.parquet, or finetune_train.pt."""
    return folder / (f"{split}.parquet" if kind == "parquet" else f"{stage}_{split}.pt")
