# SPDX-License-Identifier: Apache-2.0
"""Adapters as other programs leave them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


def write_users_adapter(folder: Path, base: str, **options: Any) -> Path:
    """A reward model's adapter of random numbers, as peft saves it."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    layers = ["c_attn", "c_fc"] if "gpt2" in type(model).__name__.lower() else ["q_proj", "up_proj"]
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=layers, task_type="SEQ_CLS", modules_to_save=["score"], **options
    )
    torch.manual_seed(0)
    with_adapter = get_peft_model(model, config)
    for name, parameter in with_adapter.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with_adapter.save_pretrained(str(folder))
    return folder


def write_head_adapter(folder: Path, base: str, targets: list[str], saved: list[str], same: bool = False) -> Path:
    """A causal LM's adapter, as peft saves it, with random numbers in the layers of `saved` too, or as they are."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=saved)
    torch.manual_seed(0)
    with_adapter = get_peft_model(model, config)
    for name, parameter in with_adapter.named_parameters():
        if "lora_B" in name or ("modules_to_save" in name and not same):
            torch.nn.init.normal_(parameter, std=0.3)
    with_adapter.save_pretrained(str(folder))
    return folder
