# SPDX-License-Identifier: Apache-2.0
"""A plan as text and as JSON. 1 GB = 10⁹ bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dschat.common.tables import text_table
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import DPOConfig
from dschat.plan.counts import Counts
from dschat.plan.machine import CUDA_BYTES, GB
from dschat.plan.models import shape
from dschat.plan.plan import Plan
from dschat.plan.remedies import Change, in_words, what_else
from dschat.plan.states import effective_stage, states

Remedies = Sequence[tuple[Change, Plan]]


def as_text(title: str, plan: Plan, counts: Counts | None, remedies: Remedies) -> str:
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
            _host(plan),
            _counts(plan, counts),
        ]
    )


def as_json(title: str, plan: Plan, counts: Counts | None, remedies: Remedies) -> dict[str, Any]:
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
                "zero_stage": effective_stage(role.weights.stage, role.weights.width, role.weights.trained > 0),
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
    }


def gigabytes(size: int) -> str:
    """One decimal; what is nothing, or less than half of that, as a dash."""
    return f"{size / GB:.1f}" if size >= GB / 20 else "-"


def _models(plan: Plan) -> str:
    headers = ["model", "parameters", "ZeRO", "weights", "gradients", "optimiser", "buffers", "in main memory"]
    rows, n = [], plan.machine.processes
    for role in plan.roles:
        kept, weights = states(role.weights, n), role.weights
        stage = effective_stage(weights.stage, weights.width, weights.trained > 0)
        sizes = (kept.parameters, kept.gradients, kept.optimizer, kept.buffers, kept.host)
        million = f"{shape(role.model).parameters / 1e6:,.1f} M"
        rows.append([role.name, million, str(stage), *(gigabytes(size) for size in sizes)])
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


def _step(config: CommonConfig) -> int | str:
    """As --step names it."""
    return "dpo" if isinstance(config, DPOConfig) else config.step


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
    trained = f"{counts.examples:,} training rows: {counts.updates:,} updates on {counts.trained:,} {what}"
    evaluated = f"{counts.evaluations:,} evaluations on {counts.evaluated:,} {evaluated_on} in all"
    return f"{trained}; {evaluated} ({counts.held_out:,} held-out rows)."
