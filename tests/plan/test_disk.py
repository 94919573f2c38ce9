# SPDX-License-Identifier: Apache-2.0
"""What a plan says of the disk: by hand, and against the files of small runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dschat.plan.disk import disk_of
from dschat.plan.models import Role
from dschat.plan.states import Weights, Zero
from factories import ppo_config, supervised_config
from resume_runs import Setup, supervised


@pytest.mark.parametrize(("stage", "size"), [(2, 14_000), (3, 12_000)])
def test_a_checkpoint_of_half_precision(stage, size, tmp_path):
    """bf16: of each of 1000 weights 4 bytes of a float32 copy and 8 of two moments, which 4 processes share.

    Below ZeRO 3 the main process also writes the 2 bytes of the weight itself.
    """
    disk = disk_of(supervised_config("sft", tmp_path), [role(1000, stage=stage, width=2)], 4)
    assert (disk.checkpoint, disk.others, disk.main, disk.models) == (size, 3000, size - 9000, 2000)
    assert disk.seconds == pytest.approx(size / 1e9)


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
