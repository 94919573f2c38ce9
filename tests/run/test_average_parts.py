# SPDX-License-Identifier: Apache-2.0
"""How ranks share weights and files: also a moving average and states of ZeRO 1 to 3 that other ranks wrote."""

import hashlib

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import save_file

from dschat.engine.resized import SavedPieces
from dschat.run import checkpoint, distributed
from dschat.run.distributed import own_part

WEIGHTS = {"long": torch.arange(7.0), "short": torch.arange(2.0) + 10}
# By number of ranks, the parts of the ranks in order.
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]], [[10, 11]]],
    2: [[[0, 1, 2, 3], [4, 5, 6]], [[10], [11]]],
    3: [[[0, 1, 2], [3, 4, 5], [6]], [[10], [11], []]],
    6: [[[0, 1], [2, 3], [4, 5], [6], [], []], [[10], [11], [], [], [], []]],
}


@pytest.fixture
def act_as(monkeypatch):
    """act_as(rank, ranks): what this process takes itself for."""

    def act(rank, ranks):
        for module in (checkpoint, distributed):
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
    pieces = SavedPieces(tmp_path, 3)
    for rank in range(now):
        for name, expected in zip(WEIGHTS, padded(now, rank), strict=True):
            for moment, more in ((None, 0), ("exp_avg", 100)):
                found = torch.full_like(expected, -1)
                pieces.fill(found, name, rank * len(expected), moment)
                assert found.tolist() == torch.where(expected < 0, expected, expected + more).tolist()


# By number of ranks, each rank's slice of the long weight and the short one after it: first element, elements.
SLICES = {
    1: [{"long": (0, 7), "short": (7, 2)}],
    2: [{"long": (0, 5)}, {"long": (0, 2), "short": (2, 2)}],
    3: [{"long": (0, 3)}, {"long": (0, 3)}, {"long": (0, 1), "short": (1, 2)}],
    5: [{"long": (0, 2)}, {"long": (0, 2)}, {"long": (0, 2)}, {"long": (0, 1), "short": (1, 1)}, {"short": (0, 1)}],
}


@pytest.mark.parametrize("ranks", SLICES)
def test_slices_that_other_ranks_wrote(ranks, tmp_path):
    """At ZeRO 1 and 2, in one flat tensor that is cut without regard to weights; the moments are those plus 100."""
    torch.save({"dp_world_size": ranks}, tmp_path / "mp_rank_00_model_states.pt")
    size = -(-9 // ranks)
    flats = torch.cat([*WEIGHTS.values()]).split(size)
    for rank, (slices, flat) in enumerate(zip(SLICES[ranks], flats, strict=True)):
        addresses = {name: fragment_address(numel, start) for name, (start, numel) in slices.items()}
        saved = {
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {0: {"exp_avg": flat + 100}}},
            "param_slice_mappings": [addresses],
        }
        torch.save({"optimizer_state_dict": saved}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    pieces = SavedPieces(tmp_path, 2)
    for name, weight in WEIGHTS.items():
        for start in range(len(weight)):
            for end in range(start + 1, len(weight) + 1):
                for moment, more in ((None, 0), ("exp_avg", 100)):
                    found = torch.zeros(end - start)
                    pieces.fill(found, name, start, moment)
                    assert found.tolist() == (weight[start:end] + more).tolist()


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("actor/mp_rank_00_model_states.pt", 0),
        ("actor/zero_pp_rank_3_mp_rank_00_model_states.pt", 3),
        ("critic/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt", 11),
        ("actor/offloaded_tensors/rank05/optimizer/rank1/7.tensor.swp", 5),
        ("rank-2.safetensors", 2),
        ("average-12.safetensors", 12),
        ("state.json", 0),
    ],
)
def test_the_rank_that_wrote_a_file_hashes_it(name, writer, act_as, tmp_path, monkeypatch):
    assert checkpoint.writer_of(name) == writer
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("some")
    monkeypatch.setattr(checkpoint, "barrier", lambda: None)
    for ranks in (1, 2, 16):
        hashing = []
        for rank in range(ranks):
            act_as(rank, ranks)
            monkeypatch.setattr(checkpoint, "broadcast_object", lambda item: item)
            monkeypatch.setattr(checkpoint, "gather_objects", lambda item: [item])
            files, problems = checkpoint.hash_together(tmp_path)
            assert not problems
            if files:
                hashing.append(rank)
                assert files == {name: (4, hashlib.sha256(b"some").hexdigest())}
        assert hashing == [writer % ranks]
