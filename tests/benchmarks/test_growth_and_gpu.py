# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of growing cost and of a GPU's limits: their arithmetic by hand, and a tiny run of each."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "applications" / "DeepSpeed-Chat" / "benchmarks"
PHASES = ("generation", "scoring", "training")


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The folder's modules can be imported."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def work_of(**changes: Any) -> Any:
    """Prompts of 2, 3 and 4 tokens, 5 response tokens each; a Gemma of 2 layers."""
    work = importlib.import_module("contenders.work")
    size = work.Size(vocabulary=100, hidden=8, layers=2, heads=4, kv_heads=1, head_dim=2, intermediate=16)
    return work.Work(**({"size": size, "batch": 3, "micro_batch": 3} | _LENGTHS | changes))


_LENGTHS = {"shortest_prompt": 2, "longest_prompt": 4, "response": 5}


def test_weights_by_hand(modules: None) -> None:
    """Per layer: q and o are 8 × 8, k and v 8 × 2, three matrices of the MLP 8 × 16."""
    gpu = importlib.import_module("gpu")
    assert gpu.layer_weights(work_of().size) == 2 * (2 * 64 + 2 * 16 + 3 * 128)


def test_rollout_limit_by_hand(modules: None) -> None:
    """1,888 weights. Rows hold 2 + 2, 3 + 2 and 4 + 2 tokens on average, each 2 layers × (key + value) × 2 numbers."""
    gpu = importlib.import_module("gpu")
    numbers = 1088 + 800 + (4 + 5 + 6) * 8
    assert gpu.rollout_limit(work_of(), 1e6) == pytest.approx(3 * 1e6 / (4 * numbers))
    assert gpu.rollout_limit(work_of(dtype="bf16"), 1e6) == pytest.approx(3 * 1e6 / (2 * numbers))


def test_training_operations_by_hand(modules: None) -> None:
    """24 tokens in rows of 7, 8 and 9; a token attends to half of its row on average; the head sees 15 tokens."""
    gpu = importlib.import_module("gpu")
    layers = 2 * 1088 * 24
    attention = 2 * 2 * 8 * (49 + 64 + 81)  # per layer: 4 operations × half the row × 8 numbers, for every token
    head = 2 * 800 * 15
    assert gpu.training_operations(work_of()) == 3 * (2 * (layers + attention) + head)


def test_growth(modules: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A quantity whose cost is quadratic at the end is named so, in the table; the picture is an SVG."""
    growth, tables = importlib.import_module("growth"), importlib.import_module("contenders.tables")
    pictures = importlib.import_module("contenders.pictures")

    def run(work: Any, processes: int, repeats: int) -> dict[str, Any]:
        seconds = work.response**2 / 1000
        return {"cpu_seconds": seconds, "phases": dict.fromkeys(PHASES, 1.0), "wall_seconds": 1.0, "peak_mb": 7.0}

    monkeypatch.setattr(growth, "run", run)
    response = growth.QUANTITIES[0]
    found = growth.measure(response, growth.BASE, 1)
    assert [point["value"] for point in found["points"]] == [128, 256, 512, 1024]
    assert found["exponent"] == {"cpu_seconds": 2.0, "peak_mb": 0.0}
    text = tables.growth_table(found, response.unit, PHASES)
    assert "| 1,024 | 1048.58 | 1.00 | 1.00 | 1.00 | 1.00 | 7 |" in text
    assert "CPU time grows with the power 2.0, memory with 0.0" in text
    picture = pictures.draw_growth(found["points"], response.unit, PHASES)
    assert ElementTree.fromstring(picture).tag.endswith("svg") and len(picture) < 60_000
    assert picture == pictures.draw_growth(found["points"], response.unit, PHASES)


def run_script(script: str, flags: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / script), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GPU_FLAGS = "--device cpu --size tiny --batch 2 --micro_batch 2 --shortest_prompt 3 --longest_prompt 5 --response 6"


class Canned:
    """Stands in for a contender's process: four seconds an iteration."""

    def __init__(self, python: str, module: str, job: Any) -> None:
        assert (Path(job.files) / "actor" / "config.json").exists() and job.flags == ["--seed", "7"]

    def iterate(self) -> dict[str, Any]:
        """As `Meter.end` gives them."""
        wall = {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0}
        return {"wall": wall, "peak_mb": 3000.0}

    def end(self) -> None:
        """Nothing to end."""


def test_gpu_with_canned_iterations(
    modules: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates are work by time of the phase; the document gets them beside the limits."""
    gpu = importlib.import_module("gpu")
    document = tmp_path / "performance.md"
    document.write_text("<!-- gpu -->\n<!-- /gpu -->\n", encoding="utf-8")
    words = [*GPU_FLAGS.split(), "--factors", "2", "--flags=--seed 7", "--markdown", str(document)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(importlib.import_module("contenders.process"), "Contender", Canned)
    gpu.main()
    report = json.loads(capsys.readouterr().out)
    (row,) = report["figures"]["batches"]
    assert min(report["figures"]["limits"].values()) > 0
    assert row["rollout_tokens_per_second"] == 4 * 6 / 1.0 and row["share"]["training"] == 0.5
    work = importlib.import_module("contenders.work")
    same = work.Work(work.SIZES["tiny"], 4, 2, 3, 5, 6)
    assert row["training_operations_per_second"] == gpu.training_operations(same) / 2.0
    text = document.read_text(encoding="utf-8")
    assert "| 4 | 24 | " in text and "| 25 % | 12 % | 50 % | 12 % | 4.0 | 3.0 |" in text


@pytest.mark.slow
def test_gpu_on_a_cpu() -> None:
    report = run_script("gpu.py", f"{GPU_FLAGS} --factors 1 2 --repeats 1")
    assert [row["batch"] for row in report["figures"]["batches"]] == [2, 4]
    for row in report["figures"]["batches"]:
        assert sum(row["share"].values()) == pytest.approx(1)
        assert 0 < row["rollout_tokens_per_second"] < row["rollout_limit"]
        assert 0 < row["training_operations_per_second"] < row["training_limit"]


@pytest.mark.slow
def test_growth_of_two_points_each(tmp_path: Path) -> None:
    figures = run_script("growth.py", f"--tiny --repeats 1 --pictures {tmp_path}")["figures"]
    assert set(figures) == {"response", "batch", "vocabulary", "processes"}
    for name, found in figures.items():
        assert all(point["cpu_seconds"] > 0 and point["peak_mb"] > 0 for point in found["points"])
        assert (tmp_path / f"growth-{name}.svg").exists()
