# SPDX-License-Identifier: Apache-2.0
"""Runs of step 3 whose models share a base, and the same runs with a base for each of them."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from adapter_cases import add_filled_lora
from dschat.models.classifiers import load_critic, load_scalar
from dschat.models.save import save_model
from dschat.run.distributed import is_main, rank, world_size
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from dschat.training.steps import shared_base
from dschat.training.steps.engines import RunPlan
from dschat.training.steps.ppo import build_ppo_models
from factories import make_causal_lm, make_prompt, ppo_trainer_of, random_ids, save_folder
from real_size import as_large_as

RANK = 2
FLAGS = {
    "lora_dim": RANK,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_prompt_seq_len": 8,
    "max_answer_seq_len": 6,
    "ppo_epochs": 2,
    "dtype": "fp32",
}


def write_base(folder: Path, tokenizer: Any, kind: str = "gemma") -> str:
    """A random model; its path."""
    return save_folder(folder / "base", make_causal_lm(kind), tokenizer)


def write_adapter(folder: Path, base: str, tokenizer: Any) -> str:
    """What step 2 leaves of a reward model that it trained with LoRA from a base; its path."""
    model = load_scalar(base, "--model_name_or_path", torch.float32, tokenizer)
    add_filled_lora(model, RANK, base, std=0.1, seed=4)
    save_model(model, model.named_parameters(), tokenizer, folder, merge=False)
    return str(folder)


def config_of(folder: Path, base: str, **flags: Any) -> PPOConfig:
    """Two updates of 8 rows, in 2 micro-batches on all processes, of every rollout of 8 prompts."""
    share = 8 // world_size()
    sizes = {"per_device_generation_batch_size": share, "per_device_training_batch_size": share // 2}
    given = sizes | {"gradient_accumulation_steps": 2, "actor_model_name_or_path": base} | FLAGS | flags
    given |= {"data_path": "unused", "output_dir": folder}
    if Path(base).is_dir():
        given.setdefault("deepspeed_config", as_large_as(7e9, base))
    words = [
        word
        for name, value in given.items()
        if value is not False
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    return parse(PPOConfig, words)


def trainer_of(folder: Path, base: str, tokenizer: Any, **flags: Any) -> Any:
    """A trainer whose models are made as the flags say."""
    config = config_of(folder, base, share_base=True, **flags)
    torch.manual_seed(7)
    models = build_ppo_models(config, RunPlan.of(config, config.plan_batches(world_size()), 20), tokenizer)
    prompts = [make_prompt([1, *random_ids(2 + i % 4, i)], f"p{i}", i) for i in range(16)]
    return ppo_trainer_of(models, prompts, prompts[:3], tokenizer, config)


def separate_trainer_of(folder: Path, base: str, tokenizer: Any, **flags: Any) -> Any:
    """The same, where transformers opens the base once more for every model."""

    def opened(actor: Any, flag: str) -> Any:
        return load_critic(base, flag, actor.dtype, tokenizer)

    with mock.patch.object(shared_base, "classifier_beside", opened):
        return trainer_of(folder, base, tokenizer, **flags)


def two_updates(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Whole trained weights by name after two updates, and the metrics of their rollout without timings."""
    share = 8 // world_size()
    metrics = trainer.iterate([list(range(8))[rank() * share : (rank() + 1) * share]])
    weights = {}
    for name, engine in trainer.algorithm.models.trained.items():
        trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
        for key, x in engine.whole_weights():
            if is_main() and key in trained:
                weights[f"{name}.{key}"] = x.detach().float().cpu().clone()
    return weights, {name: x for name, x in metrics.items() if not name.startswith("time/")}


def storages(module: torch.nn.Module) -> dict[str, int]:
    """By name, where the frozen weights of a model lie."""
    return {
        name: p.data_ptr() for name, p in module.named_parameters() if ".lora_" not in name and "score" not in name
    }
