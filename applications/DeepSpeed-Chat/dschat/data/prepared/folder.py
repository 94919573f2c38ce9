# SPDX-License-Identifier: Apache-2.0
"""The layout of a prepared folder, what it says of itself, and its `.pt` files.

`prepared.json`, the splits as `DatasetDict.save_to_disk` writes them (or `finetune_train.pt`, …), `lengths.png` and,
if asked for, `skipped.jsonl`. A folder with `.pt` files alone, as SheepRL's preparation leaves it, is one, too. These
hold lists of rows: for fine-tuning `prompt_len`, `input_ids` and `targets`, for preferences `prompt_len`,
`chosen_input_ids` and `rejected_input_ids`.
Nothing in such a file is ever executed.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.atomic import recover_folder, replaced_by
from dschat.base.errors import UserError
from dschat.base.jsonl import parse_json
from dschat.base.lock import Lock
from dschat.data.encoding import decode_response
from dschat.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Stage = Literal["finetune", "preference"]
STAGES = ("finetune", "preference")
SPLITS = ("train", "validation", "test")
INFO = "prepared.json"
ARGUMENTS = "args.json"  # SheepRL's
EXAMPLE_PROMPT = "example_prompt.pt"
PLOT, SKIPPED = "lengths.png", "skipped.jsonl"
# What a prepared folder may hold, by its path there.
OWN = re.compile(
    r"(prepared|args|dataset_dict)\.json|example_prompt\.pt|lengths\.png|skipped\.jsonl|"
    r"(finetune|preference)_(train|validation|test)\.pt|"
    r"(train|validation|test)/(state\.json|dataset_info\.json|data-\d+-of-\d+\.arrow)"
)
PREPARE = "`dschat data prepare SOURCE --output FOLDER --tokenizer MODEL`"


@dataclass(frozen=True)
class PreparedExample:
    """A row of a prepared folder."""

    prompt: str  # text as the model reads it; a conversation as its chat template writes it
    chosen: str  # the response, or the better one
    rejected: str | None  # the worse response; None in data for fine-tuning
    prompt_ids: list[int]  # ids, BOS included
    chosen_ids: list[int]  # both: ids of the responses, with the token that ends them unless they were cut
    rejected_ids: list[int] | None
    row: Row = field(repr=False)  # the data row

    def __len__(self) -> int:
        """Tokens of prompt and longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids or ()))


@dataclass(frozen=True)
class PreparedFolder:
    """A folder and what it says of itself."""

    path: Path  # of the folder
    stage: Stage  # finetune or preference
    files: dict[str, list[Path]]  # split → its files
    info: dict[str, Any]  # what `prepared.json` holds; empty where there is none

    @property
    def format(self) -> str:
        """The suffix of its files: arrow or pt."""
        return self.files["train"][0].suffix.removeprefix(".")

    @property
    def mask_prompt(self) -> bool:
        """Whether step 1 is to learn from the responses alone."""
        return bool((self.info or self._arguments()).get("mask_prompt", True))

    @property
    def applied_chat_template(self) -> bool:
        """Whether prompts of plain text were written as messages (`--apply_chat_template`)."""
        return bool(self.info) and bool(self.info["arguments"]["keys"]["apply_chat_template"])

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
    if not folder.exists() and replaced_by(folder.resolve()).exists():
        with closing(lock_of(folder, "--data_path", waits=True)):
            recover_folder(folder.resolve())
    if (folder / INFO).is_file():
        try:
            info = json.loads((folder / INFO).read_text(encoding="utf-8"))
            stage, kind, splits = info["stage"], info["format"], list(info["kept"])
            info["tokenizer"]["fingerprint"], info["template"]["fingerprint"], info["end_id"], info["mask_prompt"]
            info["arguments"]["keys"]["apply_chat_template"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"--data_path {folder}: {INFO} cannot be read ({reason}); prepare the data again."
            ) from error
        prepared = PreparedFolder(
            folder, stage, {name: split_files(folder, stage, name, kind) for name in splits}, info
        )
    else:
        found = [stage for stage in STAGES if split_files(folder, stage, "train", "pt")[0].is_file()]
        if not found:
            return None
        if len(found) > 1:
            names = " and ".join(f"{stage}_*.pt" for stage in found)
            raise UserError(f"--data_path {folder}: it holds {names}; leave the files of one stage in a folder.")
        files = {name: split_files(folder, found[0], name, "pt") for name in SPLITS}
        there = {name: listed for name, listed in files.items() if listed[0].is_file()}
        prepared = PreparedFolder(folder, "preference" if found[0] == "preference" else "finetune", there, {})
    for file in chain.from_iterable(prepared.files.values()):
        if not file.is_file():
            raise UserError(f"--data_path {folder}: {file.relative_to(folder)} is missing; prepare the data again.")
    return prepared


def foreign_entry(folder: Path) -> Path | None:
    """What a folder to be replaced holds that is no part of a prepared one; the folder itself if it is none.

    A damaged prepared folder is one all the same. None where nothing would be lost: also in an empty folder.
    """
    if not folder.is_dir():
        return folder
    entries = sorted(entry for entry in folder.rglob("*") if not entry.is_dir() or entry.is_symlink())
    names = {entry.relative_to(folder).as_posix(): entry for entry in entries}
    if any(folder.iterdir()) and not {INFO, *(f"{stage}_train.pt" for stage in STAGES)} & set(names):
        return folder
    empty = (entry for entry in folder.iterdir() if entry.is_dir() and entry.name not in SPLITS)
    return next((entry for name, entry in names.items() if not OWN.fullmatch(name)), next(empty, None))


def split_files(folder: Path, stage: str, split: str, kind: str) -> list[Path]:
    """The files of a split, at least one, even where there is none: train/data-…, finetune_train.pt."""
    if kind == "arrow":
        return sorted((folder / split).glob("*.arrow")) or [folder / split / "data-00000-of-00001.arrow"]
    return [folder / f"{stage}_{split}.pt"]


def find_prepared(paths: Sequence[str]) -> list[PreparedFolder]:
    """The prepared folders that a `--data_path` names; none where it names other data.

    Raises:
        UserError: it names both, or a folder is damaged.
    """
    found = [open_prepared(path) for path in paths]
    folders = [folder for folder in found if folder is not None]
    if folders and len(folders) < len(found):
        other = next(path for path, folder in zip(paths, found, strict=True) if folder is None)
        raise UserError(
            f"--data_path: {folders[0].path} is a prepared folder and {other} is not; give data of one kind, or "
            f"prepare the other as well ({PREPARE})."
        )
    return folders


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


def read_pt(file: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[PreparedExample]:
    """The rows of a file; texts are decoded from the ids, and empty without a tokenizer.

    Raises:
        UserError: it holds something else, or ids that the tokenizer does not have.
    """
    rows = _load(file)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"--data_path {file}: it must hold a list of rows; prepare the data again.")
    known = None if tokenizer is None else frozenset(tokenizer.get_vocab().values())
    return [_example(row, f"{file} row {number}", tokenizer, known) for number, row in enumerate(rows, start=1)]


def check_example_prompt(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a folder whose example prompt has other ids with this tokenizer. Raises UserError where it has."""
    file = folder.path / EXAMPLE_PROMPT
    if not file.is_file():
        logger.warning(
            "%s has neither prepared.json nor %s: nothing tells whether it was made with this tokenizer (%s)",
            *(folder.path, EXAMPLE_PROMPT, folder.tokenizer_name),
        )
        return
    found = _load(file)
    try:
        prompt, ids = found["prompt"], _ids(found["input_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--data_path {file}: it must hold prompt and input_ids; prepare the data again.") from error
    own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # A text for BOS may stand before it, which several tokens may spell.
    if ids[len(ids) - len(own) :] != own or len(ids) > len(own) + 16:
        raise UserError(
            f"--data_path {folder.path}: it was prepared with the tokenizer of {folder.tokenizer_name}, and the "
            f"model's, {tokenizer.name_or_path}, gives other ids to the prompt in {EXAMPLE_PROMPT}; give that model, "
            f"or prepare the data again with --tokenizer {tokenizer.name_or_path}."
        )


def _load(file: Path) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"--data_path {file}: not readable as plain tensors, lists and texts ({reason}); what else a .pt file may "
            "hold is not opened, since it can be a program. Prepare the data again."
        ) from error


def _example(
    row: object, origin: str, tokenizer: PreTrainedTokenizerBase | None, known: frozenset[int] | None
) -> PreparedExample:
    """`known` are the tokenizer's ids."""
    if not isinstance(row, Mapping):
        raise UserError(f"{origin}: it must hold prompt_len and ids; prepare the data again.")
    is_pair = "chosen_input_ids" in row
    try:
        length = int(row["prompt_len"])
        chosen = _ids(row["chosen_input_ids" if is_pair else "input_ids"])
        rejected = _ids(row["rejected_input_ids"]) if is_pair else None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: {error} is missing or no such value; prepare the data again.") from error
    unknown = set() if known is None else {*chosen, *(rejected or ())} - known
    if tokenizer is not None and unknown:
        raise UserError(
            f"{origin}: token {max(unknown)} is none of the {len(tokenizer)} of {tokenizer.name_or_path}: the data "
            "were prepared with another tokenizer; prepare them again."
        )
    if not 0 < length <= len(chosen) or (rejected is not None and rejected[:length] != chosen[:length]):
        raise UserError(f"{origin}: prompt_len {length} is no prompt of its ids; prepare the data again.")
    prompt_ids, chosen_ids = chosen[:length], chosen[length:]
    rejected_ids = None if rejected is None else rejected[length:]
    prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True)) if tokenizer else ""
    texts = [decode_response(tokenizer, ids) if tokenizer and ids else None for ids in (chosen_ids, rejected_ids)]
    source = Row(prompt, None, texts[0], texts[1], {}, origin)
    return PreparedExample(prompt, texts[0] or "", texts[1], prompt_ids, chosen_ids, rejected_ids, source)


def _ids(value: Any) -> list[int]:
    """Ids of a tensor (n,) or (1, n), or of a list."""
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    return [int(number) for number in (listed[0] if listed and isinstance(listed[0], list) else listed)]
