# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder or file: held by one process, and only as long as it lives."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from dschat.base.errors import UserError
from dschat.base.lock import Lock, close_all

# Takes the lock, starts what its second argument says, says so, and waits.
HOLDER = """
import os, signal, subprocess, sys
from pathlib import Path
from dschat.base.lock import Lock

lock = Lock(Path(sys.argv[1]), "--output_dir out")
child, (told, tells) = 0, os.pipe()
if sys.argv[2] == "fork":
    if (child := os.fork()) == 0:
        lock.close()
        os.write(tells, b"forked")
        signal.alarm(60)
        signal.pause()
    os.read(told, 6)
if sys.argv[2] == "program":
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid
print(os.getpid(), child, flush=True)
signal.pause()
"""
# Adds 1 to the number in a file, so often.
COUNTER = """
import sys
from pathlib import Path
from dschat.base.lock import Lock

for _ in range(int(sys.argv[3])):
    lock = Lock(Path(sys.argv[1]), "a number", waits=True)
    file = Path(sys.argv[2])
    file.write_text(str(int(file.read_text()) + 1))
    lock.close()
"""


@contextmanager
def held_elsewhere(file, child="none"):
    """Another process that has the lock, and its child, or 0; both are gone afterwards."""
    command = [sys.executable, "-c", HOLDER, file, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        _, child = map(int, process.stdout.readline().split())
        try:
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("child", ["none", "fork", "program"])
def test_a_killed_process_has_it_no_more_even_if_its_child_lives(child, tmp_path):
    file = tmp_path / "new" / ".lock"
    with held_elsewhere(file, child) as (process, other):
        with pytest.raises(UserError) as refusal:
            Lock(file, "--output_dir out")
        remedy = "Wait for its end, stop it, or write elsewhere."
        assert str(refusal.value) == f"--output_dir out: another process is writing it. {remedy}"
        process.kill()
        process.wait()
        assert file.exists(), "nobody has removed it"
        lock = Lock(file, "--output_dir out")
        if other:
            os.kill(other, 0)  # it lives
        lock.check()
        lock.close()
    assert not file.exists()


def test_a_lock_that_is_given_back_is_free_and_its_file_is_gone(tmp_path):
    lock = Lock(tmp_path / "new" / ".lock", "--output x")
    with pytest.raises(UserError, match="another process"):
        Lock(tmp_path / "new" / ".lock", "--output x")
    lock.close()
    lock.close()
    assert list(tmp_path.iterdir()) == []
    Lock(tmp_path / ".lock", "--output x")
    close_all()
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time_when_many_want_it(tmp_path):
    """200 additions by 4 processes; two at a time would lose some."""
    number, many = tmp_path / "number", 50
    number.write_text("0")
    command = [sys.executable, "-c", COUNTER, tmp_path / ".lock", number, str(many)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert number.read_text() == str(4 * many)
    assert list(tmp_path.iterdir()) == [number]


def test_a_lock_that_was_taken_away_is_noticed(tmp_path):
    file = tmp_path / ".lock"
    lock = Lock(file, "--output x")
    lock.check()
    file.unlink()
    with pytest.raises(UserError, match=r"--output x: this run has lost its lock .*\.lock"):
        lock.check()
    with held_elsewhere(file):
        assert not lock.is_held()
        lock.close()
        assert file.exists(), "it is the other one's"


@pytest.mark.parametrize("call", ["stat", "unlink"])
def test_a_disk_that_went_away_holds_up_no_process_that_ends(call, tmp_path, monkeypatch):
    Lock(tmp_path / ".lock", "--output x")

    def gone(*_, **__):
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, gone)
        close_all()
    Lock(tmp_path / ".lock", "--output x").close()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output x: cannot be written: "):
        Lock(tmp_path / "file" / ".lock", "--output x")
