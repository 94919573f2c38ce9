# SPDX-License-Identifier: Apache-2.0
"""Parts of weights: how ranks share a weight, and a moving average that other ranks wrote."""

import pytest
import torch
from safetensors.torch import save_file

from dschat.run import checkpoint, distributed
from dschat.run.distributed import own_part, put_together

WEIGHTS = {"long": torch.arange(7.0), "short": torch.arange(2.0) + 10}
# By number of ranks, the parts of the ranks in order.
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]], [[10, 11]]],
    2: [[[0, 1, 2, 3], [4, 5, 6]], [[10], [11]]],
    3: [[[0, 1, 2], [3, 4, 5], [6]], [[10], [11], []]],
    4: [[[0, 1], [2, 3], [4, 5], [6]], [[10], [11], [], []]],
}


@pytest.fixture
def act_as(monkeypatch):
    """act_as(rank, ranks): what this process takes itself for."""

    def act(rank, ranks):
        for module in (checkpoint, distributed):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "world_size", lambda: ranks)

    return act


def parts_of(act_as, rank, ranks):
    act_as(rank, ranks)
    return {name: own_part(weight) for name, weight in WEIGHTS.items()}


@pytest.mark.parametrize("ranks", PARTS)
def test_ranks_share_a_weight(ranks, act_as):
    for rank in range(ranks):
        found = parts_of(act_as, rank, ranks)
        assert [part.tolist() for part in found.values()] == [parts[rank] for parts in PARTS[ranks]]


def test_one_rank_has_the_whole():
    assert torch.equal(put_together(own_part(WEIGHTS["long"]), 7), WEIGHTS["long"])


@pytest.mark.parametrize("before", PARTS)
@pytest.mark.parametrize("now", PARTS)
def test_an_average_that_other_ranks_wrote(before, now, act_as, tmp_path):
    for rank in range(before):
        parts = parts_of(act_as, rank, before)
        save_file({name: part.clone() for name, part in parts.items()}, tmp_path / f"average-{rank}.safetensors")
    for rank in range(now):
        found = {name: part.clone().fill_(-1) for name, part in parts_of(act_as, rank, now).items()}
        checkpoint._load_average(found, tmp_path, before)
        assert [part.tolist() for part in found.values()] == [parts[rank] for parts in PARTS[now]]
