# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes of models' passes, against sums made by hand, and against what PyTorch counts."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from dschat.models.finetuning import EVERYTHING, Finetuning, choose_trained, train_top_layers
from dschat.models.layout import Lengths
from dschat.models.operations import ModelCost, cached_per_token, cost_of, decoding_bytes, decoding_steps, seen_keys

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
# A layer: q and o 32 · 32 each, k and v 32 · 16 each, gate, up and down 32 · 64 each.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
ATTENTION = 4 * 4 * 8  # of a layer, for a key: 2 operations with the query and 2 with the value, 4 heads of width 8
HEAD = 50 * 32
LENGTHS = np.array([3, 5])  # 6 + 15 keys are seen
KEYS = 3 * 4 // 2 + 5 * 6 // 2


def cost(config: PreTrainedConfig, finetuning: Finetuning = EVERYTHING, top_layers: int = 0) -> ModelCost:
    """Of a causal LM with so much of it trained."""
    model = AutoModelForCausalLM.from_config(config)
    choose_trained(model, finetuning, "the model")
    if top_layers:
        train_top_layers(model, top_layers, "--trained_layers")
    computed = cost_of(model)
    assert computed is not None
    return computed


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), GemmaConfig(**SIZES)], ids=lambda config: config.model_type)
def test_forward_and_backward_by_hand(config: PreTrainedConfig) -> None:
    """8 tokens in two texts, of which 4 are targets. Gemma's head is its embedding, Llama's a matrix of its own."""
    computed = cost(config)
    forward = 2 * 2 * LAYER * 8 + 2 * ATTENTION * KEYS + 2 * HEAD * 4
    assert computed.forward.operations(LENGTHS, 4) == forward
    assert computed.backward.operations(LENGTHS, 4) == 2 * forward
    assert computed.training_operations(LENGTHS, 4) == 3 * forward


@pytest.mark.parametrize("family", [LlamaConfig, GemmaConfig, GPT2Config, OPTConfig])
def test_pytorch_counts_the_same(family: type[PreTrainedConfig]) -> None:
    """PyTorch's own counter, of one text of 7 tokens with attention as matrices: it counts all 7 · 7 keys, which a
    causal mask then hides, and the head at every position.

    Families name their layers and heads differently; OPT and GPT-2 have biases and learnt positions, which do not
    count.
    """
    names = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50} if family is GPT2Config else SIZES
    if family is OPTConfig:
        names = {"vocab_size": 50, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        names |= {"word_embed_proj_dim": 16, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(family(**names), attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=False).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    backward = counter.get_total_flops() - forward
    computed = cost_of(model)
    assert computed is not None
    (per_key,) = computed.forward.per_key.values()
    hidden = per_key * (7 * 7 - 7 * 8 / 2)
    assert computed.forward.operations(np.array([7]), 7) + hidden == forward
    assert computed.backward.operations(np.array([7]), 7) + 2 * hidden == backward


def test_keys_within_a_window() -> None:
    """Of 6 tokens with a window of 4: 1, 2, 3, 4, 4 and 4 keys; a text of 3 does not reach it."""
    assert seen_keys(np.array([6, 3]), 4) == 18 + 6
    assert seen_keys(np.array([6, 3])) == 21 + 6
    assert seen_keys(np.array([], dtype=np.int64)) == 0


def test_sliding_layers_see_their_window() -> None:
    """Gemma 2's first layer slides, its second does not; all of Mistral's do."""
    window = {"sliding_window": 4}
    gemma2 = cost(Gemma2Config(**SIZES, **window)).forward.per_key
    assert gemma2 == {4: ATTENTION, None: ATTENTION}
    assert cost(MistralConfig(**SIZES, **window)).forward.per_key == {4: 2 * ATTENTION}


def test_lora_computes_no_gradients_of_frozen_weights() -> None:
    """Adapters of rank 3 beside every matrix: each has 3 · (in + out) weights, which take their own gradients, too."""
    adapters = 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    computed = cost(LlamaConfig(**SIZES), Finetuning(rank=3))
    assert computed.forward.per_token == 2 * 2 * (LAYER + adapters)
    assert computed.backward.per_token == 2 * 2 * LAYER + 2 * 2 * 2 * adapters
    assert computed.backward.per_key == {None: 2 * 2 * ATTENTION}
    assert computed.backward.per_target == 2 * HEAD


def test_nothing_goes_backward_below_the_trained_layers() -> None:
    computed = cost(LlamaConfig(**SIZES), top_layers=1)
    assert computed.forward.per_token == 2 * 2 * LAYER
    assert computed.backward.per_token == 2 * 2 * LAYER
    assert computed.backward.per_key == {None: 2 * ATTENTION}
    assert computed.backward.per_target == 2 * HEAD  # of the states alone


def test_a_head_that_is_trained_alone() -> None:
    """Llama's takes the gradient of its weights; Gemma's is the embedding, too, and gradients pass all layers."""
    alone = Finetuning(last_layer=True)
    llama = cost(LlamaConfig(**SIZES), alone).backward
    assert (llama.per_token, llama.per_key, llama.per_target) == (0, {}, 2 * HEAD)
    gemma = cost(GemmaConfig(**SIZES), alone).backward
    assert (gemma.per_token, gemma.per_target) == (2 * 2 * LAYER, 2 * 2 * HEAD)


def test_a_scalar_models_head_counts_for_nothing() -> None:
    config = LlamaConfig(**SIZES, num_labels=1)
    computed = cost_of(AutoModelForSequenceClassification.from_config(config))
    assert computed is not None
    assert computed.forward.per_target == 0
    assert computed.forward.per_token == 2 * 2 * LAYER


def test_active_experts_count() -> None:
    """Mixtral: 2 of 4 experts, each with gate, up and down, and a router of 4 rows. A step reads nobody knows what."""
    attention = 2 * 32 * 32 + 2 * 32 * 16
    computed = cost(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    assert computed.forward.per_token == 2 * 2 * (attention + 4 * 32 + 2 * 3 * 32 * 64)
    assert computed.backward.per_token == 2 * computed.forward.per_token
    assert computed.step_bytes is None
    assert decoding_bytes(computed, Lengths(np.array([1]), np.array([1])), 1) is None


def test_a_config_without_attention_heads_is_not_known() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2))
    assert cost_of(model) is None


def test_keys_and_values_of_falcon_and_of_latent_attention() -> None:
    """Falcon 7B keeps one head for all queries; DeepSeek's keys are wider than its values."""
    falcon = FalconConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=3, multi_query=True)
    assert cached_per_token(falcon) == 3 * 2 * 8
    latent = DeepseekV3Config(num_hidden_layers=2, num_attention_heads=128, num_key_value_heads=128)
    assert cached_per_token(latent) == 2 * 128 * (192 + 128)


def test_other_layers_are_not_known() -> None:
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"]}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**sizes))
    assert cost_of(model) is None


@pytest.mark.parametrize(
    ("responses", "slots", "steps"), [([5, 2, 2], 3, 5), ([5, 2, 2], 2, 5), ([5, 5, 2], 2, 6), ([0, 0], 2, 0)]
)
def test_the_fewest_steps(responses: list[int], slots: int, steps: int) -> None:
    assert decoding_steps(np.array(responses), slots) == steps


def test_decoding_by_hand() -> None:
    """Responses of 3 and 1 tokens to prompts of 4 and 6, in float32: three steps read all matrices, the head included,
    and two tokens see 5 and 6 keys, each with 2 layers × (key + value) × 2 heads × 8 numbers."""
    read = decoding_bytes(cost(LlamaConfig(**SIZES)), Lengths(np.array([4, 6]), np.array([3, 1])), 2)
    assert read == 4 * (3 * (2 * LAYER + HEAD) + (5 + 6) * 2 * 2 * 2 * 8)


def test_a_sharded_weight_counts_whole() -> None:
    """ZeRO 3 leaves an empty tensor, and the shape beside it."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    expected = cost_of(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert cost_of(model) == expected
