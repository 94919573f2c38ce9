# SPDX-License-Identifier: Apache-2.0
"""Rows for forward passes: where their tokens lie, and how rows are grouped."""

import itertools

import numpy as np
import pytest
import torch

from dschat.models.layout import Lengths, PassSize, group_by_length, lay_out
from factories import make_rollout


def share_of_tokens(lengths, groups):
    """Real tokens among those that forward passes over the groups compute."""
    return lengths.sum() / sum(len(group) * lengths[group].max() for group in groups)


def test_a_layout_by_hand():
    """Of three rows the last two: 5 6 | 7 8 9 and 4 | 3; the first column of each is its first token."""
    rollout = make_rollout([([9, 9, 9], [9]), ([5, 6], [7, 8, 9]), ([4], [3])], left=2, right=1)
    lengths = Lengths.of(rollout)
    assert lengths.totals.tolist() == [4, 5, 2]
    rows = lay_out(rollout, np.array([1, 2]), lengths)
    assert rows.input_ids[0].tolist() == [5, 6, 7, 8, 9] and rows.input_ids[1, :2].tolist() == [4, 3]
    assert rows.rows.tolist() == [1, 2] and rows.width == 3
    assert rows.input_ids.flatten()[rows.targets].tolist() == [7, 8, 9, 3]
    numbers = torch.arange(10.0).view(2, 5)
    assert rows.spread(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.before(numbers).tolist() == [[1, 2, 3], [5, 0, 0]]
    assert rows.last(numbers).tolist() == [4, 6]


def test_rows_without_a_response():
    rollout = make_rollout([([5, 6], []), ([4], [])], right=2)
    rows = lay_out(rollout, np.array([0, 1]), Lengths.of(rollout))
    assert rows.width == 1 and rows.targets.shape == (0,)
    assert rows.last(torch.tensor([[0.0, 1.0], [2.0, 3.0]])).tolist() == [1, 2]
    assert rows.before(torch.ones(2, 2)).tolist() == [[0], [0]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_have_the_least_padding_of_all_cuts(seed):
    lengths = np.random.RandomState(seed).randint(1, 40, 9)
    count, most = 3, 4
    groups = group_by_length(lengths, PassSize(most))
    assert sorted(np.concatenate(groups)) == list(range(9)) and len(groups) == count
    ordered = np.sort(lengths)
    sizes = []
    for cuts in itertools.combinations(range(1, 9), count - 1):
        parts = np.split(ordered, cuts)
        areas = [len(part) * part[-1] for part in parts]
        if max(areas) <= most * ordered[-1]:
            sizes.append(sum(areas))
    found = [len(group) * lengths[group].max() for group in groups]
    assert sum(found) == min(sizes) and max(found) <= most * ordered[-1]


def test_no_group_is_larger_than_the_longest_rows_allow():
    """Two rows of 10 at most: three of 9 would be too many, two and one row of 9 leave as little padding."""
    lengths = np.array([9, 9, 9, 9, 10])
    groups = group_by_length(lengths, PassSize(2))
    assert sorted(len(group) for group in groups) == [1, 2, 2]
    assert [len(group) for group in group_by_length(np.full(12, 7), PassSize(4))] == [4, 4, 4]  # rows of one length


def test_groups_have_no_more_rows_than_allowed_whatever_the_tokens():
    assert [len(group) for group in group_by_length(np.full(12, 7), PassSize(4, 1000))] == [4, 4, 4]


def test_groups_by_tokens_of_ragged_rollouts():
    """64 rows with prompts and responses of 64 to 512 tokens each, in passes of at most 8192."""
    random = np.random.RandomState(0)
    lengths = random.randint(64, 513, 64) + random.randint(64, 513, 64)
    groups = group_by_length(lengths, PassSize(64, 8192))
    assert share_of_tokens(lengths, groups) >= 0.95 > share_of_tokens(lengths, group_by_length(lengths, PassSize(16)))
    assert max(len(group) * lengths[group].max() for group in groups) <= 8192


def test_a_process_makes_as_many_groups_as_another_needs():
    """[2 2 2], [4 4] are enough; of three groups the first row stands alone: no other cut leaves less padding."""
    lengths, asked = np.array([4, 2, 2, 4, 2]), []
    assert [group.tolist() for group in group_by_length(lengths, PassSize(4, 8))] == [[1, 2, 4], [0, 3]]
    groups = group_by_length(lengths, PassSize(4, 8), lambda count: asked.append(count) or 3)
    assert asked == [2] and [len(group) for group in groups] == [1, 2, 2]
    groups = group_by_length(lengths, PassSize(4, 8), lambda count: 5)
    assert [len(group) for group in groups] == [1] * 5


def test_passes_without_gradients_hold_four_times_as_much_where_tokens_count():
    assert PassSize(16, 8192).without_gradient == PassSize(64, 32768)
    assert PassSize(16).without_gradient == PassSize(16)
