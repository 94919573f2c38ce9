# SPDX-License-Identifier: Apache-2.0
"""Writing Hugging Face folders from whole weights, without touching the live model."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.models.lora import lora_config, merged_state, save_adapter


def save_model(model: Any, state: Mapping[str, Tensor], tokenizer: Any, folder: Path, merge: bool = True) -> None:
    """Writes an ordinary Hugging Face folder: safetensors, tokenizer and, for a causal LM, the generation config.

    Args:
        model: Hugging Face model; its weights may be sharded, only its class and configs are used.
        state: whole weights, names as in ``model``.
        tokenizer: of the run.
        folder: to write into. A model with LoRA leaves its adapter in ``folder/adapter``.
        merge: with LoRA, also write the merged model into ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if lora_config(model) is not None:
        save_adapter(model, state, folder / "adapter")
        if not merge:
            return
        state = merged_state(model, state)
    config = copy.deepcopy(model.config)
    config.use_cache = True  # gradient checkpointing turns it off
    with torch.device("meta"):
        plain = type(model)(config).to(next(iter(state.values())).dtype)
    if hasattr(model, "generation_config"):
        plain.generation_config = model.generation_config
    plain.save_pretrained(folder, state_dict=dict(state))
