# SPDX-License-Identifier: Apache-2.0
"""A rehearsal on two processes leaves nothing behind, at every ZeRO stage and precision."""

import pytest

from rehearsal_cases import CASES, SLOW_CASES

pytestmark = pytest.mark.xdist_group("launcher")


def check(notes, case):
    assert notes["moved"][case] == 0.0 and notes["left"][case] == 0
    assert notes["said"][case] is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_an_update_after_a_rehearsal_is_that_without(case, rank, two_processes):
    check(two_processes.numbers("rehearsal", rank), case)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", SLOW_CASES)
def test_so_it_is_in_other_settings(case, rank, two_slow):
    check(two_slow.numbers("rehearsal_slow", rank), case)
