# SPDX-License-Identifier: Apache-2.0
"""Writes a small Llama as a GGUF file, as llama.cpp lays it out, and an installed package that holds it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map
from transformers import LlamaConfig, LlamaForCausalLM

from dschat.models.tiny import BOS, EOS, PAD, train_tokenizer

WIDTH = 64
HEADS = 4
KEY_VALUE_HEADS = 2
LAYERS = 2
INNER = 96
END = "<|im_end|>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", END)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_small_gguf(file: Path, texts: list[str]) -> LlamaForCausalLM:
    """Writes a random Llama with a byte-level BPE tokenizer and a chat template; returns the model in float32."""
    vocabulary, merges = _tokenizer_parts(texts)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)

    writer = GGUFWriter(file, "llama")
    _add_settings(writer, config)
    _add_tokenizer(writer, vocabulary, merges)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _tokenizer_parts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Tokens by id, special ones first, and merges as GGUF has them."""
    trained = json.loads(train_tokenizer(texts, 400).backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = trained["vocab"]
    ordinary = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if token not in (PAD, BOS, EOS)]
    return [*SPECIALS, *ordinary], [" ".join(pair) for pair in trained["merges"]]


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: GGUFWriter, vocabulary: list[str], merges: list[str]) -> None:
    types = [TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: LlamaForCausalLM) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Names of llama.cpp with weights; rows of queries and keys are interleaved as its rotary embedding wants them."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    tensors = []
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if "q_proj" in name:
            weight = _interleaved(weight, HEADS)
        elif "k_proj" in name:
            weight = _interleaved(weight, KEY_VALUE_HEADS)
        tensors.append((f"{names.get_name(name.removesuffix('.weight'))}.weight", weight))
    return tensors


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows (heads × 2 halves × pairs) → (heads × pairs × 2 halves)."""
    rows, columns = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows, columns)
