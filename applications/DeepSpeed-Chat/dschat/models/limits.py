# SPDX-License-Identifier: Apache-2.0
"""How long a text a model can read, asked before anything is loaded."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from dschat.base.errors import UserError
from dschat.models.load import open_config

logger = logging.getLogger(__name__)

POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # what tables of positions are called
# Families with a table of another kind → the field of their configs that says how long it is.
OTHER_TABLES = {
    "codegen": "n_positions",
    "ctrl": "n_positions",
    "gptj": "n_positions",
    "mpt": "max_seq_len",
    "openai-gpt": "n_positions",
}


def position_limit(model: Any) -> int | None:
    """Longest input in tokens of a model that looks positions up in a table; None where it computes them."""
    if model.config.model_type in OTHER_TABLES:
        return int(getattr(model.config, OTHER_TABLES[model.config.model_type]))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITIONS:
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa begins behind its pad
            declared = getattr(model.config, "max_position_embeddings", module.num_embeddings)
            return min(module.num_embeddings - first, declared)
    return None


def trained_length(config: PreTrainedConfig) -> int | None:
    """The longest text that a model was made for, in tokens; None where its config does not tell."""
    declared: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return declared


def open_decoder_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """The config of a model to train or to score with. Raises UserError where there is none, or it is an
    encoder-decoder (T5, BART, …), which is named.
    """
    config = open_config(path, flag, **options)
    if config.is_encoder_decoder:
        raise UserError(
            f"{flag} {path}: a {config.model_type} model is an encoder-decoder, which no step trains or scores with. "
            "Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, OPT, …)."
        )
    return config


def check_length(path: str, flag: str, tokens: int, what: str) -> None:
    """Compares the longest text of a run, in tokens, with what a model can read, before its weights are loaded.

    A table of positions ends somewhere: UserError. Where positions are computed, a longer text than in the model's own
    training works, but not well: that is a warning. The message says `what` flags decide the length.
    """
    config = open_decoder_config(path, flag)
    with torch.device("meta"):
        limit = position_limit(AutoModel.from_config(config, trust_remote_code=False))
    if limit is not None and tokens > limit:
        raise UserError(f"{flag} {path} reads at most {limit} tokens, but {what} is {tokens}: lower it.")
    trained = trained_length(config)
    if limit is None and trained is not None and tokens > trained:
        logger.warning("%s %s was made for at most %d tokens, but %s is %d", flag, path, trained, what, tokens)
