# SPDX-License-Identifier: Apache-2.0
"""Split sizes of the published data sets, and the shuffle against a Mersenne Twister written out here."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.data.sources import split_bounds, split_indices, split_part
from dschat.errors import UserError


def reference_shuffle(num_rows: int, seed: int) -> list[int]:
    """Fisher-Yates from the end, indices by masked rejection, on MT19937 seeded by Knuth's recurrence."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))
    order = list(range(num_rows))
    for i in range(num_rows - 1, 0, -1):
        mask = (1 << i.bit_length()) - 1
        j = twister.getrandbits(32) & mask
        while j > i:
            j = twister.getrandbits(32) & mask
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize(("num_rows", "seed"), [(1, 0), (10, 1234), (1000, 1234), (257, 2**32 - 1)])
def test_order_equals_a_twister_written_out(num_rows, seed):
    assert split_indices(num_rows, "1", 0, seed).tolist() == reference_shuffle(num_rows, seed)


def test_parts_are_slices_of_one_order():
    order = reference_shuffle(1000, 1234)
    assert split_indices(1000, "2,4,4", 0, 1234).tolist() == order[:200]
    assert split_indices(1000, "2,4,4", 1, 1234).tolist() == order[200:600]
    assert split_indices(1000, "2,4,4", 2, 1234).tolist() == order[600:]
    assert split_part(range(1000), "2,4,4", 1, 1234) == order[200:600]
    assert split_indices(1000, "2,4,4", 0, 1234).dtype == np.uint32


def test_excess_and_deficit_by_hand():
    # 7 rows: 1.4 → 1, 2.8 → 3, 2.8 → 3: exact. 8 rows: 1.6 → 2, 3.2 → 3, 3.2 → 3: exact.
    assert split_bounds(7, [2, 4, 4]) == [0, 1, 4, 7]
    assert split_bounds(8, [2, 4, 4]) == [0, 2, 5, 8]
    # 4 rows: .8 → 1, 1.6 → 2, 1.6 → 2 is one too many. 18,599 rows: 3720 + 7440 + 7440 is one too many.
    assert split_bounds(4, [2, 4, 4]) == [0, 0, 2, 4]
    assert split_bounds(18599, [2, 4, 4]) == [0, 3719, 11159, 18599]
    # 5 rows, halves: 2.5 rounds to 2 (to even), one too few, added to every bound.
    assert split_bounds(5, [1, 1]) == [0, 3, 5]


def test_a_bound_stays_at_zero():
    # 3 rows: 0, 1.5 → 2, 2 is one too many; the first bound would be -1.
    assert split_bounds(3, [0, 1, 1]) == [0, 0, 1, 3]
    assert [len(split_indices(3, "0,1,1", part, 7)) for part in range(3)] == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(0, 300),
    fractions=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_cover_every_row_once(num_rows, fractions, seed):
    text = ",".join(map(str, fractions))
    parts = [split_indices(num_rows, text, part, seed).tolist() for part in range(len(fractions))]
    assert sorted(sum(parts, [])) == list(range(num_rows))


@pytest.mark.parametrize("data_split", ["", "a,b", "2,-4,4", "0,0,0", "2,nan,4", "2,inf,4"])
def test_bad_split(data_split):
    with pytest.raises(UserError, match="--data_split .* is no list of fractions"):
        split_indices(10, data_split, 0, 1234)


@pytest.mark.parametrize(("part", "named"), [(2, "PPO step"), (3, "part 3"), (-1, "part -1")])
def test_absent_part(part, named):
    with pytest.raises(UserError, match=f"--data_split 1,1 has 2 parts, none for .*{named}"):
        split_indices(10, "1,1", part, 1234)
