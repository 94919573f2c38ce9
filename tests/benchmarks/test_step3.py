# SPDX-License-Identifier: Apache-2.0
"""The benchmark of step 3: contenders do the same work, their figures add up, and the document gets its tables."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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

FOLDER = Path(__file__).resolve().parents[2] / "applications" / "DeepSpeed-Chat" / "benchmarks"
PHASES = ("generation", "scoring", "training", "rest")
SIZES = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4, "max_answer_seq_len": 6}
TINY = "--sizes tiny --batch 8 --response 6 --repeats 1"


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The folder's modules can be imported."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def load(name: str) -> Any:
    return importlib.import_module(f"contenders.{name}")


def run(script: str, flags: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / script), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_equal_lengths(tmp_path: Path) -> None:
    """Floor and ours sample as many tokens; the phases make up the whole; TRL is left out by name."""
    document = tmp_path / "performance.md"
    first, last = "<!-- step3 tiny, equal -->\n", "<!-- /step3 tiny, equal -->\n"
    document.write_text(f"before\n{first}old\n{last}after\n", encoding="utf-8")
    report = run("step3.py", f"{TINY} --lengths equal --contenders floor_scoring ours trl --markdown {document}")
    rows = report["figures"]["tiny, equal"]
    assert rows["TRL PPOTrainer"] == {"not_measured": "no --trl_python"}
    for name in ("floor + scoring passes", "ours"):
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


def test_profile(modules: None, group: None, tokenizer: Any, tmp_path: Path) -> None:
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
    with load("profiling").profiled(trainer, tmp_path / "trace"):
        trainer.iterate([list(range(4))], 0)
    assert type(models.actor).step is step
    found = json.loads((tmp_path / "trace" / "profile.json").read_text(encoding="utf-8"))
    percent = found["percent"]
    assert sum(percent.values()) == pytest.approx(100, abs=0.1)
    assert all(percent[name] > 0 for name in ("model forward", "model backward", "sampling", "optimiser"))
    assert sum(found["items"]["everything else"].values()) <= percent["everything else"] + 0.1
    assert (tmp_path / "trace" / "trace.json").stat().st_size > 0


def test_lengths_of_responses(modules: None) -> None:
    """The actor's own probability of EOS gives the mean that was asked for, or none at all; pad is never drawn."""
    work = load("work")
    asked = work.Work(work.SIZES["tiny"], 4, 2, 3, 9, 40, mean_response=11.0)
    ids = torch.randint(2, 64, (64, 49), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ragged = work.make_actor(asked)(ids).logits[:, 8:-1].softmax(-1)
        equal = work.make_actor(work.Work(work.SIZES["tiny"], 4, 2, 3, 9, 40))(ids).logits.softmax(-1)
    reached = (1 - ragged[..., work.EOS].double()).cumprod(1)
    mean = 1 + reached[:, :-1].sum(1).mean()  # token t + 1 is there if none of the first t was EOS
    assert float(mean) == pytest.approx(11.0, rel=0.05)
    assert float(equal[..., work.EOS].max()) < 1e-9 and float(ragged[..., work.PAD].max()) < 1e-9


def test_prompt_lengths(modules: None) -> None:
    work = load("work")
    lengths = work.Work(work.SIZES["tiny"], 8, 2, 8, 64, 4).prompt_lengths()
    assert sorted(lengths) == [8, 16, 24, 32, 40, 48, 56, 64]


def test_expected_length_by_hand(modules: None) -> None:
    """Ends after the first token with 1/2, after the second with 1/4: 1 + 1/2 + 3/8 of at most three."""
    ends = torch.tensor([[0.5, 0.25, 0.9]])
    assert load("work").expected_length(ends) == pytest.approx(1 + 0.5 + 0.375)


def test_a_document_without_the_section_is_refused(modules: None, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="no section between"):
        load("tables").write_section(document, "step3", "text")


def test_table(modules: None) -> None:
    row = {
        "speed": 1.234,
        "cpu_seconds": {"generation": 1.0, "scoring": 0.5, "training": 2.0, "rest": 0.5, "total": 4.0},
        "inside_cpu_seconds": {"macro actions": 0.01},
        "positions_per_token": {"scoring": 1.5, "training": 1.02},
        "peak_mb": 12,
        "tokens": 64.0,
        "batch": 8,
    }
    profile = {"percent": {"sampling": 60.0}, "items": {"everything else": {"a: b": 0.7, "a: c": 0.3}}}
    text = load("tables").step3_table({"ours": row, "TRL": {"not_measured": "why"}, "where": profile})
    assert "| ours | 1.23 | 1.00 | 0.50 | 2.00 | 0.50 | 0.25 % | 1.50 / 1.02 | 12 | 8 |" in text
    assert "| TRL | not measured: why |" in text
    assert "| sampling | 60.0 % |" in text and "| · a: b | 0.7 % |" in text and "a: c" not in text
