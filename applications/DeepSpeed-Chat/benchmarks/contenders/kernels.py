# SPDX-License-Identifier: Apache-2.0
"""Reads a profiler's trace: how long a GPU spends on which kind of kernel, and how long it waits.

The trace is the compressed JSON of `torch.profiler.profile.export_chrome_trace`. The program is annotated with
*parts*, such as scoring and training; a kernel belongs to the part that launched it. Its *group*, such as matrix
products or attention, follows from the profiler's ranges around its launch, then from its name. The time between two
kernels counts as idle time of the part of the second one. Together, parts and groups make up the whole time.

Without a GPU, operators stand in for kernels: those that call no other operator, and matrix products and attention,
whatever they call. Time outside of them counts as idle.
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

PART = "part: "  # prefix of the annotations of parts
HEAD_RANGE = "output head"  # annotation around the output head and its passes over logits
REST = "rest"  # the part of kernels that were launched outside of all parts
OPTIMISER_PART = "optimiser step"
NODE = "autograd::engine::evaluate_function"  # prefix of the ranges of the backward pass, one per graph node
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
LARGEST = 10  # kernels that a row names
NAME_LENGTH = 60  # maximum characters of their names


class Event(TypedDict):
    """An event with a duration in Chrome's trace format. Times are in microseconds."""

    cat: str
    name: str
    ts: float
    dur: float
    tid: int | str
    args: dict[str, object]


@dataclass(frozen=True)
class Launch:
    """A kernel's launch by the host."""

    time: float  # microseconds
    ranges: tuple[str, ...]  # label of the part, then the ranges around the launch in its thread, outermost first


@dataclass(frozen=True)
class PartRange:
    """One occurrence of an annotated part."""

    start: float  # microseconds
    end: float
    label: str  # name of the part, #, and the number of this occurrence from 1


@dataclass(frozen=True)
class Kernel:
    """A kernel, or an operator on a CPU."""

    name: str
    start: float  # microseconds
    end: float
    group: str
    part: str
    occurrence: int = 0  # number of the part's occurrence from 1; 0 outside of all parts


@dataclass
class PartTimes:
    """Where the time of one part of the program went."""

    occurrences: int  # how often the part ran
    microseconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0.0))  # by group
    by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # microseconds by kernel name
    kernels: int = 0  # number of kernels

    def row(self) -> dict[str, float | str]:
        """Means over the occurrences: milliseconds by group, number of kernels, and the kernels with most time."""
        divisor = 1e3 * self.occurrences  # from microseconds of all occurrences to milliseconds of one
        row: dict[str, float | str] = {"passes": str(self.occurrences)}
        row["ms"] = sum(self.microseconds.values()) / divisor
        for group in GROUPS:
            row[f"{group}_ms"] = self.microseconds[group] / divisor
        row["kernels"] = self.kernels / self.occurrences
        largest = sorted(self.by_name, key=self.by_name.__getitem__, reverse=True)[:LARGEST]
        names = [f"{name[:NAME_LENGTH]} {self.by_name[name] / divisor:.3g}" for name in largest]
        row["largest_ms"] = "; ".join(names).replace("|", "/")
        return row


def read_kernels(trace: Path) -> list[Kernel]:
    """Kernels of a trace in the order in which they began."""
    content = json.loads(gzip.decompress(trace.read_bytes()))
    events: list[Event] = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    host_events = [event for event in events if event.get("cat") in HOST_CATEGORIES]
    device_events = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    launches, operators = find_launches(host_events)
    kernels = []
    if device_events:
        unknown = Launch(-1.0, (f"{REST}#0",))
        for event in device_events:
            launch = launches.get(event["args"].get("correlation"), unknown)
            kernels.append(kernel_of(event, launch))
    else:
        for event, launch in operators:
            kernels.append(kernel_of(event, launch))
    return sorted(kernels, key=lambda kernel: kernel.start)


def find_launches(events: Sequence[Event]) -> tuple[dict[object, Launch], list[tuple[Event, Launch]]]:
    """Launches of kernels, and operators that stand in for kernels.

    Parts are annotated in the main thread, but hold for the threads of autograd, too.

    Args:
        events: events of the host, in any order.

    Returns:
        Launches by correlation number; operators with the ranges around them.
    """
    parts = part_ranges(events)
    by_thread: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)

    launches: dict[object, Launch] = {}
    operators: list[tuple[Event, Launch]] = []
    for thread_events in by_thread.values():
        thread_launches, thread_operators = _launches_of_thread(thread_events, parts)
        launches |= thread_launches
        operators += thread_operators
    return launches, operators


def _launches_of_thread(
    events: Sequence[Event], parts: Sequence[PartRange]
) -> tuple[dict[object, Launch], list[tuple[Event, Launch]]]:
    """Launches and operators of one thread, whose ranges are nested; see `find_launches`."""
    launches: dict[object, Launch] = {}
    operators: dict[int, tuple[Event, Launch]] = {}  # id of the event → operator that has called no other so far
    enclosing: list[Event] = []  # ranges around the current event, outermost first
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while enclosing and enclosing[-1]["ts"] + enclosing[-1]["dur"] <= event["ts"]:
            enclosing.pop()
        names = [outer["name"] for outer in enclosing]
        launch = Launch(event["ts"], (part_at(event["ts"], parts), *names))

        if event["cat"] in LAUNCH_CATEGORIES:
            launches[event["args"].get("correlation")] = launch
        elif not _is_inside_whole(enclosing):
            if enclosing:
                operators.pop(id(enclosing[-1]), None)  # it calls this event
            if event["cat"] == "cpu_op":
                operators[id(event)] = (event, launch)
            enclosing.append(event)
    return launches, list(operators.values())


def _is_inside_whole(enclosing: Sequence[Event]) -> bool:
    """Whether one of the ranges is an operator that stands for those that it calls."""
    return any(outer["cat"] == "cpu_op" and is_whole(outer["name"]) for outer in enclosing)


@cache
def is_whole(operator: str) -> bool:
    """Whether an operator stands for the operators that it calls: a matrix product or attention."""
    is_product = MATRIX_KERNEL.search(operator) or ATTENTION_KERNEL.search(operator)
    return bool(is_product) and not operator.startswith(NODE)


def part_ranges(events: Sequence[Event]) -> list[PartRange]:
    """Occurrences of all annotated parts in the order of time."""
    annotations = []
    for event in events:
        if event["cat"] == "user_annotation" and event["name"].startswith(PART):
            annotations.append(event)
    ranges = []
    counts: dict[str, int] = defaultdict(int)
    for event in sorted(annotations, key=lambda event: event["ts"]):
        name = event["name"].removeprefix(PART)
        counts[name] += 1
        ranges.append(PartRange(event["ts"], event["ts"] + event["dur"], f"{name}#{counts[name]}"))
    return ranges


def part_at(time: float, parts: Sequence[PartRange]) -> str:
    """Label of the part that runs at a time; parts do not overlap and are in the order of time."""
    index = bisect_right(parts, time, key=lambda part: part.start) - 1
    if index >= 0 and time < parts[index].end:
        return parts[index].label
    return f"{REST}#0"


def kernel_of(event: Event, launch: Launch) -> Kernel:
    """A kernel with its part and its group."""
    label, *ranges = launch.ranges
    part, _, occurrence = label.rpartition("#")
    group = group_of(event["name"], part, ranges)
    return Kernel(event["name"], event["ts"], event["ts"] + event["dur"], group, part, int(occurrence))


def group_of(name: str, part: str, ranges: Sequence[str]) -> str:
    """Group of a kernel.

    Args:
        name: the kernel's name.
        part: name of its part.
        ranges: ranges around its launch, outermost first.
    """
    if part == OPTIMISER_PART:
        return OPTIMISER
    if part.endswith("backward"):
        nodes = [outer for outer in ranges if outer.startswith(NODE)]
        # Outside of all graph nodes, DeepSpeed copies gradients to where the optimiser reads them.
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
    """Kernels of decoding steps with those of the output head in group HEAD.

    Kernels of replayed CUDA graphs have no ranges around them. The last matrix product of each step, and everything
    after it, belongs to the output head.

    Args:
        kernels: kernels in the order in which they began.
        part: the part whose occurrences are decoding steps.
    """
    head_starts: dict[int, float] = {}  # by occurrence of the part
    for kernel in kernels:
        if kernel.part == part and kernel.group == MATRICES:
            head_starts[kernel.occurrence] = kernel.start
    marked = []
    for kernel in kernels:
        is_head = kernel.part == part and kernel.start >= head_starts.get(kernel.occurrence, float("inf"))
        marked.append(replace(kernel, group=HEAD) if is_head else kernel)
    return marked


def times_of_parts(kernels: Sequence[Kernel]) -> dict[str, PartTimes]:
    """Where the time of each part went, in the order in which the parts first ran.

    Args:
        kernels: kernels in the order in which they began. Time in which two of them run counts for the earlier one.
    """
    occurrences: dict[str, set[int]] = defaultdict(set)
    for kernel in kernels:
        occurrences[kernel.part].add(kernel.occurrence)
    times = {part: PartTimes(len(numbers)) for part, numbers in occurrences.items()}

    counted_until = kernels[0].start if kernels else 0.0
    for kernel in kernels:
        part = times[kernel.part]
        microseconds = max(0.0, kernel.end - max(kernel.start, counted_until))
        part.microseconds[IDLE] += max(0.0, kernel.start - counted_until)
        part.microseconds[kernel.group] += microseconds
        part.by_name[kernel.name] += microseconds
        part.kernels += 1
        counted_until = max(counted_until, kernel.end)
    return times
