# SPDX-License-Identifier: Apache-2.0
"""How ranks share rows: all of them, none twice, and as many batches on every rank."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dschat.data.batches import eval_batches, update_batches

WORLDS = st.integers(1, 5)


@given(WORLDS, st.integers(1, 4), st.integers(1, 6), st.integers(0, 40), st.integers(0, 3))
def test_ranks_share_every_update_without_overlap(world, share, micro, extra, epoch):
    size = share * world
    lengths = np.random.RandomState(extra).randint(1, 9, 2 * size + extra).tolist()
    everyone = update_batches(lengths, size, size, 7, epoch)
    ranks = [update_batches(lengths, size, micro, 7, epoch, rank, world) for rank in range(world)]
    assert {len(updates) for updates in ranks} == {len(lengths) // size}
    for number, whole in enumerate(everyone):
        parts = [updates[number] for updates in ranks]
        assert len({len(part) for part in parts}) == 1  # micro-batches
        rows = [row for part in parts for batch in part for row in batch]
        assert sorted(rows) == sorted(whole[0])
        assert all(sum(map(len, part)) == share for part in parts)


@given(WORLDS, st.integers(1, 6), st.integers(1, 30))
def test_ranks_share_an_evaluation_without_loss(world, batch_size, rows):
    lengths = np.random.RandomState(rows).randint(1, 9, rows).tolist()
    ranks = [eval_batches(lengths, batch_size, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = Counter(row for batches in ranks for batch in batches for row in batch)
    assert counted == Counter(range(rows))
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
    assert ranks[0][-1] and all(eval_batches(lengths, batch_size))
