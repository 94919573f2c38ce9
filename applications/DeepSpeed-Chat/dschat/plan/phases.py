# SPDX-License-Identifier: Apache-2.0
"""What a run has, and what it holds in each of its phases: in the memory of a device, and in that of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dschat.base.errors import UserError
from dschat.models.layout import COLUMN_STEP, PREFILL_TOKENS, SPARE_COLUMNS, PassSize
from dschat.models.save import FILE_SIZE
from dschat.plan.models import Role
from dschat.plan.passes import (
    Pass,
    kept_gradient,
    sampling_logits,
    scoring_logits,
    scoring_pass,
    shape_of,
    training_logits,
    training_pass,
)
from dschat.plan.states import averaging, gathering, keeps_gradients, passing, reducing, states, stepping
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.settings.supervised import SupervisedConfig

# Of a GPU's memory, what is none of ours: CUDA's context, NCCL's and cuBLAS's work space.
CUDA_BYTES = 2_500_000_000
VLLM_CPU_CACHE = 1 << 28  # of vLLM on a CPU, as `dschat.rollouts.vllm.engine` asks for it
VLLM_PASSES = 2_000_000_000  # of a GPU, for vLLM's activations and logits; an allowance that nobody has measured
GB = 10**9
PROCESS_BYTES = 3_000_000_000  # of main memory: a process with torch, DeepSpeed and CUDA's libraries
FILES_AT_A_TIME = 2  # of a model that is saved
Drawing = PPOConfig | RefuelOnlineConfig  # whose responses are drawn
NOTHING = Pass(0)


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
    """What models keep between phases: not every gradient, see `keeps_gradients`."""
    kept = [(role.weights, states(role.weights, processes)) for role in roles]
    return sum(of.total - (0 if keeps_gradients(weights) else of.gradients) for weights, of in kept)


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
            return cls(
                config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len,
                config.sampling.max_answer_seq_len,
            )
        if isinstance(config, RefuelOnlineConfig):
            return cls(config.model.max_seq_len, config.sampling.max_answer_seq_len, 2)
        assert isinstance(config, SupervisedConfig)
        return cls(config.model.max_seq_len, config.model.max_seq_len, config.sequences_per_example)

    def filling(self, examples: int, budget: int | None) -> tuple[int, int, int]:
        """Rows, tokens of each, and log-probs of the largest micro-batch of so many examples at most.

        The budget is its tokens at most, padding included; of a longer example, its own; None = any.
        """
        rows, tokens = examples * self.per_example, self.tokens
        if budget is not None and rows * tokens > budget:
            area = max(budget, self.per_example * tokens)
            rows = -(-area // tokens)
            tokens = area // rows
        # Short texts, of which more go together, may have as many log-probs.
        return rows, tokens, min(examples * self.per_example * self.scored, rows * tokens)


def phases_of(config: CommonConfig, plan: BatchPlan, roles: Sequence[Role], machine: Machine) -> list[Phase]:
    """The phases of a run, in the order of an iteration."""
    n, device = plan.world_size, machine.device
    trained = [role for role in roles if role.weights.trained]
    gradients = sum(states(role.weights, n).gradients for role in trained if not keeps_gradients(role.weights))
    update = max(stepping(role.weights, n, fused=device.type == "cuda") for role in trained)
    scored = max((_scored(config, plan, role, device) for role in roles), key=lambda parts: sum(parts.values()))
    draws, kept, parts = isinstance(config, Drawing), kept_bytes(roles, n), dict[str, dict[str, int]]()
    if isinstance(config, Drawing):
        parts["generate"], beside = _drawn(config, plan, roles[0], machine)
        kept += beside
    parts |= {
        "score" if draws else "evaluate": scored,
        "train": _trained(config, plan, trained, device) | {"gradients": gradients},
        "update": {"gradients": gradients, "optimiser": update},
    }
    return [Phase(name, kept, {part: size for part, size in of.items() if size}) for name, of in parts.items()]


def _trained(config: CommonConfig, plan: BatchPlan, trained: Sequence[Role], device: torch.device) -> dict[str, int]:
    """The worst moment of a micro-batch."""
    n, sizes = plan.world_size, Texts.of(config).filling(plan.micro_batch, plan.max_tokens)
    passes = [_passes(role, *sizes, device) for role in trained]
    if isinstance(config, PPOConfig) and config.credit_is_fused(plan):
        # Both models go forward on a micro-batch before either goes backward.
        actor, critic = passes
        moments, buffers = _moments(actor, critic[0]), _zero(trained, n)
    else:
        moments = [moment for one in passes for moment in _moments(one, NOTHING)]
        buffers = max(_zero([role], n) for role in trained)
    activations, logits = max(moments, key=sum)
    return {"activations": activations, "logits": logits, "ZeRO": buffers}


def _drawn(config: Drawing, plan: BatchPlan, actor: Role, machine: Machine) -> tuple[dict[str, int], int]:
    """What is there while responses are drawn; and what stays beside the models, the moving average included."""
    weights, kept = actor.weights, 0
    if isinstance(config, PPOConfig):
        kept += averaging(weights, machine.processes)[0] if config.memory.enable_ema else 0
        if config.runs_vllm and machine.device_memory is None:  # where it never sleeps
            kept += weights.whole // config.vllm.vllm_tensor_parallel + VLLM_CPU_CACHE
        if config.rollouts.uses_vllm:
            return _vllm_parts(config, actor, machine), kept
    texts, slots = Texts.of(config), config.sampling.per_device_generation_batch_size * plan.samples_per_prompt
    prompt = texts.tokens - 1 if _completes(config) else texts.tokens - texts.scored
    logits = sampling_logits(shape_of(actor.model).head, slots, machine.device)
    rows = min(slots, max(1, PREFILL_TOKENS // prompt)) if _rollout_engine(config) == "continuous" else slots
    parts = {
        "gathered weights": gathering(weights, plan.world_size),
        "KV cache": _kv_cache(config, plan, actor, machine),
        "activations": scoring_pass(actor.model, rows, prompt).forward,
        "logits": logits,
    }
    if uses_graphs(config, machine) and not parts["gathered weights"]:
        # CUDA graphs hold what they write into from one rollout to the next: the cache, and all that a step makes.
        kept += parts.pop("KV cache") + scoring_pass(actor.model, slots, 1).forward + logits
    return parts, kept


def _kv_cache(config: Drawing, plan: BatchPlan, actor: Role, machine: Machine) -> int:
    """Keys and values of all rows that are drawn together."""
    slots = config.sampling.per_device_generation_batch_size * plan.samples_per_prompt
    waiting = _rollout_engine(config) == "continuous" and plan.rollout_per_rank * plan.samples_per_prompt > slots
    texts = Texts.of(config)
    columns = texts.tokens + SPARE_COLUMNS * waiting
    if _completes(config):
        # The longest text that is completed stands beside a short one, whose response is as long as any.
        columns = texts.tokens - 1 + texts.scored + SPARE_COLUMNS * (_rollout_engine(config) == "continuous")
    if uses_graphs(config, machine):
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
    return slots * columns * shape_of(actor.model).cached * actor.weights.width


def _rollout_engine(config: Drawing) -> str:
    """What samples responses."""
    if isinstance(config, PPOConfig):
        return config.rollouts.rollout_engine
    return config.dialogues.rollout_engine


def _completes(config: Drawing) -> bool:
    """Whether responses are also drawn from the middle of others."""
    return isinstance(config, PPOConfig) and config.advantages.needs.segment_values


def uses_graphs(config: Drawing, machine: Machine) -> bool:
    """Whether decoding steps have fixed shapes."""
    on = config.sampling.decode_graphs == "on" or (
        config.sampling.decode_graphs == "auto" and machine.device.type == "cuda"
    )
    return on and _rollout_engine(config) == "continuous"


def engines(config: PPOConfig, plan: BatchPlan, actor: Role, machine: Machine, gpus: int) -> dict[int, int]:
    """GPUs of an engine of vLLM, which divide its attention heads and stay within a node → bytes of each of them.

    They are the GPU's part of the actor, keys and values of what one process of the training on `machine` draws at
    once, and VLLM_PASSES. `gpus` are all that draw.
    """
    heads: int = actor.model.config.get_text_config().num_attention_heads
    on_a_node = min(gpus, machine.gpus_per_node)
    parts = [k for k in range(1, on_a_node + 1) if gpus % k == on_a_node % k == heads % k == 0]
    beside = _kv_cache(config, plan, actor, machine) + VLLM_PASSES
    return {k: -(-actor.weights.whole // k) + beside for k in parts}


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
    neighbours, device = config.vllm.vllm_tensor_parallel, machine.device_memory
    held = -(-weights.whole // neighbours)
    share = int(config.vllm.vllm_gpu_memory * device)
    if share < held <= device:
        part = "the actor whole" if neighbours == 1 else f"1/{neighbours} of the actor"
        raise UserError(
            f"--vllm_gpu_memory {config.vllm.vllm_gpu_memory:g}: vLLM would have {share / GB:.1f} GB of a GPU, and"
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
        most = config.output.per_device_eval_batch_size
    elif isinstance(config, RefuelOnlineConfig) and role.name == "reward model":
        texts, most = replace(texts, per_example=1), config.output.per_device_eval_batch_size
    elif isinstance(config, RefuelOnlineConfig) and not config.kl.kl_coef:  # the policy, in the passes of its updates
        size, most = training, training.rows
    else:
        drawn, held_out = plan.rollout_per_rank * plan.samples_per_prompt, _held_out(config, plan.world_size)
        most = min(most, max(drawn, held_out)) if held_out else most
    (rows, tokens, positions), shape = texts.filling(most, size.tokens), shape_of(role.model)
    body = scoring_pass(role.model, rows, min(tokens, shape.limit or tokens))
    logits = scoring_logits(shape.head, positions, device) if role.model.kind == "policy" else 0
    activations, logits = max((body.forward, 0), (body.held, logits), key=sum)
    return {"activations": activations, "logits": logits, "whole weights": passing(role.weights, plan.world_size)}


def _held_out(config: CommonConfig, processes: int) -> int:
    """Responses of an evaluation, or pairs of replies, on each process at most; 0 = any number."""
    if isinstance(config, PPOConfig):
        return -(-config.num_eval_prompts(processes) // processes)
    assert isinstance(config, RefuelOnlineConfig)
    return -(-(config.sampling.eval_prompts or 0) * config.dialogues.max_turns // (2 * processes))


def _passes(role: Role, rows: int, tokens: int, positions: int, device: torch.device) -> tuple[Pass, Pass, int]:
    """Of the model without its head, of its log-probs, and what of the head's gradient is kept after those."""
    body = training_pass(role.model, rows, tokens, role.recomputed, role.compiled)
    head = shape_of(role.model).head
    if role.model.kind != "policy":
        return body, NOTHING, 0
    return body, training_logits(head, positions, device), kept_gradient(head)


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
    """Main memory of the node of the main process; `average` is --enable_ema."""
    weights, processes, here = [role.weights for role in roles], machine.processes, machine.on_a_node
    saved = max(each.whole for each in weights if each.trained)
    return Host(
        processes=here * PROCESS_BYTES,
        offload=here * sum(states(each, processes).host for each in weights),
        average=here * averaging(weights[0], processes)[1] if average else 0,
        # A weight at a time is loaded, which goes to its GPU, or is cut at ZeRO 3.
        loading=here * max(each.width * each.largest for each in weights),
        saving=min(saved, FILES_AT_A_TIME * FILE_SIZE),
    )
