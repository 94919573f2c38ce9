# SPDX-License-Identifier: Apache-2.0
"""Small random models of the families that people train, each with a tokenizer of the kind that the family has."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from factories import save_folder

VOCAB_SIZE = 400
RESERVED = 8  # rows of the embeddings beyond the tokenizer, in families that round their number up
LONGEST = 512

# Nearly all families call their sizes so.
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
ROPE = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": LONGEST}
SLIDING = {"sliding_window": 16, "head_dim": 8}


@dataclass(frozen=True)
class ModelFamily:
    """A family of models.

    Attributes:
        config: name of its configuration class in transformers.
        make_tokenizer: texts → a tokenizer trained on them.
        puts_bos: whether that puts BOS before a text.
        sizes: fields of the configuration.
        reserved: rows of the embeddings beyond the tokenizer.
    """

    config: str
    make_tokenizer: Callable[[Sequence[str]], Any]
    puts_bos: bool
    sizes: dict[str, Any] = field(default_factory=lambda: dict(ROPE))
    reserved: int = 0

    def save(self, folder: Path, texts: Sequence[str]) -> str:
        """Saves a random model with its tokenizer as a Hugging Face folder; its path."""
        import transformers

        tokenizer = self.make_tokenizer(texts)
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = getattr(transformers, self.config)(vocab_size=len(tokenizer) + self.reserved, **ids, **self.sizes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).float()
        return save_folder(folder, model, tokenizer)


# -- byte-level tokenizers


def _byte_pieces(texts: Sequence[str], special: Sequence[str]) -> dict[str, Any]:
    """Vocabulary and merges of a byte-level BPE, the special tokens first."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(backend, texts, special, alphabet)


def _trained(backend: Tokenizer, texts: Sequence[str], special: Sequence[str], alphabet: list[str]) -> dict[str, Any]:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _gpt2(texts: Sequence[str]) -> Any:
    """One special token, which begins, ends and stands for the unknown; no pad, nothing put before a text."""
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer(**_byte_pieces(texts, ["<|endoftext|>"]))


def _opt(texts: Sequence[str]) -> Any:
    """GPT-2's, with </s> put before a text: the token that also ends one."""
    from transformers import GPT2Tokenizer

    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    return GPT2Tokenizer(**_byte_pieces(texts, ["<s>", "<pad>", "</s>"]), **special, add_bos_token=True)


def _gpt_neox(texts: Sequence[str]) -> Any:
    """GPT-2's, with a token for padding."""
    from transformers import GPTNeoXTokenizer

    return GPTNeoXTokenizer(**_byte_pieces(texts, ["<|endoftext|>", "<|padding|>"]))


def _qwen(texts: Sequence[str]) -> Any:
    """No BOS at all; pads with what ends a text."""
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(**_byte_pieces(texts, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))


def _backend_only(texts: Sequence[str], **special: str) -> Any:
    """Of a family without a tokenizer class: a byte-level backend that puts nothing before a text."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(**_byte_pieces(texts, list(special.values()))))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _falcon(texts: Sequence[str]) -> Any:
    """No BOS and no pad."""
    return _backend_only(texts, eos_token="<|endoftext|>")


def _bloom(texts: Sequence[str]) -> Any:
    """Has a BOS, which it does not use."""
    return _backend_only(texts, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")


# -- tokenizers that write a blank as ▁ and unknown characters as bytes


def _blank_pieces(texts: Sequence[str], special: Sequence[str]) -> dict[str, Any]:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # no piece goes across two words
    return _trained(backend, texts, [*special, *(f"<0x{byte:02X}>" for byte in range(256))], ["▁"])


def _llama(texts: Sequence[str], add_bos_token: bool = True, **special: str) -> Any:
    """BOS and a blank before every text; no pad."""
    from transformers import LlamaTokenizer

    pieces = _blank_pieces(texts, ["<unk>", "<s>", "</s>", "<|endoftext|>"])
    return LlamaTokenizer(**pieces, add_bos_token=add_bos_token, **special)


def _phi3(texts: Sequence[str]) -> Any:
    """Llama's without BOS; pads with what ends a text."""
    return _llama(texts, add_bos_token=False, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _gemma(texts: Sequence[str]) -> Any:
    """BOS before every text, but no blank."""
    from transformers import GemmaTokenizer

    pieces = _blank_pieces(texts, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    return GemmaTokenizer(**pieces, add_bos_token=True)


MODEL_FAMILIES = {
    "llama": ModelFamily("LlamaConfig", _llama, True),
    "qwen2": ModelFamily("Qwen2Config", _qwen, False, reserved=RESERVED),
    "qwen3": ModelFamily("Qwen3Config", _qwen, False, {**ROPE, "head_dim": 8}, RESERVED),
    "mistral": ModelFamily("MistralConfig", _llama, True, {**ROPE, "sliding_window": 16}),
    "gpt2": ModelFamily(
        "GPT2Config",
        _gpt2,
        False,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "initializer_range": 0.2},
    ),
    "gpt_neox": ModelFamily(
        "GPTNeoXConfig",
        _gpt_neox,
        False,
        {**SIZES, "intermediate_size": 64, "max_position_embeddings": LONGEST},
        RESERVED,
    ),
    "phi3": ModelFamily("Phi3Config", _phi3, False, {**ROPE, "original_max_position_embeddings": LONGEST}, RESERVED),
    "gemma": ModelFamily("GemmaConfig", _gemma, True, {**ROPE, "head_dim": 8}),
    "gemma2": ModelFamily("Gemma2Config", _gemma, True, {**ROPE, **SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3_text": ModelFamily(
        "Gemma3TextConfig",
        _gemma,
        True,
        {**ROPE, **SLIDING, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "opt": ModelFamily(
        "OPTConfig",
        _opt,
        True,
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": LONGEST,
            "init_std": 0.2,
        },
    ),
    "falcon": ModelFamily("FalconConfig", _falcon, False, SIZES, RESERVED),
    "bloom": ModelFamily(
        "BloomConfig",
        _bloom,
        False,
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        RESERVED,
    ),
    "mixtral": ModelFamily("MixtralConfig", _llama, True, {**ROPE, "num_local_experts": 4}),
}
WITHOUT_CLASSIFIER = ModelFamily("GraniteConfig", _gpt2, False, {**ROPE, "logits_scaling": 2.0})
