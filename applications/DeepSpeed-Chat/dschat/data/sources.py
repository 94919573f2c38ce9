# SPDX-License-Identifier: Apache-2.0
"""A `--data_path` → the rows that a training step reads.

Without `--data_split`, the steps share the rows of a published set, and each takes all rows of any other source.
Rows are held out and shared by the rules of `dschat.data.splits`.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from dschat.base.errors import UserError
from dschat.base.progress import progress
from dschat.data.files import FILE_SUFFIXES, TRAIN_PREFIX, note_of_unread, open_local, suffix_of
from dschat.data.formats import parse_row
from dschat.data.known_sets import KNOWN_SETS, KnownSet, describe_counts, find_known, local_copy
from dschat.data.prepared.folder import find_prepared, open_prepared
from dschat.data.rows import RawSource, Row, SkipReason, in_words
from dschat.data.splits import PUBLISHED_SPLIT, PromptOf, prompt_of_rows, split_part, step_rows, with_eval_share
from dschat.settings.common import ColumnFlags, CommonConfig, DataFlags
from dschat.settings.flags import default_of

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
EVAL_SHARE: float = default_of(DataFlags, "eval_share")
HELD_OUT_ELSEWHERE = "prompt held out in another source"

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Source:
    """The rows of one `--data_path`; for name, files, hub and splits see `RawSource`."""

    name: str
    train: list[Row] = field(repr=False)
    eval: list[Row] = field(repr=False)
    files: tuple[Path, ...]
    dropped: dict[str, int]  # reason → number of rows left out
    num_rows: tuple[int, int | None]  # training and evaluation rows that were read; None without an evaluation split
    hub: dict[str, Any] | None = None
    splits: tuple[str, ...] = ()
    prompt_of: PromptOf | None = None  # what rows are kept together by; None = each row stands for itself

    @property
    def has_eval_rows(self) -> bool:
        """Whether the source has evaluation rows of its own."""
        return self.num_rows[1] is not None


def open_source(path: str | Path, keys: ColumnFlags | None = None) -> RawSource:
    """A source to train on, before its rows are read. Raises UserError if there is nothing to train on."""
    raw, _ = _open(path, keys or ColumnFlags())
    require_training_rows(raw, path)
    return raw


def require_training_rows(raw: RawSource, path: str | Path) -> Iterable[tuple[str, Any]]:
    """The training rows of a source. Raises UserError if it has only evaluation rows."""
    if raw.train is None:
        raise UserError(
            f"--data_path {path}: it has evaluation rows and no training rows. Add files {TRAIN_PREFIX}*, or give a "
            "file of it, whose rows are then trained on."
        )
    return raw.train


def load_source(path: str | Path, keys: ColumnFlags | None = None, show: bool = False) -> Source:
    """Reads one source, of which 5 % are held out if it has no evaluation rows; see `read_source` and `hold_out`."""
    return hold_out(read_source(path, keys, show))


def read_source(
    path: str | Path, keys: ColumnFlags | None = None, show: bool = False, to_train: bool = False
) -> Source:
    """Reads all rows of one source, in the order of the files. Nothing of a data set is executed.

    Args:
        path: the first of these that it fits
            - short name of a published set (`dschat.data.known_sets`): its copy in $MA_RLHF_DATA, or else the hub's
              data; a folder of that name in the current folder is "./name", or a Path;
            - a local file or folder (see `dschat.data.files`);
            - hub id of a published set: as for a short name;
            - owner/name of another data set on the hub.
        keys: column names; None = the defaults of `ColumnFlags`.
        show: whether to show progress.
        to_train: whether the source must have training rows.

    Raises:
        UserError: nothing to read, a file that cannot be read, or a bad row, named by file and line.
    """
    keys = keys or ColumnFlags()
    raw, published = _open(path, keys)
    if to_train:
        require_training_rows(raw, path)
    if raw.unread:
        logger.warning("%s: %s", path, note_of_unread(raw.splits, raw.unread))
    train, skipped = _parse(raw, raw.train, keys, show)
    held_out, skipped_eval = _parse(raw, raw.eval, keys, show)
    num_eval = None if raw.eval is None else len(held_out) + skipped_eval.total()
    counts = (len(train) + skipped.total(), num_eval)
    skipped += skipped_eval
    if published and counts != published.counts:  # a warning, since users shorten their copies on purpose
        logger.warning(
            "%s has %s, the published %s has %s: shares will differ from the published ones",
            local_copy(published),
            describe_counts(*counts),
            published.hub_id,
            describe_counts(*published.counts),
        )
    if skipped:
        logger.warning("%s: skipped %d rows (%s)", path, skipped.total(), in_words(skipped))
    prompt_of = None if is_published(path) else prompt_of_rows(train + held_out)
    return Source(
        name=raw.name,
        train=train,
        eval=held_out,
        files=raw.files,
        dropped=dict(skipped),
        num_rows=counts,
        hub=raw.hub,
        splits=raw.splits,
        prompt_of=prompt_of,
    )


def hold_out(source: Source, share: float = EVAL_SHARE, shuffle: bool = True) -> Source:
    """A source with evaluation rows: its own, or a share of its rows in whole prompts, in every run the same.

    Args:
        source: from `read_source`.
        share: fraction of the rows that is held out.
        shuffle: whether prompts are held out at random, instead of the last ones.
    """
    return source if source.has_eval_rows else _split_off(source, share, shuffle)


def keep_apart(parts: Sequence[Source], sources: Sequence[Source]) -> list[Source]:
    """A step's parts of sources, without training rows whose prompt is an evaluation row of another source.

    They are removed after each source was divided among the steps, so that other sources beside it do not change which
    step has a row. Published sets keep their own split.

    Args:
        parts: a step's rows of each source.
        sources: the whole sources, from `hold_out`.
    """
    prompts: list[set[str]] = []
    for source in sources:
        prompts.append(set() if source.prompt_of is None else set(map(source.prompt_of, source.eval)))
    apart = []
    for number, part in enumerate(parts):
        elsewhere = set().union(*prompts[:number], *prompts[number + 1 :])
        apart.append(_without_prompts(part, elsewhere))
    return apart


def _split_off(source: Source, share: float, shuffle: bool) -> Source:
    """A source with a share of its rows as its evaluation rows, in whole prompts.

    If every prompt has too many rows for that, the one with the fewest rows is held out.
    """
    prompt_of = source.prompt_of
    split = with_eval_share(share)
    train = split_part(source.train, split, 0, prompt_of, shuffle)
    held_out = split_part(source.train, split, 1, prompt_of, shuffle)
    if not held_out and prompt_of is not None and round(share * len(train)):
        counts = Counter(map(prompt_of, train))
        rarest = min(counts, key=counts.__getitem__)
        held_out = [row for row in train if prompt_of(row) == rarest]
        train = [row for row in train if prompt_of(row) != rarest]
    return replace(source, train=train, eval=held_out)


def _without_prompts(source: Source, held_out: set[str]) -> Source:
    """A source that is not trained on some prompts.

    Their rows become evaluation rows; they are dropped and counted if the source has evaluation rows of its own.
    """
    prompt_of = source.prompt_of
    if prompt_of is None:
        return source
    train: list[Row] = []
    moved: list[Row] = []
    for row in source.train:
        rows = moved if prompt_of(row) in held_out else train
        rows.append(row)
    if not moved:
        return source
    if source.has_eval_rows:
        return replace(source, train=train, dropped=source.dropped | {HELD_OUT_ELSEWHERE: len(moved)})
    return replace(source, train=train, eval=source.eval + moved)


def is_published(path: str | Path) -> bool:
    """Whether a `--data_path` is a set of the paper's runs: its short name, its hub id, or its copy in $MA_RLHF_DATA.

    A folder or file elsewhere is the user's data, whatever its name.
    """
    if not names_file(path):
        known_set = find_known(str(path))
        return known_set is not None and known_set.of_paper
    copies = [local_copy(published) for published in KNOWN_SETS if published.of_paper]
    return any(copy is not None and copy.samefile(path) for copy in copies)


def names_file(path: str | Path) -> bool:
    """Whether a `--data_path` is a local file or folder. The short name of a published set never is."""
    is_short_name = isinstance(path, str) and "/" not in path and find_known(path) is not None
    return Path(path).exists() and not is_short_name


def _open(path: str | Path, keys: ColumnFlags) -> tuple[RawSource, KnownSet | None]:
    """The source that a path names; and the published set, if the source is a local copy of one."""
    root = Path(path)
    if names_file(path):
        return open_local(root), None
    published = find_known(str(path))
    copy = local_copy(published) if published else None
    if published and root.exists() and not (copy and copy.samefile(root)):
        logger.warning(
            "%s is the published data set %s; for the one in the current folder give ./%s",
            root,
            published.hub_id,
            root,
        )
    if copy:
        return open_local(copy), published
    is_hub_name = HUB_NAME.fullmatch(str(path)) and not str(path).startswith(".")
    if published or (is_hub_name and suffix_of(root) not in FILE_SUFFIXES):
        return _open_hub(str(path), published), None
    names = ", ".join(f"{published.name} ({published.hub_id})" for published in KNOWN_SETS)
    raise UserError(
        f"--data_path {path}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, or a folder"
        f" with files {TRAIN_PREFIX}*.jsonl, {TRAIN_PREFIX}*.parquet and so on, with the columns {keys.prompt_key},"
        f" {keys.chosen_key}, {keys.rejected_key} (or {keys.prompt_key}, {keys.response_key}; or {keys.messages_key}),"
        f" or a published data set: {names}."
    )


def _open_hub(path: str, published: KnownSet | None) -> RawSource:
    from dschat.data.hub import open_hub  # read only for data of the hub

    return open_hub(path, published)


def _parse(
    source: RawSource, raws: Iterable[tuple[str, Any]] | None, keys: ColumnFlags, show: bool
) -> tuple[list[Row], Counter[SkipReason]]:
    """Parses `raws`, the training or evaluation rows of a source; the rows, and reason → number of skipped ones."""
    rows: list[Row] = []
    skipped: Counter[SkipReason] = Counter()
    if raws is None:
        return rows, skipped
    title = f"reading {source.name}"
    for origin, raw in progress(desc=title, unit="row", disable=not show, iterable=raws):
        row = parse_row(raw, keys, origin, source.fills_nulls)
        if isinstance(row, str):
            skipped[row] += 1
        else:
            rows.append(row)
    if not rows:
        raise UserError(
            f"--data_path: no usable row in {source.name} ({in_words(skipped)}); correct it, or give other data."
        )
    return rows, skipped


def is_folder(name: str) -> bool:
    """Whether a name to write to is a local folder: unless it is an owner/name and there is no folder "owner"."""
    is_hub_name = HUB_NAME.fullmatch(name) is not None and not name.startswith(".")
    return not is_hub_name or Path(name).parent.is_dir()


def open_data(name: str, flag: str) -> RawSource:
    """The source that a name means, a local file or folder or owner/name on the hub; rows are read when iterated over.

    Raises:
        UserError: there is no such source, it is a prepared folder, or, while rows are read, a bad row; names the
            command-line `flag`.
    """
    with _naming_flag(flag):
        if open_prepared(name) is not None:
            raise UserError(
                f"{flag} {name}: a prepared folder, whose prompts are written for one model already; give the data "
                "that it was made from."
            )
        if Path(name).exists():
            raw = open_local(Path(name))
        elif HUB_NAME.fullmatch(name) and not name.startswith("."):
            raw = _open_hub(name, None)
        else:
            raise UserError(
                f"{flag} {name}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, a folder "
                "with train*.jsonl, train*.parquet and so on, or owner/name of a data set on the Hugging Face hub."
            )
    if raw.unread:
        logger.warning("%s %s: %s", flag, name, note_of_unread(raw.splits, raw.unread))
    train = None if raw.train is None else _read(raw.train, flag)
    held_out = None if raw.eval is None else _read(raw.eval, flag)
    return replace(raw, train=train, eval=held_out)


def _read(rows: Iterable[tuple[str, Any]], flag: str) -> Iterator[tuple[str, Any]]:
    with _naming_flag(flag):
        yield from rows


@contextmanager
def _naming_flag(flag: str) -> Iterator[None]:
    """Inside, messages name another flag than --data_path."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--data_path", flag)) from error


@dataclass(frozen=True)
class Share(Generic[R_co]):
    """The rows of one step."""

    train: Sequence[R_co]  # one source after another
    eval: Sequence[R_co]  # of several sources `in_proportion`
    sources: list[dict[str, Any]]  # records in run.json, see `described`
    files: tuple[Path, ...]


def in_proportion(parts: Sequence[Sequence[T]]) -> Sequence[T]:
    """The rows of several sources in an order whose first rows come from all sources.

    Evaluations read the first rows only (--eval_iters, --eval_prompts). With k sources, the first r of all N rows hold
    r · n / N rows of a source of n rows, give or take k; if r is at least k, they hold a row of every source.
    The rows of each source stay in their order; those of a single source are returned as they are.

    Example: sources a, b, c, d and x, y give a, x, b, c, y, d.
    """
    if len(parts) == 1:
        return parts[0]
    positions = []
    for number, rows in enumerate(parts):
        for index in range(len(rows)):
            positions.append((index / len(rows), number, index))
    return [parts[number][index] for _, number, index in sorted(positions)]


def described(
    name: str,
    train: int,
    held_out: int,
    dropped: dict[str, int],
    num_rows: tuple[int, int | None],
    split: str | None = None,
    hub: Any = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """The record of a source in run.json.

    Args:
        name: name of the source.
        train, held_out: training and evaluation rows that the step takes.
        dropped: reason → number of rows left out.
        num_rows: training and evaluation rows of the whole source; None if it has no evaluation rows of its own.
        split: fractions by which the steps share the rows; None if the step takes all rows.
        hub: the hub's data set, if the rows come from there.
        names: names of the source's training and evaluation split, if they have names.
    """
    record: dict[str, Any] = {
        "name": name,
        "train": train,
        "eval": held_out,
        "dropped": dropped,
        "rows": {"train": num_rows[0], "eval": num_rows[1]},
        "data_split": split,
    }
    if hub:
        record["hub"] = hub
    if names:
        record["splits"] = list(names)
    return record


def source_line(source: Mapping[str, Any]) -> str:
    """The number of rows that a step takes from a source: "mine: 190 of 200 rows to train on, 10 to evaluate on".

    Splits that have names are named: "owner/name (train_sft, test_sft): 190 of 190 training rows, …".

    Args:
        source: a record from `described`.
    """
    rows = source["rows"]
    split = source["data_split"]
    train = f"{source['train']:,} of {rows['train']:,}"
    held_out = f"{source['eval']:,}"
    if rows["eval"] is None:
        counts = f"{train} rows to train on, {held_out} to evaluate on"
    else:
        counts = f"{train} training rows, {held_out} of {rows['eval']:,} evaluation rows"
    skipped = f"; {in_words(source['dropped'])}" if source["dropped"] else ""
    part = f" (this step's part of {split})" if split else ""
    names = f" ({', '.join(source['splits'])})" if source.get("splits") else ""
    return f"{source['name']}{names}: {counts}{skipped}{part}"


def load_share(config: CommonConfig, show: bool = False, paths: Sequence[str] | None = None) -> Share[Row]:
    """Reads every source (``--data_path``, or else `paths`) and takes the step's training and evaluation rows.

    Raises:
        UserError: see `load_source`; or ``--data_split`` has no part for this step.
    """
    for folder in find_prepared(config.data.data_path):
        raise UserError(
            f"--data_path {folder.path}: a prepared folder serves steps 1, 2, 3 and DPO; this run needs the rows of"
            " the source itself: give that."
        )
    data = config.data
    return read_share(
        paths=data.data_path if paths is None else paths,
        keys=config.columns,
        data_split=data.data_split,
        step=config.step,
        show=show,
        eval_share=data.eval_share,
    )


def split_for(path: str | Path, data_split: str | None, published_split: str = PUBLISHED_SPLIT) -> str | None:
    """The fractions by which the steps share the rows of a source; None if each step takes all rows.

    Args:
        path: a `--data_path`.
        data_split: `--data_split`, which applies to every source; None if the flag is not given.
        published_split: the fractions of a published set without the flag.
    """
    if data_split is not None:
        return data_split
    return published_split if is_published(path) else None


def read_share(
    paths: Sequence[str],
    keys: ColumnFlags,
    data_split: str | None,
    step: int,
    show: bool = False,
    published_split: str = PUBLISHED_SPLIT,
    eval_share: float = EVAL_SHARE,
    shuffle: bool = True,
) -> Share[Row]:
    """The rows of step 1, 2 or 3 from every source; see `load_share`, and `split_for` for the two splits.

    Without `shuffle`, rows stay in their order.
    """
    train: list[Row] = []
    held_out: list[list[Row]] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    whole_sources: list[Source] = []
    parts: list[Source] = []
    splits: list[str | None] = []
    for path in paths:
        source = hold_out(read_source(path, keys, show, to_train=True), eval_share, shuffle)
        split = split_for(path, data_split, published_split)
        whole_sources.append(source)
        splits.append(split)
        parts.append(
            replace(
                source,
                train=step_rows(source.train, split, step, source.prompt_of, shuffle),
                eval=step_rows(source.eval, split, step, source.prompt_of, shuffle),
            )
        )
    for source, split in zip(keep_apart(parts, whole_sources), splits, strict=True):
        train += source.train
        held_out.append(source.eval)
        files += source.files
        record = described(
            source.name,
            len(source.train),
            len(source.eval),
            source.dropped,
            source.num_rows,
            split,
            source.hub,
            source.splits,
        )
        sources.append(record)
    return Share(train, in_proportion(held_out), sources, tuple(files))
