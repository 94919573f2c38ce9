# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data on two processes is the run of one, whole and sharded."""

import pytest

from closeness import UPDATE, WEIGHT_GAP, near
from factories import largest_difference
from refuel_runs import talker, two_rounds

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


@pytest.mark.parametrize("stage, tokens", [(0, None), (3, None), (3, 150)])
def test_two_processes_make_the_rounds_of_one(stage, tokens, group, run_cases, tmp_path):
    """Dialogues of 1 to 3 turns, so that ranks draw unequally often; the evaluation, too."""
    outputs = run_cases("two-refuel", (), ("refuel",))
    expected, metrics = two_rounds(tmp_path, 0)
    found = outputs.tensors(f"refuel-zero{stage}-{tokens}")
    assert largest_difference(found, expected) < WEIGHT_GAP
    start = {f"inner.{name}": p.detach() for name, p in talker().named_parameters()}
    assert largest_difference(found, start) > 1e-4
    for rank in (0, 1):
        assert outputs.numbers(f"refuel-zero{stage}-{tokens}", rank) == near(metrics, 8 * UPDATE, scale=0.1)
