# SPDX-License-Identifier: Apache-2.0
"""A `--data_path` → the rows that a training step reads.

Which rows these are is DeepSpeed-Chat's rule, index for index, so that runs are comparable with published ones:

    index_k = index_{k-1} + int(round(fraction_k * N));  every index_k, k >= 1, then loses index_last - N
    order   = RandomState(seed).shuffle(arange(N, uint32));  part k = order[index_k : index_{k+1}]

Without `--data_split`, the steps share the rows of a published set, and each takes all rows of any other source.
"""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from dschat.base.errors import UserError
from dschat.base.progress import progress
from dschat.data.files import FILE_SUFFIXES, TRAIN_PREFIX, open_local, suffix_of
from dschat.data.formats import NO_TEXT, parse_row
from dschat.data.hub import KNOWN_SETS, KnownSet, describe_counts, find_known, local_copy, open_hub
from dschat.data.prepared.folder import find_prepared
from dschat.data.rows import RawSource, Row, in_words
from dschat.settings.common import ColumnFlags, CommonConfig

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
STEPS = ("SFT", "reward model", "PPO")
TRAIN_EVAL_SPLIT = "95,5"  # of a source without evaluation rows
PUBLISHED_SPLIT = "2,4,4"  # of a published set between the steps, without --data_split

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Source:
    """The rows of one `--data_path`; name, files and hub as in `RawSource`."""

    name: str
    train: list[Row] = field(repr=False)
    eval: list[Row] = field(repr=False)
    files: tuple[Path, ...]
    dropped: dict[str, int]  # reason → number of rows left out
    num_rows: tuple[int, int | None]  # training and evaluation rows that were read; None without evaluation rows
    hub: dict[str, Any] | None = None


def open_source(path: str | Path, keys: ColumnFlags | None = None) -> RawSource:
    """One source before its rows are read. Raises UserError where there is nothing to read."""
    return _open(path, keys or ColumnFlags())[0]


def load_source(
    path: str | Path, keys: ColumnFlags | None = None, seed: int | None = 1234, show: bool = False
) -> Source:
    """Reads one source. Nothing of a data set is executed.

    Args:
        path: the first that it is of
            - short name of a published set (`dschat.data.hub`): its local copy in $MA_RLHF_DATA, if any,
              else the hub's; a folder of that name in the current one is "./name", or a Path;
            - a local file or folder (see `dschat.data.files`);
            - a published set by hub id: as by short name;
            - owner/name of another data set on the hub.
        keys: column names; the defaults of `ColumnFlags` if None.
        seed: seed of the split, 95 to 5, of a source without evaluation rows; None = the last rows are held out.
        show: whether to show progress.

    Returns:
        The source, with rows in the order of the files, or of the split where there is one.

    Raises:
        UserError: nothing to read, a file that cannot be read, or a bad row, named by file and line.
    """
    keys = keys or ColumnFlags()
    raw, copied = _open(path, keys)
    train, skipped = _parse(raw, raw.train, keys, show)
    held_out, skipped_eval = _parse(raw, raw.eval, keys, show) if raw.eval is not None else (None, 0)
    counts = len(train) + skipped, None if held_out is None else len(held_out) + skipped_eval
    if copied and counts != copied.counts:  # no error: people cut their copies on purpose
        logger.warning(
            "%s has %s, the published %s has %s: shares will differ from the published ones",
            *(local_copy(copied), describe_counts(*counts), copied.hub_id, describe_counts(*copied.counts)),
        )
    dropped = {NO_TEXT: skipped + skipped_eval} if skipped + skipped_eval else {}
    for reason, count in dropped.items():
        logger.warning("%s: skipped %d rows (%s)", path, count, reason)
    if held_out is None:
        train, held_out = (split_part(train, TRAIN_EVAL_SPLIT, part, seed) for part in (0, 1))
    return Source(raw.name, train, held_out, raw.files, dropped, counts, raw.hub)


def is_published(path: str | Path) -> bool:
    """Whether a `--data_path` is a published set: by short name, by hub id, or as the folder or file of its local copy
    in $MA_RLHF_DATA. A folder or file elsewhere is the user's own, whatever its name.
    """
    root = Path(path)
    if not root.exists() or _is_short_name(path):
        return find_known(str(path)) is not None
    copies = [copy for known in KNOWN_SETS if (copy := local_copy(known)) is not None]
    return any(copy.samefile(root) for copy in copies)


def _is_short_name(path: str | Path) -> bool:
    return isinstance(path, str) and "/" not in path and find_known(path) is not None


def _open(path: str | Path, keys: ColumnFlags) -> tuple[RawSource, KnownSet | None]:
    """What a path names; and the published set of which that is a local copy, if it is one."""
    root, known = Path(path), find_known(str(path))
    if root.exists() and not _is_short_name(path):
        return open_local(root), None
    copy = local_copy(known) if known else None
    if known and root.exists() and not (copy and copy.samefile(root)):
        logger.warning(
            "%s is the published data set %s; for the one in the current folder give ./%s", root, known.hub_id, root
        )
    if copy:
        return open_local(copy), known
    looks_like_hub = HUB_NAME.fullmatch(str(path)) and not str(path).startswith(".")
    if known or (looks_like_hub and suffix_of(root) not in FILE_SUFFIXES):
        return open_hub(str(path), known), None
    published = ", ".join(f"{known.name} ({known.hub_id})" for known in KNOWN_SETS)
    raise UserError(
        f"--data_path {path}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, or a folder"
        f" with files {TRAIN_PREFIX}*.jsonl, {TRAIN_PREFIX}*.parquet and so on, with the columns {keys.prompt_key},"
        f" {keys.chosen_key}, {keys.rejected_key} (or {keys.prompt_key}, {keys.response_key}; or {keys.messages_key}),"
        f" or a published data set: {published}."
    )


def _parse(source: RawSource, raws: Iterable[tuple[str, Any]], keys: ColumnFlags, show: bool) -> tuple[list[Row], int]:
    """Rows of a source, and the number of those that were skipped; `raws` are its training or evaluation rows."""
    shown = progress(desc=f"reading {source.name}", unit="row", disable=not show, iterable=raws)
    parsed = [parse_row(raw, keys, origin, source.fills_nulls) for origin, raw in shown]
    rows = [row for row in parsed if row is not None]
    if not rows:
        raise UserError(f"--data_path: no usable row in {source.name}: every row has {NO_TEXT}; give data with texts.")
    return rows, len(parsed) - len(rows)


def is_folder(name: str) -> bool:
    """Whether a name means a folder here, to be written: unless it is an owner/name and there is no folder "owner"."""
    return name.startswith(".") or HUB_NAME.fullmatch(name) is None or Path(name).parent.is_dir()


def open_data(name: str, flag: str) -> RawSource:
    """What a name means, a file or folder here or owner/name on the hub; rows are read when they are asked for.

    Raises:
        UserError: there is no such thing, also while rows are read; names the command-line `flag` that gave it.
    """
    with _about(flag):
        if Path(name).exists():
            raw = open_local(Path(name))
        elif HUB_NAME.fullmatch(name) and not name.startswith("."):
            raw = open_hub(name, None)
        else:
            raise UserError(
                f"{flag} {name}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, a folder "
                "with train*.jsonl, train*.parquet and so on, or owner/name of a data set on the Hugging Face hub."
            )
    held_out = None if raw.eval is None else _read(raw.eval, flag)
    return replace(raw, train=_read(raw.train, flag), eval=held_out)


def _read(rows: Iterable[tuple[str, Any]], flag: str) -> Iterator[tuple[str, Any]]:
    with _about(flag):
        yield from rows


@contextmanager
def _about(flag: str) -> Iterator[None]:
    """Inside, messages are about another flag than the training steps' own."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--data_path", flag)) from error


def split_indices(num_rows: int, data_split: str, part: int, seed: int | None) -> np.ndarray:
    """Rows of one part of a split, in shuffled order: uint32 numbers (n,) from 0 to `num_rows` - 1.

    The parts of one split are disjoint and together hold every row.

    Args:
        num_rows: N, the rows of the source.
        data_split: comma-separated fractions, normalised to a sum of 1, for instance "2,4,4".
        part: number of the part; in training 0 = SFT, 1 = reward model, 2 = PPO.
        seed: seed of the shuffle, 0 to 2**32 - 1; None = rows stay in their order.

    Raises:
        UserError: `data_split` is no list of fractions, or has no part number `part`.
    """
    fractions = parse_fractions(data_split)
    if not 0 <= part < len(fractions):
        needed = f"the {STEPS[part]} step" if 0 <= part < len(STEPS) else f"part {part}"
        raise UserError(
            f"--data_split {data_split} has {len(fractions)} parts, none for {needed}: give three, like 2,4,4."
        )
    bounds = split_bounds(num_rows, fractions)
    order = np.arange(num_rows, dtype=np.uint32)
    if seed is not None:
        np.random.RandomState(seed).shuffle(order)
    return order[bounds[part] : bounds[part + 1]]


def split_part(rows: Sequence[T], data_split: str, part: int, seed: int | None) -> list[T]:
    """The rows of one part of a split, in shuffled order; see `split_indices`."""
    return [rows[i] for i in split_indices(len(rows), data_split, part, seed)]


def split_bounds(num_rows: int, fractions: list[float]) -> list[int]:
    """Where K parts begin and end in the shuffled order: K + 1 ascending positions from 0 to N.

    In tiny sources the correction could push one below 0; it stays at 0. The sum of the fractions must be above 0.
    """
    total = sum(fractions)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction / total * float(num_rows))))
    excess = bounds[-1] - num_rows
    return [0] + [max(0, bound - excess) for bound in bounds[1:]]


def parse_fractions(data_split: str) -> list[float]:
    """The numbers of a `--data_split`; raises UserError."""
    try:
        fractions = [float(part) for part in data_split.split(",")]
    except ValueError:
        fractions = []
    if not all(math.isfinite(part) and part >= 0 for part in fractions) or sum(fractions) <= 0:
        raise UserError(f"--data_split {data_split} is no list of fractions: give numbers of at least 0, like 2,4,4.")
    return fractions


@dataclass(frozen=True)
class Share(Generic[R_co]):
    """Rows of one step, the sources one after another, and what run.json says of each (see `described`)."""

    train: Sequence[R_co]
    eval: Sequence[R_co]
    sources: list[dict[str, Any]]
    files: tuple[Path, ...]


def described(
    name: str,
    train: Sequence[object],
    held_out: Sequence[object],
    dropped: dict[str, int],
    num_rows: tuple[int, int | None],
    split: str | None = None,
    hub: Any = None,
) -> dict[str, Any]:
    """What run.json says of a source.

    Args:
        name: of the source.
        train, held_out: the rows of the step's share.
        dropped: reason → number of rows left out.
        num_rows: training and evaluation rows of the whole source; None where it has no evaluation rows of its own.
        split: fractions by which the steps share the rows; None where the step takes all of them.
        hub: the hub's data set, if the rows come from there.
    """
    record = {"name": name, "train": len(train), "eval": len(held_out), "dropped": dropped}
    record |= {"rows": {"train": num_rows[0], "eval": num_rows[1]}, "data_split": split}
    return record | ({"hub": hub} if hub else {})


def source_line(source: Mapping[str, Any]) -> str:
    """How many rows of a source a step takes, in words: "mine: 190 of 200 rows to train on, 10 to evaluate on".

    Args:
        source: from `described`.
    """
    rows, split = source["rows"], source["data_split"]
    train = f"{source['train']:,} of {rows['train']:,}"
    held_out = f"{source['eval']:,}"
    if rows["eval"] is None:
        counts = f"{train} rows to train on, {held_out} to evaluate on"
    else:
        counts = f"{train} training rows, {held_out} of {rows['eval']:,} evaluation rows"
    skipped = f"; {in_words(source['dropped'])}" if source["dropped"] else ""
    part = f" (this step's part of {split})" if split else ""
    return f"{source['name']}: {counts}{skipped}{part}"


def load_share(config: CommonConfig, show: bool = False) -> Share[Row]:
    """Reads every source and takes the step's training and evaluation rows (``--data_split``).

    Raises:
        UserError: see `load_source`; or ``--data_split`` has no part for this step.
    """
    for folder in find_prepared(config.data.data_path):
        raise UserError(
            f"--data_path {folder.path}: a prepared folder serves steps 1, 2, 3 and DPO; this run needs the rows of"
            " the source itself: give that."
        )
    data = config.data
    return read_share(data.data_path, config.columns, data.data_split, config.step, config.optimisation.seed, show)


def split_for(path: str | Path, data_split: str | None, published_split: str = PUBLISHED_SPLIT) -> str | None:
    """The fractions by which the steps share the rows of a source; None where each step takes all of them.

    Args:
        path: a `--data_path`.
        data_split: `--data_split`, which holds for every source; None where the flag is not given.
        published_split: the fractions of a published set without the flag.
    """
    if data_split is not None:
        return data_split
    return published_split if is_published(path) else None


def step_rows(rows: Sequence[T], split: str | None, step: int, seed: int | None) -> list[T]:
    """The rows that step 1, 2 or 3 takes by fractions from `split_for`, in shuffled order; see `split_indices`.

    All rows come in the same order as with the fractions that give this step everything, such as 0,1,0.
    """
    if split is None:
        return split_part(rows, "1", 0, seed)
    return split_part(rows, split, step - 1, seed)


def read_share(
    paths: Sequence[str],
    keys: ColumnFlags,
    data_split: str | None,
    step: int,
    seed: int | None,
    show: bool = False,
    published_split: str = PUBLISHED_SPLIT,
) -> Share[Row]:
    """The rows of a step, 1, 2 or 3, of every source; see `load_share`, and `split_for` for the two splits.

    Without a seed, rows stay in their order.
    """
    train: list[Row] = []
    held_out: list[Row] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    for path in paths:
        source = load_source(path, keys, seed, show)
        split = split_for(path, data_split, published_split)
        own = step_rows(source.train, split, step, seed)
        own_eval = step_rows(source.eval, split, step, seed)
        train += own
        held_out += own_eval
        sources.append(described(source.name, own, own_eval, source.dropped, source.num_rows, split, source.hub))
        files += source.files
    return Share(train, held_out, sources, tuple(files))
