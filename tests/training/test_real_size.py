# SPDX-License-Identifier: Apache-2.0
"""ZeRO 3 with the limits that a model of 7 billion weights meets makes the runs of whole weights.

Every run evaluates before, between and after its updates, which leaves weights in flight, and gathers them all at the
end. Those of step 3 check themselves, keep a moving average and have several PPO epochs.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from closeness import assert_weights_near, near
from dschat.engine.zero3 import parameter_offload
from factories import HIDDEN, engine_of, largest_difference, make_causal_lm, pad_rows, ragged_rows, whole_state
from resume_runs import Setup, ppo, refuel_online, result_of, supervised

FLOAT32, BF16, LORA = Setup(), Setup(dtype=torch.bfloat16, gradient_clipping=0.0), Setup(lora_dim=2)
ROWS = ragged_rows([2, 5], [7, 3])
LATE = {"ppo_epochs": 1, "generation_batches": 1}  # one update per rollout: its own passes give log-probs and values


def refuel(folder, setup):
    flags = {"noptepochs": 2, "eval_interval": 2, "engine": {"zero_stage": setup.zero_stage}}
    return refuel_online(folder, lora_dim=setup.lora_dim, **flags)


RUNS = {
    "sft": (partial(supervised, "sft"), FLOAT32),
    "dpo with adapters": (partial(supervised, "dpo"), LORA),
    "ppo": (ppo, FLOAT32),
    "ppo in bf16": (ppo, BF16),
    "ppo with log-probs of the update": (partial(ppo, **LATE), FLOAT32),
    "refuel with adapters": (refuel, LORA),
}


SLOW = [("dpo with adapters", HIDDEN), *((name, 0) for name in RUNS if name != "sft")]


@pytest.mark.parametrize(
    ("name", "whole"), [("sft", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_run_of_real_size_is_that_of_whole_weights(name, whole, group, tmp_path):
    """With the vectors of the hidden size whole, and with nothing whole.

    In bf16 ZeRO 2 stands for whole weights: below it, DeepSpeed rounds sums over micro-batches otherwise. And nothing
    is clipped: norms are summed in another order, and whatever the last digit of a step moves over an edge between
    two numbers of bf16 is another run.
    """
    make, setup = RUNS[name]
    results = []
    for stage in (2 if setup.dtype == torch.bfloat16 else 0, 3):
        place = tmp_path / str(stage)
        results.append(result_of(make(place, replace(setup, zero_stage=stage, whole=whole)), place))
    (weights, rows, _), (found, found_rows, _) = results
    assert_weights_near(found, weights)
    for row, expected in zip(found_rows, rows, strict=True):
        assert row == near(expected)
    assert rows


def engine_in_flight():
    """At ZeRO 3, after a pass without gradients: DeepSpeed, used to updates, has fetched for the way back."""
    engine = engine_of(make_causal_lm(num_hidden_layers=4), zero_stage=3, learning_rate=0.0)
    ids, attention_mask, mask = pad_rows(ROWS)
    for _ in range(2):
        engine.backward(engine(ids, attention_mask, mask.shape[1])[0].sum())
        engine.step()
    with torch.no_grad():
        return engine, engine(ids, attention_mask, mask.shape[1])[0]


def in_flight(engine):
    return len(parameter_offload(engine._engine).module.ds_inflight_param_registry)


@pytest.mark.parametrize("entry", ["whole weights", "parts"])
def test_weights_in_flight_are_waited_for(entry, group):
    """What needs weights at rest finds them so, and the next pass says the same."""
    engine, expected = engine_in_flight()
    assert in_flight(engine) > 0, "nothing was fetched ahead: the limits do not act"
    found = whole_state(engine) if entry == "whole weights" else engine.parts()  # one process has all of each
    assert in_flight(engine) == 0 and all(p.numel() == 0 for p in engine.module.parameters())
    weights = make_causal_lm(num_hidden_layers=4).named_parameters()
    flat = {name: weight.flatten() for name, weight in found.items()}
    assert largest_difference(flat, {f"inner.{name}": p.detach().flatten() for name, p in weights}) == 0
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        assert torch.equal(engine(ids, attention_mask, mask.shape[1])[0], expected)
