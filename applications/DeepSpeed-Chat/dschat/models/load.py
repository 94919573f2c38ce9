# SPDX-License-Identifier: Apache-2.0
"""Opening Hugging Face models, from folders or the hub."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.errors import UserError

logger = logging.getLogger(__name__)


def load_causal_lm(path: str, flag: str, dtype: torch.dtype, tokenizer: Any, end_id: int | None = None) -> Any:
    """Opens a causal LM without dropout, its embeddings large enough for the tokenizer.

    Args:
        path: folder or hub id.
        flag: the command-line flag that named it, for messages.
        dtype: of the parameters.
        tokenizer: of the run.
        end_id: ends a response beside EOS (--end_of_conversation_token); kept in the generation config.

    Raises:
        UserError: there is no such model.
    """
    model, _ = _from_pretrained(AutoModelForCausalLM, path, flag, dtype)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    _set_special_ids(model, tokenizer)
    generation = model.generation_config
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(generation, name, getattr(tokenizer, name))
    if end_id is not None and end_id != tokenizer.eos_token_id:
        generation.eos_token_id = [tokenizer.eos_token_id, end_id]
    try:
        generation.validate(strict=True)
    except ValueError:  # sampling values without do_sample, which transformers refuses to save
        generation.do_sample = True
    return model


def load_scalar(path: str, flag: str, dtype: torch.dtype, tokenizer: Any, may_be_new: bool = True) -> Any:
    """Opens a sequence classifier with one label; from a causal LM the head is new, and starts at zero.

    Args:
        path: folder or hub id of a reward model, or of a causal LM to start one from.
        flag: the command-line flag that named it, for messages.
        dtype: of the parameters.
        tokenizer: of the run.
        may_be_new: accept a model without a trained head.

    Raises:
        UserError: there is no such model, or it has no ``score`` head with one output, or none that was trained.
    """
    model, loading = _from_pretrained(AutoModelForSequenceClassification, path, flag, dtype, num_labels=1)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{flag} {path}: a {type(model).__name__} has no `score` layer with one output, which the reward model "
            "and the critic need. Use a decoder-only model (Gemma, Llama, Mistral, Qwen, GPT-2, …)."
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    if "score.weight" in loading["missing_keys"] and not may_be_new:
        raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
    if "score.weight" in loading["missing_keys"]:
        logger.info("%s %s: a new score head, starting at zero", flag, path)
        nn.init.zeros_(head.weight)
    _set_special_ids(model, tokenizer)
    return model


def load_classifier(path: str, flag: str, dtype: torch.dtype) -> Any:
    """Opens any sequence classifier with one trained label as it is, for scoring; its tokenizer is its own.

    Args:
        path: folder or hub id of a reward model, of any architecture.
        flag: the command-line flag that named it, for messages.
        dtype: of the parameters.

    Raises:
        UserError: there is no such model, it has several labels, or no head that was trained.
    """
    model, loading = _from_pretrained(AutoModelForSequenceClassification, path, flag, dtype)
    if any(not name.startswith(f"{model.base_model_prefix}.") for name in loading["missing_keys"]):
        raise UserError(f"{flag} {path}: not a reward model, it has no score head. Train one from it with step 2.")
    if model.config.num_labels != 1:
        raise UserError(
            f"{flag} {path}: a classifier with {model.config.num_labels} labels; a reward model must have one label."
        )
    return model


def explain_missing(what: str, path: str, flag: str, error: Exception) -> str:
    """One message for a model or tokenizer that cannot be opened, local or on the hub."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if Path(path).is_dir():
        return f"{flag} {path}: this folder holds no {what} that transformers can open: {first_line}"
    if looks_local:
        return f"{flag} {path}: no such folder. Give the folder that holds the model's config.json."
    return (
        f"{flag} {path}: there is no such folder here, and the {what} could not be fetched from the Hugging Face hub: "
        f"{first_line} Check the name, the connection and, for gated models, HF_TOKEN; or download it first with "
        f"`hf download {path}`."
    )


def _from_pretrained(auto_class: Any, path: str, flag: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The model and what transformers says of its weights (missing_keys, …)."""
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _disable_dropout(config)
        return auto_class.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(explain_missing("model", path, flag, error)) from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(
            f"{flag} {path}: the weights do not fit the model that is wanted here. A reward model must have one label."
        ) from error


def _disable_dropout(config: Any) -> None:
    """Sets every dropout probability of a config to 0: rollout and update must see the same function."""
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)


def _set_special_ids(model: Any, tokenizer: Any) -> None:
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
    model.config.use_cache = True
