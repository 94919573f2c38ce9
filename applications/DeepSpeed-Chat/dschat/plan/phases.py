# SPDX-License-Identifier: Apache-2.0
"""The memory that a run holds in each of its phases, on a device and on a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dschat.base.errors import UserError
from dschat.models.layout import COLUMN_STEP, PREFILL_TOKENS, SPARE_COLUMNS, PassSize
from dschat.models.save import FILE_SIZE
from dschat.plan.minimum import kept_bytes
from dschat.plan.models import Role
from dschat.plan.passes import (
    Pass,
    sampling_logits,
    scoring_logits,
    scoring_pass,
    tied_head_gradient,
    training_logits,
    training_pass,
)
from dschat.plan.sizes import shape_of
from dschat.plan.states import (
    ema_bytes,
    keeps_gradients,
    model_states,
    pass_weight_bytes,
    reduction_bytes,
    sampling_weight_bytes,
    step_bytes,
)
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.rollouts import sampling_lengths
from dschat.settings.supervised import SupervisedConfig

CUDA_BYTES = 2_500_000_000  # GPU memory used by the CUDA context, NCCL and cuBLAS workspaces
VLLM_CPU_CACHE = 1 << 28  # the KV cache that `dschat.vllm.engine` asks vLLM for on a CPU
GB = 10**9
PROCESS_BYTES = 3_000_000_000  # main memory of a process that has loaded torch, DeepSpeed and CUDA's libraries
FILES_AT_A_TIME = 2  # files of a model that are in memory while it is saved
SamplingConfig = PPOConfig | RefuelOnlineConfig  # steps that sample responses
NO_PASS = Pass(0)


@dataclass(frozen=True)
class Machine:
    """The hardware of a run; sizes in bytes."""

    processes: int  # N, each on its own GPU, or on the CPU
    device_memory: int | None  # memory of a GPU; None to plan for a CPU
    main_memory: int | None = None  # memory of a node; None if unknown
    gpus_per_node: int = 8  # the most processes of a node

    @property
    def on_a_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.processes, self.gpus_per_node)

    @property
    def device(self) -> torch.device:
        """The device that a process computes on."""
        return torch.device("cpu" if self.device_memory is None else "cuda")


@dataclass(frozen=True)
class Phase:
    """Bytes at the peak of a phase."""

    name: str  # generate, score, evaluate, train or update
    kept: int  # what all models hold between phases
    parts: Mapping[str, int]  # what the phase adds, by name

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.kept + sum(self.parts.values())


@dataclass(frozen=True)
class Texts:
    """The longest sequences of a run."""

    tokens: int  # tokens per sequence
    scored: int  # tokens with log-probs, at the end of the sequence
    per_example: int = 1  # sequences per example in one forward pass (2 for a preference pair)

    @classmethod
    def of(cls, config: CommonConfig) -> Texts:
        """Lengths that the flags allow."""
        if isinstance(config, PPOConfig):
            response = config.sampling.max_answer_seq_len
            return cls(config.sampling.max_prompt_seq_len + response, response)
        if isinstance(config, RefuelOnlineConfig):
            return cls(config.model.max_seq_len, config.sampling.max_answer_seq_len, 2)
        assert isinstance(config, SupervisedConfig)
        return cls(config.model.max_seq_len, config.model.max_seq_len, config.sequences_per_example)

    def filling(self, examples: int, budget: int | None) -> tuple[int, int, int]:
        """Rows, tokens per row and number of log-probs of the largest micro-batch.

        Args:
            examples: the most examples of a micro-batch.
            budget: its most tokens, padding included; a longer example passes alone. None: no limit.
        """
        rows = examples * self.per_example
        tokens = self.tokens
        if budget is not None and rows * tokens > budget:
            area = max(budget, self.per_example * tokens)
            rows = -(-area // tokens)
            tokens = area // rows
        # A pass of more but shorter sequences may have as many log-probs.
        log_probs = min(examples * self.per_example * self.scored, rows * tokens)
        return rows, tokens, log_probs


def phases_of(config: CommonConfig, plan: BatchPlan, roles: Sequence[Role], machine: Machine) -> list[Phase]:
    """The phases of a run, in the order of an iteration."""
    processes = plan.world_size
    device = machine.device
    trained = [role for role in roles if role.weights.trained]
    parts: dict[str, dict[str, int]] = {}
    permanent = kept_bytes(roles, processes)
    is_sampling = isinstance(config, SamplingConfig)

    # Sampling of responses.
    if isinstance(config, SamplingConfig):
        parts["generate"], sampler = _sampling_parts(config, plan, roles[0], machine)
        permanent += sampler

    # Passes without gradients, by the model that needs most.
    scoring = [_scoring_parts(config, plan, role, device) for role in roles]
    parts["score" if is_sampling else "evaluate"] = max(scoring, key=lambda sizes: sum(sizes.values()))

    # Training.
    gradients = 0
    for role in trained:
        if not keeps_gradients(role.weights):
            gradients += model_states(role.weights, processes).gradients
    parts["train"] = _training_parts(config, plan, trained, device) | {"gradients": gradients}
    fused = device.type == "cuda"
    step = max(step_bytes(role.weights, processes, fused) for role in trained)
    parts["update"] = {"gradients": gradients, "optimiser": step}

    phases = []
    for name, sizes in parts.items():
        nonzero = {part: size for part, size in sizes.items() if size}
        phases.append(Phase(name, permanent, nonzero))
    return phases


# ---- Training ----


def _training_parts(
    config: CommonConfig, plan: BatchPlan, trained: Sequence[Role], device: torch.device
) -> dict[str, int]:
    """The peak of one micro-batch."""
    processes = plan.world_size
    size = Texts.of(config).filling(plan.micro_batch, plan.max_tokens)
    passes = [_passes(role, *size, device) for role in trained]
    if isinstance(config, PPOConfig) and config.credit_is_fused(plan):
        # Both models run forward on a micro-batch before either runs backward.
        actor, critic = passes
        moments = _moments(actor, critic[0])
        buffers = _zero_bytes(trained, processes)
    else:
        moments = []
        for role_passes in passes:
            moments += _moments(role_passes, NO_PASS)
        buffers = max(_zero_bytes([role], processes) for role in trained)
    activations, logits = max(moments, key=sum)
    return {"activations": activations, "logits": logits, "ZeRO": buffers}


def _passes(role: Role, rows: int, tokens: int, positions: int, device: torch.device) -> tuple[Pass, Pass, int]:
    """The pass of the model without its head, that of its log-probs, and the head's gradient that stays after both."""
    body = training_pass(role.model, rows, tokens, role.recompute_every, role.compiled)
    if role.model.kind != "policy":
        return body, NO_PASS, 0
    head = shape_of(role.model).head
    return body, training_logits(head, positions, device), tied_head_gradient(head)


def _moments(passes: tuple[Pass, Pass, int], other: Pass) -> list[tuple[int, int]]:
    """Activations and logits at each moment of a micro-batch; `other` is a model that runs forward before it ends."""
    body, logits, head_gradient = passes
    return [
        (body.forward, 0),
        (body.held, logits.forward),
        (body.held + other.forward, logits.held),
        (body.held + other.held, logits.backward),
        (body.backward + other.held, head_gradient),
        (other.backward, 0),
    ]


def _zero_bytes(roles: Sequence[Role], processes: int) -> int:
    gathered = sum(pass_weight_bytes(role.weights, processes) for role in roles)
    return gathered + max(reduction_bytes(role.weights, processes) for role in roles)


# ---- Sampling ----


def _sampling_parts(
    config: SamplingConfig, plan: BatchPlan, actor: Role, machine: Machine
) -> tuple[dict[str, int], int]:
    """Memory that sampling adds, and memory that it keeps between rollouts (with the moving average)."""
    permanent = 0
    if isinstance(config, PPOConfig):
        if config.memory.enable_ema:
            permanent += ema_bytes(actor.weights, machine.processes)[0]
        if config.runs_vllm and machine.device_memory is None:
            # On a CPU, vLLM never sleeps.
            permanent += actor.weights.whole // config.vllm.vllm_tensor_parallel + VLLM_CPU_CACHE
        if config.rollouts.uses_vllm:
            return _vllm_parts(config, actor, machine), permanent

    # The prompts of the first pass.
    slots = _slots(config, plan)
    prompt, _ = _sampling_lengths(config)
    rows = min(slots, max(1, PREFILL_TOKENS // prompt)) if _is_continuous(config) else slots
    parts = {
        "gathered weights": sampling_weight_bytes(actor.weights, plan.world_size),
        "KV cache": _kv_cache(config, plan, actor, machine),
        "activations": scoring_pass(actor.model, rows, prompt).forward,
        "logits": sampling_logits(shape_of(actor.model).head, slots, machine.device),
    }
    if uses_graphs(config, machine) and not parts["gathered weights"]:
        # CUDA graphs keep their buffers between rollouts: the cache, and all that one step writes.
        step = scoring_pass(actor.model, slots, 1)
        permanent += parts.pop("KV cache") + step.forward + parts["logits"]
    return parts, permanent


def _slots(config: SamplingConfig, plan: BatchPlan) -> int:
    """Responses that are generated at a time."""
    return config.sampling.per_device_generation_batch_size * plan.samples_per_prompt


def _kv_cache(config: SamplingConfig, plan: BatchPlan, actor: Role, machine: Machine) -> int:
    """Keys and values of all rows that are generated at a time."""
    slots = _slots(config, plan)
    prompts_wait = _is_continuous(config) and plan.rollout_per_rank * plan.samples_per_prompt > slots
    if _completes(config):
        prompts_wait = _is_continuous(config)
    columns = sum(_sampling_lengths(config)) + SPARE_COLUMNS * prompts_wait
    if uses_graphs(config, machine):
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
    return slots * columns * shape_of(actor.model).cached * actor.weights.width


def _is_continuous(config: SamplingConfig) -> bool:
    """Whether the built-in engine (continuous batching) generates."""
    if isinstance(config, PPOConfig):
        return config.rollouts.rollout_engine == "continuous"
    return config.dialogues.rollout_engine == "continuous"


def _completes(config: SamplingConfig) -> bool:
    """Whether completions are also sampled from the middle of responses."""
    return isinstance(config, PPOConfig) and config.advantages.needs.segment_values


def _sampling_lengths(config: SamplingConfig) -> tuple[int, int]:
    """The most tokens that are read before a response is sampled, and the most that are sampled at once."""
    texts = Texts.of(config)
    prompt = texts.tokens - texts.scored
    if isinstance(config, PPOConfig):
        return sampling_lengths(config, prompt, texts.scored)
    return prompt, texts.scored


def uses_graphs(config: SamplingConfig, machine: Machine) -> bool:
    """Whether decoding steps run as CUDA graphs, with fixed shapes."""
    if not _is_continuous(config):
        return False
    setting = config.sampling.decode_graphs
    return setting == "on" or (setting == "auto" and machine.device.type == "cuda")


def _vllm_parts(config: PPOConfig, actor: Role, machine: Machine) -> dict[str, int]:
    """vLLM's share of a GPU and the weight that is on its way to vLLM.

    An engine holds the actor, or its part of it where neighbours share an engine. A server is sent one whole weight at
    a time. If the GPU is too small for the actor, its part counts instead of --vllm_gpu_memory. While vLLM sleeps it
    counts as 0; its CUDA graphs, which stay, are unknown.

    Raises:
        UserError: --vllm_gpu_memory is too small for the weights.
    """
    weights = actor.weights
    sent = weights.width * weights.largest
    if not config.runs_vllm:
        return {"weights passed on": sent}
    sent *= 2 if sampling_weight_bytes(weights, machine.processes) else 1
    device = machine.device_memory
    if device is None:
        return {"weights passed on": sent}
    neighbours = config.vllm.vllm_tensor_parallel
    held = -(-weights.whole // neighbours)
    share = int(config.vllm.vllm_gpu_memory * device)
    if share < held <= device:
        part = "the actor whole" if neighbours == 1 else f"1/{neighbours} of the actor"
        raise UserError(
            f"--vllm_gpu_memory {config.vllm.vllm_gpu_memory:g}: vLLM would have {share / GB:.1f} GB of a GPU, and"
            f" holds {part}, {held / GB:.1f} GB: give more than {held / device:.2f}, or a larger"
            " --vllm_tensor_parallel."
        )
    return {"vLLM": max(share, held), "weights passed on": sent}


# ---- Scoring and evaluation ----


def _scoring_parts(config: CommonConfig, plan: BatchPlan, role: Role, device: torch.device) -> dict[str, int]:
    """A pass without gradients: of a rollout, or of an evaluation in steps without rollouts."""
    texts, examples, budget = _scored_batch(config, plan, role)
    rows, tokens, positions = texts.filling(examples, budget)
    shape = shape_of(role.model)
    body = scoring_pass(role.model, rows, min(tokens, shape.limit or tokens))
    logits = scoring_logits(shape.head, positions, device) if role.model.kind == "policy" else 0

    # The peak is in the layers or in the head.
    activations, logits = max((body.forward, 0), (body.held, logits), key=sum)
    weights = pass_weight_bytes(role.weights, plan.world_size)
    return {"activations": activations, "logits": logits, "whole weights": weights}


def _scored_batch(config: CommonConfig, plan: BatchPlan, role: Role) -> tuple[Texts, int, int | None]:
    """Sequence lengths, examples and tokens of the largest pass without gradients."""
    texts = Texts.of(config)
    training = PassSize(plan.micro_batch, plan.max_tokens)
    scoring = training.without_gradient
    if isinstance(config, SupervisedConfig):
        return texts, config.output.per_device_eval_batch_size, scoring.tokens
    if isinstance(config, RefuelOnlineConfig) and role.name == "reward model":
        return replace(texts, per_example=1), config.output.per_device_eval_batch_size, scoring.tokens
    if isinstance(config, RefuelOnlineConfig) and not config.kl.kl_coef:
        # The policy, in micro-batches as large as those of its updates.
        return texts, training.rows, training.tokens
    sampled = plan.rollout_per_rank * plan.samples_per_prompt
    held_out = _held_out(config, plan.world_size)
    examples = min(scoring.rows, max(sampled, held_out)) if held_out else scoring.rows
    return texts, examples, scoring.tokens


def _held_out(config: CommonConfig, processes: int) -> int:
    """The most responses (or pairs of replies) that each process evaluates; 0: no limit."""
    if isinstance(config, PPOConfig):
        return -(-config.num_eval_prompts // processes)
    assert isinstance(config, RefuelOnlineConfig)
    replies = (config.sampling.eval_prompts or 0) * config.dialogues.max_turns
    return -(-replies // (2 * processes))


# ---- Main memory ----


@dataclass(frozen=True)
class Host:
    """Bytes of main memory of a node."""

    processes: int  # the programs themselves
    offload: int  # offloaded states and weights
    average: int  # the actor's moving average, if its weights are offloaded
    loading: int  # weights on their way to the device
    saving: int  # files that the main process writes

    @property
    def total(self) -> int:
        """Bytes at the peak: nothing is saved during loading."""
        return self.processes + self.offload + self.average + max(self.loading, self.saving)


def host_of(roles: Sequence[Role], machine: Machine, average: bool) -> Host:
    """Main memory of the node with the main process; `average` is --enable_ema."""
    processes = machine.processes
    on_a_node = machine.on_a_node
    saved = max(role.weights.whole for role in roles if role.weights.trained)
    offloaded = sum(model_states(role.weights, processes).host for role in roles)
    ema = ema_bytes(roles[0].weights, processes)[1] if average else 0
    # Weights are loaded one at a time; each goes to its GPU, or is sharded at ZeRO 3.
    loaded = max(role.weights.width * role.weights.largest for role in roles)
    return Host(
        processes=on_a_node * PROCESS_BYTES,
        offload=on_a_node * offloaded,
        average=on_a_node * ema,
        loading=on_a_node * loaded,
        saving=min(saved, FILES_AT_A_TIME * FILE_SIZE),
    )
