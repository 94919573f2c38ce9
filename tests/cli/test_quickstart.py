# SPDX-License-Identifier: Apache-2.0
"""The quickstart with --small: every part runs and the report stands."""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_runs import TRAINING, Result, evaluation_rows, read_jsonl, run_command
from dschat.quickstart.inputs import RUNS
from dschat.quickstart.reward_losses import table
from dschat.scoring.programs.levels import weakness


def run_small(script: str, folder: Path, *flags: object, **variables: str) -> Result:
    """Runs an example of the quickstart."""
    command = [sys.executable, TRAINING / "quickstart" / script, "--small", "--output_dir", folder, *flags]
    result = run_command(command, **variables).expect(0)
    assert "Traceback" not in result.stdout + result.stderr
    return result


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "train_config.json").read_text())


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def test_small(tmp_path):
    folder = tmp_path / "quick"
    result = run_small("main.py", folder, "--seed", 1234)
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<table") >= 1 and page.count("<html") == 1
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page), "it opens without network"
    for name in ("SFT", *RUNS, "updates to where PPO, SFT critic ends"):
        assert name in page and name in result.stdout
    for step in ("sft", "reward", "ppo"):
        assert f"== dschat {step} " in result.stdout
    assert "report.html" in result.stdout.splitlines()[-1]
    for judge in ("gold score", "reward-model score"):
        pairs = [
            line
            for line in result.stdout.splitlines()
            if " against " in line and "against SFT" not in line and judge in line and "[" in line
        ]
        assert len(pairs) == 4, "the win rate of the best run against all others, with its interval"

    runs = {
        "step3-ppo": (1, 0.95, "step2-reward"),
        "step3-ma-ppo": (5, 0.95, "step2-reward"),
        "step3-ppo-sft-critic": (1, 0.95, "step1-sft"),
        "step3-ma-ppo-sft-critic": (5, 0.95, "step1-sft"),
        "step3-ppo-99-sft-critic": (1, 0.99, "step1-sft"),
    }
    assert config_of(folder / "step2-reward")["reward_loss"] == "per_sample"
    before = {}
    for name, (ngram, lam, critic) in runs.items():
        config = config_of(folder / name)
        assert (config["termination_condition"], config["ngram"], config["lam"]) == ("fixed", ngram, lam)
        assert config["critic_model_name_or_path"].endswith(critic) and config["whiten_advantages"]
        assert config["missing_eos_penalty"] == 5
        rows = evaluation_rows(folder / name)
        assert all("eval/gold_scores" in row for row in rows)
        before[name] = {key: value for key, value in rows[0].items() if key != "seconds"}
        last = read_jsonl(folder / name / "samples" / f"update-{rows[-1]['update']:06d}.jsonl")
        assert all(0 <= sample["gold_scores"] <= 1 for sample in last)
        assert f"{rows[-1]['eval/gold_scores']:.3f}" in page, "the table shows the last evaluation"
    assert all(row == before["step3-ppo"] for row in before.values()), "all start from the same model and prompts"
    assert {record_of(folder / name)["seeds"]["seed"] for name in runs} == {1234}


@pytest.mark.slow
def test_two_processes_that_shard_everything(tmp_path):
    """The same three steps through the launcher at ZeRO 3; the models open in plain transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = tmp_path / "quick"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = run_small("main.py", folder, "--num_gpus", 2, "--zero_stage", 3, PATH=path, DS_ACCELERATOR="cpu")
    assert "2 processes" in result.stderr + result.stdout
    for name in ("step3-ppo", "step3-ma-ppo"):
        config = config_of(folder / name)
        assert (config["actor_zero_stage"], config["critic_zero_stage"]) == (3, 3)
        assert record_of(folder / name)["batches"]["world_size"] == 2
        weights = AutoModelForCausalLM.from_pretrained(folder / name / "actor").parameters()
        assert all(weight.isfinite().all() for weight in weights)
    AutoModelForSequenceClassification.from_pretrained(folder / "step2-reward")


@pytest.mark.slow
@pytest.mark.xdist_group("sandbox")
@pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))
def test_programs_small(tmp_path):
    folder = tmp_path / "programs"
    result = run_small("programs.py", folder)
    assert "pass@1, %" in result.stdout and "pass@5, %" in (folder / "pass-at-k.txt").read_text()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "MA-PPO (n = 10)" in page and "pass@5" in page
    answers = read_jsonl(folder / "results" / "problems" / "temperature=1.0" / "sft.jsonl")
    assert len(answers) == 16 and all(len(row["samples"]) == 5 for row in answers)


@pytest.mark.slow
def test_learners_small(tmp_path):
    folder = tmp_path / "learners"
    result = run_small("learners.py", folder)
    page = (folder / "README.md").read_text(encoding="utf-8")
    names = (
        "SFT",
        "DPO",
        "RLOO, K = 4",
        "GRPO, K = 4",
        "GSPO, K = 4",
        "TEMPO, K = 4, n = 5",
        "segment values, 2 of 2",
    )
    for name in (*names, "PPO, n = 1", "MA-PPO, n = 5", "best of 16 of SFT", "limit"):
        assert f"| {name} " in page and name in result.stdout
    assert "refuel against sft, scores" in page
    assert "published" not in page, "the published rates are of other dialogues"
    for picture in ("gold-against-kl.png", "dialogues/win-rates.png"):
        assert f"({picture})" in page and (folder / picture).read_bytes().startswith(b"\x89PNG")
    config = config_of(folder / "rloo")
    assert (config["advantage_estimator"], config["samples_per_prompt"]) == ("rloo", 4)
    assert not (folder / "rloo" / "critic").exists() and (folder / "ma-ppo" / "critic").exists()
    updates = {record_of(folder / name)["batches"]["total_updates"] for name in ("rloo", "ppo")}
    assert len(updates) == 1, "RLOO draws as many responses as PPO"


def test_the_limit_by_hand():
    """Of 16 responses half have gold 1: at s they have the share e^s / (1 + e^s), and KL ln 2 − H(share)."""
    from dschat.lab.measure import Answer
    from dschat.quickstart import learners

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners, "gold_score", float)
        points = learners.limit_of([[Answer(str(n % 2), -float(n % 2), 0.0, 5 + n % 2) for n in range(16)]] * 3)
    assert len(points) == 24, "the better half of 16 is 8"
    share = math.e**2 / (1 + math.e**2)
    kl = math.log(2) + share * math.log(share) + (1 - share) * math.log(1 - share)
    assert points[2].gold == [pytest.approx(share)] * 3 and points[2].kl == [pytest.approx(kl)] * 3
    assert points[2].score == [pytest.approx(-share)] * 3 and points[2].tokens == [pytest.approx(5 + share)] * 3


def test_the_table_of_losses_by_hand():
    """Accuracies of 0.5 and 0.7 have the mean 0.6 and, of two, the standard error 0.1."""
    average = {"eval/accuracy": 0.5, "eval/end_accuracy": 0.25, "eval/mean_accuracy": 0.75}
    printed = table({"end": [{"eval/accuracy": 0.5}, {"eval/accuracy": 0.7}], "average": [average]})
    assert printed.splitlines()[2:] == [
        "| `end` |  | 60.0 ± 10.0 % | 60.0 ± 10.0 % |",
        "| `average` | 75.0 % | 50.0 % | 25.0 % |",
    ]


@pytest.mark.slow
def test_reward_losses_small(tmp_path):
    result = run_small("reward_losses.py", tmp_path / "out", "--seeds", "1")
    table = (tmp_path / "out" / "reward-losses.md").read_text(encoding="utf-8")
    assert table.strip() in result.stdout and "27 held-out pairs" in result.stdout
    assert [row.split("`")[1] for row in table.splitlines()[2:]] == ["end", "last_token", "per_sample", "average"]
