# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a GPU's limits: its arithmetic by hand, and pieces that fail."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpu
from benchmark_runs import run_benchmark
from contenders import limits, work
from contenders.meter import PHASES, IterationFigures

LIMITS = limits.DeviceLimits(operations_per_second=1e6, bytes_per_second=1e6)


def work_of(**changes: Any) -> Any:
    """Prompts of 2, 3 and 4 tokens, 5 response tokens each; a Gemma of 2 layers."""
    size = work.Size(100, 8, 2, 4, 1, head_dim=2, intermediate_size=16)
    lengths = {"shortest_prompt": 2, "longest_prompt": 4, "longest_response": 5}
    return work.IterationWork(**({"size": size, "batch": 3, "micro_batch": 3} | lengths | changes))


# Per layer: q and o are 8 × 8, k and v 8 × 2, three matrices 8 × 16, two norms; another norm, and a head of 100 × 8.
POLICY = 2 * (2 * 64 + 2 * 16 + 3 * 128) + 5 * 8 + 800
SCALAR = POLICY - 800 + 8


def test_decoding_by_hand() -> None:
    """Four steps follow the first token, in 1.2 s. Each reads all weights in bf16 and what tokens see, their own
    included: 2 + 2.5, 3 + 2.5 and 4 + 2.5 tokens on average, each 2 layers × (key + value) × 2 numbers.
    """
    limit = 2 * (POLICY + (4.5 + 5.5 + 6.5) * 8) / 1e6
    same = work_of(dtype="bf16")
    assert limits.rollout_limit(same, LIMITS) == pytest.approx(4 * limit + 2 * POLICY / 1e6)
    assert limits.decoding_rates(same, 1.5, 0.3, LIMITS) == pytest.approx(
        {
            "first_tokens_seconds": 0.3,
            "step_ms": 300,
            "limit_ms": 1000 * limit,
            "tokens_per_second": 10,
            "of_limit": limit / 0.3,
        }
    )


def test_scoring_and_training_by_hand() -> None:
    """24 tokens in rows of 7, 8 and 9. A policy and a scalar model go forward; training is three times that."""
    operations = 2 * (POLICY + SCALAR) * 24 + 2 * 4 * 2 * 8 * (49 + 64 + 81)
    assert limits.phase_operations(work_of()) == {"scoring": operations, "training": 3 * operations}
    assert limits.phase_rates(work_of(), {"scoring": 2.0, "training": 3.0}, LIMITS) == pytest.approx(
        {
            "scoring_seconds": 2,
            "scoring_tflops": operations / 2 / 1e12,
            "scoring_of_limit": operations / 2 / 1e6,
            "training_seconds": 3,
            "training_tflops": operations / 1e12,
            "training_of_limit": operations / 1e6,
        }
    )


def run_gpu(monkeypatch: pytest.MonkeyPatch, flags: str) -> int:
    """The exit status of the main on a CPU, whose limits are not measured."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags.split(), "--device", "cpu", "--size", "tiny"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu, "in_process", lambda *args: LIMITS)
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return int(end.value.code or 0)


def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The other rows of the piece are there, and the status says that there was a problem."""

    def fail() -> Any:
        raise ValueError("no such kernel\nand more")

    tasks = [({"way": "a"}, fail), ({"way": "b"}, lambda: [{"step_ms": 2.0}])]
    monkeypatch.setitem(gpu.PIECES, "decoding", lambda *args: tasks)
    assert run_gpu(monkeypatch, "--pieces decoding") == 1
    rows = [{"way": "a", "problem": "ValueError: no such kernel"}, {"way": "b", "step_ms": 2.0}]
    assert json.loads(capsys.readouterr().out)["figures"]["pieces"] == {"decoding": rows}


class Canned:
    """Stands in for a contender's process: four seconds an iteration."""

    def __init__(self, python: str, module: str, job: Any) -> None:
        assert (Path(job.files) / "actor" / "config.json").exists() and job.flags[:2] == ["--seed", "7"]

    def iterate(self) -> IterationFigures:
        """As a process gives them."""
        wall = {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0}
        return IterationFigures({}, wall, {}, {}, 3000.0, 24.0, 2000.0)

    def __enter__(self) -> "Canned":
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing to end."""


def test_parts_and_the_whole_of_an_iteration_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4 responses of 16 tokens, drawn in a second of four; the peak of 3 GB stands on 2 GB of models."""
    monkeypatch.setattr(gpu, "Contender", Canned)
    settings = Namespace(size="tiny", device="cpu", micro_batches=[8], prompts=[4], repeats=1, flags="--seed 7")
    same = work.IterationWork(work.SIZES["tiny"], 4, 4, 4, 16, 16)
    (row,) = gpu.iterations(settings, LIMITS, tmp_path)[0][1]()
    assert row["drawing_tokens_per_second"] == 64 and row["tokens_per_second"] == 16
    assert row["drawing_of_limit"] == pytest.approx(limits.rollout_limit(same, LIMITS))
    training = limits.phase_operations(same)["training"] / 2.0
    assert row["training_tflops"] == pytest.approx(training / 1e12) and row["peak_gb"] == 5
    assert [row[f"{phase}_share"] for phase in PHASES] == [0.25, 0.125, 0.5, 0.125]
    assert (row["micro_batch"], row["checkpointing"]) == (4, "no")
    plain, compiled, again, _ = gpu.training(settings, LIMITS, tmp_path)
    assert plain[0] == {"micro_batch": 8, "checkpointing": "no", "compile": "off"}
    assert compiled[0]["compile"] == "on" and again[0]["checkpointing"] == "yes"
    (row,) = plain[1]()
    larger = replace(same, batch=64, micro_batch=8)
    scoring = limits.phase_operations(larger)["scoring"] / 0.5
    assert row["scoring_tflops"] == pytest.approx(scoring / 1e12)
    assert row["peak_gb"] == 5 and 1e-4 < row["planned_gb"] < 1e-2


@pytest.mark.slow
def test_pieces_on_a_cpu() -> None:
    """What each measures is below its limit, and the plan's peak is above zero."""
    found = run_benchmark("gpu.py", "--device cpu --size tiny --prompts 4 --micro_batches 2")
    assert min(found["limits"].values()) > 0
    decoding, training, iterations = (found["pieces"][name] for name in ("decoding", "training", "iterations"))
    assert [row["decoder"] for row in decoding] == list(gpu.DECODERS.values())
    assert all(0 < row["of_limit"] < 1 for row in decoding)
    assert [row["checkpointing"] for row in training] == ["no", "no", "yes", "yes"]
    assert all(row["planned_gb"] > 0 for row in training)
    for row in [*training, *iterations]:
        assert 0 < row["scoring_of_limit"] < 1 and 0 < row["training_of_limit"] < 1
