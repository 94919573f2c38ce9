# SPDX-License-Identifier: Apache-2.0
"""One `--data_path` → `Source`: training and evaluation rows, with the place of each row for messages."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.data.formats.files import FILE_SUFFIXES, TRAIN_PREFIX, find_files, read_file
from dschat.data.formats.formats import NO_TEXT, DataKeys, Row, parse_row
from dschat.data.formats.hub import hub_rows, load_hub, warn_of_counts
from dschat.data.formats.registry import KNOWN_SETS, KnownSet, find_known, local_copy
from dschat.data.splits import train_eval_indices
from dschat.errors import UserError

__all__ = ["DataKeys", "Row", "Source", "load_source"]

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The rows of one `--data_path`.

    Attributes:
        name: name of the folder, of the file without its suffix, or of the data set on the hub.
        train: training rows.
        eval: evaluation rows.
        files: the local files that were read, in order; none where the rows came from the hub.
        dropped: reason → number of rows left out.
        hub: where rows from the hub came from: id, revision, and per split rows and fingerprint.
    """

    name: str
    train: list[Row] = field(repr=False)
    eval: list[Row] = field(repr=False)
    files: tuple[Path, ...]
    dropped: dict[str, int]
    hub: dict[str, Any] | None = None


def load_source(path: str | Path, keys: DataKeys | None = None, seed: int = 1234) -> Source:
    """Reads one source. Nothing of a data set is executed.

    Args:
        path: the first that it is of
            - short name of a published set (`dschat.data.formats.registry`): its local copy in $MA_RLHF_DATA, if any,
              else the hub's; a folder of that name in the current one is "./name", or a Path;
            - a local .jsonl, .json or .parquet file, or a folder with train*.jsonl or train*.parquet and, optionally,
              valid*, eval* or test* files of either suffix (see `dschat.data.formats.files.find_files`);
            - a published set by hub id: as by short name;
            - owner/name of another data set on the hub.
        keys: column names; the defaults of `DataKeys` if None.
        seed: seed of the split, 95 to 5, of a source without evaluation rows.

    Returns:
        The source, with rows in the order of the files, or of the split where there is one.

    Raises:
        UserError: nothing to read, a file that cannot be read, or a bad row, named by file and line.
    """
    keys = keys or DataKeys()
    root, known = Path(path), find_known(str(path))
    here = root.exists() and not (known and _is_short_name(path))
    copy = local_copy(known) if known and not here else None
    if known and not here:
        _warn_of_namesake(root, known, copy)
    if here or copy:
        source = _read_local(copy or root, keys, seed, known if copy else None)
    elif known or _is_hub_name(str(path)):
        source = _read_hub(str(path), known, keys, seed)
    else:
        published = ", ".join(f"{known.name} ({known.hub_id})" for known in KNOWN_SETS)
        raise UserError(
            f"--data_path {path}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, or a folder"
            f" with {TRAIN_PREFIX}*.jsonl or {TRAIN_PREFIX}*.parquet, with the columns {keys.prompt}, {keys.chosen},"
            f" {keys.rejected} (or {keys.prompt}, {keys.response}; or {keys.messages}), or a published data set:"
            f" {published}."
        )
    for reason, count in source.dropped.items():
        logger.warning("%s: skipped %d rows (%s)", path, count, reason)
    return source


def _is_short_name(path: str | Path) -> bool:
    """Whether `path`, a name of a published set, is one of those that could be a folder's here."""
    return isinstance(path, str) and "/" not in path


def _warn_of_namesake(root: Path, known: KnownSet, copy: Path | None) -> None:
    """Says so where the current folder holds something that is called like a published set."""
    if root.exists() and not (copy and copy.samefile(root)):
        logger.warning(
            "%s is the published data set %s; for the one in the current folder give ./%s", root, known.hub_id, root
        )


def _is_hub_name(path: str) -> bool:
    return bool(HUB_NAME.fullmatch(path)) and not path.startswith(".") and Path(path).suffix not in FILE_SUFFIXES


def _read_local(root: Path, keys: DataKeys, seed: int, known: KnownSet | None) -> Source:
    """A file or folder; `known` is the published set whose local copy it is."""
    if root.is_dir():
        name, train_files, eval_files = root.resolve().name, *find_files(root)
    elif root.suffix in FILE_SUFFIXES:
        name, train_files, eval_files = root.stem, [root], []
    else:
        raise UserError(f"--data_path {root}: not a data file; give a file that ends in {', '.join(FILE_SUFFIXES)}.")
    train, skipped = _read_files(train_files, keys)
    held_out, skipped_eval = _read_files(eval_files, keys) if eval_files else (None, 0)
    if known:
        warn_of_counts(root, known, len(train) + skipped, None if held_out is None else len(held_out) + skipped_eval)
    train, held_out = _with_eval(train, held_out, seed)
    return Source(name, train, held_out, (*train_files, *eval_files), _dropped(skipped + skipped_eval))


def _read_hub(path: str, known: KnownSet | None, keys: DataKeys, seed: int) -> Source:
    loaded = load_hub(path, known)
    train, skipped = _parse(hub_rows(loaded.train, loaded.hub_id), keys)
    held_out, skipped_eval = (None, 0) if loaded.eval is None else _parse(hub_rows(loaded.eval, loaded.hub_id), keys)
    if not train:
        raise UserError(f"--data_path {path}: no usable row in the data set {loaded.hub_id}; give another one.")
    train, held_out = _with_eval(train, held_out, seed)
    return Source(loaded.hub_id, train, held_out, (), _dropped(skipped + skipped_eval), loaded.record)


def _read_files(files: Sequence[Path], keys: DataKeys) -> tuple[list[Row], int]:
    """Rows of several files, and the number of those that were skipped."""
    rows: list[Row] = []
    all_skipped = 0
    for file in files:
        parsed, skipped = _parse(read_file(file), keys)
        if not parsed and not skipped:
            raise UserError(f"--data_path: {file} is empty; give a file with at least one row.")
        rows += parsed
        all_skipped += skipped
    if not rows:
        names = ", ".join(map(str, files))
        raise UserError(f"--data_path: no usable row in {names}: every row has {NO_TEXT}; give a file with texts.")
    return rows, all_skipped


def _parse(raws: Iterable[tuple[Any, str]], keys: DataKeys) -> tuple[list[Row], int]:
    """Rows, and the number of those that were skipped."""
    parsed = [parse_row(raw, keys, origin) for raw, origin in raws]
    rows = [row for row in parsed if row is not None]
    return rows, len(parsed) - len(rows)


def _with_eval(train: list[Row], held_out: list[Row] | None, seed: int) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows; split off where there are none of their own."""
    if held_out is not None:
        return train, held_out
    train_index, eval_index = train_eval_indices(len(train), seed)
    return [train[i] for i in train_index], [train[i] for i in eval_index]


def _dropped(skipped: int) -> dict[str, int]:
    return {NO_TEXT: skipped} if skipped else {}
