# SPDX-License-Identifier: Apache-2.0
"""Traces of a profiler, written by hand: which group and part each kernel belongs to, and how long the GPU waits."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark_runs import run_benchmark
from contenders.kernels import GROUPS, Kernel, read_kernels, times_of_parts, with_decoding_heads

MAIN, AUTOGRAD, GPU = 1, 2, 7  # threads; the GPU's stream
NODE = "autograd::engine::evaluate_function: "
ACCUMULATION = NODE + "torch::autograd::AccumulateGrad"


Event = dict[str, Any]


def event(cat: str, name: str, thread: int, start: float, end: float, correlation: int | None = None) -> Event:
    """An event of a trace."""
    args = {} if correlation is None else {"correlation": correlation}
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "args": args} | times


def write_trace(folder: Path, events: Sequence[Event]) -> Path:
    """A trace with an event that has no duration."""
    trace = folder / "trace.json.gz"
    content = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})
    trace.write_bytes(gzip.compress(content.encode()))
    return trace


def test_kernels_belong_to_what_launched_them(tmp_path: Path) -> None:
    """Kernels run later than they are launched, those of a backward pass from a thread of autograd."""
    launches = [  # kernel, group, part; the thread and the ranges inside of which it is launched
        ("nvjet_tst_128x64", "matrices", "actor forward", MAIN, ["CompiledFunction"]),
        ("cudnn_generated_fort_native_sdpa_sm90_cutlass", "attention", "actor forward", MAIN, ["CompiledFunction"]),
        ("nvjet_tst_256x128", "head", "actor forward", MAIN, ["output head", "aten::mm"]),
        ("vectorized_elementwise_kernel", "gradients", "actor backward", MAIN, ["aten::mul"]),
        ("triton_red_fused_sum", "head", "actor backward", AUTOGRAD, [f"{NODE}_TokenLogprobsBackward"]),
        ("sm90_xmma_gemm_bf16", "matrices", "actor backward", AUTOGRAD, [f"{NODE}CompiledFunctionBackward"]),
        ("multi_tensor_apply_kernel", "gradients", "actor backward", AUTOGRAD, [ACCUMULATION]),
        ("nvjet_tst_64x64", "optimiser", "optimiser step", MAIN, ["aten::mm"]),
        ("Memcpy DtoH", "other", "rest", MAIN, ["aten::item"]),
    ]
    events, expected = [], []
    for number, (name, group, part, thread, ranges) in enumerate(launches):
        time = 100.0 * number
        if part != "rest" and (number == 0 or launches[number - 1][2] != part):
            last = max(i for i, launch in enumerate(launches) if launch[2] == part)
            events.append(event("user_annotation", f"part: {part}", MAIN, time, 100.0 * last + 90))
        for depth, range_name in enumerate(ranges):
            cat = "user_annotation" if range_name == "output head" else "cpu_op"
            events.append(event(cat, range_name, thread, time + 10 + depth, time + 50 - depth))
        runtime = "cuda_driver" if name.startswith("triton") else "cuda_runtime"
        events.append(event(runtime, "launch", thread, time + 20, time + 21, correlation=number))
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        events.append(event(category, name, GPU, 1000 + time, 1000 + time + 60, correlation=number))
        expected.append((name, group, part))
    found = read_kernels(write_trace(tmp_path, events[::-1]))
    assert [(kernel.name, kernel.group, kernel.part) for kernel in found] == expected
    assert found[0].start == 1000 and found[0].end == 1060


def test_without_a_gpu_operators_stand_in_for_kernels(tmp_path: Path) -> None:
    """Those that call no others; a matrix product stands for what it calls."""
    events = [
        event("user_annotation", "part: scoring", MAIN, 0, 100),
        event("cpu_op", "aten::linear", MAIN, 10, 40),
        event("cpu_op", "aten::mm", MAIN, 12, 38),
        event("cpu_op", "aten::resolve_conj", MAIN, 14, 15),
        event("cpu_op", "aten::add", MAIN, 50, 60),
    ]
    found = read_kernels(write_trace(tmp_path, events))
    assert found == [
        Kernel("aten::mm", 12, 38, "matrices", "scoring", 1),
        Kernel("aten::add", 50, 60, "other", "scoring", 1),
    ]


def test_groups_and_idle_time_make_up_the_whole_by_hand() -> None:
    """Two passes of scoring, whose kernels overlap for 5 µs, and one of the rest; a gap belongs to what comes next."""
    found = times_of_parts(
        [
            Kernel("gemm", 0, 40, "matrices", "scoring", 1),
            Kernel("add", 35, 50, "other", "scoring", 1),
            Kernel("copy", 80, 90, "other", "rest"),
            Kernel("gemm", 100, 200, "matrices", "scoring", 2),
        ]
    )
    scoring, rest = found["scoring"].row(), found["rest"].row()
    assert (scoring["passes"], scoring["kernels"]) == ("2", 1.5)
    assert scoring["ms"] == pytest.approx((40 + 10 + 10 + 100) / 2000)
    assert scoring["matrices_ms"] == pytest.approx(140 / 2000) and scoring["other_ms"] == pytest.approx(10 / 2000)
    assert scoring["idle_ms"] == pytest.approx(10 / 2000) and rest["idle_ms"] == pytest.approx(30 / 1000)
    assert scoring["largest_ms"] == "gemm 0.07; add 0.005"
    total = sum(float(row["ms"]) * int(row["passes"]) for row in (scoring, rest))
    assert total == pytest.approx(200 / 1000)


def test_a_decoding_step_ends_with_its_head() -> None:
    """In each step, from the last matrix product on."""
    names = ["norm", "gemm", "add", "gemm", "softmax"]
    groups = ["other", "matrices", "other", "matrices", "other"]
    steps = [
        Kernel(name, 10 * step + place, 10 * step + place + 1, group, "decoding step", step)
        for step in (1, 2)
        for place, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
    marked = [kernel.group for kernel in with_decoding_heads(steps, "decoding step")]
    assert marked == ["other", "matrices", "other", "head", "head"] * 2
    assert [kernel.group for kernel in with_decoding_heads(steps, "scoring")] == groups * 2


@pytest.mark.slow
def test_profile_on_a_cpu(tmp_path: Path) -> None:
    """Two micro-batches of one update: every part ran as often as the algorithm says, and has its groups."""
    flags = f"--device cpu --size tiny --prompts 4 --micro_batches 2 --json_folder {tmp_path} --pieces profile"
    rows = run_benchmark("gpu.py", f"{flags} --flags=--compile=off")["pieces"]["profile"]
    by_part = {row["part"]: row for row in rows}
    passes = {part: int(row["passes"]) for part, row in by_part.items()}
    assert passes == {
        "scoring": 4,  # reference and reward model
        "actor forward": 2,
        "critic forward": 2,
        "actor backward": 2,
        "critic backward": 2,
        "optimiser step": 2,  # actor and critic
        "rest": 1,
        "decoding step": 4,
    }
    for part, row in by_part.items():
        assert sum(row[f"{group}_ms"] for group in GROUPS) == pytest.approx(row["ms"])
        has_matrices = part not in ("rest", "optimiser step")
        assert (row["matrices_ms"] > 0) == has_matrices, part
    with_heads = {part for part, row in by_part.items() if row["head_ms"] > 0}
    assert with_heads == {"scoring", "actor forward", "actor backward", "decoding step"}
    assert {part for part, row in by_part.items() if row["gradients_ms"] > 0} == {"actor backward", "critic backward"}
    assert {part for part, row in by_part.items() if row["optimiser_ms"] > 0} == {"optimiser step"}
