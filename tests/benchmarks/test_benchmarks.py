# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run and print one JSON object with their figures. What the figures say is not tested here."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmark_runs import run_benchmark
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from factories import make_causal_lm, make_classifier
from pieces import learners


@pytest.mark.slow
def test_memory_of_logprobs() -> None:
    shape = "--vocabulary 64 --hidden 8 --prompt 4 --response 4 --batch_sizes 2 3"
    figures = run_benchmark("memory.py", f"logprobs {shape}")
    cases = [(row["method"], row["phase"], row["batch_size"]) for row in figures]
    chunks = [("chunks", phase, size) for phase in ("training", "scoring") for size in (2, 3)]
    assert cases == [*chunks, ("full_logits", "training", 2), ("full_logits", "scoring", 2)]
    assert all(row.keys() >= {"peak_gb", "inputs_gb", "seconds"} for row in figures)


@pytest.mark.slow
def test_memory_that_the_plan_expects() -> None:
    """The plan of small models is within 15 % of what torch's allocator reports."""
    cases = ["float32", "tokens", "bert", "refuel"]
    shape = "--rows 4 --prompt 16 --response 16"
    figures = run_benchmark("memory.py", f"plan --shapes S --cases {' '.join(cases)} {shape}")
    assert [figure["case"] for figure in figures] == cases
    for figure in figures:
        assert set(figure["phases"]) == {"generate", "score", "train"}
        for phase in figure["phases"].values():
            assert 0.85 < phase["ratio"] < 1.15 and phase["measured_mb"] > 10


@pytest.mark.slow
def test_memory_of_learners() -> None:
    """Runs of the mains: DPO holds what step 1 holds; a critic, a reference and a reward model cost their weights."""
    figures = run_benchmark("memory.py", "learners --hidden 256 --layers 4 --vocabulary 600")
    sft, dpo, gae = figures["sft"], figures["dpo"], figures["ppo, gae"]
    assert sft["models"] == dpo["models"] == ["policy"]
    assert gae["models"] == ["policy", "reference", "critic", "reward model"]
    assert sft["parameters_mb"] == dpo["parameters_mb"] == pytest.approx(gae["parameters_mb"] / 4, rel=0.01)
    assert sft["optimizer_mb"] == dpo["optimizer_mb"] == pytest.approx(2 * dpo["parameters_mb"], rel=0.01)
    assert gae["optimizer_mb"] == pytest.approx(2 * dpo["optimizer_mb"], rel=0.01)
    assert figures["ppo, rloo"]["models"] == ["policy", "reference", "reward model"]
    weights = dpo["parameters_mb"] + dpo["optimizer_mb"]
    assert weights < dpo["peak_mb"] < gae["peak_mb"]


@pytest.mark.slow
def test_share_base() -> None:
    """Four models whole, three bases with LoRA (the reference is the actor's), and one."""
    figures = run_benchmark("memory.py", "learners --share_base --hidden 256 --layers 4 --vocabulary 600 --rank 4")
    whole, lora, shared = figures.values()
    base = whole["parameters_mb"] / 4
    assert lora["parameters_mb"] == pytest.approx(3 * base, rel=0.1) and lora["parameters_mb"] > 3 * base
    assert shared["parameters_mb"] - base == pytest.approx(lora["parameters_mb"] - 3 * base, abs=0.5 + base / 10)
    assert lora["optimizer_mb"] == shared["optimizer_mb"] < 0.1 * whole["optimizer_mb"]
    assert shared["models"] == lora["models"] == ["policy", "critic", "reward model"]
    assert shared["peak_mb"] < lora["peak_mb"] < whole["peak_mb"]


def test_what_counts_as_memory_of_a_learner(tmp_path: Path) -> None:
    """A trained and a frozen model, storages once each, and the rows that every learner trains on."""
    before = Counter(learners.census()["models"])
    policy = PolicyModel(make_causal_lm())
    critic, reward = ScalarModel(make_classifier()), ScalarModel(make_classifier()).requires_grad_(False)
    after = Counter(learners.census()["models"])
    assert after - before == {"policy": 1, "critic": 1, "reward model": 1}, (policy, critic, reward)
    x = torch.zeros(250_000)
    assert learners.megabytes([x, x[:10], x.view(2, -1), torch.zeros(500_000)]) == 3.0
    cases = learners.learner_cases(tmp_path, 8)
    assert {name: Path(flags["data_path"]).parent.name for name, (_, flags) in cases.items()}.items() >= {
        ("sft", "data-8"),
        ("dpo", "data-4"),
        ("ppo, gae", "data-8"),
    }
