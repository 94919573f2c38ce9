# SPDX-License-Identifier: Apache-2.0
"""Updates and samples of a run, and its plan as text and as JSON. 1 GB = 10⁹ bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.display import text_table
from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.supervised import DPOConfig, SupervisedConfig
from dschat.data.hub import find_known
from dschat.data.prepared.read import share_sizes
from dschat.data.sources import TRAIN_EVAL_SPLIT, load_share, parse_fractions, split_bounds
from dschat.errors import UserError
from dschat.plan.micro_batches import RIDGE, Choice
from dschat.plan.models import shape
from dschat.plan.phases import CUDA_BYTES, GB, engines
from dschat.plan.plan import Change, Plan, in_words, what_else
from dschat.plan.states import states


@dataclass(frozen=True)
class Counts:
    """Of a whole run."""

    examples: int  # rows to train on
    held_out: int  # rows to evaluate on
    updates: int  # of the optimiser
    trained: int  # examples in these updates; in step 3 each is a prompt with all of its responses
    evaluations: int  # that of the start and of the end included
    evaluated: int  # examples in all evaluations


def counts(config: CommonConfig, plan: BatchPlan, examples: int, held_out: int) -> Counts:
    """The arithmetic of the trainers: what does not fill a rollout (in steps 1 and 2 an update) is left out.

    Args:
        config: the flags.
        plan: its batch sizes.
        examples, held_out: rows of the data.

    Raises:
        UserError: fewer examples than one rollout or update.
    """
    size = plan.global_rollout or plan.global_batch
    per_size = plan.updates_per_rollout or 1
    if examples < size:
        raise UserError(f"{examples} training rows are fewer than the {size} that are needed at a time.")
    rounds = config.total_iterations(examples // size, size)
    updates = rounds * per_size
    evaluations = _evaluations(updates, per_size, config.eval_interval) if held_out else 0
    at_once = min(held_out, _evaluated_at_once(config, plan) or held_out)
    return Counts(examples, held_out, updates, rounds * size, evaluations, evaluations * at_once)


def find_rows(config: CommonConfig) -> tuple[int, int] | None:
    """Training and held-out rows of the step's share; None where the data are neither local nor published sets."""
    if isinstance(config, RefuelConfig):  # of pairs, which are tokens
        return None
    if all(Path(path).exists() for path in config.data_path):
        prepared = share_sizes(config)
        if prepared is not None:
            return prepared
        share = load_share(config)
        return len(share.train), len(share.eval)
    known = [find_known(path) for path in config.data_path]
    sizes = [_published_rows(one.train_rows, one.eval_rows, config) for one in known if one is not None]
    if len(sizes) < len(known):
        return None
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


def _published_rows(train: int, held_out: int | None, config: CommonConfig) -> tuple[int, int]:
    if held_out is None:
        bounds = split_bounds(train, parse_fractions(TRAIN_EVAL_SPLIT))
        train, held_out = bounds[1], bounds[2] - bounds[1]
    first, second = (_share(rows, config) for rows in (train, held_out))
    return first, second


def _share(rows: int, config: CommonConfig) -> int:
    bounds = split_bounds(rows, parse_fractions(config.data_split))
    return bounds[config.step] - bounds[config.step - 1]


def _evaluations(updates: int, at_a_time: int, interval: int) -> int:
    """At the start, after every update (or rollout's updates) that reaches a multiple of the interval, at the end."""
    ends: Sequence[int] = range(at_a_time, updates, at_a_time)
    due = sum((end - at_a_time) // interval < end // interval for end in ends) if interval else 0
    return 2 + due


def _evaluated_at_once(config: CommonConfig, plan: BatchPlan) -> int:
    """Most examples of one evaluation; 0 = all."""
    if isinstance(config, PPOConfig):
        return config.num_eval_prompts(plan.world_size)
    if isinstance(config, RefuelOnlineConfig):
        return config.eval_prompts or 0
    assert isinstance(config, SupervisedConfig)
    return config.num_eval_examples(plan.world_size)


def _micro_batches(choices: Sequence[Choice]) -> str:
    lines = ["The largest --max_tokens_per_micro_batch that fits:"]
    for choice in choices:
        how = "with" if choice.checkpointing else "without"
        lines.append(
            f"  {choice.tokens}, {choice.rows} texts of full length, {how} gradient checkpointing:"
            f" {choice.peak / GB:.1f} GB; {choice.operations:.1f} operations for a weight and token"
        )
    best = min(choices, key=lambda choice: choice.operations)
    how = "with" if best.checkpointing else "without"
    rule = f"a byte of weights and gradients counts as {RIDGE} operations; nothing is measured"
    lines.append(f"  Recommended: {how} ({rule}).")
    return "\n".join(lines)


STEP_NAMES = {DPOConfig: "dpo", RefuelConfig: "refuel", RefuelOnlineConfig: "refuel_online"}
Remedies = Sequence[tuple[Change, Plan]]


def as_text(title: str, plan: Plan, counts: Counts | None, remedies: Remedies, choices: Sequence[Choice]) -> str:
    """Tables of models and phases, main memory, counts, and whether it fits."""
    machine = plan.machine
    dtype = str(plan.roles[0].model.dtype).removeprefix("torch.")
    device = "on CPUs" if machine.device_memory is None else f"GPUs of {machine.device_memory / GB:g} GB"
    if machine.processes > machine.on_a_node:
        device += f", {machine.on_a_node} on a node"
    return "\n\n".join(
        [
            f"{title}: step {_step(plan.config)}, {dtype}, {machine.processes} {device}; GB (10⁹ bytes) per process",
            _models(plan),
            _phases(plan),
            _verdict(plan, remedies),
            *_servers(plan),
            *([_micro_batches(choices)] if choices else []),
            _host(plan),
            _counts(plan, counts),
        ]
    )


def as_json(
    title: str, plan: Plan, counts: Counts | None, remedies: Remedies, choices: Sequence[Choice]
) -> dict[str, Any]:
    """The same as numbers, all in bytes."""
    n = plan.machine.processes
    return {
        "title": title,
        "step": _step(plan.config),
        "machine": dataclasses.asdict(plan.machine),
        "models": [
            {
                "role": role.name,
                "source": role.source,
                "parameters": role.weights.parameters,
                "trained": role.weights.trained,
                "zero_stage": role.weights.zero.stage,
                "bytes": dataclasses.asdict(states(role.weights, n)),
            }
            for role in plan.roles
        ],
        "phases": [{"name": p.name, "kept": p.kept, "parts": dict(p.parts), "total": p.total} for p in plan.phases],
        "peak": plan.peak,
        "host": dataclasses.asdict(plan.host) | {"total": plan.main_memory},
        "counts": None if counts is None else dataclasses.asdict(counts),
        "fits": plan.fits,
        "remedies": [{"flags": in_words(change), "peak": changed.peak} for change, changed in remedies],
        "micro_batches": [dataclasses.asdict(choice) for choice in choices],
    }


def gigabytes(size: int) -> str:
    """One decimal; what is nothing, or less than half of that, as a dash."""
    return f"{size / GB:.1f}" if size >= GB / 20 else "-"


def _models(plan: Plan) -> str:
    headers = ["model", "parameters", "ZeRO", "weights", "gradients", "optimiser", "buffers", "in main memory"]
    rows, n = [], plan.machine.processes
    for role in plan.roles:
        kept = states(role.weights, n)
        sizes = (kept.parameters, kept.gradients, kept.optimizer, kept.buffers, kept.host)
        million = f"{shape(role.model).parameters / 1e6:,.1f} M"
        rows.append([role.name, million, str(role.weights.zero.stage), *(gigabytes(size) for size in sizes)])
    return text_table(headers, rows)


def _phases(plan: Plan) -> str:
    rows = []
    for phase in plan.phases:
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in phase.parts.items() if size >= GB / 20)
        rows.append(
            [phase.name, gigabytes(phase.kept), gigabytes(phase.total - phase.kept), gigabytes(phase.total), parts]
        )
    table = text_table(["phase", "kept", "added", "sum"], [row[:4] for row in rows]).splitlines()
    width = max(len(line) for line in table)
    notes = ["of which", "", *(row[4] for row in rows)]
    return "\n".join(f"{line:<{width}}  {note}".rstrip() for line, note in zip(table, notes, strict=True))


def _verdict(plan: Plan, remedies: Remedies) -> str:
    if plan.machine.device_memory is None:
        return f"Peak: {plan.peak / GB:.1f} GB in each process, while it is in phase {plan.worst.name!r}."
    peak = f"{plan.peak / GB:.1f} GB ({CUDA_BYTES / GB:g} of them for CUDA and NCCL), in phase {plan.worst.name!r}"
    if plan.fits_device:
        return f"Fits: a GPU holds at most {peak}."
    lines = [f"DOES NOT FIT: a GPU would hold {peak}."]
    for change, changed in remedies:
        still = "" if changed.fits_device else ", still too much"
        lines.append(f"  {in_words(change)}: {changed.peak / GB:.1f} GB{still}")
    if not any(changed.fits_device for _, changed in remedies):
        lines.append(f"  What helps: {what_else(plan)}.")
    return "\n".join(lines)


def _servers(plan: Plan) -> list[str]:
    """What --vllm_url asks of other GPUs, which are taken to be as large."""
    config, machine = plan.config, plan.machine
    if not isinstance(config, PPOConfig) or not config.vllm_url or machine.device_memory is None:
        return []
    sizes = engines(config, config.plan_batches(machine.processes), plan.roles[0], machine, machine.gpus_per_node)
    fitting = [k for k, size in sizes.items() if size + CUDA_BYTES <= machine.device_memory]
    parts = fitting[0] if fitting else max(sizes)
    holds = "the actor" if parts == 1 else f"1/{parts} of the actor"
    return [
        f"Each server of --vllm_url, on GPUs of its own: with --tensor_parallel {parts} at least"
        f" {(sizes[parts] + CUDA_BYTES) / GB:.1f} GB of each GPU ({holds}, and a cache for what one process draws at"
        f" once){'' if fitting else ', which DOES NOT FIT'}."
    ]


def _step(config: CommonConfig) -> int | str:
    """As --step names it."""
    return STEP_NAMES.get(type(config), config.step)


def _host(plan: Plan) -> str:
    parts = dataclasses.asdict(plan.host) | {"computing": plan.main_memory - plan.host.total}
    text = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size >= GB / 20)
    line = f"Main memory of a node: {plan.main_memory / GB:.0f} GB ({text}; nothing is saved while loading)."
    if plan.fits_host:
        return line
    has = (plan.machine.main_memory or 0) / GB
    remedy = "leave out --offload or --offload_reference_model, or use more nodes"
    return f"{line}\nDOES NOT FIT: it has {has:.0f} GB; {remedy}."


def _counts(plan: Plan, counts: Counts | None) -> str:
    if counts is None:
        return "Updates and samples: give --prompts N, the number of training rows."
    what = evaluated_on = "examples"
    if isinstance(plan.config, PPOConfig):
        samples = plan.config.samples_per_prompt
        what = evaluated_on = "prompts, one response each"
        what = what if samples == 1 else f"prompts, {samples} responses each"
    elif isinstance(plan.config, RefuelOnlineConfig):
        what = evaluated_on = "dialogues"
    trained = f"{counts.examples:,} training rows: {counts.updates:,} updates on {counts.trained:,} {what}"
    evaluated = f"{counts.evaluations:,} evaluations on {counts.evaluated:,} {evaluated_on} in all"
    return f"{trained}; {evaluated} ({counts.held_out:,} held-out rows)."
