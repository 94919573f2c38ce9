# SPDX-License-Identifier: Apache-2.0
"""Expected tokens per second: a run's operations and bytes, divided by the shares of a GPU's peaks in shares.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from dschat.base.errors import UserError
from dschat.models.layout import Integers, Lengths
from dschat.models.operations import ModelCost, Peaks, decoding_bytes
from dschat.plan import shares
from dschat.plan.models import Role
from dschat.plan.passes import cost_of_passes
from dschat.plan.phases import Texts, uses_graphs
from dschat.plan.plan import Plan
from dschat.plan.shares import GIGA, GPUS, REACHED_BYTES, REACHED_OPERATIONS, TERA
from dschat.settings.ppo import PPOConfig

DEFAULT_MEMORY = 80.0  # GB of a GPU without a name


@dataclass(frozen=True)
class NamedGpu:
    """The GPU of --gpu_type."""

    name: str
    reached: Peaks  # the rates that large matrix products and copies reach on it
    memory: float | None = None  # GB; None if only peaks are given


@dataclass(frozen=True)
class TokenRate:
    """Tokens per second of all processes together, and the share of `NamedGpu.reached` that it assumes."""

    tokens_per_second: float
    share: float


@dataclass(frozen=True)
class Expectation:
    """The speed to expect of a run on a GPU."""

    gpu: str
    unknown: str = ""  # why there are no numbers; empty if there are
    trained: TokenRate | None = None  # tokens of prompts and responses in updates; share of the matrix rate
    sampled: TokenRate | None = None  # tokens of responses during sampling; share of the memory bandwidth
    iteration: float | None = None  # tokens of responses per second of whole iterations


def named_gpu(word: str) -> NamedGpu:
    """A GPU by its name in GPUS, or by its own peaks, "TFLOP/s,GB/s".

    Raises:
        UserError: neither; the message names the flag.
    """
    gpu = GPUS.get(word.lower())
    if gpu is not None:
        operations = REACHED_OPERATIONS * gpu.peaks.operations_per_second
        bandwidth = REACHED_BYTES * gpu.peaks.bytes_per_second
        return NamedGpu(word.lower(), Peaks(operations, bandwidth), gpu.memory)
    tflops, _, gigabytes = word.partition(",")
    try:
        peaks = Peaks(float(tflops) * TERA, float(gigabytes) * GIGA)
    except ValueError:
        peaks = Peaks(0.0, 0.0)
    if not (0 < peaks.operations_per_second < np.inf and 0 < peaks.bytes_per_second < np.inf):
        raise UserError(
            f"--gpu_type {word}: give one of {', '.join(GPUS)}, or its peaks as run.json has them: TFLOP/s and GB/s,"
            " such as 800,4200."
        )
    return NamedGpu(f"a GPU of {float(tflops):g} TFLOP/s and {float(gigabytes):g} GB/s", peaks)


def expect(plan: Plan, gpu: NamedGpu) -> Expectation:
    """The speed of a run whose sequences all have their full length."""
    unknown = _why_unknown(plan)
    if unknown:
        return Expectation(gpu.name, unknown)
    config = plan.config
    texts = Texts.of(config)
    lengths = np.full(texts.per_example, texts.tokens)
    targets = texts.per_example * texts.scored
    operations = sum(_cost(role).training_operations(lengths, targets) for role in _trained(plan))
    seconds = _training_seconds(plan, lengths, targets, gpu.reached)
    trained = TokenRate(
        tokens_per_second=plan.machine.processes * float(lengths.sum()) / seconds,
        share=operations / seconds / gpu.reached.operations_per_second,
    )
    # How long environments take is not known.
    if isinstance(config, PPOConfig) and not config.has_episodes and config.rollouts.rollout_engine == "continuous":
        return _expect_rollouts(plan, config, gpu, trained)
    return Expectation(gpu.name, trained=trained)


def _why_unknown(plan: Plan) -> str:
    """Why the speed is unknown; empty if it is not."""
    config = plan.config
    if plan.roles[0].model.dtype != torch.bfloat16:
        return "the shares of the peaks were measured in bf16 alone"
    offloads_reference = isinstance(config, PPOConfig) and config.memory.offload_reference_model
    if 3 in config.zero_stages or config.engine.offload or offloads_reference:
        return "the shares of the peaks were not measured with ZeRO 3 or offloading"
    for role in plan.roles:
        if cost_of_passes(role.model) is None:
            return f"the operations of a {role.model.config.model_type} model are not known"
    return ""


def _expect_rollouts(plan: Plan, config: PPOConfig, gpu: NamedGpu, trained: TokenRate) -> Expectation:
    """The speed of step 3: of sampling and of whole iterations, in addition to that of training."""
    batches = config.plan_batches(plan.machine.processes)
    rows = batches.rollout_per_rank * batches.samples_per_prompt
    slots = min(rows, config.sampling.per_device_generation_batch_size * batches.samples_per_prompt)
    prompts = np.full(rows, config.sampling.max_prompt_seq_len)
    responses = np.full(rows, config.sampling.max_answer_seq_len)

    # Sampling: prefill and decoding.
    actor = _cost(plan.roles[0])
    read = decoding_bytes(actor, Lengths(prompts, responses), slots)
    if read is None:  # a mixture of experts
        return Expectation(gpu.name, trained=trained)
    share = _decoding_share(config, plan, slots)
    decoding = read / (share * gpu.reached.bytes_per_second)
    scoring_rate = shares.SCORING[plan.roles[0].compiled] * gpu.reached.operations_per_second
    prefill = actor.forward.operations(prompts, rows) / scoring_rate
    tokens = plan.machine.processes * float(responses.sum())
    sampled = TokenRate(tokens / (decoding + prefill), share)
    if config.advantages.needs.segment_values:
        # The number of completions depends on the responses.
        return Expectation(gpu.name, trained=trained, sampled=sampled)

    # Scoring and training.
    targets = int(responses.sum())
    lengths = prompts + responses
    scoring = sum(cost.forward.operations(lengths, targets) for cost in _scoring_costs(plan, config))
    training = config.rollouts.ppo_epochs * _training_seconds(plan, lengths, targets, gpu.reached)
    iteration = tokens / (decoding + prefill + scoring / scoring_rate + training)
    return Expectation(gpu.name, trained=trained, sampled=sampled, iteration=iteration)


def _training_seconds(plan: Plan, lengths: Integers, targets: int, peaks: Peaks) -> float:
    """Seconds for one forward and backward pass of all trained models on sequences of these lengths."""
    seconds = 0.0
    for role in _trained(plan):
        share = shares.TRAINING[bool(role.recompute_every), role.compiled]
        operations = _cost(role).training_operations(lengths, targets)
        seconds += operations / (share * peaks.operations_per_second)
    return seconds


def _scoring_costs(plan: Plan, config: PPOConfig) -> list[ModelCost]:
    """Costs of the models that score a rollout before its updates.

    The frozen models do; with LoRA the actor does as the reference; and trained models do, unless the passes of the
    updates provide their log-probs and values.
    """
    roles = [role for role in plan.roles if not role.weights.trained]
    if not any(role.name == "reference" for role in roles):
        roles.append(plan.roles[0])
    if not config.credit_is_fused(config.plan_batches(plan.machine.processes)):
        roles += _trained(plan)
    return [_cost(role) for role in roles]


def _decoding_share(config: PPOConfig, plan: Plan, rows: int) -> float:
    """The share of the memory bandwidth, as measured at the nearest number of rows."""
    measured = shares.DECODING_ONE_BY_ONE
    if uses_graphs(config, plan.machine):
        measured = shares.DECODING_GRAPHS_COMPILED if plan.roles[0].compiled else shares.DECODING_GRAPHS
    nearest = min(measured, key=lambda count: abs(math.log(rows / count)))
    return measured[nearest]


def _trained(plan: Plan) -> list[Role]:
    return [role for role in plan.roles if role.weights.trained]


def _cost(role: Role) -> ModelCost:
    cost = cost_of_passes(role.model)
    assert cost is not None  # see `_why_unknown`
    return cost


def expectation_text(expectation: Expectation) -> str:
    """The expectation in words."""
    begin = f"Speed to expect on {expectation.gpu}:"
    if expectation.unknown:
        return f"{begin} not known; {expectation.unknown}."
    parts = []
    if expectation.sampled is not None:
        parts.append(_rate_text("sampled", expectation.sampled, "the rate of large copies"))
    if expectation.trained is not None:
        parts.append(_rate_text("trained", expectation.trained, "the rate of large matrix products"))
    if expectation.iteration is not None:
        parts.append(f"{expectation.iteration:,.0f} tokens/s of responses over whole iterations")
    return (
        f"{begin} {'; '.join(parts)}.\n  An estimate for sequences of full length, from shares of the peaks"
        f" {shares.MEASURED}; without communication between GPUs, and without scores that no model computes."
    )


def _rate_text(work: str, rate: TokenRate, peak: str) -> str:
    return f"{rate.tokens_per_second:,.0f} tokens/s {work} ({100 * rate.share:.0f} % of {peak})"
