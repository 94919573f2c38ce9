# SPDX-License-Identifier: Apache-2.0
"""Flags that make a plan fit: those that need less memory, tried in the order of their cost in speed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

from dschat.base.errors import UserError
from dschat.models.limits import open_decoder_config
from dschat.plan.models import ConfigLoader
from dschat.plan.phases import CUDA_BYTES, GB, Machine
from dschat.plan.plan import Plan, make_plan
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.batches import largest_part
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import OneModelConfig

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=CommonConfig)
Change = dict[str, object]  # flag → its new value


def remedies(plan: Plan, load_config: ConfigLoader) -> list[tuple[Change, Plan]]:
    """Changes of flags for a plan that does not fit, each with the plan that it makes.

    Returns every change that is enough by itself. If there is none, returns one change that combines them in order
    until the plan fits; if it never does, the combination of all that help.
    """
    changes: list[Change] = []
    for change in _changes(plan.config):
        if change not in changes:
            changes.append(change)

    # Changes that are enough by themselves.
    enough = []
    for change in changes:
        attempt = _changed_plan(plan, change, load_config)
        if attempt.fits:
            enough.append((change, attempt))
    if enough:
        return enough

    # A combination: every change that brings the plan closer to fitting, until it fits.
    combined: Change = {}
    best = plan
    for change in changes:
        attempt = _changed_plan(plan, combined | change, load_config)
        if attempt.excess < best.excess:
            combined = combined | change
            best = attempt
        if best.fits:
            break
    return [(combined, best)] if combined else []


def _changed_plan(plan: Plan, change: Change, load_config: ConfigLoader) -> Plan:
    return make_plan(changed(plan.config, change), plan.machine, load_config)


def changed(config: Config, change: Change) -> Config:
    """A copy of the settings with other values."""
    values = dict(change)
    if config.optimisation.global_batch_size is not None:
        values.setdefault("gradient_accumulation_steps", None)
    return config.changed(**values)


def change_as_flags(change: Change) -> str:
    """The flags as they are written on a command line."""
    words = []
    for name, value in change.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name} {value}")
    return " ".join(words)


def hardware_advice(plan: Plan) -> str:
    """Advice for a plan that no flag makes fit."""
    actor = plan.sampling_actor
    if not actor or actor + CUDA_BYTES <= (plan.machine.device_memory or 0):
        return "more GPUs, smaller batches, LoRA (--lora_dim) or a smaller model"
    return (
        "a smaller actor, GPUs with more memory, or in step 3 --rollout_engine vllm with a --vllm_tensor_parallel that"
        f" divides it; more GPUs or LoRA do not help: during sampling, each GPU holds {actor / GB:.1f} GB of the actor"
    )


def _changes(config: CommonConfig) -> Iterator[Change]:
    """Changes in the order of what they cost: recomputation, smaller batches, sharding, offloading."""
    if isinstance(config, PPOConfig):
        yield from _ppo_changes(config)
        return
    assert isinstance(config, OneModelConfig)
    yield from _smaller_budget(config)
    yield from _recomputation(config)
    yield from _smaller_micro_batch("per_device_train_batch_size", config.model.per_device_train_batch_size, config)
    if isinstance(config, RefuelOnlineConfig) and config.sampling.per_device_generation_batch_size > 1:
        yield {"per_device_generation_batch_size": config.sampling.per_device_generation_batch_size // 2}
    stage = config.engine.zero_stage
    if stage < 3:
        yield {"zero_stage": stage + 1 if stage else 2}
        yield {"zero_stage": 3}
    if not config.engine.offload:
        yield {"zero_stage": max(stage, 2), "offload": True}
        yield {"zero_stage": 3, "offload": True}


def _ppo_changes(config: PPOConfig) -> Iterator[Change]:
    """The changes of step 3, in the order of `_changes`."""
    yield from _recomputation(config)
    yield from smaller(config)
    for stage in (2, 3):
        if min(config.zero_stages) < stage:
            yield at_stage(config, stage)
    if not config.memory.offload_reference_model:
        yield {"offload_reference_model": True}
    if not config.engine.offload:
        yield at_stage(config, max(2, *config.zero_stages)) | {"offload": True}
        yield at_stage(config, 3) | {"offload": True}


def at_stage(config: PPOConfig, stage: int) -> Change:
    """The ZeRO stage of the trained models: by the flags of each, which win, if one of them is given."""
    flags = ["actor_zero_stage"]
    if config.advantages.needs.critic:
        flags.append("critic_zero_stage")
    if config.arguments.keys().isdisjoint(flags):
        return {"zero_stage": stage}
    return dict.fromkeys(flags, stage)


def smaller(config: PPOConfig) -> Iterator[Change]:
    """Smaller batches for rollouts and updates of the same size: tokens per pass, prompts at a time, rows per pass."""
    yield from _smaller_budget(config)
    slots = config.sampling.per_device_generation_batch_size
    if slots > 1:
        half = _half(slots)
        batches = config.rollouts.generation_batches * slots // half
        yield {"per_device_generation_batch_size": half, "generation_batches": batches}
    rows = config.rollouts.per_device_training_batch_size
    yield from _smaller_micro_batch("per_device_training_batch_size", rows, config)


def _smaller_micro_batch(flag: str, rows: int, config: CommonConfig) -> Iterator[Change]:
    """Half the examples per forward pass, and twice the passes, so that an update keeps its size."""
    if rows == 1:
        return
    half = _half(rows)
    change: Change = {flag: half}
    passes = config.optimisation.gradient_accumulation_steps
    if passes is not None or not config.optimisation.global_batch_size:
        change["gradient_accumulation_steps"] = (passes or 1) * rows // half
    yield change


def _smaller_budget(config: CommonConfig) -> Iterator[Change]:
    """Half of --max_tokens_per_micro_batch, if the longest example still fits."""
    budget = config.optimisation.max_tokens_per_micro_batch
    if budget is not None and budget // 2 >= config.longest_example[0]:
        yield {"max_tokens_per_micro_batch": budget // 2}


def _recomputation(config: CommonConfig) -> Iterator[Change]:
    """Gradient checkpointing of the models that do not have it yet, then of all their layers."""
    names = ["gradient_checkpointing"]
    if isinstance(config, PPOConfig):
        names = ["actor_gradient_checkpointing"]
        if config.advantages.needs.critic:
            names.append("critic_gradient_checkpointing")
    values = config.flat()
    for name in names:
        if not values[name]:
            yield {name: True}
    if config.engine.gradient_checkpointing_every > 1:
        yield {"gradient_checkpointing_every": 1}


def _half(size: int) -> int:
    """The largest divisor up to one half, so that rollouts and updates keep their size."""
    return largest_part(size, size // 2)


def warn_of_gpu_memory(config: CommonConfig, processes: int, free: int) -> None:
    """Warns if a GPU with `free` bytes may be too small for the longest batch; names flags that would help."""
    try:
        plan = make_plan(config, Machine(processes, free), open_decoder_config)
        attempts = remedies(plan, open_decoder_config) if not plan.fits else []
    except UserError as error:
        logger.warning("the memory of this run could not be planned: %s", error)
        return
    if plan.fits:
        return
    flags = []
    for change, attempt in attempts:
        if attempt.fits:
            flags.append(change_as_flags(change))
    logger.warning(
        "a GPU would hold up to %.1f GB with the longest batch (phase %r), of which %.1f GB are free. What helps: "
        "%s; `dschat plan` shows more.",
        plan.peak / GB,
        plan.worst.name,
        free / GB,
        ", or ".join(flags) or hardware_advice(plan),
    )
