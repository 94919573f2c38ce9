# SPDX-License-Identifier: Apache-2.0
"""Parts of weights: how ranks share a weight, and a moving average and states of ZeRO 3 that other ranks wrote."""

import pytest
import torch
from safetensors.torch import save_file

from dschat.engine import zero3
from dschat.run import checkpoint, distributed
from dschat.run.distributed import own_part

WEIGHTS = {"long": torch.arange(7.0), "short": torch.arange(2.0) + 10}
# By number of ranks, the parts of the ranks in order.
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]], [[10, 11]]],
    2: [[[0, 1, 2, 3], [4, 5, 6]], [[10], [11]]],
    3: [[[0, 1, 2], [3, 4, 5], [6]], [[10], [11], []]],
    4: [[[0, 1], [2, 3], [4, 5], [6]], [[10], [11], [], []]],
    6: [[[0, 1], [2, 3], [4, 5], [6], [], []], [[10], [11], [], [], [], []]],
}


@pytest.fixture
def act_as(monkeypatch):
    """act_as(rank, ranks): what this process takes itself for."""

    def act(rank, ranks):
        for module in (checkpoint, distributed, zero3):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "world_size", lambda: ranks, raising=False)

    return act


def parts_of(act_as, rank, ranks):
    act_as(rank, ranks)
    return {name: own_part(weight) for name, weight in WEIGHTS.items()}


@pytest.mark.parametrize("ranks", PARTS)
def test_ranks_share_a_weight(ranks, act_as):
    for rank in range(ranks):
        found = parts_of(act_as, rank, ranks)
        assert [part.tolist() for part in found.values()] == [parts[rank] for parts in PARTS[ranks]]


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


def padded(ranks, rank):
    """A rank's parts, each as long as on every rank."""
    lengths = [max(map(len, parts)) for parts in PARTS[ranks]]
    cut = [parts[rank] for parts in PARTS[ranks]]
    return [torch.tensor(part + [-1] * (n - len(part))).float() for part, n in zip(cut, lengths, strict=True)]


@pytest.mark.parametrize("before", PARTS)
@pytest.mark.parametrize("now", PARTS)
def test_weights_and_moments_that_other_ranks_wrote(before, now, act_as, tmp_path):
    """In one flat tensor; the moments are the weights plus 100. What is padding now stays what it was."""
    shapes = {name: weight.shape for name, weight in WEIGHTS.items()}
    common = {"dp_world_size": before, "param_shapes": [shapes]}
    torch.save(common, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank in range(before):
        flat = torch.cat(padded(before, rank))
        saved = {"fp32_flat_groups": [flat], "optimizer_state_dict": {"state": {0: {"exp_avg": flat + 100}}}}
        torch.save({"optimizer_state_dict": saved}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    parts = zero3.SavedParts(tmp_path)
    for rank in range(now):
        act_as(rank, now)
        for name, expected in zip(WEIGHTS, padded(now, rank), strict=True):
            for moment, more in ((None, 0), ("exp_avg", 100)):
                found = torch.full_like(expected, -1)
                parts.fill(found, name, moment)
                assert found.tolist() == torch.where(expected < 0, expected, expected + more).tolist()
