# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder or file: held by one process, and only as long as it lives."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
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
        pid, child = map(int, process.stdout.readline().split())
        try:
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)
    assert process.pid == pid


def test_the_refusal_says_who_has_it_and_what_to_do(tmp_path):
    file = tmp_path / "new" / ".lock"
    with held_elsewhere(file) as (process, _):
        with pytest.raises(UserError) as refusal:
            Lock(file, "--output_dir out")
        name = f"process {process.pid} on {socket.gethostname()}, since "
        assert str(refusal.value).startswith(f"--output_dir out: another process is writing it: {name}20")
        assert str(refusal.value).endswith(" UTC. Wait for its end, stop it, or write elsewhere.")
        assert file.read_text().startswith(name), "the refused process has changed nothing"


@pytest.mark.parametrize("child", ["none", "fork", "program"])
def test_a_killed_process_has_it_no_more_even_if_its_child_lives(child, tmp_path):
    file = tmp_path / ".lock"
    with held_elsewhere(file, child) as (process, other):
        with pytest.raises(UserError, match="another process"):
            Lock(file, "--output_dir out")
        process.kill()
        process.wait()
        assert file.exists(), "nobody has removed it"
        lock = Lock(file, "--output_dir out")
        if other:
            os.kill(other, 0)  # it lives
        assert file.read_text().startswith(f"process {os.getpid()} on ")
        lock.close()
    assert not file.exists()


def test_a_lock_that_is_given_back_is_free_and_its_file_is_gone(tmp_path):
    lock = Lock(tmp_path / ".lock", "--output x")
    with pytest.raises(UserError, match="another process"):
        Lock(tmp_path / ".lock", "--output x")
    lock.close()
    lock.close()
    assert list(tmp_path.iterdir()) == []
    Lock(tmp_path / ".lock", "--output x")
    close_all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", ["", "process 1 on elsewhere, since 2020-01-01 00:00:00 UTC", "x" * 5000])
def test_what_a_killed_process_left_is_in_nobody_s_way(left, tmp_path):
    """Whatever it was, and whichever machine wrote it."""
    (tmp_path / ".lock").write_text(left)
    lock = Lock(tmp_path / ".lock", "--output x")
    lock.check()
    lock.close()


def test_one_at_a_time_when_many_want_it(tmp_path):
    """200 additions by 4 processes; two at a time would lose some."""
    number, many = tmp_path / "number", 50
    number.write_text("0")
    command = [sys.executable, "-c", COUNTER, tmp_path / ".lock", number, str(many)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert number.read_text() == str(4 * many)
    assert list(tmp_path.iterdir()) == [number]


def test_a_file_that_is_removed_before_it_is_locked(tmp_path, monkeypatch):
    """By its holder, which gives it back at that moment."""
    file, real, removed = tmp_path / ".lock", fcntl.flock, []

    def flock(*arguments):
        if not removed:
            file.unlink()
            removed.append(file)
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = Lock(file, "--output x")
    lock.check()
    lock.close()
    assert removed and not file.exists()


def test_a_lock_that_was_taken_away_is_noticed(tmp_path):
    file = tmp_path / ".lock"
    lock = Lock(file, "--output x")
    lock.check()
    file.unlink()
    with pytest.raises(UserError, match=r"--output x: this run has lost its lock .*\.lock \(now held by nobody\)"):
        lock.check()
    with held_elsewhere(file) as (process, _):
        with pytest.raises(UserError, match=rf"now held by process {process.pid} on .*\)"):
            lock.check()
        lock.close()
        assert file.exists(), "it is the other one's"


@pytest.mark.parametrize("missing", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_disk_without_locks_a_file_that_is_there_counts(missing, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(missing, os.strerror(missing))

    monkeypatch.setattr(fcntl, "flock", refuse)
    file = tmp_path / ".lock"
    lock = Lock(file, "--output x")
    with pytest.raises(UserError, match=rf"process {os.getpid()} on .*a disk without locks.*remove {file}\)"):
        Lock(file, "--output x")
    lock.close()
    Lock(file, "--output x").close()
    assert not file.exists()


def test_on_a_disk_without_locks_one_of_two_that_start_at_once_has_it(tmp_path, monkeypatch):
    """The second opens the file before the first has written its name."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("dschat.base.lock.TRIES", 3)
    file, real, refused = tmp_path / ".lock", os.pwrite, []

    def pwrite(*arguments):
        monkeypatch.setattr(os, "pwrite", real)
        with pytest.raises(UserError, match="another process is writing it: unknown"):
            Lock(file, "--output x")
        refused.append(file)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    lock = Lock(file, "--output x")
    lock.check()
    assert refused
    lock.close()


@pytest.mark.parametrize("call", ["stat", "unlink"])
def test_a_disk_that_went_away_holds_up_no_process_that_ends(call, tmp_path, monkeypatch):
    locks = [Lock(tmp_path / f".lock{n}", "--output x") for n in range(2)]

    def gone(*_, **__):
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, gone)
        close_all()
    for n in range(len(locks)):
        Lock(tmp_path / f".lock{n}", "--output x").close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_holder_that_has_not_said_its_name_yet_is_waited_for(code, tmp_path, monkeypatch):
    """Both numbers mean that the lock is held."""
    asked, pauses = [], []

    def flock(*_):
        asked.append(code)
        if len(asked) < 4:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(time, "sleep", pauses.append)
    Lock(tmp_path / ".lock", "--output x").close()
    assert len(asked) == 4 and len(pauses) == 3


def test_a_place_that_cannot_be_written_is_named_and_the_lock_is_free_again(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="--output x: cannot be written: .*No space"):
        patch.setattr(os, "pwrite", full)
        Lock(tmp_path / ".lock", "--output x")
    Lock(tmp_path / ".lock", "--output x").close()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output x: cannot be written: "):
        Lock(tmp_path / "file" / ".lock", "--output x")
