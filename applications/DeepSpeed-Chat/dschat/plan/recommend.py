# SPDX-License-Identifier: Apache-2.0
"""Which flags make step 3 fit a machine, what then stands on which GPU, and what the other ways of drawing would need.

Of all that fits, the first in this order is taken; what is named first is given up last:

1. all weights are trained, and only if nothing else fits adapters (LoRA), which is another training;
2. optimiser states stay on the GPUs, then in main memory (--offload);
3. responses are drawn by our own loop, then by vLLM in the training processes with the smallest number of neighbours
   that share an engine, then by vLLM servers on half of the GPUs;
4. micro-batches as the flags have them, then with activations computed again, then the largest halves that fit;
5. the ZeRO stage as it is, then 2, then 3; then also the frozen models in main memory.

Rollouts and updates stay as large as they are, and 3 % of a GPU stay free: as much as the plan may err.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import groupby, product
from operator import or_
from typing import Any

from dschat.base.display import text_table
from dschat.base.errors import UserError
from dschat.plan.models import Configs, roles_of
from dschat.plan.phases import CUDA_BYTES, GB, Machine, engines
from dschat.plan.plan import Change, Plan, changed, in_words, make_plan, minimum_memory, recomputation, smaller
from dschat.settings.common import DEFAULT_RANK, CommonConfig
from dschat.settings.flags import default_of
from dschat.settings.ppo import PPOConfig

MOST = 0.97  # of a GPU's memory
SHARES = 20  # --vllm_gpu_memory is a multiple of 1/20
OWN, COLOCATED, SERVERS = "our own loop", "vLLM in the training processes", "vLLM servers"
COSTS = {
    "lora_dim": "only adapters are trained, which is ANOTHER TRAINING: nothing else fits, and published settings,"
    " learning rates above all, are not for it",
    "offload": "optimiser states are in main memory, at ZeRO 3 weights too, and every update waits for them;"
    " --main_memory N says whether a node has room",
    "offload_reference_model": "frozen models are in main memory, and are fetched for every pass",
    "zero_stage": "more is sent between GPUs",
    "actor_gradient_checkpointing": "activations are computed again, a third more operations in training",
    "gradient_checkpointing_every": "activations of all layers are computed again",
    "per_device_training_batch_size": "smaller micro-batches, which use a GPU less well",
}


@dataclass(frozen=True)
class Way:
    """How responses are drawn."""

    name: str
    change: Change  # its flags
    machine: Machine  # that trains
    parts: int = 0  # GPUs of an engine of vLLM; 0 without one
    servers: int = 0  # engines on GPUs of their own
    engine: int = 0  # bytes that vLLM needs of each of its GPUs, CUDA's not counted

    @property
    def told(self) -> str:
        """In words."""
        if self.servers and self.parts:
            engines = f"{self.servers} of {self.parts} GPU{'s' * (self.parts > 1)}"
            return f"{self.name}, {engines} each, beside {self.machine.processes} that train"
        return f"{self.name}, {self.parts} to an engine" if self.parts else self.name


@dataclass(frozen=True)
class Outcome:
    """What becomes of one way."""

    way: Way
    level: int  # place of what is trained and of --offload in the order above
    change: Change  # all flags
    plan: Plan | None  # that fits
    needed: int = 0  # bytes of a GPU in the most sparing attempt, if nothing fits


@dataclass(frozen=True)
class Recommendation:
    """Outcomes of all ways; the best is the first of them that gives up least."""

    outcomes: tuple[Outcome, ...]
    gpus_per_node: int

    @property
    def best(self) -> Outcome | None:
        """None where nothing fits."""
        return min((one for one in self.outcomes if one.plan), key=lambda one: one.level, default=None)


def recommend(config: CommonConfig, machine: Machine, configs: Configs) -> Recommendation:
    """Searches for flags that fit, beside those that are given; the machine has all GPUs, with --vllm_url those that
    train.

    Raises:
        UserError: not step 3, or flags with which nothing can be planned.
    """
    if not isinstance(config, PPOConfig):
        raise UserError(
            "--recommend is for step 3 alone: add --step 3, or leave it out; the plan of other steps says what helps."
        )
    levels: list[Change] = [{}] if config.engine.offload else [{}, {"offload": True}]
    if not any(config.lora_ranks) and config.finetuning.finetune_mode is None:
        levels += [level | {"lora_dim": DEFAULT_RANK} for level in levels]
    kinds = groupby(_ways(config, machine, configs), key=lambda way: way.name)
    outcomes = tuple(_first(list(ways), levels, config, configs) for _, ways in kinds)
    return Recommendation(outcomes, machine.gpus_per_node)


def _first(ways: Sequence[Way], levels: Sequence[Change], config: PPOConfig, configs: Configs) -> Outcome:
    """The first way that fits at the lowest level, or else the most sparing attempt."""
    tried = []
    for (number, level), way in product(enumerate(levels), ways):
        tried.append(_search(way, number, level, config, configs))
        if tried[-1].plan:
            return tried[-1]
    return min(tried, key=lambda outcome: outcome.needed)


def _ways(config: PPOConfig, machine: Machine, configs: Configs) -> Iterator[Way]:
    """Our own loop, vLLM's engines by their number of neighbours, and its servers, alone where they are given."""
    if config.vllm.vllm_url:
        yield Way(SERVERS, {}, machine, servers=len(config.vllm.vllm_url))
        return
    memory, processes = machine.device_memory or 0, machine.processes
    own = (
        ("rollout_engine", "vllm_tensor_parallel", "vllm_gpu_memory", "rollout_is_clip")
        if config.rollouts.uses_vllm
        else ()
    )
    yield Way(OWN, {name: default_of(PPOConfig, name) for name in own}, machine)
    batches, vllm = config.plan_batches(processes), changed(config, {"rollout_engine": "vllm"})
    actor = roles_of(vllm, batches, configs, machine.device)[0]
    for parts, needed in list(engines(vllm, batches, actor, machine, processes).items())[1:]:
        share = min(1.0, max(config.vllm.vllm_gpu_memory, math.ceil(SHARES * needed / memory) / SHARES))
        flags = {"rollout_engine": "vllm", "vllm_tensor_parallel": parts, "vllm_gpu_memory": share}
        yield Way(COLOCATED, flags, machine, parts, engine=int(share * memory))
    if processes % 2 == 0:
        half = replace(machine, processes=processes // 2)
        found = list(engines(vllm, batches, actor, half, half.processes).items())
        parts, needed = next((one for one in found if one[1] + CUDA_BYTES <= MOST * memory), found[-1])
        servers = half.processes // parts
        yield Way(SERVERS, _served(config, half, servers), half, parts, servers, needed)


def _served(config: PPOConfig, half: Machine, servers: int) -> Change:
    """The servers' flags, and rollouts and updates that stay as large on half of the processes."""
    nodes = -(-2 * half.processes // half.gpus_per_node)
    on_each = servers if nodes == 1 else max(1, half.gpus_per_node * servers // half.processes)
    several = servers > on_each
    place = "SERVER" if nodes > 1 else "127.0.0.1"
    hosts = [f"SERVER{1 + n // on_each}" if several else place for n in range(servers)]
    passes = config.optimisation.gradient_accumulation_steps
    derived = passes is None and config.optimisation.global_batch_size
    alone: Change = {"vllm_tensor_parallel": 1} if config.vllm.vllm_tensor_parallel > 1 else {}
    return alone | {
        "rollout_engine": "vllm",
        "vllm_url": [f"http://{host}:{8000 + number % on_each}" for number, host in enumerate(hosts)],
        "per_device_generation_batch_size": config.sampling.per_device_generation_batch_size,
        "generation_batches": 2 * config.rollouts.generation_batches,
        "per_device_training_batch_size": config.rollouts.per_device_training_batch_size,
        "gradient_accumulation_steps": None if derived else 2 * (passes or 1),
    }


def _search(way: Way, number: int, level: Change, config: PPOConfig, configs: Configs) -> Outcome:
    """Of one way and level the first that fits."""
    start, memory, needed = changed(config, way.change), MOST * (way.machine.device_memory or 0), list[float]()
    main_memory = way.machine.main_memory or math.inf
    if way.servers and way.engine + CUDA_BYTES > memory:
        return Outcome(way, number, {}, None, way.engine + CUDA_BYTES)

    @cache
    def fitting(place: int) -> tuple[Change, Plan] | None:
        for elsewhere in _elsewhere(start, level):
            change = level | elsewhere | batches[place]
            attempt = changed(start, change)
            # Known without the models' passes, which take seconds.
            least = minimum_memory(attempt, way.machine.processes, way.machine.device, configs)
            if least is not None:
                needed.append(least.gpu + least.drawing + CUDA_BYTES + (0 if way.servers else way.engine))
                if needed[-1] > memory or least.main * way.machine.on_a_node > main_memory:
                    continue
            plan = make_plan(attempt, way.machine, configs)
            needed.append(plan.peak)
            if plan.fits_host and plan.peak <= memory:
                return change, plan
        return None

    batches = _at_a_time(start)
    places = range(len(batches))
    first = next((place for place in places[:2] if fitting(place)), 2)  # most often, and each takes seconds
    place = first if first < 2 else bisect_left(places, True, 2, key=lambda place: fitting(place) is not None)
    found = fitting(place) if place < len(batches) else None
    if found is None:
        return Outcome(way, number, {}, None, int(min(needed)))
    values = start.flat()
    differing = {name: value for name, value in found[0].items() if values[name] != value}
    return Outcome(way, number, way.change | differing, found[1])


def _elsewhere(config: PPOConfig, level: Change) -> Iterator[Change]:
    """Weights and states divided among processes, then frozen models in main memory."""
    lowest = max(2 if level.get("offload") else 0, *config.zero_stages)
    apart = {*config.zero_stages} != {config.engine.zero_stage}
    names = ("actor_zero_stage", "critic_zero_stage") if apart else ("zero_stage",)
    stages = [dict.fromkeys(names, stage) for stage in range(lowest, 4) if stage != 1]
    stages = stages if level.get("offload") and lowest > min(config.zero_stages) else [{}, *stages]
    for frozen in ({}, {"offload_reference_model": True}):
        for stage in stages:
            yield {**stage, **frozen}


def _at_a_time(config: PPOConfig) -> list[Change]:
    """As it is, with activations computed again, and then ever smaller micro-batches."""
    found: list[Change] = [{}]
    less = recomputation(config) or list(smaller(config))
    while less:
        found.append(reduce(or_, less, found[-1]))
        less = list(smaller(changed(config, found[-1])))
    return found


def _places(best: Outcome, gpus_per_node: int) -> list[dict[str, Any]]:
    """What stands on which GPU, and bytes of each: training processes from 0 on, servers after them."""
    assert best.plan is not None
    way, trains, first = best.way, best.way.machine.processes, 0
    does = {OWN: "trains, and draws with the whole actor", SERVERS: "trains"}
    places, last = [], trains + way.servers * way.parts
    while first < last:
        serves = first >= trains
        size = way.parts if serves or way.name == COLOCATED else gpus_per_node - first % gpus_per_node
        size = min(size, (last if serves else trains) - first)
        holds = does.get(way.name, f"trains, and draws with 1/{way.parts} of the actor")
        places.append(
            {
                "gpus": f"{first}-{first + size - 1}" if size > 1 else str(first),
                "node": first // gpus_per_node,
                "what": f"serves vLLM with 1/{way.parts} of the actor" if serves else holds,
                "peak": way.engine + CUDA_BYTES if serves else best.plan.peak,
            }
        )
        first += size
    return places


def advice_json(found: Recommendation) -> dict[str, Any]:
    """Sizes in bytes; `best` is the number of the way that is recommended, None where nothing fits."""
    best = found.best
    return {
        "best": None if best is None else found.outcomes.index(best),
        "places": _places(best, found.gpus_per_node) if best else [],
        "ways": [
            {
                "way": one.way.name,
                "fits": one.plan is not None,
                "flags": in_words(one.change),
                "training_gpus": one.way.machine.processes,
                "servers": one.way.servers,
                "gpus_of_an_engine": one.way.parts,
                "peak": one.plan.peak if one.plan else one.needed,
                "main_memory": one.plan.main_memory if one.plan else None,
                "trains_adapters_instead": "lora_dim" in one.change,
            }
            for one in found.outcomes
        ],
    }


def advice(found: Recommendation) -> str:
    """The same as text."""
    lines, best = ["The ways of drawing responses, and GB of a GPU that trains:"], found.best
    for one in found.outcomes:
        fits = f"does not fit: at least {one.needed / GB:.1f} GB, whatever is spared"
        if one.needed <= MOST * (one.way.machine.device_memory or 0):
            fits = "does not fit into main memory, nor without it"
        if one.plan:
            fits = f"fits: {one.plan.peak / GB:.1f} GB, {one.plan.main_memory / GB:.0f} GB of main memory of a node"
            fits += f", with {in_words(one.change) or 'the flags as they are'}"
        lines.append(f"  {one.way.told}: {fits}")
    if best is None:
        return "\n".join(["Recommended: nothing, since nothing that is tried fits.", *lines])
    way, said = best.way, [f"Recommended: {best.way.told}. Flags to add:"]
    if way.servers and way.parts:
        start = f"dschat serve-vllm --model ACTOR --tensor_parallel {way.parts}"
        said.append(f"  servers: {start}; then training, --gpus {way.machine.processes}, with")
    said.append(f"  {in_words(best.change) or '(none)'}")
    costs = [f"  --{name}: {COSTS[name]}." for name in COSTS if name in best.change]
    said += ["What they cost:", *costs] if costs else []
    places = _places(best, found.gpus_per_node)
    rows = [[place["gpus"], str(place["node"]), f"{place['peak'] / GB:.1f}", place["what"]] for place in places]
    return "\n".join([*said, "", text_table(["GPUs", "node", "GB at most", "what they do"], rows), "", *lines])
