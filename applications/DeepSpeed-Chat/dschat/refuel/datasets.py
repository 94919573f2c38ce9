# SPDX-License-Identifier: Apache-2.0
"""Data sets that `dschat refuel-data` makes: their rows, the settings that made them, and their copy or upload."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, writing
from dschat.base.errors import UserError
from dschat.base.fingerprints import contents_hash
from dschat.base.kept import Kept, settings_of_kept
from dschat.data.hub import push
from dschat.data.sources import is_folder, open_data
from dschat.evaluation.runner import Concluded, Conclusion, Entry, RunPart, restore_date, run_batches
from dschat.refuel.data_options import RefuelOutputFlags

OUTPUT = "--output_repo"  # the flag, for messages
ROWS = "train.jsonl"
RECORD = "made.json"  # file with the settings that made the rows; a data set without it is not finished


@dataclass(frozen=True)
class OutputLocation:
    """The folder in which a data set is made, and the folder or repository to which it is copied or uploaded."""

    options: RefuelOutputFlags

    @property
    def repo(self) -> str:
        """Destination of the data set: a folder, or owner/name on the hub."""
        return self.options.output_repo.rstrip("/") or "/"

    @property
    def folder(self) -> Path:
        """The folder in which rows are made: --output_dir, or a folder named like the end of --output_repo."""
        if self.options.output_dir is not None:
            return self.options.output_dir
        return Path(self.repo if is_folder(self.repo) else self.repo.rpartition("/")[2])

    def restore_date(self) -> None:
        """Gives chat templates the date of the earlier run if it made the data set or a part of it."""
        finished_settings = None if self.options.overwrite else settings_of_kept(self.folder / RECORD)
        restore_date(self.folder / ROWS, self.options.overwrite, finished_settings)

    def publish_finished(self, files: Sequence[str], settings: Mapping[str, Any]) -> str | None:
        """Copies or uploads the data set again if an earlier run has finished it.

        Returns:
            The summary of the earlier run and where the files are; None if the data set is not finished.

        Raises:
            UserError: the earlier run had other settings, or its record cannot be read.
        """
        if self.options.overwrite or not (self.folder / files[0]).exists():
            return None
        earlier_record = Kept(self.folder / RECORD, settings)
        try:
            difference = earlier_record.difference()
            summary = earlier_record.open()
        except (OSError, ValueError) as error:
            raise UserError(f"{error}: give another folder, or --overwrite.") from error
        if difference:
            remedy = "give another folder, or --overwrite to make it anew."
            raise UserError(f"{self.folder} holds a data set that was made with {difference}: {remedy}")
        if summary is None:
            return None
        present = [name for name in files if (self.folder / name).exists()]
        absent = [name for name in files if name not in present]
        return f"{summary}; finished before: {self.publish(present, gone=absent)}"

    def record(self, settings: Mapping[str, Any], summary: str) -> None:
        """Writes the settings and summary of a finished data set. Raises UserError if the file cannot be written."""
        file = self.folder / RECORD
        with reporting(str(file)):
            Kept(file, settings).write(summary)

    def publish(self, files: Sequence[str], gone: Sequence[str] = ()) -> str:
        """Copies finished files to --output_repo, or uploads them; returns where they are.

        Args:
            files: names of the files of the data set.
            gone: names of files that an earlier data set may have had there; they are removed.

        Raises:
            UserError: the folder cannot be written, or the hub does not accept them.
        """
        if not is_folder(self.repo):
            return push(self.folder, files, self.repo, self.options.public, OUTPUT)
        target = Path(self.repo)
        if target.resolve() != self.folder.resolve():
            try:
                target.mkdir(parents=True, exist_ok=True)
                for name in files:
                    with writing(target / name) as temporary:
                        shutil.copyfile(self.folder / name, temporary)
                for name in gone:
                    (target / name).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"{OUTPUT} {target}: cannot be written: {error}; the rows are in {self.folder}"
                ) from error
        return str(target)


def open_rows(name: str, flag: str) -> Iterable[tuple[str, Any]]:
    """The rows of a source for a command that trains nothing: training rows, or evaluation rows if it has no others.

    Raises:
        UserError: see `open_data`.
    """
    raw = open_data(name, flag)
    return raw.train or raw.eval or ()


def make_rows(options: RefuelOutputFlags, settings: Mapping[str, Any], part: RunPart, conclude: Conclusion) -> str:
    """Makes train.jsonl with `run_batches` unless it is finished, then copies or uploads it. Returns a summary line.

    Raises:
        UserError: the folder has a finished or unfinished data set with other settings.
    """
    location = OutputLocation(options)
    earlier_summary = location.publish_finished([ROWS], settings)
    if earlier_summary is not None:
        return earlier_summary

    def conclude_and_record(entries: list[Entry]) -> Concluded:
        rows, summary = conclude(entries)
        (location.folder / ROWS).unlink(missing_ok=True)  # those of earlier settings, which are not of this record
        location.record(settings, summary)
        return rows, summary

    summary = run_batches(location.folder / ROWS, settings, options.overwrite, [part], conclude_and_record)
    return f"{summary}: {location.publish([ROWS])}"


def digest(rows: Iterable[object]) -> str:
    """The first 12 hexadecimal digits of a hash of rows."""
    return contents_hash(f"{json.dumps(row, sort_keys=True)}\n" for row in rows)[:12]
