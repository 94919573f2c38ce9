# SPDX-License-Identifier: Apache-2.0
"""The batch runner of every command: what a batch becomes is a function, and what it gave an interruption leaves."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dschat.base.errors import UserError
from dschat.base.journal import Journal, begun_settings
from dschat.base.progress import progress
from dschat.models.template_date import SETTING, begin_date

LARGER = "--dtype bf16 or a larger GPU"

Entry = dict[str, Any]  # of the journal: the row's number, "row" as it will stand in the file, and what it took
BatchFunction = Callable[[list[int]], list[Entry]]  # numbers of the rows of a batch → their entries
Concluded = tuple[list[dict[str, Any]], str]  # the rows of the file, and what is said of it
Conclusion = Callable[[list[Entry]], Concluded]


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The work of a run, or what one of several models or settings does of it."""

    batches: Sequence[list[int]]  # numbers of the rows in each
    prepare: Callable[[], BatchFunction]  # opens the models, if there is anything left to do
    shown: Callable[[list[Entry]], Mapping[str, str]] | None = None  # what stands beside the progress, by name
    columns: Mapping[str, Any] = field(default_factory=dict)  # of its entries, which tell one part from the others
    title: str = ""  # before the progress
    unit: str = "prompt"  # what a row is called there


def run_batches(
    path: Path, settings: Mapping[str, Any], overwrite: bool, parts: Iterable[RunPart], conclude: Conclusion
) -> str:
    """Makes a file batch by batch; what an interrupted run kept is not done again.

    A batch that a kill left incomplete is done again as a whole: with --rollout_engine generate, and by rounding in
    bf16, its draws depend on all of its rows.

    Args:
        path, settings, overwrite: of the file, see `Journal`.
        parts: what is done, one after the other; each is asked for when those before it are done.
        conclude: makes of all entries, part by part and there by number, the rows of the file and a summary. What it
            writes is there before the file, which says that the run is over.

    Returns:
        The summary.
    """
    with closing(Journal(path, settings, overwrite)) as journal:
        rows, summary = conclude([entry for part in parts for entry in _entries(journal, part)])
        journal.finish(rows)
    return summary


def _entries(journal: Journal, part: RunPart) -> list[Entry]:
    """Those that the journal holds and, once they are kept there as well, the others."""
    done = {entry["number"]: entry for entry in journal.rows if part.columns.items() <= entry.items()}
    pending = [batch for batch in part.batches if any(number not in done for number in batch)]
    if pending:
        function, total = part.prepare(), sum(map(len, part.batches))
        with progress(total, part.title, total - sum(map(len, pending)), unit=part.unit) as bar:
            for batch in pending:
                new = [{**part.columns, **entry} for entry in function(batch) if entry["number"] not in done]
                journal.append(new)
                done.update((entry["number"], entry) for entry in new)
                bar.update(len(batch))
                if part.shown is not None:
                    bar.set_postfix(part.shown(list(done.values())))
    return [done[number] for number in sorted(done)]


def in_batches(numbers: Sequence[int], size: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Numbers of the rows in each batch; by length the longest first: what does not fit into memory fails at once."""
    if lengths is not None:
        numbers = [number for _, number in sorted(zip(lengths, numbers, strict=True), key=lambda pair: -pair[0])]
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def go_on_with_date(path: Path, overwrite: bool, made: Mapping[str, Any] | None = None) -> None:
    """Gives chat templates the date of the interrupted run that a file of results goes on with.

    Args:
        path, overwrite: of the file, see `Journal`.
        made: settings of the finished run, where they are known.
    """
    begun = begun_settings(path, overwrite) if made is None else made
    begin_date(begun.get(SETTING))


def settings_of(options: object, names: Iterable[str]) -> dict[str, Any]:
    """Flags that rows depend on, by name; an interrupted run goes on only with the same."""
    return {name.replace("_", "-"): getattr(options, name) for name in names}


@contextmanager
def enough_memory(problem: str, remedy: str = LARGER) -> Iterator[None]:
    """Inside, a full GPU is reported like a wrong flag, with what helps: by default where models do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{problem}. Give {remedy}.") from error
