# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes of models' passes, against sums made by hand, and against what PyTorch counts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)

from dschat.models.finetuning import Finetuning, choose_trained
from dschat.models.layout import Lengths
from dschat.models.operations import ModelCost, cached_per_token, cost_of, decoding_bytes, decoding_steps

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
# A layer: q and o 32 · 32 each, k and v 32 · 16 each, gate, up and down 32 · 64 each; there are five norms of 32.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
NORMS = 5 * 32
HEAD = 50 * 32
N = 2 * LAYER + NORMS + HEAD
LENGTHS = np.array([3, 5])


def known_cost(model: Any) -> ModelCost:
    cost = cost_of(model)
    assert cost is not None
    return cost


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), GemmaConfig(**SIZES)], ids=lambda config: config.model_type)
def test_forward_and_backward_by_hand(config: PreTrainedConfig) -> None:
    """6·N + 12·L·H·S for 8 tokens in two texts. Gemma's head is its embedding, Llama's a matrix of its own."""
    cost = known_cost(AutoModelForCausalLM.from_config(config))
    assert cost.training_operations(LENGTHS) == 6 * N * 8 + 12 * 2 * 32 * (3 * 3 + 5 * 5)
    assert cost.forward_operations(LENGTHS) == 2 * N * 8 + 4 * 2 * 32 * (3 * 3 + 5 * 5)


GPT2 = GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=500, n_positions=8)
WIDE_HEADS = LlamaConfig(**SIZES | {"head_dim": 32})  # four of them, for a hidden size of 32


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), WIDE_HEADS, GPT2], ids=["llama", "wide heads", "gpt2"])
def test_pytorch_counts_nearly_the_same(config: PreTrainedConfig) -> None:
    """PyTorch's own counter, of one text of 7 tokens, leaves out norms, biases and learnt positions: 2 % here."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert known_cost(model).training_operations(np.array([7])) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    """Adapters of rank 3 beside every matrix: each has 3 · (in + out) weights."""
    adapters = 2 * 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    choose_trained(model, Finetuning(rank=3), "the model")
    operations = known_cost(model).training_operations(np.array([1]))
    assert operations == 4 * (N + adapters) + 2 * adapters + 12 * 2 * 32


def test_a_scalar_model_reads_its_embedding_without_multiplying() -> None:
    config = LlamaConfig(**SIZES, num_labels=1)
    cost = known_cost(AutoModelForSequenceClassification.from_config(config))
    assert cost.weights == cost.trained == 2 * LAYER + NORMS + 32


def test_a_mixture_of_experts_is_not_known() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    assert cost_of(AutoModelForCausalLM.from_config(config)) is None


def test_keys_and_values_of_a_token() -> None:
    """Falcon 7B keeps one head for all queries; DeepSeek's keys are wider than its values."""
    assert cached_per_token(LlamaConfig(**SIZES)) == 2 * 2 * 2 * 8
    falcon = FalconConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=3, multi_query=True)
    assert cached_per_token(falcon) == 3 * 2 * 8
    latent = DeepseekV3Config(num_hidden_layers=2, num_attention_heads=128, num_key_value_heads=128)
    assert cached_per_token(latent) == 2 * 128 * (192 + 128)


@pytest.mark.parametrize(("responses", "slots", "steps"), [([5, 2, 2], 3, 5), ([5, 5, 2], 2, 6), ([0, 0], 2, 0)])
def test_the_fewest_steps(responses: list[int], slots: int, steps: int) -> None:
    assert decoding_steps(np.array(responses), slots) == steps


def test_decoding_by_hand() -> None:
    """Responses of 3 and 1 tokens to prompts of 4 and 6, in float32: three steps read all weights, the head included,
    and two tokens see 5 and 6 keys, each with 2 layers × (key + value) × 2 heads × 8 numbers."""
    cost = known_cost(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    read = decoding_bytes(cost, Lengths(np.array([4, 6]), np.array([3, 1])), 2)
    assert read == 4 * (3 * N + (5 + 6) * 2 * 2 * 2 * 8)


def test_a_sharded_weight_counts_whole() -> None:
    """ZeRO 3 leaves an empty tensor, and the shape beside it."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    expected = cost_of(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert cost_of(model) == expected
