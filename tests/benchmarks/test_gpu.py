# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a GPU's limits: its arithmetic by hand; pieces that fail or come too late; its tables."""

import json
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import gpu
from benchmark_runs import run_benchmark
from contenders import limits, process, work
from contenders.process import PHASES, IterationFigures
from dschat.models.operations import Peaks

LIMITS = Peaks(operations_per_second=1e6, bytes_per_second=1e6)


def work_of(**changes: Any) -> Any:
    """Prompts of 2, 3 and 4 tokens, 5 response tokens each; a Gemma of 2 layers."""
    size = work.Size(100, 8, 2, 4, 1, head_dim=2, intermediate_size=16)
    lengths = {"shortest_prompt": 2, "longest_prompt": 4, "longest_response": 5}
    return work.IterationWork(**({"size": size, "batch": 3, "micro_batch": 3} | lengths | changes))


WEIGHTS = 2 * (2 * 64 + 2 * 16 + 3 * 128)  # per layer: q and o are 8 × 8, k and v 8 × 2, three matrices 8 × 16
HEAD = 800  # 100 × 8


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_decoding_by_hand(dtype: str, width: int) -> None:
    """Four steps follow the first token, in 1.2 s. Each reads 1,888 weights and what tokens see, their own included:
    2 + 2.5, 3 + 2.5 and 4 + 2.5 tokens on average, each 2 layers × (key + value) × 2 numbers.
    """
    weights = WEIGHTS + HEAD
    assert weights == 1888
    limit = width * (weights + (4.5 + 5.5 + 6.5) * 8) / 1e6
    assert limits.rollout_limit(work_of(dtype=dtype), LIMITS) == pytest.approx(4 * limit + width * weights / 1e6)
    assert limits.decoding_rates(work_of(dtype=dtype), 1.5, 0.3, LIMITS) == pytest.approx(
        {
            "first_tokens_seconds": 0.3,
            "step_ms": 300,
            "limit_ms": 1000 * limit,
            "tokens_per_second": 10,
            "of_limit": limit / 0.3,
        }
    )


def test_scoring_and_training_by_hand() -> None:
    """24 tokens in rows of 7, 8 and 9, where tokens see 28, 36 and 45 keys; the head sees 15 tokens.

    Two models go forward; the same and a backward pass, which is twice a forward, make training.
    """
    layers = 2 * WEIGHTS * 24
    attention = 2 * 4 * 8 * (28 + 36 + 45)  # 2 layers, two products of 2 operations with 8 numbers for every key
    operations = 2 * (layers + attention) + 2 * HEAD * 15
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


def test_limits_of_zero_3_by_hand() -> None:
    """1,888 weights and five norms of 8: a billion of 7 is 275.4 of 1,928."""
    assert gpu.zero3_limits(work_of()) == {
        "stage3_max_live_parameters": 275,
        "stage3_max_reuse_distance": 275,
        "stage3_prefetch_bucket_size": 14,
        "stage3_param_persistence_threshold": 1,
    }


def run_gpu(monkeypatch: pytest.MonkeyPatch, flags: str) -> int:
    """The exit status of the main on a CPU, whose limits are not measured."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags.split(), "--device", "cpu", "--size", "tiny"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu, "in_process", lambda *args: LIMITS)
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return int(end.value.code or 0)


def test_what_fails_or_comes_too_late_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of a piece are in its file although one failed; the next piece has no time; the status says so."""

    def fail() -> Any:
        raise ValueError("no such kernel\nand more")

    tasks = [({"way": "a"}, lambda: [{"step_ms": 2.0, "prompts": 16}]), ({"way": "b"}, fail), ({"way": "c"}, list)]
    monkeypatch.setitem(gpu.PIECES, "decoding", lambda *args: tasks)
    flags = f"--pieces decoding --json_folder {tmp_path}"
    assert run_gpu(monkeypatch, flags) == 1
    rows = [{"way": "a", "step_ms": 2.0, "prompts": 16}, {"way": "b", "problem": "ValueError: no such kernel"}]
    found = json.loads((tmp_path / "decoding.json").read_text())
    assert found["figures"] == {"limits": asdict(LIMITS), "rows": rows}
    assert json.loads(capsys.readouterr().out)["figures"] == {"limits": asdict(LIMITS), "pieces": {"decoding": rows}}
    monkeypatch.setattr(gpu, "MOST_SECONDS", -1)
    assert run_gpu(monkeypatch, f"{flags} --tables {tmp_path / 'gpu.md'}") == 0
    late = [{"way": way, "not_measured": "no time was left"} for way in "abc"]
    assert json.loads((tmp_path / "decoding.json").read_text())["figures"]["rows"][-3:] == late
    tables = (tmp_path / "gpu.md").read_text()
    assert tables.startswith("## decoding\n") and "| c | no time was left |" in tables and "## training" not in tables


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who waits for a process of a piece learns that it was killed; what was there before goes on."""
    with subprocess.Popen(["sleep", "600"]) as other:
        monkeypatch.setattr(gpu, "MOST_SECONDS", 0.2)
        tasks = [({"way": "a"}, lambda: [{"status": subprocess.call(["sleep", "600"])}])]
        monkeypatch.setitem(gpu.PIECES, "decoding", lambda *args: tasks)
        assert run_gpu(monkeypatch, f"--pieces decoding --json_folder {tmp_path}") == 0
        rows = json.loads((tmp_path / "decoding.json").read_text())["figures"]["rows"]
        assert rows == [{"way": "a", "status": -signal.SIGKILL}] and other.poll() is None
        other.kill()


class Canned:
    """Stands in for a contender's process: four seconds an iteration; TRL's ends with micro-batches above 2."""

    modules: list[str] = []
    flags: list[list[str]] = []

    def __init__(self, python: str, module: str, job: Any) -> None:
        assert (Path(job.files) / "actor" / "config.json").exists() and job.flags[:2] == ["--seed", "7"]
        self.modules.append(f"{module} {job.work.micro_batch}")
        self.flags.append(job.flags[2:])
        if module == "trl_ppo" and job.work.micro_batch > 2:
            raise RuntimeError("a contender ended early")

    def iterate(self) -> list[IterationFigures]:
        """As one process gives them."""
        wall = {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0}
        return [IterationFigures({}, wall, {}, {}, 3000.0, 24.0, 2000.0)]

    def __enter__(self) -> "Canned":
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing to end."""


def canned_settings(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Namespace:
    """Settings of a run on a CPU, whose contenders are canned."""
    monkeypatch.setattr(process, "Contender", Canned)
    monkeypatch.setattr(Canned, "modules", [])
    monkeypatch.setattr(Canned, "flags", [])
    settings = {"size": "tiny", "device": "cpu", "micro_batches": [8], "prompts": [4], "repeats": 1, "peer": None}
    return Namespace(**(settings | {"flags": "--seed 7"} | changes))


def test_parts_and_the_whole_of_an_iteration_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4 responses of 16 tokens, drawn in a second of four; the peak of 3 GB stands on 2 GB of models."""
    settings = canned_settings(monkeypatch)
    same = work.IterationWork(work.SIZES["tiny"], 4, 4, 4, 16, 16)
    (row,) = gpu.iterations(settings, LIMITS, tmp_path)[0][1]()
    assert row["drawing_tokens_per_second"] == 64 and row["tokens_per_second"] == 16
    assert row["drawing_of_limit"] == pytest.approx(limits.rollout_limit(same, LIMITS))
    training = limits.phase_operations(same)["training"] / 2.0
    assert row["training_tflops"] == pytest.approx(training / 1e12) and row["peak_gb"] == 5
    assert [row[f"{phase}_share"] for phase in PHASES] == [0.25, 0.125, 0.5, 0.125]
    assert (row["micro_batch"], row["checkpointing"]) == (4, "no")
    plain, compiled, again, _ = gpu.training(settings, LIMITS, tmp_path)
    assert plain[0] == {"micro_batch": 8, "checkpointing": "no", "compiled": "no"}
    assert compiled[0]["compiled"] == "yes" and again[0]["checkpointing"] == "yes"
    (row,) = plain[1]()
    larger = replace(same, batch=64, micro_batch=8)
    scoring = limits.phase_operations(larger)["scoring"] / 0.5
    assert row["scoring_tflops"] == pytest.approx(scoring / 1e12)
    assert row["peak_gb"] == 5 and 1e-4 < row["planned_gb"] < 1e-2


def test_zero_3_beside_zero_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both with the micro-batches that fit at both stages, here not those of 8 rows; ZeRO 3 with scaled limits."""
    settings = canned_settings(monkeypatch, micro_batches=[8, 4], prompts=[16])
    monkeypatch.setattr(gpu, "fits", lambda job: job.work.micro_batch == 4 or "3" not in job.flags)
    rows = []
    for label, task in gpu.zero3(settings, LIMITS, tmp_path):
        rows += gpu.attempted(label, task)
    assert [(row["zero_stage"], row["micro_batch"], row["seconds"]) for row in rows] == [(0, 4, 4.0), (3, 4, 4.0)]
    off = ["--compile", "off", "--zero_stage"]
    assert Canned.flags == [[*off, "0"], [*off, "3", "--deepspeed_config", str(tmp_path / "zero3.json")]]
    scaled = json.loads((tmp_path / "zero3.json").read_text())["zero_optimization"]
    assert scaled == gpu.zero3_limits(gpu.work_of(settings, 16))


def test_a_peer_takes_the_micro_batches_that_it_survives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours take 8 rows. TRL's process ends with 8 and 4, and its figures are those with 2."""
    settings = canned_settings(monkeypatch, micro_batches=[2, 8, 4], prompts=[16], peer="trl")
    monkeypatch.setattr(gpu, "PEER_PACKAGES", ("json",))
    (_, ours_task), (label, peer_task) = gpu.iterations(settings, LIMITS, tmp_path)
    assert ours_task()[0]["micro_batch"] == 8 and label == {"prompts": 16, "contender": "TRL PPOTrainer"}
    (row,) = peer_task()
    assert (row["micro_batch"], row["checkpointing"], row["seconds"]) == (2, "no", 4.0)
    assert Canned.modules == ["ours 8", "trl_ppo 8", "trl_ppo 4", "trl_ppo 2"]
    settings.micro_batches = [8, 4]
    assert peer_task() == [{"not_measured": "its process ended early with every micro-batch"}]


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = canned_settings(monkeypatch, peer="trl")
    monkeypatch.setattr(gpu, "PEER_PACKAGES", ("json", "no_such_peer", "nor_this"))
    (row,) = gpu.iterations(settings, LIMITS, tmp_path)[1][1]()
    assert row == {"not_measured": "not installed: no_such_peer, nor_this"}


TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2, 3])
def test_it(number):
    assert number != 2

def test_of_no_gpu():
    assert False
"""


def test_all_tests_that_need_a_gpu_are_listed() -> None:
    files = [file for file in (gpu.ROOT / "tests").glob("*/test_*.py") if file != Path(__file__)]
    marked = {str(file.relative_to(gpu.ROOT)) for file in files if "pytest.mark.gpu" in file.read_text("utf-8")}
    assert marked == set(gpu.TESTS)


def test_failed_tests_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # takes most of the time
    (tmp_path / "test_it.py").write_text(TESTS)
    (row,) = gpu.run_tests([str(tmp_path)], tmp_path)
    assert row["problem"] == "failed: test_it[2]" and float(row.pop("time")) > 0
    assert {name: row[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": 3,
        "failures": 1,
        "errors": 0,
        "skipped": 0,
    }


@pytest.mark.slow
def test_pieces_on_a_cpu(tmp_path: Path) -> None:
    """What each measures is below its limit, and the plan's peak is above zero."""
    flags = f"--device cpu --size tiny --prompts 2 4 --micro_batches 2 --json_folder {tmp_path}"
    found = run_benchmark("gpu.py", f"{flags} --pieces limits decoding training iterations zero3")
    assert min(found["limits"].values()) > 0
    pieces = found["pieces"]
    decoding, training, iterations, zero3 = (pieces[name] for name in ("decoding", "training", "iterations", "zero3"))
    assert [(row["decoder"], row["prompts"]) for row in decoding] == list(product(gpu.DECODERS.values(), (2, 4)))
    assert all(0 < row["of_limit"] < 1 for row in decoding)
    assert [row["checkpointing"] for row in training] == ["no", "no", "yes", "yes"]
    assert [row["zero_stage"] for row in zero3] == [0, 3]
    assert all(row["planned_gb"] > 0 for row in training)
    for row in [*training, *iterations, *zero3]:
        assert 0 < row["scoring_of_limit"] < 1 and 0 < row["training_of_limit"] < 1
    for row in [*iterations, *zero3]:
        # What passes between two phases, on a busy machine the longer, belongs to none of them. Four phases and their
        # total are rounded to 0.0001 s.
        rounding = 5 * 0.00005 / row["seconds"]
        assert 0.9 < sum(row[f"{phase}_share"] for phase in PHASES) < 1 + rounding
