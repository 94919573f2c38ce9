# SPDX-License-Identifier: Apache-2.0
"""--save_command: one copy at a time, of the newest checkpoint at the end; nothing is removed under it."""

import shlex
import signal
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.cluster import Rank
from dschat.launch import ERROR_FILE
from dschat.run.checkpoint import Checkpoints
from dschat.run.save_command import SaveCommand
from dschat.run.stop import Stopped
from resume_runs import supervised


def waiting_command(place: Path) -> str:
    """Waits for a file `go`, then writes the name of the checkpoint down."""
    folder = shlex.quote(str(place))
    return f'while [ ! -e {folder}/go ]; do sleep 0.02; done; basename "$CHECKPOINT" >> {folder}/copied'


def test_one_at_a_time_and_the_newest_at_the_end(tmp_path, caplog):
    command = SaveCommand(waiting_command(tmp_path))
    assert command.folder is None
    for name in ("step-1", "step-2", "step-3"):
        command.start(tmp_path / name)
        assert command.folder == tmp_path / "step-1"
    assert caplog.messages == [
        f"--save_command still runs for {tmp_path / 'step-1'}: {tmp_path / name} is not copied yet"
        for name in ("step-2", "step-3")
    ]
    (tmp_path / "go").touch()
    command.finish(60.0)
    assert (tmp_path / "copied").read_text().split() == ["step-1", "step-3"]
    command.start(tmp_path / "step-4")
    command.finish(60.0)
    assert (tmp_path / "copied").read_text().split() == ["step-1", "step-3", "step-4"], "step-3 once"
    assert command.folder is None and len(caplog.messages) == 2


def test_the_newest_checkpoint_behind_a_command_that_hangs_is_named(tmp_path, caplog):
    command = SaveCommand(waiting_command(tmp_path))
    command.start(tmp_path / "step-1")
    command.start(tmp_path / "step-2")
    command.finish(0.05)
    assert caplog.messages[-1] == f"{tmp_path / 'step-2'} is not copied: run --save_command for it yourself"
    (tmp_path / "go").touch()
    command.finish(60.0)


def test_a_command_that_hangs_ends_no_run(tmp_path, caplog):
    command = SaveCommand(waiting_command(tmp_path))
    command.start(tmp_path / "step-1")
    command.finish(0.05)
    assert caplog.messages == [f"--save_command for {tmp_path / 'step-1'} has not ended after 0 s, and runs on"]
    (tmp_path / "go").touch()
    command.finish(60.0)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("for i in 1 2 3 4 5 6; do echo line $i; done; exit 3", 3, "line 2\nline 3\nline 4\nline 5\nline 6"),
        ("echo from the server >&2; exit 1", 1, "from the server"),
        ("exit 1", 1, "it has printed nothing"),
        ("kill -9 $$", -9, "it has printed nothing"),
        ("head -c 9000 /dev/zero | tr '\\0' x; echo; exit 1", 1, 1999 * "x"),  # and the end of the line: 2,000 bytes
    ],
)
def test_a_failure_is_a_warning(command, status, said, tmp_path, caplog):
    copying = SaveCommand(command)
    copying.start(tmp_path)
    copying.finish(60.0)
    assert caplog.messages == [
        f"--save_command for {tmp_path} has failed with status {status}, the run goes on: {said}"
    ]


def test_a_command_that_cannot_be_started_is_a_warning(tmp_path, caplog):
    """The kernel takes no argument of more than 128 KiB."""
    copying = SaveCommand("true " + 2**17 * "x")
    copying.start(tmp_path)
    copying.finish(60.0)
    (message,) = caplog.messages
    assert message.startswith(f"--save_command for {tmp_path} cannot be started, the run goes on: ")


def test_a_command_is_no_rank_of_the_run(tmp_path, monkeypatch):
    """`dschat` in it would wait for the run's other ranks, or leave its own error as that of the run."""
    of_rank = {ERROR_FILE: "error", **Rank(1, 1, 4, 2, None, "a test").variables("10.0.0.1", 29500)}
    for name, value in of_rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    copying = SaveCommand(f"env > {shlex.quote(str(tmp_path / 'variables'))}")
    copying.start(tmp_path)
    copying.finish(60.0)
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["CHECKPOINT"]) == ("3", str(tmp_path))
    assert not variables.keys() & of_rank.keys()


def test_a_run_copies_its_last_checkpoint(tmp_path, monkeypatch, group):
    """The folder's path needs no quotes of its own; a file that the command needs of it is complete."""
    monkeypatch.chdir(tmp_path)
    place = Path("a folder's name")
    command = 'mkdir -p copies && cp -r "$CHECKPOINT" copies/'
    supervised("sft", place, save_steps=2, save_command=command).fit()
    original = place / "checkpoints" / "step-4"
    copy = Path("copies") / "step-4"
    for file in original.rglob("*"):
        if file.is_file():
            assert (copy / file.relative_to(original)).read_bytes() == file.read_bytes()
    assert (copy / "manifest.json").exists()


def test_what_is_being_copied_stays(tmp_path, monkeypatch, group):
    """Of four checkpoints one is to be kept; the first stays as well until its copy is done."""
    folder = tmp_path / "run" / "checkpoints"
    finish = Checkpoints.finish

    def go_and_finish(checkpoints):
        assert {path.name for path in folder.iterdir()} == {"step-1", "step-4"}
        (tmp_path / "go").touch()
        finish(checkpoints)

    monkeypatch.setattr(Checkpoints, "finish", go_and_finish)
    flags = {"save_steps": 1, "save_total_limit": 1, "eval_interval": 0}
    supervised("sft", tmp_path / "run", save_command=waiting_command(tmp_path), **flags).fit()
    assert {path.name for path in folder.iterdir()} == {"step-4"}
    assert (tmp_path / "copied").read_text().split() == ["step-1", "step-4"]


def test_a_checkpoint_that_stayed_for_its_copy_is_removed_once(tmp_path, group, caplog):
    """The copy of step-1 is done between the saves of step-2 and step-3; the end of the run has nothing to remove."""
    loop = supervised(
        "sft",
        tmp_path / "run",
        save_command=waiting_command(tmp_path),
        save_steps=1,
        save_total_limit=1,
        eval_interval=0,
    )
    iterate = loop.iterate

    def iterate_and_go(work):
        if loop.update == 3:
            (tmp_path / "go").touch()
            loop.checkpoints._command._running.process.wait()
        return iterate(work)

    loop.iterate = iterate_and_go
    loop.fit()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-4"}
    assert not [message for message in caplog.messages if "cannot be removed" in message]


@pytest.mark.parametrize("reason", ["signal", "alarm"])
def test_a_stopped_run_waits_for_its_copy(reason, tmp_path, group):
    """The checkpoint of a run that a signal stops, or that ends itself, is copied before the process ends."""
    loop = supervised("sft", tmp_path / "run", save_command=f"sleep 0.5; touch {tmp_path}/copied")
    iterate = loop.iterate

    def iterate_and_stop(work):
        signal.raise_signal(signal.SIGTERM)
        return iterate(work)

    if reason == "signal":
        loop.iterate = iterate_and_stop
    else:
        loop.algorithm.why_stop = lambda metrics, update, may_stop: "enough" if update == 1 else None
    with pytest.raises(Stopped if reason == "signal" else UserError):
        loop.fit()
    assert (tmp_path / "copied").exists() and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
