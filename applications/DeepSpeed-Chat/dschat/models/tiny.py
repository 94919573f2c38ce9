# SPDX-License-Identifier: Apache-2.0
"""Makes a small random Gemma and trains a byte-level BPE tokenizer: real model files for demos and tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GemmaForCausalLM, PreTrainedTokenizerFast

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
MAX_POSITIONS = 512


def train_tokenizer(texts: Iterable[str], vocab_size: int = 768) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer.

    Ids 0, 1 and 2 are `<pad>`, `<bos>` and `<eos>`; `<bos>` is prepended if special tokens are added.

    Raises:
        ValueError: `vocab_size` is less than 259, three special tokens and 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, EOS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(specials):
        raise ValueError(f"vocab_size must be at least {len(alphabet) + len(specials)}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, specials.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_gemma(
    tokenizer: "PreTrainedTokenizerFast",
    seed: int = 1234,
    hidden_size: int = 64,
    layers: int = 2,
    intermediate_size: int | None = None,
    heads: int = 4,
) -> "GemmaForCausalLM":
    """Makes a random float32 Gemma for a tokenizer, without changing the global random state.

    Args:
        tokenizer: with the vocabulary and special ids.
        seed: seed of the weights.
        hidden_size: a multiple of 2 × heads.
        layers: number of decoder layers.
        intermediate_size: size of the MLP; None means 2 × hidden_size.
        heads: attention heads, which are also the key-value heads.

    Raises:
        ValueError: the hidden size is not a multiple of 2 × heads.
    """
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM

    if hidden_size % (2 * heads):
        raise ValueError(f"hidden_size must be a multiple of {2 * heads} for {heads} heads, not {hidden_size}")
    config = GemmaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GemmaForCausalLM(config).float()


def make_model(
    folder: str | Path,
    texts: Iterable[str],
    seed: int = 1234,
    hidden_size: int = 64,
    layers: int = 2,
    vocab_size: int = 768,
    chat_template: str | None = None,
) -> Path:
    """Saves a random Gemma and a tokenizer trained on `texts` as a Hugging Face folder, and returns the folder."""
    from dschat.models.save import save_model

    folder = Path(folder)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.chat_template = chat_template
    model = make_gemma(tokenizer, seed, hidden_size, layers)
    save_model(model, model.named_parameters(), tokenizer, folder)
    return folder
