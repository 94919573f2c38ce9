# SPDX-License-Identifier: Apache-2.0
"""A rehearsal on two processes leaves nothing behind, at every ZeRO stage and precision."""

import pytest

from rehearsal_cases import CASES

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_an_update_after_a_rehearsal_is_that_without(case, rank, two_slow):
    notes = two_slow.numbers("rehearsal", rank)
    assert notes["moved"][case] == 0.0 and notes["left"][case] == 0
    assert notes["said"][case] is None
