# SPDX-License-Identifier: Apache-2.0
"""What a run has, and what it holds in each of its phases: in the memory of a device, and in that of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelOnlineConfig
from dschat.config.rollouts import SamplingFlags
from dschat.config.supervised import SupervisedConfig
from dschat.errors import UserError
from dschat.models.layout import COLUMN_STEP, PREFILL_TOKENS, SPARE_COLUMNS, PassSize
from dschat.models.save import FILE_SIZE
from dschat.plan.models import Role, score_pass, shape, train_pass
from dschat.plan.passes import Pass, kept_gradient, sampling_logits, scoring_logits, training_logits
from dschat.plan.states import averaging, gathering, keeps_gradients, passing, reducing, states, stepping

# Of a GPU's memory, what is none of ours: CUDA's context, NCCL's and cuBLAS's work space.
CUDA_BYTES = 2_500_000_000
VLLM_CPU_CACHE = 1 << 28  # of vLLM on a CPU, as `dschat.rollouts.vllm` asks for it
VLLM_PASSES = 2_000_000_000  # of a GPU, for vLLM's activations and logits; an allowance that nobody has measured
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


@dataclass(frozen=True)
class Texts:
    """The longest texts of a run."""

    tokens: int  # of a text
    scored: int  # of them those with log-probs, at the end
    per_example: int = 1  # texts that pass together

    @classmethod
    def of(cls, config: CommonConfig) -> Texts:
        """What the flags say."""
        if isinstance(config, PPOConfig):
            return cls(config.max_prompt_seq_len + config.max_answer_seq_len, config.max_answer_seq_len)
        if isinstance(config, RefuelOnlineConfig):
            return cls(config.max_seq_len, config.max_answer_seq_len, 2)
        assert isinstance(config, SupervisedConfig)
        return cls(config.max_seq_len, config.max_seq_len, config.sequences_per_example)

    def filling(self, examples: int, budget: int | None) -> tuple[int, int, int]:
        """Rows, tokens of each, and log-probs of the largest micro-batch.

        Args:
            examples: at most.
            budget: tokens at most, padding included; of a longer example, its own; None = any.
        """
        rows, tokens = examples * self.per_example, self.tokens
        if budget is not None and rows * tokens > budget:
            area = max(budget, self.per_example * tokens)
            rows = -(-area // tokens)
            tokens = area // rows
        # Short texts, of which more go together, may have as many log-probs.
        return rows, tokens, min(examples * self.per_example * self.scored, rows * tokens)


def phases_of(config: CommonConfig, plan: BatchPlan, roles: Sequence[Role], machine: Machine) -> list[Phase]:
    """The phases of a run.

    Args:
        config: the flags.
        plan: its batch sizes.
        roles: its models.
        machine: that it has.
    """
    n, device = plan.world_size, machine.device
    trained = [role for role in roles if role.weights.trained]
    gradients = sum(states(role.weights, n).gradients for role in trained if not keeps_gradients(role.weights))
    update = max(stepping(role.weights, n, fused=device.type == "cuda") for role in trained)
    scored = max((_scored(config, plan, role, device) for role in roles), key=lambda parts: sum(parts.values()))
    draws = isinstance(config, SamplingFlags)
    parts = {"generate": _sampled(config, plan, roles[0], machine)} if isinstance(config, SamplingFlags) else {}
    parts |= {
        "score" if draws else "evaluate": scored,
        "train": _trained(config, plan, trained, device) | {"gradients": gradients},
        "update": {"gradients": gradients, "optimiser": update},
    }
    kept = kept_bytes(roles, n) + _kept_beside(config, plan, roles[0], machine)
    return [Phase(name, kept, {part: size for part, size in of.items() if size}) for name, of in parts.items()]


def _kept_beside(config: CommonConfig, plan: BatchPlan, actor: Role, machine: Machine) -> int:
    """Bytes of the moving average; of what CUDA graphs write into; and of vLLM on a CPU, where it never sleeps."""
    kept = 0
    if _keeps_graphs(config, actor, machine):
        kept = _kv_cache(config, plan, actor, machine) + _decoding_step(config, plan, actor, machine)
    if not isinstance(config, PPOConfig):
        return kept
    kept += averaging(actor.weights, machine.processes)[0] if config.enable_ema else 0
    if config.runs_vllm and machine.device_memory is None:
        kept += actor.weights.width * actor.weights.parameters // config.vllm_tensor_parallel + VLLM_CPU_CACHE
    return kept


def _trained(config: CommonConfig, plan: BatchPlan, trained: Sequence[Role], device: torch.device) -> dict[str, int]:
    """The worst moment of a micro-batch."""
    n, sizes = plan.world_size, Texts.of(config).filling(plan.micro_batch, plan.max_tokens)
    if isinstance(config, PPOConfig) and config.credit_is_fused(plan):
        # Both models go forward on a micro-batch before either goes backward.
        actor, critic = trained
        moments = _moments(_passes(actor, *sizes, device), _passes(critic, *sizes, device)[0])
        buffers = _zero(trained, n)
    else:
        moments = [moment for role in trained for moment in _moments(_passes(role, *sizes, device), NOTHING)]
        buffers = max(_zero([role], n) for role in trained)
    activations, logits = max(moments, key=sum)
    return {"activations": activations, "logits": logits, "ZeRO": buffers}


def _sampled(config: SamplingFlags, plan: BatchPlan, actor: Role, machine: Machine) -> dict[str, int]:
    if isinstance(config, PPOConfig) and config.uses_vllm:
        return _vllm_parts(config, actor, machine)
    assert isinstance(config, PPOConfig | RefuelOnlineConfig)
    texts, slots = Texts.of(config), config.per_device_generation_batch_size * plan.samples_per_prompt
    prompt, kept = texts.tokens - texts.scored, _keeps_graphs(config, actor, machine)
    rows = min(slots, max(1, PREFILL_TOKENS // prompt)) if config.rollout_engine == "continuous" else slots
    return {
        "gathered weights": gathering(actor.weights, plan.world_size),
        "KV cache": 0 if kept else _kv_cache(config, plan, actor, machine),
        "activations": score_pass(actor.model, rows, prompt).forward,
        "logits": sampling_logits(actor.head, slots, machine.device),
    }


def _kv_cache(config: SamplingFlags, plan: BatchPlan, actor: Role, machine: Machine) -> int:
    """Bytes of keys and values of all rows that are drawn together."""
    assert isinstance(config, PPOConfig | RefuelOnlineConfig)
    slots = config.per_device_generation_batch_size * plan.samples_per_prompt
    waiting = config.rollout_engine == "continuous" and plan.rollout_per_rank * plan.samples_per_prompt > slots
    columns = Texts.of(config).tokens + SPARE_COLUMNS * waiting
    if _graphs(config, machine):
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
    return slots * columns * shape(actor.model).cached * actor.model.width


def _decoding_step(config: SamplingFlags, plan: BatchPlan, actor: Role, machine: Machine) -> int:
    """Bytes of all that a step makes anew, which a graph's memory holds."""
    assert isinstance(config, PPOConfig | RefuelOnlineConfig)
    slots = config.per_device_generation_batch_size * plan.samples_per_prompt
    return score_pass(actor.model, slots, 1).forward + sampling_logits(actor.head, slots, machine.device)


def _graphs(config: CommonConfig, machine: Machine) -> bool:
    """Whether decoding steps have fixed shapes."""
    if not isinstance(config, PPOConfig | RefuelOnlineConfig) or config.rollout_engine != "continuous":
        return False
    return config.decode_graphs == "on" or (config.decode_graphs == "auto" and machine.device.type == "cuda")


def _keeps_graphs(config: CommonConfig, actor: Role, machine: Machine) -> TypeGuard[SamplingFlags]:
    """Whether what they write into stays between rollouts: where weights stay, too, and are not gathered anew."""
    return _graphs(config, machine) and not gathering(actor.weights, machine.processes)


def engines(config: PPOConfig, plan: BatchPlan, actor: Role, machine: Machine, gpus: int) -> dict[int, int]:
    """GPUs of an engine of vLLM, which divide its attention heads and stay within a node → bytes of each of them.

    They are the GPU's part of the actor, keys and values of what one training process draws at once, and VLLM_PASSES.

    Args:
        config: the flags.
        plan: its batch sizes.
        actor: the model.
        machine: of the training.
        gpus: all that draw.
    """
    heads: int = actor.model.config.get_text_config().num_attention_heads
    on_a_node = min(gpus, machine.gpus_per_node)
    parts = [k for k in range(1, on_a_node + 1) if gpus % k == on_a_node % k == heads % k == 0]
    beside = _kv_cache(config, plan, actor, machine) + VLLM_PASSES
    return {k: -(-actor.weights.width * actor.weights.parameters // k) + beside for k in parts}


def _vllm_parts(config: PPOConfig, actor: Role, machine: Machine) -> dict[str, int]:
    """vLLM's share of a GPU, which holds the actor or, of neighbours that share an engine, its part of it; and the
    weight that is on its way to it, of which a server is sent the one that is whole.

    Where a GPU is too small for that, the share is that. While vLLM sleeps it counts for nothing; its CUDA
    graphs, which stay, are not known.
    """
    weights = actor.weights
    passed = weights.width * weights.largest
    if not config.runs_vllm:
        return {"weights passed on": passed}
    passed *= 2 if gathering(weights, machine.processes) else 1
    if machine.device_memory is None:
        return {"weights passed on": passed}
    neighbours, device = config.vllm_tensor_parallel, machine.device_memory
    held = -(-weights.width * weights.parameters // neighbours)
    share = int(config.vllm_gpu_memory * device)
    if share < held <= device:
        part = "the actor whole" if neighbours == 1 else f"1/{neighbours} of the actor"
        raise UserError(
            f"--vllm_gpu_memory {config.vllm_gpu_memory:g}: vLLM would have {share / GB:.1f} GB of a GPU, and"
            f" holds {part}, {held / GB:.1f} GB: give more than {held / device:.2f}, or a larger"
            " --vllm_tensor_parallel."
        )
    return {"vLLM": max(share, held), "weights passed on": passed}


def _scored(config: CommonConfig, plan: BatchPlan, role: Role, device: torch.device) -> dict[str, int]:
    """A pass without gradients: in an evaluation where there are no rollouts."""
    texts, training = Texts.of(config), PassSize(plan.micro_batch, plan.max_tokens)
    size = training.without_gradient
    most = size.rows
    if isinstance(config, SupervisedConfig):
        most = config.per_device_eval_batch_size
    elif isinstance(config, RefuelOnlineConfig) and role.name == "reward model":
        texts, most = replace(texts, per_example=1), config.per_device_eval_batch_size
    elif isinstance(config, RefuelOnlineConfig) and not config.kl_coef:  # the policy, in the passes of its updates
        size, most = training, training.rows
    else:
        drawn, held_out = plan.rollout_per_rank * plan.samples_per_prompt, _held_out(config, plan.world_size)
        most = min(most, max(drawn, held_out)) if held_out else most
    rows, tokens, positions = texts.filling(most, size.tokens)
    body = score_pass(role.model, rows, min(tokens, shape(role.model).limit or tokens))
    logits = scoring_logits(role.head, positions, device) if role.model.kind == "policy" else 0
    activations, logits = max((body.forward, 0), (body.held, logits), key=sum)
    return {
        "activations": activations,
        "logits": logits,
        "whole weights": passing(role.weights, plan.world_size),
    }


def _held_out(config: CommonConfig, processes: int) -> int:
    """Responses of an evaluation, or pairs of replies, on each process at most; 0 = any number."""
    if isinstance(config, PPOConfig):
        return -(-config.num_eval_prompts(processes) // processes)
    assert isinstance(config, RefuelOnlineConfig)
    return -(-(config.eval_prompts or 0) * config.max_turns // (2 * processes))


def _passes(role: Role, rows: int, tokens: int, positions: int, device: torch.device) -> tuple[Pass, Pass, int]:
    """Of the model without its head, of its log-probs, and what of the head's gradient is kept after those."""
    body = train_pass(role.model, rows, tokens, role.checkpointing)
    if role.model.kind != "policy":
        return body, NOTHING, 0
    return body, training_logits(role.head, positions, device), kept_gradient(role.head)


def _moments(passes: tuple[Pass, Pass, int], other: Pass) -> list[tuple[int, int]]:
    """Activations and logits at the moments of one micro-batch, beside another model that goes forward first."""
    body, logits, kept = passes
    return [
        (body.forward, 0),
        (body.held, logits.forward),
        (body.held + other.forward, logits.held),
        (body.held + other.held, logits.backward),
        (body.backward + other.held, kept),
        (other.backward, 0),
    ]


def _zero(roles: Sequence[Role], processes: int) -> int:
    whole = sum(passing(role.weights, processes) for role in roles)
    return whole + max(reducing(role.weights, processes) for role in roles)


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
