# SPDX-License-Identifier: Apache-2.0
"""Reads a profiler's trace: how long a GPU spends on which kind of kernel, and how long it waits.

The trace is the compressed JSON of `torch.profiler.profile.export_chrome_trace`. A kernel belongs to the part of the
program that launched it, and its group follows from the ranges around its launch, then from its name. Time between two
kernels counts as idle time of the part that the second one belongs to. Parts and groups together make up the whole
time.

Without a GPU, operators that call no others stand in for kernels, matrix products and attention whatever they call;
what runs outside of them counts as idle.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypedDict

PART = "part: "  # how the annotations of parts begin
HEAD_RANGE = "output head"  # annotation around the head and its passes over logits
REST = "rest"  # the part of kernels that were launched outside of all parts
OPTIMISER_PART = "optimiser step"
NODE = "autograd::engine::evaluate_function"  # a range of the backward pass
MATRICES = "matrices"
ATTENTION = "attention"
HEAD = "head"
GRADIENTS = "gradients"
OPTIMISER = "optimiser"
OTHER = "other"
IDLE = "idle"
GROUPS = (MATRICES, ATTENTION, HEAD, GRADIENTS, OPTIMISER, OTHER, IDLE)
ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
MATRIX_KERNEL = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_tem_|^aten::(addmm|b?mm|baddbmm)", re.I)
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
HOST_CATEGORIES = {"cpu_op", "user_annotation"} | LAUNCH_CATEGORIES
LARGEST = 10  # kernels that are named
NAME_LENGTH = 60  # characters of their names


class Event(TypedDict):
    """An event with a duration, as Chrome's trace format has it. Times are microseconds."""

    cat: str
    name: str
    ts: float
    dur: float
    tid: int | str
    args: dict[str, object]


@dataclass(frozen=True)
class Launch:
    """What the host did when it launched a kernel."""

    time: float  # microseconds
    ranges: tuple[str, ...]  # the part's label, then the ranges around it in its thread, outermost first


@dataclass(frozen=True)
class Kernel:
    """A kernel, or an operator on a CPU."""

    name: str
    start: float  # microseconds
    end: float
    group: str
    part: str
    passage: int = 0  # which of the annotations of its part; 0 outside of all parts


@dataclass
class PartTimes:
    """Where the time of one part of the program went."""

    passages: int  # how often the part was run
    microseconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0.0))
    by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: int = 0

    def row(self) -> dict[str, float | str]:
        """Milliseconds of one passage by group, the kernels launched in it, and the names that take most time."""
        per_passage = 1e3 * self.passages
        row: dict[str, float | str] = {"passes": str(self.passages)}
        row["ms"] = sum(self.microseconds.values()) / per_passage
        row |= {f"{group}_ms": self.microseconds[group] / per_passage for group in GROUPS}
        row["kernels"] = self.kernels / self.passages
        largest = sorted(self.by_name, key=self.by_name.__getitem__, reverse=True)[:LARGEST]
        names = [f"{name[:NAME_LENGTH]} {self.by_name[name] / per_passage:.3g}" for name in largest]
        row["largest_ms"] = "; ".join(names).replace("|", "/")
        return row


def read_kernels(trace: Path) -> list[Kernel]:
    """The kernels of a trace in the order in which they began."""
    content = json.loads(gzip.decompress(trace.read_bytes()))
    events: list[Event] = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    host_events = [event for event in events if event.get("cat") in HOST_CATEGORIES]
    device_events = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    launches, operators = launches_of(host_events)
    if not device_events:
        kernels = [kernel_of(event, launch) for event, launch in operators]
    else:
        unknown = Launch(-1.0, (f"{REST}#0",))
        kernels = []
        for event in device_events:
            kernels.append(kernel_of(event, launches.get(event["args"].get("correlation"), unknown)))
    return sorted(kernels, key=lambda kernel: kernel.start)


def launches_of(events: Sequence[Event]) -> tuple[dict[object, Launch], list[tuple[Event, Launch]]]:
    """Launches of kernels by their correlation number, and operators in place of kernels.

    Ranges of one thread are nested. Parts are annotated in the main thread and hold for the threads of autograd, too:
    the part that runs at a launch's time comes first among its ranges.
    """
    parts = part_ranges(events)
    starts = [start for start, _, _ in parts]
    by_thread: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    launches: dict[object, Launch] = {}
    leaves: list[tuple[Event, Launch]] = []
    for thread_events in by_thread.values():
        thread_events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_events: list[Event] = []
        calls_none: dict[int, tuple[Event, Launch]] = {}
        for event in thread_events:
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            part = part_at(event["ts"], parts, starts)
            launch = Launch(
                event["ts"],
                (part, *(outer["name"] for outer in open_events)),
            )
            if event["cat"] in LAUNCH_CATEGORIES:
                launches[event["args"].get("correlation")] = launch
                continue
            if any(is_whole(outer["name"]) for outer in open_events if outer["cat"] == "cpu_op"):
                continue
            if open_events:
                calls_none.pop(id(open_events[-1]), None)
            if event["cat"] == "cpu_op":
                calls_none[id(event)] = (event, launch)
            open_events.append(event)
        leaves += calls_none.values()
    return launches, leaves


@cache
def is_whole(operator: str) -> bool:
    """Whether an operator stands for the small ones that it calls: a matrix product or attention."""
    is_product = MATRIX_KERNEL.search(operator) or ATTENTION_KERNEL.search(operator)
    return bool(is_product) and not operator.startswith(NODE)


def part_ranges(events: Sequence[Event]) -> list[tuple[float, float, str]]:
    """Start, end and label of each annotated part in order; a label is the part's name and its number."""
    ranges = []
    counts: dict[str, int] = defaultdict(int)
    annotations = [event for event in events if event["cat"] == "user_annotation" and event["name"].startswith(PART)]
    for event in sorted(annotations, key=lambda event: event["ts"]):
        name = event["name"].removeprefix(PART)
        counts[name] += 1
        ranges.append((event["ts"], event["ts"] + event["dur"], f"{name}#{counts[name]}"))
    return ranges


def part_at(
    time: float,
    parts: Sequence[tuple[float, float, str]],
    starts: Sequence[float],
) -> str:
    """The label of the part at a time; parts do not overlap."""
    index = bisect_right(starts, time) - 1
    if index >= 0 and time < parts[index][1]:
        return parts[index][2]
    return f"{REST}#0"


def kernel_of(event: Event, launch: Launch) -> Kernel:
    """A kernel with its part and its group."""
    label, *ranges = launch.ranges
    part, _, passage = label.rpartition("#")
    group = group_of(event["name"], part, ranges)
    return Kernel(
        event["name"],
        event["ts"],
        event["ts"] + event["dur"],
        group,
        part,
        int(passage),
    )


def group_of(
    name: str,
    part: str,
    ranges: Sequence[str],
) -> str:
    """The group of a kernel that was launched inside of some ranges."""
    if part == OPTIMISER_PART:
        return OPTIMISER
    if part.endswith("backward"):
        nodes = [name for name in ranges if name.startswith(NODE)]
        # Outside of all nodes, the engine copies gradients to where the optimiser reads them.
        if not nodes or nodes[0].endswith("AccumulateGrad"):
            return GRADIENTS
        if nodes[0].endswith("_TokenLogprobsBackward"):
            return HEAD
    if HEAD_RANGE in ranges:
        return HEAD
    if ATTENTION_KERNEL.search(name):
        return ATTENTION
    return MATRICES if MATRIX_KERNEL.search(name) else OTHER


def with_decoding_heads(kernels: Sequence[Kernel], part: str) -> list[Kernel]:
    """Kernels of replayed graphs, which no ranges tell apart.

    The last matrix product of each step and all that follows it belong to the output head.
    """
    heads: dict[int, float] = {}  # when the head of each step begins
    for kernel in kernels:
        if kernel.part == part and kernel.group == MATRICES:
            heads[kernel.passage] = kernel.start
    marked = []
    for kernel in kernels:
        is_head = kernel.part == part and kernel.start >= heads.get(kernel.passage, float("inf"))
        marked.append(replace(kernel, group=HEAD) if is_head else kernel)
    return marked


def times_of_parts(kernels: Sequence[Kernel]) -> dict[str, PartTimes]:
    """Where the time of each part went, in the order in which the parts first ran.

    Args:
        kernels: in the order in which they began. Where two run at the same time, the earlier one counts.
    """
    passages: dict[str, set[int]] = defaultdict(set)
    for kernel in kernels:
        passages[kernel.part].add(kernel.passage)
    times = {part: PartTimes(len(numbers)) for part, numbers in passages.items()}
    reached = kernels[0].start if kernels else 0.0
    for kernel in kernels:
        part = times[kernel.part]
        seconds = max(0.0, kernel.end - max(kernel.start, reached))
        part.microseconds[IDLE] += max(0.0, kernel.start - reached)
        part.microseconds[kernel.group] += seconds
        part.by_name[kernel.name] += seconds
        part.kernels += 1
        reached = max(reached, kernel.end)
    return times
