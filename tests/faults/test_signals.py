# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C in the middle of things: the run ends, says how to go on, and does so exactly."""

import json
import os
import runpy
import signal
import sys
from functools import partial

import pytest

from fault_runs import MOMENTS, RESUME, contents, expect_same, outcome

SAID = "to continue, add --resume_from_checkpoint to the command"
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def stopped(result, sent, name=""):
    """Checks how a run ended that was sent a signal, or was stopped by `name` with the status of this signal."""
    result.expect(STATUS[sent])
    lines = [line for line in result.stderr.splitlines() if SAID in line]
    assert len(lines) == 1 and f"stopped by {name or sent.name}" in lines[0]
    assert "Traceback" not in result.stderr and "error:" not in result.stderr.lower()


# Both signals are handled by one function, and runs that stop at every moment are in training/test_resume.py.
FAST = [(signal.SIGINT, "ppo", "training"), (signal.SIGTERM, "ppo", "saving"), (signal.SIGTERM, "sft", "learning")]
SLOW = [
    (signal.SIGTERM, "ppo", "generation"),
    (signal.SIGINT, "ppo", "scoring"),
    (signal.SIGTERM, "ppo", "saving-models"),
    (signal.SIGINT, "sft", "saving"),
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("sent", "step", "moment"), CASES)
def test_a_run_stops_and_goes_on(sent, step, moment, trial, whole, inputs, monkeypatch):
    run = trial(step)
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS[moment]}|{sent.value}")
        first = partial(runpy.run_path, str(inputs / "own.py")) if step == "sft" else None
        stopped(run.ended(run.start(first), 30), sent)
    assert not (run.out / ".writing").exists() and not (run.out / ".lock").exists()
    assert json.loads((run.out / "run.json").read_text())["finished"] is False
    run.run(**RESUME).expect(0)
    expect_same(whole(step), outcome(run.out))


@pytest.mark.slow
def test_a_run_stops_in_time_and_goes_on(trial, whole, monkeypatch):
    """It is over a second old in the second rollout, if not before training, when there is nothing to save."""
    run = trial("ppo", save_steps=0)
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS['training']}|,")
        stopped(run.ended(run.start(max_time="00:00:01"), 30), signal.SIGTERM, "--max_time")
    assert all(update <= 3 for update in run.checkpoints())
    run.run(max_time="1-00:00:00", **RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


FURTHER = [("saving", "2,,2"), *(pytest.param("scoring", sent, marks=pytest.mark.slow) for sent in ("2,2", "2,15,15"))]


@pytest.mark.parametrize(("moment", "sent"), FURTHER)
def test_further_signals(moment, sent, trial, whole, monkeypatch):
    """A second Ctrl-C ends at once, unless it is the first one again; a launcher's later SIGTERM changes nothing."""
    run = trial("ppo")
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS[moment]}|{sent}")
        result = run.ended(run.start(), 30)
    if sent == "2,,2":
        assert "interrupted" in result.expect(130).stderr and SAID not in result.stderr
        assert not (run.out / ".writing").exists() and "Traceback" not in result.stderr
    else:
        stopped(result, signal.SIGINT)
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


def terminal_is_closed() -> None:
    """In a fork: nothing can be written to stdout and stderr any more."""
    controller, terminal = os.openpty()
    for descriptor in (1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    os.close(controller)
    sys.stdout = open(1, "w", closefd=False)  # buffered, also with PYTHONUNBUFFERED
    print("what a library prints is lost at the end")


def test_a_terminal_is_closed(trial, whole, monkeypatch):
    """The run saves a checkpoint, though it cannot say so."""
    run = trial("ppo", save_steps=0)
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS['training']}|1")
        run.ended(run.start(terminal_is_closed), 30).expect(STATUS[signal.SIGHUP])
    assert run.checkpoints() == [3]
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


def test_under_nohup_a_closed_terminal_changes_nothing(trial, whole, monkeypatch):
    run = trial("ppo")
    monkeypatch.setenv("FAULT", f"{MOMENTS['training']}|1")
    run.run(partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


def test_a_signal_while_models_are_loaded(trial, monkeypatch):
    """Nothing was begun, and nothing is left to go on from."""
    run = trial("ppo")
    monkeypatch.setenv("FAULT", "dschat.run.checkpoint:Checkpoints.load|1|2")
    result = run.ended(run.start(), 30).expect(130)
    assert "interrupted" in result.stderr and not contents(run.out / "checkpoints")
