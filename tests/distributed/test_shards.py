# SPDX-License-Identifier: Apache-2.0
"""How ranks share rows: all of them, none twice, and as many batches on every rank."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dschat.data.batches import eval_batches

WORLDS = st.integers(1, 5)


@given(WORLDS, st.integers(1, 6), st.integers(1, 30))
def test_ranks_share_an_evaluation_without_loss(world, batch_size, rows):
    lengths = np.random.RandomState(rows).randint(1, 9, rows).tolist()
    ranks = [eval_batches(lengths, batch_size, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = Counter(row for batches in ranks for batch in batches for row in batch)
    assert counted == Counter(range(rows))
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
    assert ranks[0][-1] and all(eval_batches(lengths, batch_size))
