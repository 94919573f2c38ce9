# SPDX-License-Identifier: Apache-2.0
"""Models that two processes load in parts at ZeRO 3, against the same models loaded whole."""

import pytest
import torch

from loading_checks import FAMILIES

pytestmark = pytest.mark.xdist_group("launcher")
MODELS = [f"{kind} {role}" for kind in FAMILIES for role in ("policy", "critic")]
SPECIAL = ["gemma bf16", "gpt2 bf16", "odd", "several files", "grown", "offloaded"]


@pytest.mark.parametrize("name", [*MODELS, *SPECIAL])
@pytest.mark.parametrize("rank", [0, 1])
def test_loaded_in_parts_a_model_is_what_it_is_whole(name, rank, two_processes):
    """Weights and buffers bit by bit, types, what is tied, and configs; a process holds its half of each."""
    found = two_processes.numbers("loading", rank)[name]
    assert found["differ"] == found["dtypes"] == []
    assert found["shared"] and found["configs"]
    assert found["whole"] == 0 and found["held"] == pytest.approx(0.5, abs=1e-3)


def test_every_model_was_looked_at(two_processes):
    assert set(two_processes.numbers("loading")) == {*MODELS, *SPECIAL}


@pytest.mark.parametrize("name", ["plain", "lora", "frozen"])
def test_engines_of_models_in_parts_do_what_engines_of_whole_ones_do(name, two_processes):
    """Two updates with weight decay, of all weights and of adapters; outputs of frozen models in CPU memory."""
    tensors = two_processes.tensors("loaded")
    keys = [key for key in tensors if key.startswith(f"{name}/whole/")]
    assert keys
    for key in keys:
        assert torch.equal(tensors[key], tensors[key.replace("/whole/", "/parts/")]), key
