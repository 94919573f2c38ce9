# SPDX-License-Identifier: Apache-2.0
"""Two processes, stopped and taken up again: see `resume` of workers.py, which compares with the uninterrupted runs."""

import pytest

pytestmark = pytest.mark.xdist_group("launcher")


def test_every_stop_was_made(two_processes):
    """Sampling, scoring and updates of four rollouts, and evaluations, have many places; the same on both ranks."""
    points = two_processes.numbers("resume")
    assert points == two_processes.numbers("resume", rank=1)
    assert set(points) == {
        f"{step}-{how}" for step in ("ppo", "sft") for how in ("zero2-lora0", "zero3-lora0", "zero2-lora2")
    }
    assert all(number > (30 if name.startswith("ppo") else 7) for name, number in points.items())
