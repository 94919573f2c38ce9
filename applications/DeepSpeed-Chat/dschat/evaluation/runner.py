# SPDX-License-Identifier: Apache-2.0
"""The batch loop of every command that writes rows: an interrupted run continues after its last saved batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, file_hash
from dschat.base.journal import Journal, begun_settings
from dschat.base.progress import progress
from dschat.models.template_date import SETTING, begin_date
from dschat.settings.config import Config

LARGER = "--dtype bf16 or a larger GPU"

Entry = dict[str, Any]  # entry of the journal: the row's number, "row" as the file will hold it, and further columns
BatchFunction = Callable[[list[int]], list[Entry]]  # row numbers of a batch → their entries
Concluded = tuple[list[dict[str, Any]], str]  # the rows of the file, and the summary
Conclusion = Callable[[list[Entry]], Concluded]


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The work of a run, or the part of it that one of several models or settings does.

    Attributes:
        batches: row numbers of each batch.
        prepare: opens the models; called only if a batch is left to do.
        columns: added to each entry; they tell the entries of this part from those of others.
        title: text before the progress bar.
        unit: what a row is called there.
    """

    batches: Sequence[list[int]]
    prepare: Callable[[], BatchFunction]
    columns: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    unit: str = "prompt"


def run_batches(
    path: Path, settings: Mapping[str, Any], overwrite: bool, parts: Iterable[RunPart], conclude: Conclusion
) -> str:
    """Make a file batch by batch; entries that an interrupted run saved are not made again.

    A batch that a kill left incomplete is done again as a whole: with --rollout_engine generate, and by rounding in
    bf16, its responses depend on all of its rows.

    Args:
        path, settings, overwrite: the result file and what made it, see `Journal`.
        parts: done one after the other; a part is taken from the iterable when those before it are done.
        conclude: makes the rows of the file and a summary from all entries, part by part and there by number. It
            writes its own files first, because the file of rows says that the run is over.

    Returns:
        The summary.
    """
    with closing(Journal(path, settings, overwrite)) as journal:
        entries: list[Entry] = []
        for part in parts:
            entries += _run_part(journal, part)
        rows, summary = conclude(entries)
        journal.finish(rows)
    return summary


def _run_part(journal: Journal, part: RunPart) -> list[Entry]:
    """Computes the missing entries of a part into the journal; returns all entries in the order of their numbers."""
    entries: dict[int, Entry] = {}
    for entry in journal.rows:
        if part.columns.items() <= entry.items():
            entries[entry["number"]] = entry

    pending: list[list[int]] = []
    for batch in part.batches:
        if not entries.keys() >= set(batch):
            pending.append(batch)
    if pending:
        function = part.prepare()
        total = sum(map(len, part.batches))
        pending_rows = sum(map(len, pending))
        with progress(total, part.title, total - pending_rows, unit=part.unit) as bar:
            for batch in pending:
                new_entries: dict[int, Entry] = {}
                for entry in function(batch):
                    number = entry["number"]
                    if number not in entries:
                        new_entries[number] = {**part.columns, **entry}
                journal.append(list(new_entries.values()))
                entries |= new_entries
                bar.update(len(batch))
    return [entries[number] for number in sorted(entries)]


def entry_rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The rows of entries as the file will hold them."""
    return [entry["row"] for entry in entries]


def in_batches(numbers: Sequence[int], size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Split row numbers into batches.

    With lengths, the longest rows come first, so that a batch that does not fit into memory fails at once.
    """
    if lengths is not None:
        length_of = dict(zip(numbers, lengths, strict=True))
        numbers = sorted(numbers, key=lambda number: -length_of[number])
    batches = []
    for start in range(0, len(numbers), size):
        batches.append(list(numbers[start : start + size]))
    return batches


def begin(path: Path, overwrite: bool, another: str) -> None:
    """Called before models and data are read: gives chat templates the date of an interrupted run.

    Args:
        path, overwrite: the result file, see `Journal`.
        another: flag that names another file, for the message.

    Raises:
        UserError: the result is finished and not to be overwritten.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists, finished. Give --overwrite to make it again, or another {another}.")
    restore_date(path, overwrite)


def restore_date(path: Path, overwrite: bool, finished_settings: Mapping[str, Any] | None = None) -> None:
    """Gives chat templates the date of the interrupted run whose result file is continued.

    Args:
        path, overwrite: the result file, see `Journal`.
        finished_settings: settings of the run that finished the results, if there is one.
    """
    settings = begun_settings(path, overwrite) if finished_settings is None else finished_settings
    begin_date((settings or {}).get(SETTING))


def settings_of(options: Config, names: Iterable[str]) -> dict[str, Any]:
    """Flags that the rows depend on, by name; an interrupted run continues only if they are equal."""
    values = options.flat()
    settings = {}
    for name in names:
        settings[name.replace("_", "-")] = values[name]
    return settings


@contextmanager
def enough_memory(problem: str, remedy: str = LARGER) -> Iterator[None]:
    """Report a full GPU inside this block as a UserError with a remedy, as a wrong flag is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{problem}. Give {remedy}.") from error


def described_function(spec: str) -> str:
    """A function's name with a hash of its file."""
    path = Path(spec.rpartition(":")[0])
    hash_of_file = file_hash(path) if path.is_file() else content_hash(b"")
    return f"{spec} (file {hash_of_file[:12]})"
