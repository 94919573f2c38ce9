# SPDX-License-Identifier: Apache-2.0
"""Expected tokens per second of a run on GPUs of a kind.

Each phase takes its operations and bytes, divided by shares of the GPU's peaks, and what moves between processes
(`shares.py`). Sequences have their full length; no process waits for a slower one; the optimizer's step is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dschat.base.errors import UserError
from dschat.models.layout import WITHOUT_GRADIENT, Integers, Lengths
from dschat.models.operations import ModelCost, decoding_bytes
from dschat.plan import shares
from dschat.plan.models import Role
from dschat.plan.phases import Machine, Texts, uses_graphs
from dschat.plan.plan import Plan
from dschat.plan.sizes import cost_of_passes
from dschat.plan.states import Weights
from dschat.run.peaks import GPUS, Gpu
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig

DEFAULT_MEMORY = 80.0  # GB of a GPU without a name


@dataclass(frozen=True)
class Expectation:
    """The speed to expect of a run, in tokens per second of all processes together; None where it is not known."""

    gpu: str
    unknown: str = ""  # why there are no numbers; empty if there are
    trained: float | None = None  # tokens of prompts and responses in updates
    sampled: float | None = None  # tokens of responses during sampling
    iteration: float | None = None  # tokens of responses in whole iterations


def named_gpu(word: str) -> Gpu:
    """A GPU by its name in GPUS, or by the peaks of its data sheet, "TFLOP/s,GB/s", with memory of DEFAULT_MEMORY.

    Raises:
        UserError: neither; the message names the flag.
    """
    gpu = GPUS.get(word.lower())
    if gpu is not None:
        return gpu
    tflops, _, gigabytes = word.partition(",")
    try:
        gpu = Gpu(DEFAULT_MEMORY, 1e12 * float(tflops), 1e9 * float(gigabytes))
    except ValueError:
        gpu = Gpu(DEFAULT_MEMORY, 0.0, 0.0)
    if not (0 < gpu.operations_per_second < np.inf and 0 < gpu.bytes_per_second < np.inf):
        raise UserError(
            f"--gpu_type {word}: give one of {', '.join(GPUS)}, or TFLOP/s (dense bf16) and GB/s of its data sheet,"
            " such as 989,4800."
        )
    return gpu


def expect(plan: Plan, name: str) -> Expectation:
    """The speed of a run on GPUs of a name, see `named_gpu`."""
    unknown = _why_unknown(plan)
    if unknown:
        return Expectation(name, unknown)
    config = plan.config
    predictor = Predictor(plan, named_gpu(name))
    batches = config.plan_batches(plan.machine.processes)
    texts = Texts.of(config)
    lengths = np.full(batches.update_per_rank * texts.per_example, texts.tokens)
    trained = float(lengths.sum()) / predictor.training(lengths, TrainingCounts())
    sampled: float | None = None
    iteration: float | None = None
    # How long environments take is not known.
    if isinstance(config, PPOConfig) and not config.has_episodes and config.rollouts.rollout_engine == "continuous":
        rows = batches.rollout_per_rank * batches.samples_per_prompt
        prompts = np.full(rows, config.sampling.max_prompt_seq_len)
        rollout = Lengths(prompts, np.full(rows, config.sampling.max_answer_seq_len))
        tokens = float(rollout.responses.sum())
        sampling = predictor.sampling(config, rollout)
        sampled = tokens / sampling
        # The number of completions from the middle of responses depends on the responses.
        if not config.advantages.needs.segment_values:
            actor = TrainingCounts(config.rollouts.ppo_epochs, batches.updates_per_rollout)
            critic = TrainingCounts(config.critic_passes, config.critic_updates(batches))
            learning = predictor.scoring(config, rollout.totals)
            learning += predictor.training(rollout.totals, actor, {"critic": critic})
            iteration = tokens / (sampling + learning)
    processes = plan.machine.processes
    rates = [None if rate is None else processes * rate for rate in (trained, sampled, iteration)]
    return Expectation(name, "", *rates)


def _why_unknown(plan: Plan) -> str:
    """Why the speed is unknown; empty if it is not."""
    config = plan.config
    if plan.roles[0].model.dtype != torch.bfloat16:
        return "the shares of the peaks were measured in bf16 alone"
    offloads_reference = isinstance(config, PPOConfig) and config.memory.offload_reference_model
    if config.engine.offload or offloads_reference:
        return "the shares of the peaks were not measured with offloading"
    for role in plan.roles:
        if cost_of_passes(role.model) is None:
            return f"the operations of a {role.model.config.model_type} model are not known"
    return ""


@dataclass(frozen=True)
class TrainingCounts:
    """How often a model is trained on sequences."""

    epochs: int = 1
    updates: int = 1  # optimiser steps of all epochs together


NO_OTHERS: Mapping[str, TrainingCounts] = {}


@dataclass(frozen=True)
class Predictor:
    """Seconds of the phases of a run, each on one process."""

    plan: Plan
    gpu: Gpu

    def training(
        self, lengths: Integers, all_models: TrainingCounts, others: Mapping[str, TrainingCounts] = NO_OTHERS
    ) -> float:
        """Forward and backward passes of all trained models on sequences of these lengths (n,).

        Args:
            lengths: tokens of each sequence.
            all_models: how often they are trained on them.
            others: by the name of a role, how often it is if that differs.
        """
        computing = 0.0
        moved = 0.0
        for role in self._trained:
            times = others.get(role.name, all_models)
            passes = math.ceil(times.epochs * self._passes(lengths) / times.updates)
            share = shares.TRAINING[bool(role.recompute_every), role.compiled]
            operations = times.epochs * _cost(role).training_operations(lengths)
            computing += operations / (share * self.gpu.operations_per_second)
            moved += times.updates * bytes_of_update(role.weights, self.plan.machine.processes, passes)
        return together(computing, moving_seconds(moved, self.plan.machine))

    def scoring(self, config: PPOConfig, lengths: Integers) -> float:
        """Passes without gradients of the models that score a rollout of sequences of these lengths (n,)."""
        passes = self._passes(lengths)
        if self._batches.max_tokens is not None:
            passes = math.ceil(passes / WITHOUT_GRADIENT)
        operations = 0.0
        moved = 0.0
        for role in self._scoring_roles(config):
            operations += _cost(role).forward_operations(lengths)
            if role.weights.zero.stage == 3:
                moved += passes * _others(role.weights.whole, self.plan.machine.processes)
        return together(operations / self._scoring_rate, moving_seconds(moved, self.plan.machine))

    def sampling(self, config: PPOConfig, rollout: Lengths) -> float:
        """Gathering the actor at ZeRO 3, passes over the prompts, and decoding."""
        actor = self.plan.roles[0]
        processes = self.plan.machine.processes
        gathered = _others(actor.weights.whole, processes) if actor.weights.zero.stage == 3 else 0.0
        slots = config.sampling.per_device_generation_batch_size * self._batches.samples_per_prompt
        slots = min(len(rollout.prompts), slots)
        read = decoding_bytes(_cost(actor), rollout, slots)
        decoding = read / (self._decoding_share(config, slots) * self.gpu.bytes_per_second)
        prefill = _cost(actor).forward_operations(rollout.prompts) / self._scoring_rate
        return moving_seconds(gathered, self.plan.machine) + prefill + decoding

    @property
    def _batches(self) -> BatchPlan:
        return self.plan.config.plan_batches(self.plan.machine.processes)

    @property
    def _trained(self) -> list[Role]:
        return [role for role in self.plan.roles if role.weights.trained]

    @property
    def _scoring_rate(self) -> float:
        """Operations per second of passes without gradients."""
        return shares.SCORING[self.plan.roles[0].compiled] * self.gpu.operations_per_second

    def _passes(self, lengths: Integers) -> int:
        """Micro-batches with gradients."""
        if self._batches.max_tokens is not None:
            return math.ceil(lengths.sum() / self._batches.max_tokens)
        return math.ceil(len(lengths) / (self._batches.micro_batch * Texts.of(self.plan.config).per_example))

    def _scoring_roles(self, config: PPOConfig) -> list[Role]:
        """The models that score a rollout before its updates.

        The frozen models do; with LoRA the actor does as the reference; and trained models do, unless the passes of
        the updates provide their log-probs and values.
        """
        roles = [role for role in self.plan.roles if not role.weights.trained]
        if not any(role.name == "reference" for role in roles):
            roles.append(self.plan.roles[0])
        if not config.credit_is_fused(self._batches):
            roles += self._trained
        return roles

    def _decoding_share(self, config: PPOConfig, rows: int) -> float:
        """The share of the memory bandwidth, as measured at the nearest number of rows."""
        measured = shares.DECODING_ONE_BY_ONE
        if uses_graphs(config, self.plan.machine):
            is_compiled = self.plan.roles[0].compiled
            measured = shares.DECODING_GRAPHS_COMPILED if is_compiled else shares.DECODING_GRAPHS
        nearest = min(measured, key=lambda count: abs(math.log(rows / count)))
        return measured[nearest]


def _cost(role: Role) -> ModelCost:
    cost = cost_of_passes(role.model)
    assert cost is not None  # see `_why_unknown`
    return cost


def bytes_of_update(weights: Weights, processes: int, passes: int) -> float:
    """Bytes that a process receives from the others in one update of a model.

    ZeRO 3 gathers weights for each forward and each backward pass, and scatters sums of gradients after each; ZeRO 2
    scatters as often, and gathers weights once per update; lower stages sum gradients once, which counts twice.

    Args:
        weights: sizes of the model.
        processes: processes that train it.
        passes: micro-batches of the update.
    """
    trained = weights.width * weights.trained
    if weights.zero.stage == 3:
        moved = passes * (2 * weights.whole + trained)
    elif weights.zero.stage == 2:
        moved = passes * trained + trained
    else:
        moved = 2 * weights.zero.gradient * weights.trained + trained
    return _others(moved, processes)


def _others(size: float, processes: int) -> float:
    """The part of some bytes that the other processes have."""
    return size * (processes - 1) / processes


def moving_seconds(moved: float, machine: Machine) -> float:
    """Seconds in which each process receives some bytes from the others; those of other nodes enter a node once."""
    nodes = math.ceil(machine.processes / machine.gpus_per_node)
    entering = moved * (1 - 1 / nodes) / (machine.on_a_node * shares.NETWORK)
    return max(moved / shares.NVLINK, entering)


def together(computing: float, moving: float) -> float:
    """Seconds of computing and moving, which partly hide each other."""
    return max(computing, moving) + (1 - shares.OVERLAP) * min(computing, moving)


def expectation_text(expectation: Expectation) -> str:
    """The expectation in words."""
    begin = f"Speed to expect on {expectation.gpu}:"
    if expectation.unknown:
        return f"{begin} not known; {expectation.unknown}."
    rates = {
        "tokens/s sampled": expectation.sampled,
        "tokens/s trained": expectation.trained,
        "tokens/s of responses over whole iterations": expectation.iteration,
    }
    parts = [f"{rate:,.0f} {name}" for name, rate in rates.items() if rate is not None]
    return (
        f"{begin} {'; '.join(parts)}.\n  An estimate for sequences of full length, from shares of the peaks"
        f" {shares.MEASURED}. Assumed, not measured: {shares.NVLINK / 1e9:.0f} GB/s between the GPUs of a node,"
        f" {shares.NETWORK / 1e9:.0f} GB/s per GPU between nodes, half of it hidden behind computation. Without scores"
        " that no model computes."
    )
