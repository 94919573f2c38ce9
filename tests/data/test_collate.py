# SPDX-License-Identifier: Apache-2.0
"""Padding written out by hand, and which rows meet in which update."""

import pytest
import torch

from dschat.base.errors import UserError
from dschat.data.batches import eval_batches, further_examples, update_batches
from dschat.data.collate import collate_pairs, collate_sft
from dschat.data.examples import PairExample, SFTExample

PAD = 0
DEMONSTRATIONS = [SFTExample([1, 5], [6, 7, 2]), SFTExample([1, 8, 9, 10], [2])]


def test_sft_layout():
    batch = collate_sft(DEMONSTRATIONS, PAD)
    assert batch["input_ids"].tolist() == [[0, 0, 1, 5, 6, 7, 2], [1, 8, 9, 10, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [
        [False, False, True, True, True, True, True],
        [True, True, True, True, True, False, False],
    ]
    assert batch["response_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert (batch["input_ids"].dtype, batch["attention_mask"].dtype) == (torch.long, torch.bool)


def test_sft_on_prompt_layout():
    batch = collate_sft([DEMONSTRATIONS[0], SFTExample([1], [2])], PAD, sft_on_prompt=True)
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2], [1, 2, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch["response_mask"].tolist() == [[True] * 4, [True, False, False, False]]


def test_pairs_layout():
    batch = collate_pairs([PairExample([1, 5, 2], [1, 6]), PairExample([1], [1, 7, 8, 2])], PAD)
    assert batch["input_ids"].tolist() == [[1, 5, 2, 0], [1, 0, 0, 0], [1, 6, 0, 0], [1, 7, 8, 2]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 1, 2, 4]
    assert batch["attention_mask"].dtype == torch.bool


def flat(updates):
    return [[row for micro in update for row in micro] for update in updates]


@pytest.mark.parametrize(("micro", "sizes"), [(1, [1] * 8), (3, [3, 3, 2]), (9, [8])])
def test_updates_hold_the_same_rows_for_any_micro_batch(micro, sizes):
    lengths = [1 + 7 * row % 40 for row in range(30)]
    reference = update_batches(lengths, 8, 8, seed=3, epoch=1)
    updates = update_batches(lengths, 8, micro, seed=3, epoch=1)
    assert [sorted(rows) for rows in flat(updates)] == [sorted(rows) for rows in flat(reference)]
    assert len(set(sum(flat(updates), []))) == 24
    for update, rows in zip(updates, flat(updates), strict=True):
        assert [len(batch) for batch in update] == sizes
        assert rows == sorted(rows, key=lengths.__getitem__)


def test_ranks_share_every_update():
    lengths = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 5, 3, 9, 2]
    whole = update_batches(lengths, 6, 3, seed=1, epoch=0)
    first, second = (update_batches(lengths, 6, 3, seed=1, epoch=0, rank=rank, world_size=2) for rank in (0, 1))
    for all_rows, mine, others in zip(flat(whole), flat(first), flat(second), strict=True):
        assert len(mine) == 3 and sorted(mine + others) == sorted(all_rows)


def test_order_depends_on_seed_and_epoch_only():
    lengths = list(range(1, 41))
    order = update_batches(lengths, 4, 2, seed=1, epoch=0)
    assert order == update_batches(lengths, 4, 2, seed=1, epoch=0)
    assert order != update_batches(lengths, 4, 2, seed=1, epoch=1)
    assert order != update_batches(lengths, 4, 2, seed=2, epoch=0)


def test_too_few_examples_and_uneven_ranks():
    with pytest.raises(UserError, match="3 examples are left, fewer than the 4 of one update"):
        update_batches([1, 2, 3], 4, 2, seed=1, epoch=0)
    with pytest.raises(ValueError, match="not a multiple of world_size 3"):
        update_batches([1, 2, 3, 4], 4, 2, seed=1, epoch=0, world_size=3)


def test_further_examples_are_others_first():
    """Of 11, 4 in an update: the other 7, then these, then the order again."""
    taken = [2, 10, 5, 7]
    parts = [further_examples(11, taken, 4, seed=3, part=part) for part in range(4)]
    order = sum(parts, [])
    assert sorted(order[:7]) == [0, 1, 3, 4, 6, 8, 9] and sorted(order[7:11]) == sorted(taken)
    assert order[11:] == order[:5] and all(len(part) == 4 for part in parts)
    assert further_examples(11, taken[::-1], 4, 3, 0) == parts[0] != further_examples(11, taken, 4, 4, 0)
    assert order[:7] != sorted(order[:7])


def test_eval_batches_are_sorted_and_complete():
    assert eval_batches([30, 10, 20, 40, 10], 2) == [[1, 4], [2, 0], [3]]
    shares = [eval_batches([30, 10, 20, 40, 10], 2, rank=rank, world_size=2) for rank in (0, 1)]
    assert shares == [[[1, 2], [3]], [[4, 0], []]]
