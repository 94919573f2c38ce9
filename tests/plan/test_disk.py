# SPDX-License-Identifier: Apache-2.0
"""What a plan says of the disk: by hand for the published sizes, and against the files of small runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dschat.plan.command import plan_step
from dschat.plan.disk import disk_of
from dschat.plan.models import Role
from dschat.plan.options import PlanOptions
from dschat.plan.phases import GB
from dschat.plan.states import Weights, Zero
from factories import ppo_config, supervised_config
from resume_runs import Setup, supervised

# Weights of an actor. A critic has the same body, the embedding once, and a row for its score.
GEMMA_LAYER_7B = 4 * 3072 * 16 * 256 + 3 * 3072 * 24_576 + 2 * 3072
GEMMA_7B = 256_000 * 3072 + 28 * GEMMA_LAYER_7B + 3072
GEMMA2_LAYER_27B = 2 * 4608 * (32 + 16) * 128 + 3 * 4608 * 36_864 + 4 * 4608
GEMMA2_27B = 256_000 * 4608 + 46 * GEMMA2_LAYER_27B + 4608
LLAMA_LAYER_70B = 2 * 8192 * (64 + 8) * 128 + 3 * 8192 * 28_672 + 2 * 8192
LLAMA_BODY_70B = 128_256 * 8192 + 80 * LLAMA_LAYER_70B + 8192
LLAMA_70B = LLAMA_BODY_70B + 128_256 * 8192


PRESETS = [
    ("tldr_gemma_7b", 8, GEMMA_7B, GEMMA_7B + 3072, "", 12),
    ("tldr_gemma_7b", 8, GEMMA_7B, GEMMA_7B + 3072, "--zero_stage 2", 14),
    ("tldr_gemma2_27b", 8, GEMMA2_27B, GEMMA2_27B + 4608, "", 12),
    ("tldr_llama31_70b", 16, LLAMA_70B, LLAMA_BODY_70B + 8192, "", 12),
]


@pytest.mark.parametrize(
    ("preset", "gpus", "actor", "critic", "flags", "bytes_of_a_weight"),
    [PRESETS[0], *(pytest.param(*preset, marks=pytest.mark.slow) for preset in PRESETS[1:])],
)
def test_the_checkpoints_of_large_models(preset, gpus, actor, critic, flags, bytes_of_a_weight):
    """bf16: 4 bytes of a float32 copy and 8 of two moments; below ZeRO 3 also 2 of the weight. Models: 2."""
    report = plan_step("ppo", PlanOptions(gpus=gpus, num_samples=10_000), flags.split(), preset)
    disk = report.plan.disk
    assert disk.checkpoint == bytes_of_a_weight * (actor + critic)
    assert disk.models == 2 * (actor + critic)
    # Of a weight, 12 bytes are divided among the processes; the main one writes the other two.
    assert disk.others == -(-12 * (actor + critic) // gpus)
    assert disk.main - disk.others == (bytes_of_a_weight - 12) * (actor + critic)
    # Two newest ones, the best one, and one that is being written.
    assert report.plan.config.output.save_total_limit == 2 and report.plan.config.output.eval_interval > 0
    assert disk.total == 4 * disk.checkpoint + disk.models
    assert disk.seconds == pytest.approx(disk.checkpoint / 1e9)
    text = report.text()
    assert f"Disk: {disk.checkpoint / GB:.1f} GB for a checkpoint" in text and "at an assumed 1 GB/s" in text
    assert report.json()["disk"]["total"] == disk.total


@pytest.mark.parametrize(
    ("flags", "at_a_time"),
    [
        ({}, 1),
        ({"save_steps": 5, "save_total_limit": 2}, 3),
        ({"save_minutes": 5.0, "save_total_limit": 2}, 3),
        ({"save_steps": 5, "save_total_limit": 3, "eval_interval": 5}, 5),
        ({"save_steps": 5, "save_total_limit": 0}, 1),
    ],
)
def test_how_many_checkpoints_there_are_at_a_time(flags, at_a_time, tmp_path):
    """The newest ones, the best one if there are evaluations, and one being written."""
    config = supervised_config("sft", tmp_path, **({"eval_interval": 0} | flags))
    disk = disk_of(config, [role(1000)], 4)
    assert disk.checkpoints == at_a_time and disk.total == at_a_time * 12_000 + 4000


def test_an_average_and_frozen_models(tmp_path):
    """float32: 12 bytes of the actor, 4 of its moving average, nothing of a frozen model; two models are saved."""
    config = ppo_config(tmp_path, enable_ema=True, save_steps=0)
    disk = disk_of(config, [role(1000), role(500, trained=0)], 4)
    assert (disk.checkpoint, disk.models, disk.others) == (16_000, 8000, 1000)
    config = supervised_config("sft", tmp_path, lora_dim=2, merge_lora=False)
    assert disk_of(config, [role(1000, trained=10)], 4).models == 40


def role(parameters: int, trained: int | None = None, stage: int = 0, width: int = 4) -> Role:
    """A model without its architecture, which the disk does not depend on."""
    sizes = Weights(parameters, parameters if trained is None else trained, 1, width, Zero(stage))
    return Role("policy", "anywhere", None, sizes)


ZERO_3 = pytest.param(3, torch.bfloat16, 0, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("stage", "dtype", "lora_dim"), [(0, torch.float32, 0), (1, torch.float32, 2), (2, torch.bfloat16, 0), ZERO_3]
)
def test_the_tensors_of_a_checkpoint(stage, dtype, lora_dim, group, tmp_path):
    """DeepSpeed's files hold what the plan says, and a counter of 4 bytes for each of a few groups."""
    untied = {"tie_word_embeddings": False}  # see plan/disk.py
    setup = Setup(zero_stage=stage, dtype=dtype, lora_dim=lora_dim, model=untied if lora_dim else {})
    loop = supervised("sft", tmp_path, setup, save_steps=1, max_steps=1)
    loop.fit()
    (engine,) = loop.checkpoints.engines.values()
    trained = 0
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            trained += getattr(parameter, "ds_numel", parameter.numel())
    expected = disk_of(loop.config, [role(trained, stage=stage, width=dtype.itemsize)], 1).checkpoint
    written = 0
    for file in tmp_path.glob("checkpoints/step-1/*/*.pt"):
        written += stored_bytes(file)
    assert expected <= written <= 1.01 * expected


def stored_bytes(file: Path) -> int:
    """Bytes of the tensors in a file; one that is there under two names counts once."""
    sizes = {}
    for tensor in tensors_in(torch.load(file, weights_only=False)):
        if tensor.numel():
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """The tensors in dictionaries and lists."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        yield from tensors_in(list(content.values()))
    elif isinstance(content, list | tuple):
        for item in content:
            yield from tensors_in(item)
