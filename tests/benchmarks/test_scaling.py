# SPDX-License-Identifier: Apache-2.0
"""What an iteration moves and how long it takes on many GPUs: by hand, for models and speeds of round numbers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scaling
from benchmark_runs import FOLDER
from dschat.plan.states import Weights, Zero

# Of a billion weights in bf16, 2 GB.
ZERO_3, ZERO_2, ZERO_1 = (Weights(10**9, 10**9, 10**8, 2, Zero(stage)) for stage in (3, 2, 1))
SPEEDS = scaling.Assumptions(
    **{"memory": 80e9, "peak": 1e12, "hbm": 1e9, "own_decoding": 0.5, "vllm_decoding": 0.5, "prefill": 0.5},
    **{"scoring": 0.5, "training": 0.5, "nvlink": 1e9, "infiniband": 1e8, "http": 1e7, "all_reduce": 0.25},
    overlap=0.5,
)


def test_a_push_is_all_weights() -> None:
    assert scaling.push_bytes(ZERO_3) == 2e9
    assert scaling.push_bytes(replace(ZERO_3, width=4)) == 4e9


def test_bytes_of_zero_3() -> None:
    """Of four processes each lacks three quarters: three passes gather 2 GB twice and scatter 2 GB once."""
    assert scaling.training_bytes(ZERO_3, 4, 3) == 3 * (2 * 2e9 + 2e9) * 3 / 4
    assert scaling.scoring_bytes(ZERO_3, 4, 3) == 3 * 2e9 * 3 / 4
    frozen = replace(ZERO_3, trained=10**6)  # adapters: their gradients alone go round
    assert scaling.training_bytes(frozen, 4, 3) == 3 * (2 * 2e9 + 2e6) * 3 / 4


def test_bytes_of_lower_stages() -> None:
    """2 GB of gradients after each of three passes, and 2 GB of weights; or 4 GB of gradients once, there and back."""
    assert scaling.training_bytes(ZERO_2, 4, 3) == (3 * 2e9 + 2e9) * 3 / 4
    assert scaling.training_bytes(ZERO_1, 4, 3) == scaling.training_bytes(ZERO_1, 4, 1) == (2 * 4e9 + 2e9) * 3 / 4
    assert scaling.scoring_bytes(ZERO_2, 4, 3) == 0


@pytest.mark.parametrize("weights", [ZERO_3, ZERO_2, ZERO_1])
def test_one_process_moves_nothing(weights: Weights) -> None:
    assert scaling.training_bytes(weights, 1, 3) == scaling.scoring_bytes(weights, 1, 3) == 0


def test_between_nodes() -> None:
    """4 GB: 4 s over NVLink; half of them enter each of two nodes, at 8 × 0.1 GB/s. A node alone needs no network."""
    assert scaling.moving_seconds(4e9, 8, SPEEDS) == 4
    assert scaling.moving_seconds(4e9, 16, replace(SPEEDS, nvlink=1e12)) == pytest.approx(2.5)
    assert scaling.moving_seconds(4e9, 16, SPEEDS) == 4


def test_half_of_the_shorter_is_hidden() -> None:
    assert scaling.together(10, 4, SPEEDS) == scaling.together(4, 10, SPEEDS) == 12
    assert scaling.together(10, 4, replace(SPEEDS, overlap=1)) == 10


def test_one_row_waits_for_memory() -> None:
    """2 GB at half of 1 GB/s are 4 s, although 2e9 operations take 4 ms; many rows wait for the matrices."""
    one = (2e9, 0.0, 2e9, 36)
    assert scaling.step_seconds(*one, 1, 0.5, SPEEDS) == 4
    assert scaling.step_seconds(2e9, 1e9, 2e9, 36, 1, 0.5, SPEEDS) == 6
    assert scaling.step_seconds(2e9, 0.0, 4e12, 36, 1, 0.5, SPEEDS) == 8
    assert scaling.step_seconds(*one, 2, 0.5, SPEEDS) == 2 + 36 * 0.25


@pytest.mark.parametrize(("draw", "train", "whole", "ahead"), [(3, 5, 13, 10), (9, 5, 19, 11), (0, 5, 10, 10)])
def test_one_ahead_is_never_slower(draw: float, train: float, whole: float, ahead: float) -> None:
    """After a push of 2 s, beside scoring of 3 s."""
    parts = scaling.IterationCost(2, draw, 3, train, 0, 0)
    assert (parts.seconds(ahead=False), parts.seconds(ahead=True)) == (whole, ahead)


@pytest.mark.parametrize(("processes", "rows"), [(1, 512), (8, 64), (6, 88), (64, 8), (256, 4)])
def test_processes_take_whole_micro_batches(processes: int, rows: int) -> None:
    """A sixth of 512 is 85.3: 22 micro-batches of 4."""
    assert scaling.rows_of(processes, scaling.ClusterIteration()) == rows


def test_measured_figures_take_the_place_of_assumptions(tmp_path: Path) -> None:
    """Limits, and the best share of them; what transformers' loop reaches is not ours."""
    limits = {"bytes_per_second": 4e12, "operations_per_second": 8e14}

    def found(*rows: dict[str, Any]) -> dict[str, float]:
        file = tmp_path / "piece.json"
        file.write_text(json.dumps({"figures": {"limits": limits, "rows": rows}}))
        return scaling.measured_figures(file)

    assert found() == {"hbm": 4e12, "peak": 8e14}
    decoders = [("dynamic loop", 0.1), ("static graphs", 0.6), ("transformers' static cache", 0.7)]
    assert found(*({"decoder": name, "of_limit": share} for name, share in decoders))["own_decoding"] == 0.6
    training = found({"scoring_of_limit": 0.3, "training_of_limit": 0.2}, {"micro_batch": 32, "problem": "memory"})
    assert (training["scoring"], training["training"]) == (0.3, 0.2)
    table = scaling.assumption_table(scaling.Assumptions(training=0.25, peak=8e14), ["training"])
    assert "| training | 0.25 | share of peak, with gradient checkpointing | measured |" in table
    assert "| peak | 8e+14 | operations/s of a GPU, bf16 | as on the command line |" in table


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    """2B on a GPU fits nowhere, on 8 in every way; a model moves twice its weights; the document gets its tables."""
    document, names = tmp_path / "scaling.md", ("scaling", "scaling assumptions", "scaling bytes", "scaling 2B")
    document.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    words = f"--models 2B --gpus 1 8 --json {tmp_path / 'rows.json'} --markdown {document}".split()
    done = subprocess.run([sys.executable, str(FOLDER / "scaling.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {(row["gpus"], row["way"]): row for row in json.loads((tmp_path / "rows.json").read_text())["figures"]}
    assert rows.keys() == {(n, way) for n in (1, 8) for way in scaling.WAYS}
    for way in scaling.WAYS:
        one, eight = rows[1, way], rows[8, way]
        assert one["layout"] == "does not fit" and eight["pushed"] == 2 * 2_506_172_416
        assert eight["rate"] * eight["total"] == pytest.approx(512 * 512)
    assert rows[8, scaling.AHEAD]["total"] <= rows[8, scaling.SERVERS]["total"]
    text = document.read_text()
    assert "Nothing fits on 1." in text and "| 8 | built-in | ZeRO 1 |" in text and "| 2B | 5.0 |" in text
