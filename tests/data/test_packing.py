# SPDX-License-Identifier: Apache-2.0
"""Where packed examples lie in a row, by hand, and what a row holds."""

from hypothesis import given
from hypothesis import strategies as st

from dschat.data.batches import update_batches
from dschat.data.collate import collate_packed, pack
from dschat.data.examples import SFTExample

PAD = 0


def test_first_fit_by_hand():
    assert pack([3, 5, 2, 4, 1], 6) == [[1, 4], [3, 2], [0]]
    assert pack([9, 2], 6) == [[0], [1]]


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=30))
def test_every_example_is_in_one_row_and_no_row_overflows(lengths):
    rows = pack(lengths, 10)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 10 for row in rows)


def test_a_batch_by_hand():
    """Tokens of three examples in rows of 7: 4 + 3, and 2."""
    examples = [SFTExample([5, 6], [7]), SFTExample([8], [9, 10, 11]), SFTExample([12], [13])]
    batch = {name: x.tolist() for name, x in collate_packed(examples, PAD, 7).items()}
    assert batch["input_ids"] == [[8, 9, 10, 11, 5, 6, 7], [12, 13, 0, 0, 0, 0, 0]]
    assert batch["position_ids"] == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert batch["targets"] == [1, 2, 3, 6, 8]
    assert collate_packed(examples, PAD, 7, sft_on_prompt=True)["targets"].tolist() == [1, 2, 3, 5, 6, 8]


def test_earlier_turns_that_are_trained_on_by_hand():
    """Of [5, 6 | 7, 8, 9] all but 8; its places are 0 to 4 of the only row."""
    example = SFTExample([5, 6], [7, 8, 9], [True, False, True])
    assert collate_packed([example], 0, 8)["targets"].tolist() == [2, 4]
    assert collate_packed([example], 0, 8, sft_on_prompt=True)["targets"].tolist() == [1, 2, 3, 4]


def test_balanced_micro_batches_hold_the_updates_rows_and_similar_numbers_of_tokens():
    lengths = [1 + 7 * i % 40 for i in range(48)]
    plain = update_batches(lengths, 24, 4, seed=3, epoch=1, rank=1, world_size=2)
    balanced = update_batches(lengths, 24, 4, seed=3, epoch=1, rank=1, world_size=2, balance_tokens=True)
    for before, after in zip(plain, balanced, strict=True):
        assert sorted(sum(before, [])) == sorted(sum(after, []))
        assert [len(rows) for rows in before] == [len(rows) for rows in after] == [4, 4, 4]
        totals = [[sum(lengths[row] for row in rows) for rows in batches] for batches in (before, after)]
        assert max(totals[1]) - min(totals[1]) < (max(totals[0]) - min(totals[0])) / 2
