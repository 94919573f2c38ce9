# SPDX-License-Identifier: Apache-2.0
"""Two processes, stopped and taken up again: workers.py compares with the uninterrupted runs, to the last bit."""

import shutil

import pytest
from safetensors.torch import load_file

from closeness import assert_weights_near
from dschat.training.ppo import algorithm
from launches import WORKERS, launch
from resume_runs import NORMALISED, RESIZED, result_of, stop_in_call

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


def check_points(outputs, name, number):
    """Both ranks could stop at the same places, of which there are many."""
    points = outputs.numbers(name)
    assert points == outputs.numbers(name, rank=1) and len(points) == number
    assert all(count > (30 if run.startswith("ppo") else 7) for run, count in points.items())


def test_inside_a_rollout_and_between_micro_batches(two_slow):
    check_points(two_slow, "resume", 3)


def test_everywhere(run_cases):
    check_points(run_cases("resumed-everywhere", (), ("resume-everywhere",)), "resume-everywhere", 6)


def run_alone(name, place):
    """One process goes on from what is there, or begins."""
    place.mkdir(exist_ok=True)
    made = RESIZED[name](place, save_steps=1, save_total_limit=0, resume_from_checkpoint="latest")
    return result_of(made, place)[0]


def copy_begun(source, target):
    """A run as it was after two updates."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > 2:
            shutil.rmtree(folder)


def test_by_another_number_of_processes(run_cases, group, tmp_path, caplog):
    """Begun by two and ended by one, or by one and ended by two: the uninterrupted run but for rounding."""
    two, up = run_cases("resized", (), ("resized",)), tmp_path / "up"
    whole = {name: run_alone(name, tmp_path / name) for name in RESIZED}
    for name in RESIZED:
        copy_begun(two.folder / name, tmp_path / f"{name}-down")
        copy_begun(tmp_path / name, up / name)
    assert "not to the last bit" not in caplog.text
    launch(WORKERS, [up, "resized"], timeout=900).expect(0)
    for name, alone in whole.items():
        assert_weights_near(run_alone(name, tmp_path / f"{name}-down"), two.tensors(name), message=name)
        assert_weights_near(load_file(up / f"{name}-0.safetensors"), alone, message=name)
    assert caplog.text.count("was written by 2 processes, now there are 1: the run continues") == len(RESIZED)


def test_after_a_stop_inside_a_rollout(run_cases, group, tmp_path, caplog):
    """Stopped before the rollout's update, by two processes or by one: the other number samples the rollout again.

    At ZeRO 0 to 3 the weights are those of the uninterrupted run but for rounding, with scores that all earlier ones
    normalise.
    """
    two = run_cases("stopped", (), ("stopped",))
    up = tmp_path / "up"
    whole = {}
    for name, make in NORMALISED.items():
        whole[name] = result_of(make(tmp_path / name), tmp_path / name)
        alone = tmp_path / f"{name}-stopped"  # this process still holds its lock
        stop_in_call(make(alone).fit, algorithm, "ppo_update", 2)
        shutil.copytree(alone, up / name)
    launch(WORKERS, [up, "resumed_inside"], timeout=900).expect(0)
    for name, make in NORMALISED.items():
        down = tmp_path / f"{name}-down"
        shutil.copytree(two.folder / name, down)
        weights, rows, _ = result_of(make(down, resume_from_checkpoint="latest"), down)
        assert_weights_near(weights, whole[name][0], message=name)
        assert_weights_near(load_file(up / f"{name}-0.safetensors"), whole[name][0], message=name)
        expected = [row.get("objective/scores_running_mean") for row in whole[name][1]]
        assert [row.get("objective/scores_running_mean") for row in rows] == pytest.approx(expected), name
    assert caplog.text.count("the rollout that 2 processes had sampled is dropped and sampled again") == 4
