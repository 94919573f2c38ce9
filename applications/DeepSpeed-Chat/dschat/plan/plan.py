# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: its models, phases and main memory; whether it fits, what would make it fit, and a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from dschat.base.errors import UserError
from dschat.models.limits import open_decoder_config
from dschat.plan.models import Configs, Role, roles_of
from dschat.plan.phases import CUDA_BYTES, GB, Host, Machine, Phase, host_of, kept_bytes, phases_of
from dschat.plan.states import gathering, states
from dschat.settings.batches import largest_part
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import BOTH_MODELS, PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.settings.supervised import OneModelConfig

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=CommonConfig)
Change = dict[str, object]  # flag → its new value


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    config: CommonConfig  # its flags
    machine: Machine  # what it has
    roles: tuple[Role, ...]  # its models
    phases: tuple[Phase, ...]  # in the order of an iteration
    host: Host  # main memory of a node

    @property
    def worst(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of a process's device, what CUDA takes included."""
        return self.worst.total + (0 if self.machine.device_memory is None else CUDA_BYTES)

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of a node; on a CPU the processes compute there."""
        on_cpu = self.machine.on_a_node * self.worst.total if self.machine.device_memory is None else 0
        return self.host.total + on_cpu

    @property
    def drawing_actor(self) -> int:
        """Bytes of the actor's weights that each GPU holds while it draws responses; 0 in other steps.

        They are all of them, but where vLLM divides them among neighbours, and none where its servers draw.
        """
        actor, config = self.roles[0].weights, self.config
        if isinstance(config, PPOConfig):
            return 0 if config.vllm.vllm_url else -(-actor.whole // config.vllm.vllm_tensor_parallel)
        return actor.whole if isinstance(config, RefuelOnlineConfig) else 0

    @property
    def fits_device(self) -> bool:
        """Whether a GPU holds it."""
        return self.machine.device_memory is None or self.peak <= self.machine.device_memory

    @property
    def fits_host(self) -> bool:
        """Whether main memory holds it, as far as that is known."""
        return self.machine.main_memory is None or self.main_memory <= self.machine.main_memory

    @property
    def fits(self) -> bool:
        """Whether the run can be made."""
        return self.fits_device and self.fits_host

    @property
    def excess(self) -> int:
        """Bytes too many, of a GPU and of main memory; below 0 where there is room."""
        needed = (self.peak, self.machine.device_memory), (self.main_memory, self.machine.main_memory)
        return max((need - has for need, has in needed if has is not None), default=0)


def make_plan(config: CommonConfig, machine: Machine, configs: Configs) -> Plan:
    """Plans a run of these flags.

    Raises:
        UserError: a model's config cannot be read, or the batch sizes do not fit together.
    """
    batches = config.plan_batches(machine.processes)
    roles = roles_of(config, batches, configs, machine.device)
    phases = phases_of(config, batches, roles, machine)
    average = isinstance(config, PPOConfig) and config.memory.enable_ema
    return Plan(config, machine, tuple(roles), tuple(phases), host_of(roles, machine, average))


def remedies(plan: Plan, configs: Configs) -> list[tuple[Change, Plan]]:
    """What helps a plan that does not fit.

    Every change that is enough alone, with the plan that it makes; if there is none, the changes that are enough one
    after another; if they are not, all of them.
    """

    def attempted(change: Change) -> Plan:
        return make_plan(changed(plan.config, change), plan.machine, configs)

    changes = list[Change]()
    for change in _changes(plan.config):
        changes += [change] if change not in changes else []
    tried = [(change, attempted(change)) for change in changes]
    enough = [(change, made) for change, made in tried if made.fits]
    if enough:
        return enough
    together, best = Change(), plan
    for change in changes:
        attempt = attempted(together | change)
        if attempt.excess < best.excess:
            together, best = together | change, attempt
        if best.fits:
            break
    return [(together, best)] if together else []


def in_words(change: Change) -> str:
    """The flags as they are written on a command line."""
    given = {name: value for name, value in change.items() if value is not None}
    words = {name: " ".join(value) if isinstance(value, list) else value for name, value in given.items()}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in words.items())


def what_else(plan: Plan) -> str:
    """What helps where no flag does."""
    actor, memory = plan.drawing_actor, plan.machine.device_memory or 0
    if actor + CUDA_BYTES <= memory:
        return "more GPUs, smaller batches, LoRA (--lora_dim) or a smaller model"
    n, whole = plan.machine.processes, plan.roles[0].weights.whole
    shares = [k for k in range(2, n + 1) if n % k == 0 and whole / k + CUDA_BYTES < memory]
    divided = ""
    if isinstance(plan.config, PPOConfig) and shares:
        divided = f" or --rollout_engine vllm with --vllm_tensor_parallel {shares[0]}, which divides the actor,"
        divided += " or with servers on other GPUs (--vllm_url);"
    return (
        f"a smaller actor, or GPUs with more memory;{divided} more GPUs do not, nor does LoRA: while responses are"
        f" drawn, each GPU holds {actor / GB:.1f} GB of the actor"
    )


def _changes(config: CommonConfig) -> Iterator[Change]:
    """In the order of what they cost: activations again, less at a time, then weights and states elsewhere."""
    if isinstance(config, PPOConfig):
        yield from _ppo_changes(config)
        return
    assert isinstance(config, OneModelConfig)
    yield from _smaller_budget(config)
    yield from recomputation(config)
    if config.model.per_device_train_batch_size > 1:
        yield {"per_device_train_batch_size": _half(config.model.per_device_train_batch_size)}
    if isinstance(config, RefuelOnlineConfig) and config.sampling.per_device_generation_batch_size > 1:
        yield {"per_device_generation_batch_size": config.sampling.per_device_generation_batch_size // 2}
    if config.engine.zero_stage < 3:
        yield {"zero_stage": config.engine.zero_stage + 1 if config.engine.zero_stage else 2}
        yield {"zero_stage": 3}
    if not config.engine.offload:
        yield {"zero_stage": max(config.engine.zero_stage, 2), "offload": True}
        yield {"zero_stage": 3, "offload": True}


def _smaller_budget(config: CommonConfig) -> Iterator[Change]:
    budget = config.optimisation.max_tokens_per_micro_batch
    if budget is not None and budget // 2 >= config.longest_example[0]:
        yield {"max_tokens_per_micro_batch": budget // 2}


def recomputation(config: CommonConfig) -> list[Change]:
    """Activations computed again, of the models where they are not yet; and of all layers."""
    names = ["gradient_checkpointing"]
    if isinstance(config, PPOConfig):
        names = [
            f"{role}_gradient_checkpointing" for role in ("actor", "critic")[: 1 + config.advantages.needs.critic]
        ]
    changes: list[Change] = [{name: True} for name in names if not config.flat()[name]]
    if config.engine.gradient_checkpointing_every > 1:
        changes.append({"gradient_checkpointing_every": 1})
    return changes


def smaller(config: PPOConfig) -> Iterator[Change]:
    """Less at a time, of the same rollouts and updates: tokens of a pass, prompts drawn together, rows of a pass."""
    yield from _smaller_budget(config)
    slots, rows = config.sampling.per_device_generation_batch_size, config.rollouts.per_device_training_batch_size
    if slots > 1:
        half = _half(slots)
        batches = config.rollouts.generation_batches * slots // half
        yield {"per_device_generation_batch_size": half, "generation_batches": batches}
    if rows > 1:
        half, passes = _half(rows), config.optimisation.gradient_accumulation_steps
        more = (
            {}
            if passes is None and config.optimisation.global_batch_size
            else {"gradient_accumulation_steps": passes or 1}
        )
        more = {name: number * rows // half for name, number in more.items()}
        yield {"per_device_training_batch_size": half, **more}


def _ppo_changes(config: PPOConfig) -> Iterator[Change]:
    yield from recomputation(config)
    yield from smaller(config)
    for stage in (2, 3):
        if min(config.zero_stages) < stage:
            yield {"zero_stage": stage}
    if not config.memory.offload_reference_model:
        yield {"offload_reference_model": True}
    if not config.engine.offload:
        yield {"zero_stage": max(2, *config.zero_stages), "offload": True}
        yield {"zero_stage": 3, "offload": True}


def changed(config: Config, change: Change) -> Config:
    """The flags with others that win over them."""
    fields = dict(change)
    if isinstance(config, PPOConfig):
        for name in {*BOTH_MODELS} & {*change}:
            fields |= {f"{role}_{name}": change[name] for role in ("actor", "critic")}
    if config.optimisation.global_batch_size is not None:
        fields = {"gradient_accumulation_steps": None} | fields
    return config.changed(**fields)


def _half(size: int) -> int:
    """The largest divisor up to the half, so that rollouts and updates stay whole."""
    return largest_part(size, size // 2)


@dataclass(frozen=True)
class MinimumMemory:
    """Bytes that a process holds from the first update on, whatever the batches are."""

    main: int  # of main memory: on a CPU all models and optimiser states, else what is offloaded
    gpu: int  # of its GPU; 0 without one
    drawing: int = 0  # more of its GPU while responses are drawn: the whole actor, which ZeRO 3 puts together


def minimum_memory(
    config: CommonConfig, processes: int, device: torch.device, configs: Configs = open_decoder_config
) -> MinimumMemory | None:
    """What a run surely needs; None where a model cannot be opened, which the run itself will say better.

    Of the device of a process only its kind matters.
    """
    try:
        roles = roles_of(config, config.plan_batches(processes), configs, device)
    except UserError:
        return None
    kept = kept_bytes(roles, processes)
    offloaded = sum(states(role.weights, processes).host for role in roles)
    if device.type == "cpu":
        return MinimumMemory(kept + offloaded, 0)
    draws = isinstance(config, RefuelOnlineConfig) or (isinstance(config, PPOConfig) and not config.rollouts.uses_vllm)
    return MinimumMemory(offloaded, kept, gathering(roles[0].weights, processes) if draws else 0)


def warn_of_gpu_memory(config: CommonConfig, processes: int, free: int) -> None:
    """Says that a GPU with `free` bytes may be too small for the longest batch, and which flags would help."""
    try:
        plan = make_plan(config, Machine(processes, free), open_decoder_config)
        tried = remedies(plan, open_decoder_config) if not plan.fits else []
        helps = [in_words(change) for change, changed in tried if changed.fits]
    except UserError as error:
        logger.warning("the memory of this run could not be planned: %s", error)
        return
    if not plan.fits:
        logger.warning(
            "a GPU would hold up to %.1f GB with the longest batch (phase %r), of which %.1f GB are free. What helps: "
            "%s; `dschat plan` shows more.",
            plan.peak / GB,
            plan.worst.name,
            free / GB,
            ", or ".join(helps) or what_else(plan),
        )
