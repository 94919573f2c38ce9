# SPDX-License-Identifier: Apache-2.0
"""The journal of a run that can be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.base.journal import Journal, require_writable


def test_a_journal_goes_on_after_what_it_kept(tmp_path):
    file = tmp_path / "deep" / "out.jsonl"
    first = Journal(file, {"seed": 1})
    first.append([{"n": 0}, {"n": 1}])
    first.close()
    with open(first.partial, "ab") as journal:
        journal.write('{"n": 2, "text": "ü'.encode()[:-1])  # a kill in the middle of a character
    second = Journal(file, {"seed": 1})
    assert second.rows == [{"n": 0}, {"n": 1}]
    second.append([{"n": 2}])
    second.close()
    third = Journal(file, {"seed": 1})
    assert third.rows == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not file.exists()
    third.finish(reversed(third.rows))
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [2, 1, 0]
    assert [entry.name for entry in file.parent.iterdir()] == ["out.jsonl"]


def test_a_journal_refuses_other_settings_and_a_finished_file(tmp_path):
    file = tmp_path / "out.jsonl"
    journal = Journal(file, {"seed": 1, "model": "m"})
    journal.append([{"n": 0}])
    with pytest.raises(UserError, match="another process is writing it"):
        Journal(file, {"seed": 1, "model": "m"})
    journal.close()
    with pytest.raises(UserError, match=r"begun with --seed 1, now it is 2"):
        Journal(file, {"seed": 2, "model": "m"})
    with pytest.raises(UserError, match=r"--top_k"):
        Journal(file, {"seed": 1, "model": "m", "top_k": 3})
    again = Journal(file, {"seed": 2, "model": "m"}, overwrite=True)
    assert again.rows == [], "rows of other settings are dropped"
    again.finish([{"n": 5}])
    with pytest.raises(UserError, match="exists, finished.*--overwrite"):
        Journal(file, {"seed": 2, "model": "m"})
    for folder in (tmp_path, Path()):
        with pytest.raises(UserError, match="a folder. Give the path of a file"):
            Journal(folder, {})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("5\n6\n", ":1: no JSON object; remove"),
        ('{"settings": {}}\n{"n": 0}\n{broken\n', ":3: no JSON object; remove"),
        ('{"settings": 5}\n{"n": 0}\n', ":1: the settings of the run are missing"),
        ('{"n": 0}\n{"n": 1}\n', ":1: the settings of the run are missing"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_or_overwritten(lines, message, tmp_path):
    partial = tmp_path / "out.jsonl.partial"
    partial.write_text(lines)
    with pytest.raises(UserError, match=f"{partial.name}{message}"):
        Journal(tmp_path / "out.jsonl", {})
    assert partial.read_text() == lines
    assert Journal(tmp_path / "out.jsonl", {}, overwrite=True).rows == []


def test_settings_with_a_path_that_is_no_unicode_are_those_of_the_same_run(tmp_path):
    """A byte of a path that is no UTF-8 is half of a surrogate pair in Python, and is replaced in files."""
    for rows in ([], [{"n": 0}]):
        with closing(Journal(tmp_path / "out.jsonl", {"model": "m\udcff"})) as journal:
            assert journal.rows == rows
            journal.append([{"n": 0}])


# A process that appends to a journal.
APPENDING = """
import sys
from pathlib import Path
from dschat.base.journal import Journal

journal = Journal(Path(sys.argv[1]), {})
for n in range(100000):
    journal.append([{"n": n}])
    print(n, flush=True)
"""


def test_kill_9_loses_no_row_that_was_appended(tmp_path):
    """The process reports each row after `append` returned; all of them are there afterwards."""
    file = tmp_path / "out.jsonl"
    with subprocess.Popen([sys.executable, "-c", APPENDING, file], stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline().strip() != "20":
            time.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        reported = [20, *map(int, process.stdout.read().split())]
    kept = [row["n"] for row in Journal(file, {}).rows]
    assert kept[: reported[-1] + 1] == list(range(reported[-1] + 1))


def test_a_run_that_overwrites_goes_on_too(tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text('{"n": "old"}\n')
    for n in range(2):
        with closing(Journal(file, {"seed": 1}, overwrite=True)) as journal:
            journal.append([{"n": n}])
        assert file.read_text() == '{"n": "old"}\n'
    again = Journal(file, {"seed": 1}, overwrite=True)
    assert again.rows == [{"n": 0}, {"n": 1}]
    again.finish(again.rows)
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [0, 1]
    assert Journal(file, {"seed": 1}, overwrite=True).rows == []  # a finished file is made anew


def test_a_journal_without_rows_leaves_nothing(tmp_path):
    """Of a run that is refused at its start; neither does its lock. One with rows stays."""
    with closing(Journal(tmp_path / "deep" / "new" / "rows.jsonl", {"seed": 1})):
        assert (tmp_path / "deep" / "new").exists()
    assert list(tmp_path.iterdir()) == []
    with closing(Journal(tmp_path / "new" / "rows.jsonl", {"seed": 1})) as journal:
        journal.append([{"number": 0}])
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["rows.jsonl.partial"]
    with closing(Journal(tmp_path / "new" / "rows.jsonl", {"seed": 1})) as journal:
        assert journal.rows == [{"number": 0}]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["rows.jsonl.partial"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    require_writable(tmp_path / "deep" / "new", "--x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--cache: cannot be written: "):
        require_writable(tmp_path / "file", "--cache")
