# SPDX-License-Identifier: Apache-2.0
"""Two processes, stopped and taken up again: workers.py compares with the uninterrupted runs, to the last bit."""

import shutil

import pytest

from closeness import WEIGHT_GAP
from factories import largest_difference
from resume_runs import Setup, result_of, supervised

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


def check_points(outputs, name, number):
    """Both ranks could stop at the same places, of which there are many."""
    points = outputs.numbers(name)
    assert points == outputs.numbers(name, rank=1) and len(points) == number
    assert all(count > (30 if run.startswith("ppo") else 7) for run, count in points.items())


def test_inside_a_rollout_and_between_micro_batches(two_interrupted):
    check_points(two_interrupted, "resume", 2)


def test_everywhere_and_by_another_number_of_processes(run_cases, group, tmp_path, caplog):
    """Shards of ZeRO 2 from two processes go on with one: the weights of the uninterrupted run but for rounding."""
    outputs = run_cases("resumed-everywhere", (), ("resume-everywhere",))
    check_points(outputs, "resume-everywhere", 6)
    shutil.copytree(outputs.folder / "resized", tmp_path / "out")
    for later in (3, 4):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{later}")
    made = supervised("sft", tmp_path / "out", Setup(zero_stage=2), resume_from_checkpoint="latest")
    found, _, _ = result_of(made, tmp_path / "out")
    assert "was written by 2 processes, now there are 1" in caplog.text
    assert largest_difference(found, outputs.tensors("resized")) < WEIGHT_GAP
