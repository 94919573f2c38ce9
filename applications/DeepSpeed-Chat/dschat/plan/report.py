# SPDX-License-Identifier: Apache-2.0
"""A plan as text and as JSON. 1 GB = 10⁹ bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dschat.base.display import text_table
from dschat.base.steps import TrainingStep
from dschat.data.sources import source_line
from dschat.plan.counts import Counts
from dschat.plan.disk import DISK_RATE
from dschat.plan.models import Role
from dschat.plan.phases import CUDA_BYTES, GB
from dschat.plan.plan import Plan
from dschat.plan.remedies import Change, change_as_flags, hardware_advice
from dschat.plan.states import model_states
from dschat.plan.throughput import Expectation, expectation_text
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig


@dataclass(frozen=True)
class PlanReport:
    """A plan, and everything else that `dschat plan` prints with it."""

    step: TrainingStep
    title: str
    plan: Plan
    counts: Counts | None
    remedies: Sequence[tuple[Change, Plan]]  # see `dschat.plan.remedies.remedies`
    sources: Sequence[Mapping[str, Any]] = ()  # data sources, see `dschat.plan.counts.find_sources`
    expectation: Expectation | None = None  # speed, if a GPU is named

    def text(self) -> str:
        """Tables of models and phases, whether they fit, main memory, and counts."""
        plan = self.plan
        parts = [
            f"{self.title}: {_setting(self.step, plan)}; GB (10⁹ bytes) per process",
            _model_table(plan),
            _phase_table(plan),
            _verdict(plan, self.remedies),
            _host_line(plan),
            _disk_line(plan),
            "\n".join(source_line(source) for source in self.sources),
            _count_line(plan, self.counts),
        ]
        if self.expectation is not None:
            parts.append(expectation_text(self.expectation))
        return "\n\n".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """The plan as numbers, in bytes."""
        plan = self.plan
        phases = []
        for phase in plan.phases:
            sizes = {"kept": phase.kept, "parts": phase.parts, "total": phase.total}
            phases.append({"name": phase.name, **sizes})
        remedies = []
        for change, attempt in self.remedies:
            remedies.append({"flags": change_as_flags(change), "peak": attempt.peak})
        return {
            "title": self.title,
            "step": self.step.plan_name,
            "machine": asdict(plan.machine),
            "models": [_model_json(role, plan.machine.processes) for role in plan.roles],
            "phases": phases,
            "peak": plan.peak,
            "host": {**asdict(plan.host), "total": plan.main_memory},
            "disk": {**asdict(plan.disk), "total": plan.disk.total, "seconds": plan.disk.seconds},
            "counts": None if self.counts is None else asdict(self.counts),
            "sources": list(self.sources),
            "fits": plan.fits,
            "remedies": remedies,
            "expectation": None if self.expectation is None else asdict(self.expectation),
        }


def _model_json(role: Role, processes: int) -> dict[str, Any]:
    weights = role.weights
    return {
        "role": role.name,
        "source": role.source,
        "parameters": weights.parameters,
        "trained": weights.trained,
        "zero_stage": weights.zero.stage,
        "compiled": role.compiled,
        "bytes": asdict(model_states(weights, processes)),
    }


def _setting(step: TrainingStep, plan: Plan) -> str:
    """Step, dtype and machine."""
    machine = plan.machine
    dtype = str(plan.roles[0].model.dtype).removeprefix("torch.")
    if machine.device_memory is None:
        device = "on CPUs"
    else:
        device = f"GPUs of {machine.device_memory / GB:g} GB"
    setting = f"step {step.plan_name}, {dtype}, {machine.processes} {device}"
    if machine.processes > machine.on_a_node:
        setting += f", {machine.on_a_node} on a node"
    if any(role.compiled for role in plan.roles):
        setting += ", layers compiled"
    return setting


def gigabytes(size: int) -> str:
    """A size with one decimal; a dash for less than 0.05 GB."""
    return f"{size / GB:.1f}" if _is_shown(size) else "-"


def _is_shown(size: int) -> bool:
    return size >= GB / 20


def _sizes_in_words(sizes: Mapping[str, int]) -> str:
    """Names and sizes, without those that round to 0."""
    words = []
    for name, size in sizes.items():
        if _is_shown(size):
            words.append(f"{name} {gigabytes(size)}")
    return ", ".join(words)


def _model_table(plan: Plan) -> str:
    headers = ["model", "parameters", "ZeRO", "weights", "gradients", "optimiser", "buffers", "in main memory"]
    rows = []
    for role in plan.roles:
        states = model_states(role.weights, plan.machine.processes)
        millions = f"{role.weights.parameters / 1e6:,.1f} M"
        sizes = (states.parameters, states.gradients, states.optimizer, states.buffers, states.host)
        rows.append([role.name, millions, str(role.weights.zero.stage), *map(gigabytes, sizes)])
    return text_table(headers, rows)


def _phase_table(plan: Plan) -> str:
    rows = []
    notes = ["of which", ""]
    for phase in plan.phases:
        added = phase.total - phase.kept
        rows.append([phase.name, gigabytes(phase.kept), gigabytes(added), gigabytes(phase.total)])
        notes.append(_sizes_in_words(phase.parts))
    lines = text_table(["phase", "kept", "added", "sum"], rows).splitlines()
    width = max(len(line) for line in lines)
    with_notes = []
    for line, note in zip(lines, notes, strict=True):
        with_notes.append(f"{line:<{width}}  {note}".rstrip())
    return "\n".join(with_notes)


def _verdict(plan: Plan, remedies: Sequence[tuple[Change, Plan]]) -> str:
    if plan.machine.device_memory is None:
        return f"Peak: {plan.peak / GB:.1f} GB in each process, while it is in phase {plan.worst.name!r}."
    peak = f"{plan.peak / GB:.1f} GB ({CUDA_BYTES / GB:g} of them for CUDA and NCCL), in phase {plan.worst.name!r}"
    if plan.fits_device:
        return f"Fits: a GPU holds at most {peak}."
    lines = [f"DOES NOT FIT: a GPU would hold {peak}."]
    for change, attempt in remedies:
        still = "" if attempt.fits_device else ", still too much"
        lines.append(f"  {change_as_flags(change)}: {attempt.peak / GB:.1f} GB{still}")
    if not any(attempt.fits_device for _, attempt in remedies):
        lines.append(f"  What helps: {hardware_advice(plan)}.")
    return "\n".join(lines)


def _host_line(plan: Plan) -> str:
    sizes = asdict(plan.host) | {"computing": plan.main_memory - plan.host.total}
    line = (
        f"Main memory of a node: {plan.main_memory / GB:.0f} GB ({_sizes_in_words(sizes)}; nothing is saved while"
        " loading)."
    )
    if plan.fits_host:
        return line
    has = (plan.machine.main_memory or 0) / GB
    remedy = "leave out --offload or --offload_reference_model, or use more nodes"
    return f"{line}\nDOES NOT FIT: it has {has:.0f} GB; {remedy}."


def _disk_line(plan: Plan) -> str:
    disk = plan.disk
    output = plan.config.output
    if not output.saves_checkpoints:
        checkpoints = "one if the run is stopped"
    elif not output.save_total_limit:
        checkpoints = "one, and another one for each further save"
    else:
        checkpoints = f"at most {disk.checkpoints} at a time (--save_total_limit {output.save_total_limit})"
    return (
        f"Disk: {disk.checkpoint / GB:.1f} GB for a checkpoint ({disk.main / GB:.1f} GB from the main process,"
        f" {disk.others / GB:.1f} GB from each other one), {disk.seconds:.0f} s at an assumed {DISK_RATE / GB:g} GB/s;"
        f" {checkpoints}, and {disk.models / GB:.1f} GB for the final models: {disk.total / GB:.1f} GB."
    )


def _count_line(plan: Plan, counts: Counts | None) -> str:
    if counts is None:
        return "Updates and samples: give --prompts N, the number of training rows."
    trained = f"{counts.updates:,} updates on {counts.trained:,} {_trained_on(plan.config)}"
    return f"{counts.examples:,} training rows, {counts.held_out:,} held-out rows: {trained}."


def _trained_on(config: CommonConfig) -> str:
    """What a step trains on."""
    if isinstance(config, RefuelOnlineConfig):
        return "dialogues"
    if not isinstance(config, PPOConfig):
        return "examples"
    samples = config.rollouts.samples_per_prompt
    trained_on = "prompts, one response each" if samples == 1 else f"prompts, {samples} responses each"
    advantages = config.advantages
    if advantages.needs.segment_values:
        completions = advantages.mc_samples * advantages.mc_max_segments
        trained_on += f", each completed {completions} times at most"
    if advantages.refill_rounds:
        trained_on += f", and up to {advantages.refill_rounds} times as many that replace groups of equal scores"
    return trained_on
