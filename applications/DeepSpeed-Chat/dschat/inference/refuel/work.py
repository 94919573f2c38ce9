# SPDX-License-Identifier: Apache-2.0
"""How a script keeps its rows while they come, says what it wrote, and hands the finished data set over."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.atomic import writing
from dschat.common.fingerprints import content_hash, file_hash
from dschat.common.journal import Journal
from dschat.common.jsonl import parse_json, write_rows
from dschat.common.progress import progress
from dschat.data.hub import push
from dschat.data.sources import is_folder
from dschat.errors import UserError
from dschat.inference.refuel.options import PlaceOptions

FLAG = "--output-repo"
RECORD = "made.json"  # beside the rows: how they were made; a data set without it is not finished
Entry = dict[str, Any]  # of a journal: number of the dialogue, and its row, or why it has none
Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where a data set is made, and where it goes.

    Attributes:
        folder: of the rows.
        repo: what --output-repo said.
        public: see `dschat.data.hub.push`.
        overwrite: make a finished one anew.
    """

    folder: Path
    repo: str
    public: bool
    overwrite: bool

    @classmethod
    def of(cls, options: PlaceOptions) -> "Place":
        """The place that flags name."""
        repo = options.output_repo.rstrip("/") or "/"
        own = Path(repo) if is_folder(repo) else Path(repo.rpartition("/")[2])
        return cls(options.output_dir or own, repo, options.public, options.overwrite)

    def finished(self, files: Sequence[str], settings: Mapping[str, Any]) -> str | None:
        """What was written, where an earlier run of the same settings finished it; hands it over again.

        Raises:
            UserError: it was made with other settings.
        """
        record = self.folder / RECORD
        if self.overwrite or not record.exists() or not (self.folder / files[0]).exists():
            return None
        made = parse_json(record.read_bytes(), str(record))
        now = json.loads(json.dumps(dict(settings)))
        before = made.get("settings", {})
        for name in [*now, *before]:
            if before.get(name) != now.get(name):
                raise UserError(
                    f"{self.folder} holds a data set that was made with --{name} {before.get(name)}, now it is "
                    f"{now.get(name)}: give another folder, or --overwrite to make it anew."
                )
        present = [name for name in files if (self.folder / name).exists()]
        return f"{made['summary']}; finished before: {self.hand_over(present)}"

    def record(self, settings: Mapping[str, Any], summary: str) -> None:
        """Writes how the rows are made, and what they are."""
        write_rows(self.folder / RECORD, [{"settings": dict(settings), "summary": summary}])

    def hand_over(self, files: Sequence[str]) -> str:
        """Copies or pushes finished files; where they are now. Raises UserError where that is not possible."""
        if not is_folder(self.repo):
            return push(self.folder, files, self.repo, self.public, FLAG)
        target = Path(self.repo)
        if target.resolve() != self.folder.resolve():
            try:
                for name in files:
                    with writing(target / name) as beside:
                        shutil.copyfile(self.folder / name, beside)
            except OSError as error:
                raise UserError(
                    f"{FLAG} {target}: cannot be written: {error}; the rows are in {self.folder}"
                ) from error
        return str(target)


def go_through(
    journal: Journal, total: int, size: int, prepare: Callable[[], Callable[[list[int]], list[Entry]]]
) -> list[Entry]:
    """Does what the journal does not hold yet; all entries by number.

    A batch that a kill left incomplete is done again as a whole: in bf16 its numbers depend on all of its rows.

    Args:
        journal: keeps the entries.
        total: dialogues, numbered from 0.
        size: of a batch.
        prepare: opens the models, if there is anything left to do; what it returns does a batch of numbers.
    """
    done: dict[int, Entry] = {entry["number"]: entry for entry in journal.rows}
    batches = [list(range(start, min(start + size, total))) for start in range(0, total, size)]
    pending = [batch for batch in batches if any(number not in done for number in batch)]
    if pending:
        work = prepare()
        with progress(total, initial=total - sum(map(len, pending)), unit="dialogue") as bar:
            for batch in pending:
                new = [entry for entry in work(batch) if entry["number"] not in done]
                journal.append(new)
                done.update((entry["number"], entry) for entry in new)
                bar.update(len(batch))
    return [done[number] for number in range(total)]


def kept_rows(entries: Sequence[Entry], what: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of entries that have one, and what became of the others, in words; UserError where there is none."""
    rows = [entry["row"] for entry in entries if entry["row"] is not None]
    reasons = Counter(entry["reason"] for entry in entries if entry["row"] is None)
    if not rows:
        raise UserError(f"none of {len(entries)} {what} is left ({in_words(reasons)}); see --help for the limits.")
    return rows, f", {reasons.total()} left out ({in_words(reasons)})" if reasons else ""


def in_words(counts: Mapping[str, int]) -> str:
    """Reasons with their numbers."""
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


def digest(rows: Iterable[object]) -> str:
    """12 hexadecimal digits that follow from the content of rows."""
    whole = hashlib.sha256()
    for row in rows:
        whole.update(json.dumps(row, sort_keys=True).encode("utf-8") + b"\n")
    return whole.hexdigest()[:12]


def described_function(spec: str) -> str:
    """A function by name, and the content of its file."""
    path = Path(spec.rpartition(":")[0])
    return f"{spec} (file {(file_hash(path) if path.is_file() else content_hash(b''))[:12]})"
