# SPDX-License-Identifier: Apache-2.0
"""One `--data_path` → `Source`: training and evaluation rows, with the place of each row for messages."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.common.progress import progress
from dschat.data.formats.files import FILE_SUFFIXES, TRAIN_PREFIX, suffix_of
from dschat.data.formats.formats import parse_row
from dschat.data.formats.hub import open_hub
from dschat.data.formats.published import NO_TEXT
from dschat.data.formats.registry import KNOWN_SETS, KnownSet, describe_counts, find_known, local_copy
from dschat.data.formats.rows import DataKeys, RawSource, Row
from dschat.data.formats.saved import open_local
from dschat.data.splits import TRAIN_EVAL_SPLIT, split_part
from dschat.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The rows of one `--data_path`; name, files and hub as in `RawSource`."""

    name: str
    train: list[Row] = field(repr=False)
    eval: list[Row] = field(repr=False)
    files: tuple[Path, ...]
    dropped: dict[str, int]  # reason → number of rows left out
    hub: dict[str, Any] | None = None


def open_source(path: str | Path, keys: DataKeys | None = None) -> RawSource:
    """One source before its rows are read: which files it has, or what it is on the hub.

    Raises:
        UserError: there is nothing to read.
    """
    known = find_known(str(path))
    copy = local_copy(known) if known and not _is_here(path) else None
    return _open(path, known, copy, keys or DataKeys())


def load_source(path: str | Path, keys: DataKeys | None = None, seed: int | None = 1234, show: bool = False) -> Source:
    """Reads one source. Nothing of a data set is executed.

    Args:
        path: the first that it is of
            - short name of a published set (`dschat.data.formats.registry`): its local copy in $MA_RLHF_DATA, if any,
              else the hub's; a folder of that name in the current one is "./name", or a Path;
            - a local file (see `dschat.data.formats.files.FILE_SUFFIXES`), or a folder with train* and, optionally,
              valid*, eval* or test* files (see `dschat.data.formats.files.find_files`), or one that
              `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote;
            - a published set by hub id: as by short name;
            - owner/name of another data set on the hub.
        keys: column names; the defaults of `DataKeys` if None.
        seed: seed of the split, 95 to 5, of a source without evaluation rows; None = the last rows are held out.
        show: whether to show progress.

    Returns:
        The source, with rows in the order of the files, or of the split where there is one.

    Raises:
        UserError: nothing to read, a file that cannot be read, or a bad row, named by file and line.
    """
    keys, known = keys or DataKeys(), find_known(str(path))
    copy = local_copy(known) if known and not _is_here(path) else None
    raw = _open(path, known, copy, keys)
    train, skipped = _parse(raw.train, keys, raw.name, show)
    held_out, skipped_eval = _parse(raw.eval, keys, raw.name, show) if raw.eval is not None else (None, 0)
    counts = len(train) + skipped, None if held_out is None else len(held_out) + skipped_eval
    if known and copy and counts != known.counts:  # no error: people cut their copies on purpose
        logger.warning(
            "%s has %s, the published %s has %s: shares will differ from the published ones",
            *(copy, describe_counts(*counts), known.hub_id, describe_counts(*known.counts)),
        )
    dropped = {NO_TEXT: skipped + skipped_eval} if skipped + skipped_eval else {}
    for reason, count in dropped.items():
        logger.warning("%s: skipped %d rows (%s)", path, count, reason)
    if held_out is None:
        train, held_out = (split_part(train, TRAIN_EVAL_SPLIT, part, seed) for part in (0, 1))
    return Source(raw.name, train, held_out, raw.files, dropped, raw.hub)


def _is_here(path: str | Path) -> bool:
    """Whether a path is a file or folder of this machine; the short name of a published set never is."""
    is_short_name = isinstance(path, str) and "/" not in path and find_known(path) is not None
    return Path(path).exists() and not is_short_name


def _open(path: str | Path, known: KnownSet | None, copy: Path | None, keys: DataKeys) -> RawSource:
    """What a path names: a file or folder here, the published set of that name, or its local copy."""
    root = Path(path)
    if _is_here(path):
        return open_local(root)
    if known and root.exists() and not (copy and copy.samefile(root)):
        logger.warning(
            "%s is the published data set %s; for the one in the current folder give ./%s", root, known.hub_id, root
        )
    if copy:
        return open_local(copy)
    looks_like_hub = HUB_NAME.fullmatch(str(path)) and not str(path).startswith(".")
    if known or (looks_like_hub and suffix_of(root) not in FILE_SUFFIXES):
        return open_hub(str(path), known)
    published = ", ".join(f"{known.name} ({known.hub_id})" for known in KNOWN_SETS)
    raise UserError(
        f"--data_path {path}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, or a folder"
        f" with files {TRAIN_PREFIX}*.jsonl, {TRAIN_PREFIX}*.parquet and so on, with the columns {keys.prompt},"
        f" {keys.chosen}, {keys.rejected} (or {keys.prompt}, {keys.response}; or {keys.messages}), or a published data"
        " set:"
        f" {published}."
    )


def _parse(raws: Iterable[tuple[str, Any]], keys: DataKeys, name: str, show: bool) -> tuple[list[Row], int]:
    """Rows, and the number of those that were skipped."""
    shown = progress(desc=f"reading {name}", unit="row", disable=not show, iterable=raws)
    parsed = [parse_row(raw, keys, origin) for origin, raw in shown]
    rows = [row for row in parsed if row is not None]
    if not rows:
        raise UserError(f"--data_path: no usable row in {name}: every row has {NO_TEXT}; give data with texts.")
    return rows, len(parsed) - len(rows)
