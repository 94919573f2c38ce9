# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of step 3, of its growing cost and of a GPU's limits: contenders do the same work, their figures add
up, arithmetic by hand, and the document gets its tables."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import gpu
import growth
import harness
import step3
from benchmark_runs import run_benchmark
from contenders import process, work
from contenders.ours import profiled
from contenders.process import PHASES, Iteration
from dschat.rollouts.generate import ContinuousEngine
from dschat.scoring.reward_model import RewardModelScores
from dschat.trainers.ppo_models import PPOModels
from factories import (
    engine_of,
    frozen_engine_of,
    make_causal_lm,
    make_classifier,
    make_prompt,
    ppo_config,
    ppo_trainer_of,
    random_ids,
)

SIZES = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4, "max_answer_seq_len": 6}
TINY = "--sizes tiny --repeats 1"


def test_equal_lengths(tmp_path: Path) -> None:
    """Lower bound and ours sample as many tokens; the phases make up the whole; TRL is left out by name."""
    document = tmp_path / "performance.md"
    first, last = "<!-- step3 tiny, equal -->\n", "<!-- /step3 tiny, equal -->\n"
    document.write_text(f"before\n{first}old\n{last}after\n", encoding="utf-8")
    figures = run_benchmark(
        "step3.py", f"{TINY} --lengths equal --contenders lower_bound_scoring ours trl --markdown {document}"
    )
    rows = figures["tiny, equal"]
    assert rows["TRL PPOTrainer"] == {"not_measured": "no --trl_python"}
    for name in ("lower bound + scoring passes", "ours"):
        cpu = rows[name]["cpu_seconds"]
        assert rows[name]["tokens"] == 8 * 6
        assert cpu["total"] == pytest.approx(sum(cpu[phase] for phase in PHASES), abs=1e-3)
        assert min(cpu[phase] for phase in PHASES[:3]) > 0
    positions = rows["ours"]["positions_per_token"]
    assert positions.keys() == {"scoring", "training"} and min(positions.values()) >= 1
    assert 0 < rows["ours"]["inside_cpu_seconds"]["macro actions"] < rows["ours"]["cpu_seconds"]["total"]
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{first}`python step3.py ") and text.endswith(f"{last}after\n")
    assert "| ours |" in text and "old" not in text


def test_profile(group: None, tokenizer: Any, tmp_path: Path) -> None:
    """The groups make up the whole, every group of the work was found, and nothing stays behind on the trainer."""
    models = PPOModels(
        engine_of(make_causal_lm(), 4),
        frozen_engine_of(make_causal_lm()),
        engine_of(make_classifier(), 4),
        RewardModelScores(frozen_engine_of(make_classifier()), 4),
        ContinuousEngine(4),
    )
    prompts = [make_prompt(random_ids(3, i), f"p{i}", i) for i in range(4)]
    trainer = ppo_trainer_of(models, prompts, [], tokenizer, ppo_config(tmp_path / "run", **SIZES))
    step = type(models.actor).step
    with profiled(trainer.algorithm, tmp_path / "trace"):
        trainer.iterate([list(range(4))])
    assert type(models.actor).step is step
    found = json.loads((tmp_path / "trace" / "profile.json").read_text(encoding="utf-8"))
    percent = found["percent"]
    assert sum(percent.values()) == pytest.approx(100, abs=0.1)
    assert all(percent[name] > 0 for name in ("model forward", "model backward", "sampling", "optimiser"))
    assert sum(found["items"].values()) <= percent["everything else"] + 0.1
    assert (tmp_path / "trace" / "trace.json").stat().st_size > 0


def test_lengths_of_responses() -> None:
    """The actor's own probability of EOS gives the mean that was asked for, or none at all; pad is never drawn."""
    asked = work.Work(work.SIZES["tiny"], 4, 2, 3, 9, 40, mean_response=11.0)
    ids = torch.randint(2, 64, (64, 49), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ragged = work.make_actor(asked)(ids).logits[:, 8:-1].softmax(-1)
        equal = work.make_actor(work.Work(work.SIZES["tiny"], 4, 2, 3, 9, 40))(ids).logits.softmax(-1)
    reached = (1 - ragged[..., work.EOS].double()).cumprod(1)
    mean = 1 + reached[:, :-1].sum(1).mean()  # token t + 1 is there if none of the first t was EOS
    assert float(mean) == pytest.approx(11.0, rel=0.05)
    assert float(equal[..., work.EOS].max()) < 1e-9 and float(ragged[..., work.PAD].max()) < 1e-9


def test_prompt_lengths() -> None:
    lengths = work.Work(work.SIZES["tiny"], 8, 2, 8, 64, 4).prompt_lengths()
    assert sorted(lengths) == [8, 16, 24, 32, 40, 48, 56, 64]


def test_a_document_without_the_section_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="no section between"):
        harness.write_section(document, "step3", "text")


def test_table() -> None:
    phases = {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0}
    row = step3.Row(
        cpu_seconds=phases,
        wall_seconds=phases,
        inside_cpu_seconds={"macro actions": 0.01},
        counts={},
        peak_mb=12.0,
        tokens=64.0,
        batch=8,
        positions_per_token={"scoring": 1.5, "training": 1.02},
        tokens_per_cpu_second=16.0,
        spread=(1.0, 1.0),
        speed=1.234,
    )
    profile = {"percent": {"sampling": 60.0}, "items": {"a: b": 0.7, "a: c": 0.3}}
    text = step3.step3_table({"ours": row, "TRL": None}, profile)
    assert "| ours | 1.23 | 1.00 | 0.50 | 2.00 | 0.50 | 0.25 % | 1.50 / 1.02 | 12 | 8 |" in text
    assert "| TRL | not measured: no --trl_python |" in text
    assert "| sampling | 60.0 % |" in text and "| · a: b | 0.7 % |" in text and "a: c" not in text


def work_of(**changes: Any) -> Any:
    """Prompts of 2, 3 and 4 tokens, 5 response tokens each; a Gemma of 2 layers."""
    size = work.Size(100, 8, 2, 4, 1, head_dim=2, intermediate_size=16)
    return work.Work(**({"size": size, "batch": 3, "micro_batch": 3} | _LENGTHS | changes))


_LENGTHS = {"shortest_prompt": 2, "longest_prompt": 4, "response": 5}


def test_weights_by_hand() -> None:
    """Per layer: q and o are 8 × 8, k and v 8 × 2, three matrices of the MLP 8 × 16."""
    assert gpu.layer_weights(work_of().size) == 2 * (2 * 64 + 2 * 16 + 3 * 128)


def test_rollout_limit_by_hand() -> None:
    """1,888 weights. Rows hold 2 + 2, 3 + 2 and 4 + 2 tokens on average, each 2 layers × (key + value) × 2 numbers."""
    numbers = 1088 + 800 + (4 + 5 + 6) * 8
    assert gpu.rollout_limit(work_of(), 1e6) == pytest.approx(3 * 1e6 / (4 * numbers))
    assert gpu.rollout_limit(work_of(dtype="bf16"), 1e6) == pytest.approx(3 * 1e6 / (2 * numbers))


def test_training_operations_by_hand() -> None:
    """24 tokens in rows of 7, 8 and 9; a token attends to half of its row on average; the head sees 15 tokens."""
    layers = 2 * 1088 * 24
    attention = 2 * 2 * 8 * (49 + 64 + 81)  # per layer: 4 operations × half the row × 8 numbers, for every token
    head = 2 * 800 * 15
    assert gpu.training_operations(work_of()) == 3 * (2 * (layers + attention) + head)


def test_growth() -> None:
    """A quantity whose cost is quadratic at the end is named so, in the table; the picture is an SVG."""
    phases = dict.fromkeys(PHASES[:3], 1.0)
    points = [
        {"value": float(x), "cpu_seconds": x**2 / 1000, **phases, "wall_seconds": 1.0, "peak_mb": 7.0}
        for x in growth.QUANTITIES["response"][1]
    ]
    assert growth.exponents(points) == {"cpu_seconds": 2.0, "peak_mb": 0.0}
    text = growth.growth_table(points, "tokens")
    assert "| 1,024 | 1048.58 | 1.00 | 1.00 | 1.00 | 1.00 | 7 |" in text
    assert "CPU time grows with the power 2.0, memory with 0.0" in text
    picture = growth.draw(points, "tokens")
    assert ElementTree.fromstring(picture).tag.endswith("svg") and len(picture) < 60_000
    assert picture == growth.draw(points, "tokens")


GPU_FLAGS = "--device cpu --size tiny --batch 2 --micro_batch 2 --shortest_prompt 3 --longest_prompt 5 --response 6"


class Canned:
    """Stands in for a contender's process: four seconds an iteration."""

    def __init__(self, python: str, module: str, job: Any) -> None:
        assert (Path(job.files) / "actor" / "config.json").exists() and job.flags == ["--seed", "7"]

    def iterate(self) -> list[Iteration]:
        """As one process gives them."""
        wall = {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0}
        return [Iteration({}, wall, {}, {}, 3000.0, 24.0)]

    def __enter__(self) -> "Canned":
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing to end."""


def test_gpu_with_canned_iterations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates are work by time of the phase; the document gets them beside the limits."""
    document = tmp_path / "performance.md"
    document.write_text("<!-- gpu -->\n<!-- /gpu -->\n", encoding="utf-8")
    words = [*GPU_FLAGS.split(), "--factors", "2", "--flags=--seed 7", "--markdown", str(document)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(process, "Contender", Canned)
    gpu.main()
    report = json.loads(capsys.readouterr().out)
    (row,) = report["figures"]["batches"]
    assert min(report["figures"]["limits"].values()) > 0
    assert row["rollout_tokens_per_second"] == 4 * 6 / 1.0 and row["training_share"] == 0.5
    same = work.Work(work.SIZES["tiny"], 4, 2, 3, 5, 6)
    assert row["training_operations_per_second"] == gpu.training_operations(same) / 2.0
    text = document.read_text(encoding="utf-8")
    assert "| 4 | 24 | " in text and "| 25 % | 12 % | 50 % | 12 % | 4.0 | 3.0 |" in text


@pytest.mark.slow
def test_gpu_on_a_cpu() -> None:
    batches = run_benchmark("gpu.py", f"{GPU_FLAGS} --factors 1 2 --repeats 1")["batches"]
    assert [row["batch"] for row in batches] == [2, 4]
    for row in batches:
        assert sum(row[f"{phase}_share"] for phase in PHASES) == pytest.approx(1)
        assert 0 < row["rollout_tokens_per_second"] < row["rollout_limit"]
        assert 0 < row["training_operations_per_second"] < row["training_limit"]


@pytest.mark.slow
def test_growth_of_two_points_each(tmp_path: Path) -> None:
    figures = run_benchmark("growth.py", f"--tiny --repeats 1 --pictures {tmp_path}")
    assert set(figures) == {"response", "batch", "vocabulary", "processes"}
    for name, found in figures.items():
        assert all(point["cpu_seconds"] > 0 and point["peak_mb"] > 0 for point in found["points"])
        assert (tmp_path / f"growth-{name}.svg").exists()
