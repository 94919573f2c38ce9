# SPDX-License-Identifier: Apache-2.0
"""A plan as `dschat plan` prints it: as text, part by part, or as JSON. 1 GB = 10⁹ bytes."""

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

SMALLEST_SHOWN = GB // 20  # bytes; less rounds to 0.0 GB


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
            f"{self.title}: {_step_and_machine(self.step, plan)}; GB (10⁹ bytes) per process",
            _model_table(plan),
            _phase_table(plan),
            _device_verdict(plan, self.remedies),
            _main_memory_verdict(plan),
            _disk_line(plan),
            "\n".join(source_line(source) for source in self.sources),
            _count_line(plan, self.counts, any(source.get("is_estimate") for source in self.sources)),
        ]
        if self.expectation is not None:
            parts.append(expectation_text(self.expectation))
        return "\n\n".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """The plan as numbers, in bytes."""
        plan = self.plan
        phases = []
        for phase in plan.phases:
            phases.append({"name": phase.name, "kept": phase.kept, "parts": phase.parts, "total": phase.total})
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
    """A model as numbers, with the bytes that each process holds of it."""
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


def _step_and_machine(step: TrainingStep, plan: Plan) -> str:
    """The title's second half: step, dtype and machine."""
    machine = plan.machine
    dtype = str(plan.roles[0].model.dtype).removeprefix("torch.")
    if machine.device_memory is None:
        device = "on CPUs"
    else:
        device = f"GPUs of {machine.device_memory / GB:g} GB"
    text = f"step {step.plan_name}, {dtype}, {machine.processes} {device}"
    if machine.processes > machine.on_a_node:
        text += f", {machine.on_a_node} on a node"
    if any(role.compiled for role in plan.roles):
        text += ", layers compiled"
    return text


def _gigabytes(size: int) -> str:
    """A size with one decimal; a dash for one that rounds to 0."""
    return f"{size / GB:.1f}" if size >= SMALLEST_SHOWN else "-"


def _named_sizes(sizes: Mapping[str, int]) -> str:
    """Names and sizes, without those that round to 0."""
    return ", ".join(f"{name} {_gigabytes(size)}" for name, size in sizes.items() if size >= SMALLEST_SHOWN)


def _model_table(plan: Plan) -> str:
    headers = ["model", "parameters", "ZeRO", "weights", "gradients", "optimiser", "buffers", "in main memory"]
    rows = []
    for role in plan.roles:
        states = model_states(role.weights, plan.machine.processes)
        millions = f"{role.weights.parameters / 1e6:,.1f} M"
        sizes = (states.parameters, states.gradients, states.optimizer, states.buffers, states.host)
        rows.append([role.name, millions, str(role.weights.zero.stage), *map(_gigabytes, sizes)])
    return text_table(headers, rows)


def _phase_table(plan: Plan) -> str:
    rows = []
    notes = ["of which", ""]  # beside each line of the table: header, rule, phases
    for phase in plan.phases:
        added = phase.total - phase.kept
        rows.append([phase.name, _gigabytes(phase.kept), _gigabytes(added), _gigabytes(phase.total)])
        notes.append(_named_sizes(phase.parts))
    lines = text_table(["phase", "kept", "added", "sum"], rows).splitlines()
    width = max(len(line) for line in lines)
    with_notes = []
    for line, note in zip(lines, notes, strict=True):
        with_notes.append(f"{line:<{width}}  {note}".rstrip())
    return "\n".join(with_notes)


def _device_verdict(plan: Plan, remedies: Sequence[tuple[Change, Plan]]) -> str:
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


def _main_memory_verdict(plan: Plan) -> str:
    needed = plan.main_memory
    present = plan.machine.main_memory
    sizes = _named_sizes(asdict(plan.host) | {"computing": needed - plan.host.total})
    line = f"Main memory of a node: {needed / GB:.0f} GB ({sizes}; nothing is saved while loading)."
    if present is None or needed <= present:
        return line
    remedy = "leave out --offload or --offload_reference_model, or use more nodes"
    return f"{line}\nDOES NOT FIT: it has {present / GB:.0f} GB; {remedy}."


def _disk_line(plan: Plan) -> str:
    disk = plan.disk
    output = plan.config.output
    shares = ""
    if plan.machine.processes > 1:
        shares = f" ({disk.main / GB:.1f} GB from the main process, {disk.others / GB:.1f} GB from each other one)"
    if not output.saves_checkpoints:
        checkpoints = "one if the run is stopped"
    elif not output.save_total_limit:
        checkpoints = "one, and another one for each further save"
    else:
        checkpoints = f"at most {disk.checkpoints} at a time (--save_total_limit {output.save_total_limit})"
    kept_models = ""
    if output.save_models:
        kept_models = f" --save_models keeps {disk.models / GB:.1f} GB more every {output.save_models} updates."
    return (
        f"Disk: {disk.checkpoint / GB:.1f} GB for a checkpoint{shares}, {disk.seconds:.0f} s at an assumed"
        f" {DISK_RATE / GB:g} GB/s; {checkpoints}, and {disk.models / GB:.1f} GB for the final models:"
        f" {disk.total / GB:.1f} GB.{kept_models}"
    )


def _count_line(plan: Plan, counts: Counts | None, is_estimate: bool) -> str:
    if counts is None:
        return "Updates and samples: give --prompts N, the number of training rows."
    trained = f"{counts.updates:,} updates on {counts.trained:,} {_trained_on(plan.config)}"
    about = "About " if is_estimate else ""
    return f"{about}{counts.train_rows:,} training rows: {trained}."


def _trained_on(config: CommonConfig) -> str:
    """What a step counts in `_count_line`, in the plural."""
    if isinstance(config, RefuelOnlineConfig):
        return "dialogues"
    if not isinstance(config, PPOConfig):
        return "examples"
    samples = config.rollouts.samples_per_prompt
    prompts = "prompts, one response each" if samples == 1 else f"prompts, {samples} responses each"
    advantages = config.advantages
    if advantages.needs.segment_values:
        completions = advantages.mc_samples * advantages.mc_max_segments
        prompts += f", each completed {completions} times at most"
    if advantages.refill_rounds:
        prompts += f", and up to {advantages.refill_rounds} times as many that replace groups of equal scores"
    return prompts
