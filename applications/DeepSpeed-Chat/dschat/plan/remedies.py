# SPDX-License-Identifier: Apache-2.0
"""Which flags make a run fit: each is tried, by planning again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dschat.config.batches import largest_part
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import SupervisedConfig
from dschat.plan.machine import CUDA_BYTES, GB
from dschat.plan.plan import Configs, Plan, make_plan

Change = dict[str, object]  # flag → its new value


def remedies(plan: Plan, configs: Configs) -> list[tuple[Change, Plan]]:
    """What helps a plan whose GPUs are too small.

    Args:
        plan: that does not fit.
        configs: (path, flag) → a model's config.

    Returns:
        Every change that is enough alone, with the plan that it makes; if there is none, the changes that are enough
        one after another; if they are not, all of them.
    """
    config, changes = plan.config, list[Change]()
    for change in _changes(plan.config):
        changes += [change] if change not in changes else []
    tried = [(change, _changed(config, change, plan, configs)) for change in changes]
    enough = [(change, changed) for change, changed in tried if changed.fits]
    if enough:
        return enough
    together: Change = {}
    changed = plan
    for change in changes:
        attempt = _changed(config, together | change, plan, configs)
        if attempt.excess < changed.excess:
            together, changed = together | change, attempt
        if changed.fits:
            break
    return [(together, changed)] if together else []


def in_words(change: Change) -> str:
    """The flags as they are written on a command line."""
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in change.items())


def what_else(plan: Plan) -> str:
    """What helps where no flag does."""
    actor = plan.whole_actor
    if actor + CUDA_BYTES <= (plan.machine.device_memory or 0):
        return "more GPUs, smaller batches, LoRA (--lora_dim) or a smaller model"
    return (
        f"a smaller actor, or GPUs with more memory. More GPUs do not, nor does LoRA: while responses are drawn, each"
        f" GPU holds the whole actor, {actor / GB:.1f} GB, with every --rollout_engine"
    )


def _changes(config: CommonConfig) -> Iterator[Change]:
    """In the order of what they cost: less at a time, activations again, then weights and states elsewhere."""
    if isinstance(config, PPOConfig):
        yield from _ppo_changes(config)
        return
    assert isinstance(config, SupervisedConfig)
    if not config.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if config.per_device_train_batch_size > 1:
        yield {"per_device_train_batch_size": _half(config.per_device_train_batch_size)}
    if config.zero_stage < 3:
        yield {"zero_stage": config.zero_stage + 1 if config.zero_stage else 2}
        yield {"zero_stage": 3}
    if not config.offload:
        yield {"zero_stage": max(config.zero_stage, 2), "offload": True}
        yield {"zero_stage": 3, "offload": True}


def _ppo_changes(config: PPOConfig) -> Iterator[Change]:
    for role in ("actor", "critic") if config.needs.critic else ("actor",):
        if not getattr(config, f"{role}_gradient_checkpointing"):
            yield {f"{role}_gradient_checkpointing": True}
    slots, rows = config.per_device_generation_batch_size, config.per_device_training_batch_size
    if slots > 1:
        half = _half(slots)
        batches = config.generation_batches * slots // half
        yield {"per_device_generation_batch_size": half, "generation_batches": batches}
    if rows > 1:
        yield {"per_device_training_batch_size": _half(rows)}
    for stage in (2, 3):
        if min(config.zero_stages) < stage:
            yield {"zero_stage": stage}
    if not config.offload_reference_model:
        yield {"offload_reference_model": True}
    if not config.offload:
        yield {"zero_stage": max(2, *config.zero_stages), "offload": True}
        yield {"zero_stage": 3, "offload": True}


def _changed(config: CommonConfig, change: Change, plan: Plan, configs: Configs) -> Plan:
    """The plan with flags that win over the run's own."""
    fields = dict(change)
    if "zero_stage" in fields and isinstance(config, PPOConfig):
        fields |= {"actor_zero_stage": fields["zero_stage"], "critic_zero_stage": fields["zero_stage"]}
    if config.global_batch_size is not None:
        fields |= {"gradient_accumulation_steps": None}
    return make_plan(dataclasses.replace(config, **fields), plan.machine, configs)  # type: ignore[arg-type]


def _half(size: int) -> int:
    """The largest divisor up to the half, so that rollouts and updates stay whole."""
    return largest_part(size, size // 2)
