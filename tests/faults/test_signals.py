# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C in the middle of things: the run ends, says how to go on, and does so exactly."""

import runpy
import signal
from functools import partial

import pytest

from fault_runs import MOMENTS, RESUME, contents, expect_same, outcome

SAID = "to go on, add --resume_from_checkpoint to the command"
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}


def stopped(result, sent):
    """Checks how a run ended that was sent a signal."""
    result.expect(STATUS[sent])
    lines = [line for line in result.stderr.splitlines() if SAID in line]
    assert len(lines) == 1 and f"stopped by {sent.name}" in lines[0]
    assert "Traceback" not in result.stderr and "error" not in result.stderr.lower().replace("stderr", "")


@pytest.mark.parametrize("moment", ["generation", "scoring", "training", "saving", "saving-models"])
@pytest.mark.parametrize("sent", STATUS, ids=lambda sent: sent.name)
def test_step_3_stops_and_goes_on(sent, moment, trial, whole, monkeypatch):
    run = trial("ppo")
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS[moment]}|{sent.value}")
        stopped(run.ended(run.start(), 30), sent)
    assert not (run.out / ".writing").exists() and not (run.out / ".lock").exists()
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


@pytest.mark.parametrize("moment", ["learning", "saving"])
@pytest.mark.parametrize("sent", STATUS, ids=lambda sent: sent.name)
def test_step_1_stops_and_goes_on(sent, moment, trial, whole, inputs, monkeypatch):
    run = trial("sft")
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS[moment]}|{sent.value}")
        stopped(run.ended(run.start(partial(runpy.run_path, str(inputs / "own.py"))), 30), sent)
    run.run(**RESUME).expect(0)
    expect_same(whole("sft"), outcome(run.out))


def test_without_save_steps_a_signal_saves_all_the_same(trial, whole, monkeypatch):
    run = trial("ppo", save_steps=0)
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS['training']}|15")
        stopped(run.ended(run.start(), 30), signal.SIGTERM)
    assert run.checkpoints() == [3], "in the middle of the second rollout"
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


@pytest.mark.parametrize("moment", ["scoring", "saving"])
def test_a_second_ctrl_c_ends_at_once(moment, trial, whole, monkeypatch):
    run = trial("ppo")
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS[moment]}|2,2")
        result = run.ended(run.start(), 30).expect(130)
    assert "interrupted" in result.stderr and SAID not in result.stderr
    assert not (run.out / ".writing").exists() and "Traceback" not in result.stderr
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


def test_a_launcher_s_signal_after_ctrl_c_changes_nothing(trial, whole, monkeypatch):
    """It sends SIGTERM to its processes, which have had Ctrl-C already."""
    run = trial("ppo")
    with monkeypatch.context() as hurt:
        hurt.setenv("FAULT", f"{MOMENTS['scoring']}|2,15,15")
        stopped(run.ended(run.start(), 30), signal.SIGINT)
    run.run(**RESUME).expect(0)
    expect_same(whole("ppo"), outcome(run.out))


def test_a_signal_while_models_are_loaded(trial, monkeypatch):
    """Nothing was begun, and nothing is left to go on from."""
    run = trial("ppo")
    monkeypatch.setenv("FAULT", "dschat.run.checkpoint:Checkpoints.load|1|2")
    result = run.ended(run.start(), 30).expect(130)
    assert "interrupted" in result.stderr and not contents(run.out / "checkpoints")
