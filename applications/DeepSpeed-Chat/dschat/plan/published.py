# SPDX-License-Identifier: Apache-2.0
"""Sizes of the models that presets name, so that a preset can be planned without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from dschat.models.limits import open_decoder_config

GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
GEMMA_7B = {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA2_27B = {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}
GEMMA2_2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
QWEN25_05B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
QWEN25_15B = {
    **QWEN25_05B,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
PYTHIA_1B = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
}
LLAMA3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LLAMA31_8B = {**LLAMA3_8B, "max_position_embeddings": 131_072}
LLAMA31_70B = {
    **LLAMA31_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GEMMA_VOCABULARY = 256_000
# Hub id → model family of transformers, and sizes of the config; without a vocab_size it is GEMMA_VOCABULARY.
PUBLISHED: dict[str, tuple[str, Mapping[str, int]]] = {
    "google/gemma-2b": ("gemma", GEMMA_2B),
    "google/gemma-7b": ("gemma", GEMMA_7B),
    "google/codegemma-2b": ("gemma", GEMMA_2B),
    "google/codegemma-7b-it": ("gemma", GEMMA_7B),
    "google/gemma-2-2b-it": ("gemma2", GEMMA2_2B),
    "google/gemma-2-27b": ("gemma2", GEMMA2_27B),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", QWEN25_05B),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", QWEN25_15B),
    "EleutherAI/pythia-1b-deduped": ("gpt_neox", PYTHIA_1B),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", LLAMA3_8B),
    "meta-llama/Llama-3.1-8B": ("llama", LLAMA31_8B),
    "meta-llama/Llama-3.1-70B": ("llama", LLAMA31_70B),
    "sfairXC/FsfairX-LLaMA3-RM-v0.1": ("llama", LLAMA3_8B),
}


def find_config(path: str, flag: str) -> PreTrainedConfig:
    """A model's config: of a hub model in PUBLISHED its published sizes, of any other its folder's or the hub's.

    Raises:
        UserError: there is no config; the message names the flag.
    """
    if path in PUBLISHED and not Path(path).exists():
        return published_config(path)
    return open_decoder_config(path, flag)


def published_config(hub_id: str) -> PreTrainedConfig:
    """The config of a model in PUBLISHED; only its sizes are meaningful."""
    family, sizes = PUBLISHED[hub_id]
    options: dict[str, Any] = {"vocab_size": GEMMA_VOCABULARY, **sizes}
    return AutoConfig.for_model(family, **options)
