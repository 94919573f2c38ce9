# SPDX-License-Identifier: Apache-2.0
"""What a run has, and what it holds in each of its phases: in the memory of a device, and in that of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import SupervisedConfig
from dschat.errors import UserError
from dschat.models.layout import SPARE_COLUMNS
from dschat.models.save import FILE_SIZE
from dschat.plan.models import Role, score_pass, shape, train_pass
from dschat.plan.passes import Pass, kept_gradient, sampling_logits, scoring_logits, training_logits
from dschat.plan.states import averaging, gathering, keeps_gradients, passing, reducing, states, stepping

# Of a GPU's memory, what is none of ours: CUDA's context, NCCL's and cuBLAS's work space.
CUDA_BYTES = 2_500_000_000
GB = 10**9


@dataclass(frozen=True)
class Machine:
    """What a run has, in bytes."""

    processes: int  # N, each on a GPU of its own, or on the CPU
    device_memory: int | None  # of a GPU; None to plan for a CPU
    main_memory: int | None = None  # of a node; None where it is not known
    gpus_per_node: int = 8  # the most processes of a node

    @property
    def on_a_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.processes, self.gpus_per_node)

    @property
    def device(self) -> torch.device:
        """Where a process computes."""
        return torch.device("cpu" if self.device_memory is None else "cuda")


NOTHING = Pass(0)


@dataclass(frozen=True)
class Phase:
    """Bytes at the worst moment of a phase."""

    name: str  # generate, score, evaluate, train or update
    kept: int  # what all models keep between phases
    parts: Mapping[str, int]  # what the phase adds, by name

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + sum(self.parts.values())


def kept_bytes(roles: Sequence[Role], processes: int) -> int:
    """What models keep between phases. See `keeps_gradients`."""
    return sum(_kept(role, processes) for role in roles)


def phases_of(config: CommonConfig, plan: BatchPlan, roles: Sequence[Role], machine: Machine) -> list[Phase]:
    """The phases of a run.

    Args:
        config: the flags.
        plan: its batch sizes.
        roles: its models.
        machine: that it has.
    """
    n, device = plan.world_size, machine.device
    kept = kept_bytes(roles, n)
    if isinstance(config, PPOConfig) and config.enable_ema:
        kept += averaging(roles[0].weights, n)[0]
    trained = [role for role in roles if role.weights.trained]
    gradients = sum(states(role.weights, n).gradients for role in trained if not keeps_gradients(role.weights))
    update = max(stepping(role.weights, n, fused=device.type == "cuda") for role in trained)
    if isinstance(config, PPOConfig):
        parts = _ppo_parts(config, plan, roles, machine)
    else:
        assert isinstance(config, SupervisedConfig)
        parts = _supervised_parts(config, plan, roles[0], device)
    parts["train"] |= {"gradients": gradients}
    parts["update"] = {"gradients": gradients, "optimiser": update}
    return [Phase(name, kept, {part: size for part, size in of.items() if size}) for name, of in parts.items()]


def _supervised_parts(
    config: SupervisedConfig, plan: BatchPlan, role: Role, device: torch.device
) -> dict[str, dict[str, int]]:
    per_example = config.sequences_per_example
    rows, evaluated = per_example * plan.micro_batch, per_example * config.per_device_eval_batch_size
    tokens, n = config.max_seq_len, plan.world_size
    positions = tokens if role.model.kind == "policy" else 0
    moments = _moments(role, rows, tokens, rows * positions, device)
    return {
        "evaluate": _scored(role, evaluated, tokens, evaluated * positions, n, device),
        "train": _worst(moments) | _zero([role], n),
    }


def _ppo_parts(
    config: PPOConfig, plan: BatchPlan, roles: Sequence[Role], machine: Machine
) -> dict[str, dict[str, int]]:
    actor, device = roles[0], machine.device
    trained = [role for role in roles if role.weights.trained]
    n, rows, answer = plan.world_size, plan.micro_batch, config.max_answer_seq_len
    tokens = config.max_prompt_seq_len + answer
    if config.credit_is_fused(plan):  # then both models go forward on a micro-batch before either is trained on it
        _, critic = trained
        moments = _moments_together(actor, critic, rows, tokens, rows * answer, device)
        buffers = _zero(trained, n)
    else:
        moments = [moment for role in trained for moment in _moments(role, rows, tokens, rows * answer, device)]
        buffers = max((_zero([role], n) for role in trained), key=lambda parts: sum(parts.values()))
    scored = [_scored(role, rows, tokens, rows * answer, n, device) for role in roles]
    return {
        "generate": _sampled(config, plan, actor, machine),
        "score": max(scored, key=lambda parts: sum(parts.values())),
        "train": _worst(moments) | buffers,
    }


def _sampled(config: PPOConfig, plan: BatchPlan, actor: Role, machine: Machine) -> dict[str, int]:
    if config.rollout_engine == "vllm":
        return {"vLLM": _vllm_share(config, actor, machine)}
    slots = config.per_device_generation_batch_size * plan.samples_per_prompt
    waiting = config.rollout_engine == "continuous" and config.generation_batches > 1
    columns = config.max_prompt_seq_len + config.max_answer_seq_len + SPARE_COLUMNS * waiting
    return {
        "gathered weights": gathering(actor.weights, plan.world_size),
        "KV cache": slots * columns * shape(actor.model).cached * actor.model.width,
        "activations": score_pass(actor.model, slots, config.max_prompt_seq_len).forward,
        "logits": sampling_logits(actor.head, slots, machine.device),
    }


def _vllm_share(config: PPOConfig, actor: Role, machine: Machine) -> int:
    """Bytes of vLLM, whose copy of the actor is whole in every process; at least that, where a GPU is too small."""
    device, weights = machine.device_memory or 0, actor.weights.width * actor.weights.parameters
    share = int(config.vllm_gpu_memory * device)
    if share < weights <= device:
        raise UserError(
            f"--vllm_gpu_memory {config.vllm_gpu_memory:g}: vLLM would have {share / GB:.1f} GB of a GPU, and"
            f" holds the actor whole, {weights / GB:.1f} GB: give more than {weights / device:.2f}."
        )
    return max(share, weights)


def _scored(
    role: Role, rows: int, tokens: int, positions: int, processes: int, device: torch.device
) -> dict[str, int]:
    policy = role.model.kind == "policy"
    return {
        "activations": score_pass(role.model, rows, tokens).forward,
        "logits": scoring_logits(role.head, positions, device) if policy else 0,
        "ZeRO": passing(role.weights, processes),
    }


def _moments(role: Role, rows: int, tokens: int, positions: int, device: torch.device) -> list[tuple[int, int]]:
    """Activations and logits at the moments of one micro-batch."""
    return _moments_of(_passes(role, rows, tokens, positions, device), NOTHING)


def _moments_together(
    actor: Role, critic: Role, rows: int, tokens: int, positions: int, device: torch.device
) -> list[tuple[int, int]]:
    """Where both models go forward on a micro-batch before either goes backward."""
    other = train_pass(critic.model, rows, tokens, critic.checkpointing)
    return _moments_of(_passes(actor, rows, tokens, positions, device), other)


def _passes(role: Role, rows: int, tokens: int, positions: int, device: torch.device) -> tuple[Pass, Pass, int]:
    """Of the model without its head, of its log-probs, and what of the head's gradient is kept after those."""
    body = train_pass(role.model, rows, tokens, role.checkpointing)
    if role.model.kind != "policy":
        return body, NOTHING, 0
    return body, training_logits(role.head, positions, device), kept_gradient(role.head)


def _moments_of(passes: tuple[Pass, Pass, int], other: Pass) -> list[tuple[int, int]]:
    body, logits, kept = passes
    return [
        (body.forward, 0),
        (body.held, logits.forward),
        (body.held + other.forward, logits.held),
        (body.held + other.held, logits.backward),
        (body.backward + other.held, kept),
        (other.backward, 0),
    ]


def _worst(moments: Sequence[tuple[int, int]]) -> dict[str, int]:
    activations, logits = max(moments, key=sum)
    return {"activations": activations, "logits": logits}


def _zero(roles: Sequence[Role], processes: int) -> dict[str, int]:
    whole = sum(passing(role.weights, processes) for role in roles)
    return {"ZeRO": whole + max(reducing(role.weights, processes) for role in roles)}


def _kept(role: Role, processes: int) -> int:
    kept = states(role.weights, processes)
    return kept.total - (0 if keeps_gradients(role.weights) else kept.gradients)


PROCESS_BYTES = 3_000_000_000  # a process with torch, DeepSpeed and CUDA's libraries
FILES_AT_A_TIME = 2  # of a model that is saved


@dataclass(frozen=True)
class Host:
    """Bytes of main memory."""

    processes: int  # the programs themselves
    offload: int  # states and weights that live there
    average: int  # that of the actor, where its weights are offloaded
    loading: int  # weights on their way to the device
    saving: int  # files on the main process

    @property
    def total(self) -> int:
        """At the worst moment: nothing is saved while loading."""
        return self.processes + self.offload + self.average + max(self.loading, self.saving)


def host_of(roles: Sequence[Role], machine: Machine, average: bool) -> Host:
    """Main memory of the node of the main process.

    Args:
        roles: the models.
        machine: that the run has.
        average: --enable_ema.
    """
    trained = [role.weights for role in roles if role.weights.trained]
    saved = max(weights.width * weights.parameters for weights in trained)
    processes, here = machine.processes, machine.on_a_node
    return Host(
        processes=here * PROCESS_BYTES,
        offload=here * sum(states(role.weights, processes).host for role in roles),
        average=here * averaging(roles[0].weights, processes)[1] if average else 0,
        loading=here * max(loading(role) for role in roles),
        saving=min(saved, FILES_AT_A_TIME * FILE_SIZE),
    )


def loading(role: Role) -> int:
    """Bytes of one process while it loads a model: a weight at a time, which goes to its GPU, or is cut at ZeRO 3."""
    return role.weights.width * role.weights.largest
