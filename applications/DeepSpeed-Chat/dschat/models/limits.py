# SPDX-License-Identifier: Apache-2.0
"""The maximum sequence length of a model, from its config, before any weights are loaded."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from dschat.base.errors import UserError
from dschat.models.pretrained import open_config

logger = logging.getLogger(__name__)

POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # names of position tables
# Families with another kind of table → the config field with its length.
OTHER_TABLES = {
    "codegen": "n_positions",
    "ctrl": "n_positions",
    "gptj": "n_positions",
    "mpt": "max_seq_len",
    "openai-gpt": "n_positions",
}


def position_limit(model: Any) -> int | None:
    """Maximum input length in tokens of a model with a table of positions; None if it computes positions."""
    if model.config.model_type in OTHER_TABLES:
        return int(getattr(model.config, OTHER_TABLES[model.config.model_type]))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITIONS:
            first_position = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa: after its pad id
            declared = getattr(model.config, "max_position_embeddings", module.num_embeddings)
            return min(module.num_embeddings - first_position, declared)
    return None


def trained_length(config: PreTrainedConfig) -> int | None:
    """The sequence length that a model was trained for, in tokens; None if its config does not say."""
    declared: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return declared


def open_decoder_config(path: str, flag: str, **options: Any) -> PreTrainedConfig:
    """Opens the config of a model to train or to score with.

    Raises:
        UserError: there is none, or it is that of an encoder-decoder (T5, BART, …).
    """
    config = open_config(path, flag, **options)
    if config.is_encoder_decoder:
        raise UserError(
            f"{flag} {path}: a {config.model_type} model is an encoder-decoder, which no step trains or scores with. "
            "Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, OPT, …)."
        )
    return config


def check_length(path: str, flag: str, tokens: int, what: str) -> None:
    """Compares the longest sequence of a run with a model's limit, before its weights are loaded.

    A sequence longer than a table of positions raises UserError. If positions are computed, sequences longer than the
    model was trained for work badly, which is a warning.

    Args:
        path: path of the model.
        flag: that gave the path.
        tokens: length of the longest sequence.
        what: flags that determine the length, for the message.
    """
    config = open_decoder_config(path, flag)
    with torch.device("meta"):
        limit = position_limit(AutoModel.from_config(config, trust_remote_code=False))
    if limit is not None and tokens > limit:
        raise UserError(f"{flag} {path} reads at most {limit} tokens, but {what} is {tokens}: lower it.")
    trained = trained_length(config)
    if limit is None and trained is not None and tokens > trained:
        logger.warning("%s %s was made for at most %d tokens, but %s is %d", flag, path, trained, what, tokens)
