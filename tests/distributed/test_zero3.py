# SPDX-License-Identifier: Apache-2.0
"""Weights in parts: loading, generation, training around it, saved folders, moving average and evaluation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from closeness import FORMULA, assert_near, assert_weights_near
from factories import BOS, PAD, hf_logprobs, largest_difference, make_causal_lm
from sharded_checks import LENGTHS, ROWS, prompts_of
from sharded_loading_checks import FAMILIES, FAST_FAMILIES, UNTIED

pytestmark = pytest.mark.xdist_group("launcher")


@torch.no_grad()
def greedy_by_hand(model, rank):
    """Row by row without padding: the largest logit of the unpadded row, pad and BOS never."""
    prompts = prompts_of(rank)
    responses = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(LENGTHS[rank]):
            logits = model(input_ids=torch.tensor([row])).logits[0, -1]
            logits[[PAD, BOS]] = -torch.inf
            row.append(int(logits.argmax()))
        responses.append(row[-LENGTHS[rank] :])
    return responses


@pytest.mark.parametrize("rank", [0, 1])
def test_greedy_tokens_at_zero_3_are_those_of_the_whole_model(rank, two_processes):
    """Rank 1 generates longer and more often than rank 0."""
    sharded, whole = (two_processes.numbers(f"generation-zero{stage}", rank) for stage in (3, 0))
    assert sharded["first"] == whole["first"] == greedy_by_hand(make_causal_lm(), rank)
    assert sharded["later"] == whole["later"]  # after an update
    assert two_processes.numbers("generation-frozen", rank)["first"] == whole["first"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_model_in_parts_in_cpu_memory_is_the_model_itself(rank, two_processes):
    said = two_processes.tensors("offloaded", rank)["logprobs"]
    model = make_causal_lm()
    for number, row in enumerate(ROWS):
        logprobs, _ = hf_logprobs(model, row)
        assert_near(said[number, : len(logprobs)], logprobs)
    assert two_processes.numbers("offloaded", rank)["first"] == greedy_by_hand(model, rank)


def test_training_goes_on_as_if_nothing_had_been_generated(two_processes):
    weights = [two_processes.tensors(f"{name}-zero3") for name in ("generation", "training")]
    assert largest_difference(*weights) == 0
    assert_weights_near(weights[0], two_processes.tensors("generation-zero0"))


@pytest.fixture(scope="module")
def saved(two_processes):
    return two_processes.tensors("saved")


def test_a_saved_policy_is_what_the_engine_says(saved, two_processes):
    model = AutoModelForCausalLM.from_pretrained(two_processes.folder / "actor", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(two_processes.folder / "actor").pad_token == "<pad>"
    for number, row in enumerate(ROWS):
        logprobs, _ = hf_logprobs(model, row)
        assert_near(saved["logprobs"][number, : len(logprobs)], logprobs)


@torch.no_grad()
def test_a_saved_critic_is_what_the_engine_says(saved, two_processes):
    """The number at a response's last token is the score of plain transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(two_processes.folder / "critic", dtype=torch.float32)
    width = max(len(prompt) for prompt, _ in ROWS)
    for number, (prompt, response) in enumerate(ROWS):
        expected = model(input_ids=torch.tensor([prompt + response])).logits[0]
        position = width + len(response) - 1
        assert_near(saved["values"][number, position : position + 1], expected)


def test_both_ranks_compute_the_same(saved, two_processes):
    assert largest_difference(saved, two_processes.tensors("saved", 1)) == 0


def test_the_moving_average_is_that_of_hand_arithmetic(two_processes):
    """Decay 3/4: (27 w0 + 9 w1 + 12 w2 + 16 w3) / 64."""
    states = [two_processes.tensors(f"ema-weights{number}") for number in range(4)]
    average = two_processes.tensors("ema-average")
    for name in states[0]:
        total = sum(k * state[name].double() for k, state in zip((27, 9, 12, 16), states, strict=True))
        assert_near(average[name].double(), total / 64, FORMULA)
    assert largest_difference(states[0], states[3]) > 2e-4
    assert not (two_processes.folder / "ema-average-1.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_self_check_changes_no_update_and_both_processes_find_the_weight_that_one_holds(rank, two_slow):
    """The NaN is in the second process's part."""
    notes = two_slow.numbers("self_checks", rank)
    assert notes["moved"] == 0
    assert notes["said"].startswith("self-check: model.layers.1.mlp.up_proj.weight of "), notes["said"]


MODELS = [f"{kind} {role}" for kind in FAST_FAMILIES for role in ("policy", "critic")]
OTHER_MODELS = [f"{kind} {role}" for kind in FAMILIES for role in ("policy", "critic") if kind not in FAST_FAMILIES]
SPECIAL = ["bf16", "odd", "several files", "adapter", "grown", "offloaded"]


@pytest.fixture
def loaded(name, two_processes, run_cases):
    """Results of the run that loads the model of this name; the families of slow tests have one of their own."""
    return run_cases("loading-families", (), ("loading_families",)) if name in OTHER_MODELS else two_processes


@pytest.mark.parametrize(
    "name", [*MODELS, *SPECIAL, *UNTIED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_MODELS)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_loaded_in_parts_a_model_is_what_it_is_whole(name, rank, loaded):
    """Weights and buffers bit by bit, types, what is tied, and configs; a process holds its half of each."""
    found = loaded.numbers("loading", rank)[name]
    assert found["differ"] == found["dtypes"] == []
    assert found["shared"] and found["configs"]
    assert found["whole"] == 0 and found["held"] == pytest.approx(0.5, abs=1e-3)


def test_every_model_was_looked_at(two_processes):
    assert set(two_processes.numbers("loading")) == {*MODELS, *SPECIAL, *UNTIED}


@pytest.mark.parametrize("name", ["plain", "lora", "untied", "frozen"])
def test_engines_of_models_in_parts_do_what_engines_of_whole_ones_do(name, two_processes):
    """Two updates with weight decay, of all weights, of adapters and of a head that was untied; outputs of frozen
    models in CPU memory.
    """
    tensors = two_processes.tensors("loaded")
    keys = [key for key in tensors if key.startswith(f"{name}/whole/")]
    assert keys
    for key in keys:
        assert torch.equal(tensors[key], tensors[key.replace("/whole/", "/parts/")]), key
