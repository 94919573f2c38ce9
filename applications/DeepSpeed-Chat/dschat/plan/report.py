# SPDX-License-Identifier: Apache-2.0
"""Updates and samples of a run, its largest micro-batches, and its plan as text and as JSON. 1 GB = 10⁹ bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dschat.base.display import text_table
from dschat.base.errors import UserError
from dschat.data.hub import KnownSet, find_known
from dschat.data.prepared.folder import find_prepared
from dschat.data.prepared.read import prepared_share
from dschat.data.sources import (
    PUBLISHED_SPLIT,
    TRAIN_EVAL_SPLIT,
    described,
    parse_fractions,
    read_share,
    source_line,
    split_bounds,
)
from dschat.plan.models import Role
from dschat.plan.phases import CUDA_BYTES, GB, Texts, engines, phases_of
from dschat.plan.plan import Change, Plan, in_words, what_else
from dschat.plan.recommend import Recommendation, advice, advice_json
from dschat.plan.states import FLOAT32, Weights, states
from dschat.plan.throughput import Expectation, expectation_text
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.settings.supervised import DPOConfig, SupervisedConfig

# Operations that a GPU can do while a byte comes from its memory: of an H100, whose data sheet says 989 · 10¹² in bf16
# and 3.35 · 10¹² in a second.
RIDGE = 300
STEP_NAMES: dict[type[CommonConfig], str] = {
    DPOConfig: "dpo",
    RefuelConfig: "refuel",
    RefuelOnlineConfig: "refuel_online",
}


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
    """The trainers' arithmetic on so many rows: what does not fill a rollout (in steps 1 and 2 an update) is left out.

    Raises:
        UserError: fewer examples than one rollout or update.
    """
    size = plan.iteration_size
    per_size = plan.updates_per_iteration
    if examples < size:
        raise UserError(f"{examples} training rows are fewer than the {size} that are needed at a time.")
    updates = config.total_updates(examples, plan)
    evaluations = _evaluations(updates, per_size, config.output.eval_interval) if held_out else 0
    at_once = min(held_out, _evaluated_at_once(config, plan) or held_out)
    return Counts(examples, held_out, updates, updates // per_size * size, evaluations, evaluations * at_once)


def find_sources(config: CommonConfig) -> list[dict[str, Any]] | None:
    """What the step takes of each source, as `dschat.data.sources.described` says it; None where a source is neither
    local nor a published set.
    """
    if isinstance(config, RefuelConfig):  # of pairs, which are tokens
        return None
    folders = find_prepared(config.data.data_path)
    if folders:
        return prepared_share(folders).sources
    sources: list[dict[str, Any]] = []
    for path in config.data.data_path:
        known = find_known(path)
        if Path(path).exists():
            share = read_share([path], config.columns, config.data.data_split, config.step, config.optimisation.seed)
            sources += share.sources
        elif known is not None:
            sources.append(_published_source(known, config))
        else:
            return None
    return sources


def _published_source(known: KnownSet, config: CommonConfig) -> dict[str, Any]:
    """What the step takes of a published set, by its known number of rows."""
    train_rows, eval_rows = known.counts
    if eval_rows is None:
        bounds = split_bounds(train_rows, parse_fractions(TRAIN_EVAL_SPLIT))
        train_rows, eval_rows = bounds[1], bounds[2] - bounds[1]
    split = config.data.data_split or PUBLISHED_SPLIT
    train, held_out = range(_share(train_rows, split, config.step)), range(_share(eval_rows, split, config.step))
    return described(known.hub_id, train, held_out, {}, known.counts, split)


def find_rows(sources: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Training and held-out rows of the step's share, from `find_sources`."""
    return sum(source["train"] for source in sources), sum(source["eval"] for source in sources)


def _share(rows: int, data_split: str, step: int) -> int:
    """Rows of a step's share."""
    bounds = split_bounds(rows, parse_fractions(data_split))
    return bounds[step] - bounds[step - 1]


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
        return config.sampling.eval_prompts or 0
    assert isinstance(config, SupervisedConfig)
    return config.num_eval_examples(plan.world_size)


@dataclass(frozen=True)
class MicroBatchChoice:
    """The largest micro-batch that fits."""

    checkpointing: bool  # of all trained models
    tokens: int  # its size, of texts that are all the longest
    rows: int  # their number
    peak: int  # bytes of a GPU
    operations: float  # see `operations`

    @property
    def how(self) -> str:
        return "with" if self.checkpointing else "without"


def choices(plan: Plan) -> list[MicroBatchChoice]:
    """Without gradient checkpointing and with it; only what fits, and nothing for a CPU.

    An update's examples on a process are the most that a micro-batch is given.
    """
    machine, batches, texts = plan.machine, plan.config.plan_batches(plan.machine.processes), Texts.of(plan.config)
    if machine.device_memory is None:
        return []
    most, example = batches.update_per_rank, texts.per_example * texts.tokens
    found = []
    for recomputed in (0, plan.config.engine.gradient_checkpointing_every):
        roles = [replace(role, recomputed=recomputed) if role.weights.trained else role for role in plan.roles]

        def peak(examples: int, roles: Sequence[Role] = roles) -> int:
            sized = replace(batches, micro_batch=most, max_tokens=examples * example)
            return CUDA_BYTES + max(phase.total for phase in phases_of(plan.config, sized, roles, machine))

        every = peak(most) <= machine.device_memory  # asked first, since each size is a few passes of the model's code
        if examples := most if every else bisect_right(range(1, most), machine.device_memory, key=peak):
            tokens = examples * example
            cost = operations(roles[0].weights, tokens, 1 / recomputed if recomputed else 0.0)
            found.append(MicroBatchChoice(recomputed > 0, tokens, examples * texts.per_example, peak(examples), cost))
    return found


def operations(weights: Weights, tokens: int, recomputed: float) -> float:
    """Time of training on a token of a micro-batch: in operations for each weight, of which a GPU does all it can.

    A token takes 2 operations forward, 2 for the gradient of what came in and, of a weight that is trained, 2 for its
    own; recomputation another 2, a third of these 6, for the share of layers that are `recomputed`. Each micro-batch
    also reads every weight in every such pass, and writes, reads and adds up gradients, however few its tokens are.
    """
    trained, passes = weights.trained / weights.parameters, 2 + recomputed
    moved = passes * weights.width + trained * 2 * (weights.width + FLOAT32)
    return 2 * passes + 2 * trained + RIDGE * moved / tokens


@dataclass(frozen=True)
class PlanReport:
    """A plan and what is said with it."""

    title: str
    plan: Plan
    counts: Counts | None
    remedies: Sequence[tuple[Change, Plan]]  # see `dschat.plan.plan.remedies`
    choices: Sequence[MicroBatchChoice]
    recommendation: Recommendation | None = None
    sources: Sequence[Mapping[str, Any]] = ()  # of the data, see `find_sources`
    expectation: Expectation | None = None  # of its speed, where a GPU is named

    def text(self) -> str:
        """Tables of models and phases, main memory, counts, and whether it fits."""
        plan, machine = self.plan, self.plan.machine
        dtype = str(plan.roles[0].model.dtype).removeprefix("torch.")
        device = "on CPUs" if machine.device_memory is None else f"GPUs of {machine.device_memory / GB:g} GB"
        if machine.processes > machine.on_a_node:
            device += f", {machine.on_a_node} on a node"
        what = f"step {_step(plan.config)}, {dtype}, {machine.processes} {device}"
        if any(role.compiled for role in plan.roles):
            what += ", layers compiled"
        parts = [
            f"{self.title}: {what}; GB (10⁹ bytes) per process",
            _models(plan),
            _phases(plan),
            _verdict(plan, self.remedies),
            _servers(plan),
            _micro_batches(self.choices),
            _host(plan),
            "\n".join(map(source_line, self.sources)),
            _counts(plan, self.counts),
            "" if self.expectation is None else expectation_text(self.expectation),
            advice(self.recommendation) if self.recommendation else "",
        ]
        return "\n\n".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """The same as numbers, all in bytes."""
        plan = self.plan
        found = {
            "title": self.title,
            "step": _step(plan.config),
            "machine": asdict(plan.machine),
            "models": [_model(role, plan.machine.processes) for role in plan.roles],
            "phases": [{"name": p.name, "kept": p.kept, "parts": p.parts, "total": p.total} for p in plan.phases],
            "peak": plan.peak,
            "host": asdict(plan.host) | {"total": plan.main_memory},
            "counts": None if self.counts is None else asdict(self.counts),
            "sources": list(self.sources),
            "fits": plan.fits,
            "remedies": [{"flags": in_words(change), "peak": changed.peak} for change, changed in self.remedies],
            "micro_batches": [asdict(choice) for choice in self.choices],
            "expectation": None if self.expectation is None else asdict(self.expectation),
        }
        return found | ({"recommendation": advice_json(self.recommendation)} if self.recommendation else {})


def _model(role: Role, processes: int) -> dict[str, Any]:
    weights = role.weights
    sizes = {"parameters": weights.parameters, "trained": weights.trained, "zero_stage": weights.zero.stage}
    kept = asdict(states(weights, processes))
    return {"role": role.name, "source": role.source, **sizes, "compiled": role.compiled, "bytes": kept}


def _micro_batches(choices: Sequence[MicroBatchChoice]) -> str:
    if not choices:
        return ""
    lines = ["The largest --max_tokens_per_micro_batch that fits:"]
    for choice in choices:
        lines.append(
            f"  {choice.tokens}, {choice.rows} texts of full length, {choice.how} gradient checkpointing:"
            f" {choice.peak / GB:.1f} GB; {choice.operations:.1f} operations for a weight and token"
        )
    best = min(choices, key=lambda choice: choice.operations)
    rule = f"a byte of weights and gradients counts as {RIDGE} operations; nothing is measured"
    return "\n".join([*lines, f"  Recommended: {best.how} ({rule})."])


def gigabytes(size: int) -> str:
    """One decimal; what is nothing, or less than half of that, as a dash."""
    return f"{size / GB:.1f}" if size >= GB / 20 else "-"


def _models(plan: Plan) -> str:
    headers = ["model", "parameters", "ZeRO", "weights", "gradients", "optimiser", "buffers", "in main memory"]
    rows, n = [], plan.machine.processes
    for role in plan.roles:
        kept = states(role.weights, n)
        sizes = (kept.parameters, kept.gradients, kept.optimizer, kept.buffers, kept.host)
        million = f"{role.weights.parameters / 1e6:,.1f} M"
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


def _verdict(plan: Plan, remedies: Sequence[tuple[Change, Plan]]) -> str:
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


def _servers(plan: Plan) -> str:
    """What --vllm_url asks of other GPUs, which are taken to be as large."""
    config, machine = plan.config, plan.machine
    if not isinstance(config, PPOConfig) or not config.vllm.vllm_url or machine.device_memory is None:
        return ""
    sizes = engines(config, config.plan_batches(machine.processes), plan.roles[0], machine, machine.gpus_per_node)
    fitting = [k for k, size in sizes.items() if size + CUDA_BYTES <= machine.device_memory]
    parts = min(fitting, default=max(sizes))
    holds = "the actor" if parts == 1 else f"1/{parts} of the actor"
    return (
        f"Each server of --vllm_url, on GPUs of its own: with --tensor_parallel {parts} at least"
        f" {(sizes[parts] + CUDA_BYTES) / GB:.1f} GB of each GPU ({holds}, and a cache for what one process draws at"
        f" once){'' if fitting else ', which DOES NOT FIT'}."
    )


def _step(config: CommonConfig) -> int | str:
    """As --step names it."""
    return STEP_NAMES.get(type(config), config.step)


def _host(plan: Plan) -> str:
    parts = asdict(plan.host) | {"computing": plan.main_memory - plan.host.total}
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
        samples = plan.config.rollouts.samples_per_prompt
        what = evaluated_on = "prompts, one response each"
        what = what if samples == 1 else f"prompts, {samples} responses each"
        if plan.config.advantages.needs.segment_values:
            completions = plan.config.advantages.mc_samples * plan.config.advantages.mc_max_segments
            what += f", each completed {completions} times at most"
        if plan.config.advantages.refill_rounds:
            what += (
                f", and up to {plan.config.advantages.refill_rounds} times as many drawn in the places of equal ones"
            )
    elif isinstance(plan.config, RefuelOnlineConfig):
        what = evaluated_on = "dialogues"
    trained = f"{counts.examples:,} training rows: {counts.updates:,} updates on {counts.trained:,} {what}"
    evaluated = f"{counts.evaluations:,} evaluations on {counts.evaluated:,} {evaluated_on} in all"
    return f"{trained}; {evaluated} ({counts.held_out:,} held-out rows)."
