# SPDX-License-Identifier: Apache-2.0
"""Adapters of random numbers: of our own models, and as other programs leave them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.models.lora import add_lora
from factories import make_causal_lm, save_folder

# Settings of adapters by which peft scales and shapes layers; r 4 and alpha 8 scale by 2, rslora by 4, and a pattern
# gives one kind of layer another scaling or rank.
LORA_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 3, "c_attn": 3}},
    "rank_pattern": {"rank_pattern": {"up_proj": 2, "c_fc": 2}, "use_rslora": True},
}
# Layers with an adapter, and layers saved whole, of adapters that change one place of a tied weight or both.
HEADS: dict[str, tuple[list[str], list[str]]] = {
    "head saved": (["q_proj"], ["lm_head"]),
    "embeddings saved": (["q_proj"], ["embed_tokens"]),
    "both saved": (["q_proj"], ["embed_tokens", "lm_head"]),
    "adapter of the head": (["q_proj", "lm_head"], []),
}
# Largest difference between two merged weights: three float32 operations on numbers below 4: products of rank 4, the
# scaling, the sum.
MERGED = 4 * 3 * 4 * torch.finfo(torch.float32).eps


def add_filled_lora(model: nn.Module, rank: int, base: str, std: float = 0.3, seed: int = 0) -> None:
    """Adds adapters, and fills them and the score head with random numbers, the same in every model of a shape."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        add_lora(model, rank, None, base)
        for name, parameter in model.named_parameters():
            if ".lora_B" in name or name.startswith("score."):
                nn.init.normal_(parameter, std=std)


def merged_by_peft(folder: Path, kind: str, settings: str, tokenizer: Any) -> tuple[str, Path, dict[str, Tensor]]:
    """A random model of a kind and a reward model's adapter of it: their paths, and the weights that peft merges."""
    base = save_folder(folder / "base", make_causal_lm(kind), tokenizer)
    adapter = write_users_adapter(folder / "adapter", base, fan_in_fan_out=kind == "gpt2", **LORA_SETTINGS[settings])
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    return base, adapter, PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()


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


def write_head_adapter(folder: Path, base: str, targets: list[str], saved: list[str]) -> Path:
    """A causal LM's adapter, as peft saves it, with random numbers in the layers of `saved`, too."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=saved)
    torch.manual_seed(0)
    with_adapter = get_peft_model(model, config)
    for name, parameter in with_adapter.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with_adapter.save_pretrained(str(folder))
    return folder
