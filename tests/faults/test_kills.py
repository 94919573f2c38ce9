# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any instant, again and again: the run goes on, and ends as the one that nothing happened to."""

import random

import pytest

from fault_runs import RESUME, expect_same, kill_somewhere, outcome

LONGEST = {"sft": 1.2, "ppo": 2.2}  # seconds of a run, about


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [pytest.param("sft", marks=pytest.mark.slow), "ppo"])
def test_a_run_survives_kills(step, kills, trial, whole, capsys):
    expected, draw, victim = whole(step), random.Random(kills), trial(step)
    killed = finished = loaded = 0
    hit = True
    while hit or killed < kills:
        process = victim.start(**RESUME)
        hit = killed < kills and kill_somewhere(victim, process, draw, LONGEST[step])
        killed += hit
        result = victim.ended(process)
        assert "is not used" not in result.stderr, "a kill leaves every checkpoint whole that can be seen"
        loaded += "going on from" in result.stderr
        if not hit:
            result.expect(0)
            expect_same(expected, outcome(victim.out))
            assert not list(victim.out.glob("**/.*")), "nothing is left behind"
            finished += 1
            victim.clear()
    with capsys.disabled():
        print(f"\n{step}: {killed} kills survived; {finished} runs finished, {loaded} starts from a checkpoint")
