# SPDX-License-Identifier: Apache-2.0
"""Bytes that a run writes to --output_dir: checkpoints and final models, without what is small beside their tensors.

A checkpoint holds the trained weights, a float32 copy of them and Adam's two float32 moments; frozen weights are in no
checkpoint. Below ZeRO 3 the main process writes the weights. ZeRO 1 to 3 divide the rest among the processes; ZeRO 3
writes no weights beside their float32 copy, and ZeRO 0 no copy. Not counted: below ZeRO 3, DeepSpeed also writes a
head that is frozen with the embedding it shares (LoRA on models such as Gemma).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dschat.plan.models import Role
from dschat.plan.states import FLOAT32, MOMENTS, Weights
from dschat.settings.common import CommonConfig

DISK_RATE = 1_000_000_000  # bytes per second of a disk that machines share: an assumption


@dataclass(frozen=True)
class Disk:
    """What a run writes."""

    main: int  # bytes of a checkpoint that the main process writes
    others: int  # bytes of it that each other process writes
    checkpoint: int  # bytes of a checkpoint
    checkpoints: int  # most checkpoints at a time; with --save_total_limit 0 the first of all that stay
    models: int  # bytes of the final models

    @property
    def total(self) -> int:
        """Most bytes at a time."""
        return self.checkpoints * self.checkpoint + self.models

    @property
    def seconds(self) -> float:
        """Time of a save at DISK_RATE, which all processes share."""
        return self.checkpoint / DISK_RATE


def disk_of(config: CommonConfig, roles: Sequence[Role], processes: int) -> Disk:
    """What a run with these models writes."""
    by_main = 0
    shared = 0
    models = 0
    for role in roles:
        weights = role.weights
        if weights.trained:
            by_main += _main_bytes(weights)
            shared += _shared_bytes(weights)
            models += weights.whole if config.finetuning.merge_lora else weights.width * weights.trained
    if config.keeps_average:
        actor = roles[0].weights
        shared += FLOAT32 * actor.trained
        models += actor.whole
    share = -(-shared // processes)
    return Disk(by_main + share, share, by_main + shared, _checkpoints_at_a_time(config), models)


def _main_bytes(weights: Weights) -> int:
    """What the main process alone writes of a trained model."""
    if weights.zero.stage == 0:
        return (weights.width + MOMENTS) * weights.trained
    return weights.width * weights.trained if weights.zero.stage < 3 else 0


def _shared_bytes(weights: Weights) -> int:
    """What all processes write together of a trained model."""
    return 0 if weights.zero.stage == 0 else (FLOAT32 + MOMENTS) * weights.trained


def _checkpoints_at_a_time(config: CommonConfig) -> int:
    """The newest ones and the best, while another one is written."""
    output = config.output
    if not output.saves_checkpoints or not output.save_total_limit:
        return 1
    has_best = output.eval_interval > 0
    return output.save_total_limit + 1 + has_best
