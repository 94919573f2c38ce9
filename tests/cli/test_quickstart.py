# SPDX-License-Identifier: Apache-2.0
"""The quickstart with --small: every part runs and the report stands."""

import json
import os
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cli_runs import TRAINING, evaluation_rows, read_jsonl, run_command
from dschat.scoring.programs.levels import weakness


class Tags(HTMLParser):
    """Counts elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href") and value]


def test_small(tmp_path):
    folder = tmp_path / "quick"
    command = [sys.executable, TRAINING / "quickstart" / "main.py", "--small", "--output_dir", folder]
    result = run_command(command).expect(0)
    assert "Traceback" not in result.stdout + result.stderr
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.count["table"] >= 1 and tags.count["html"] == 1
    assert not [link for link in tags.links if link.startswith(("http:", "https:", "//"))], "it opens without network"
    for name in ("SFT", "PPO (n = 1)", "MA-PPO (n = 5)", "PPO, λ = .99", "updates to where PPO (n = 1) ends"):
        assert name in page and name in result.stdout
    for step in ("step1_supervised_finetuning", "step2_reward_model_finetuning", "step3_rlhf_finetuning"):
        assert f"{step}/main.py" in result.stdout
    assert "report.html" in result.stdout.splitlines()[-1]
    for judge in ("gold score", "reward-model score"):
        pairs = [
            line
            for line in result.stdout.splitlines()
            if " against " in line and "against SFT" not in line and judge in line and "[" in line
        ]
        assert len(pairs) == 2, "the win rate of the best run against both others, with its interval"

    runs = {"step3-ppo": (1, 0.95), "step3-ma-ppo": (5, 0.95), "step3-ppo-99": (1, 0.99)}
    before = {}
    for name, (ngram, lam) in runs.items():
        config = json.loads((folder / name / "train_config.json").read_text())
        assert (config["termination_condition"], config["ngram"], config["lam"]) == ("fixed", ngram, lam)
        assert config["critic_model_name_or_path"].endswith("step1-sft") and config["whiten_advantages"]
        rows = evaluation_rows(folder / name)
        assert all("eval/gold_scores" in row for row in rows)
        before[name] = {key: value for key, value in rows[0].items() if key != "seconds"}
        last = read_jsonl(folder / name / "samples" / f"update-{rows[-1]['update']:06d}.jsonl")
        assert all(0 <= sample["gold_scores"] <= 1 for sample in last)
        assert f"{rows[-1]['eval/gold_scores']:.3f}" in page, "the table shows the last evaluation"
    assert all(row == before["step3-ppo"] for row in before.values()), "all start from the same model and prompts"
    seeds = {json.loads((folder / name / "run.json").read_text())["seeds"]["seed"] for name in runs}
    assert seeds == {1234}


def test_help():
    result = run_command([sys.executable, TRAINING / "quickstart" / "main.py", "--help"]).expect(0)
    assert all(flag in result.stdout for flag in ("--output_dir", "--seed", "--small"))


@pytest.mark.slow
def test_two_processes_that_shard_everything(tmp_path):
    """The same three steps through the launcher at ZeRO 3; the models open in plain transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = tmp_path / "quick"
    command = [sys.executable, TRAINING / "quickstart" / "main.py", "--small", "--output_dir", folder]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = run_command([*command, "--num_gpus", 2, "--zero_stage", 3], PATH=path, DS_ACCELERATOR="cpu").expect(0)
    assert "2 processes" in result.stderr + result.stdout and "Traceback" not in result.stderr
    for name in ("step3-ppo", "step3-ma-ppo"):
        config = json.loads((folder / name / "train_config.json").read_text())
        assert (config["actor_zero_stage"], config["critic_zero_stage"]) == (3, 3)
        assert json.loads((folder / name / "run.json").read_text())["batches"]["world_size"] == 2
        assert all(
            weight.isfinite().all()
            for weight in AutoModelForCausalLM.from_pretrained(folder / name / "actor").parameters()
        )
    AutoModelForSequenceClassification.from_pretrained(folder / "step2-reward")


@pytest.mark.slow
@pytest.mark.xdist_group("sandbox")
@pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))
def test_programs_small(tmp_path):
    folder = tmp_path / "programs"
    command = [sys.executable, TRAINING / "quickstart" / "programs.py", "--small", "--output_dir", folder]
    result = run_command(command).expect(0)
    assert "Traceback" not in result.stdout + result.stderr
    assert "pass@1, %" in result.stdout and "pass@5, %" in (folder / "pass-at-k.txt").read_text()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "MA-PPO (n = 10)" in page and "pass@5" in page
    answers = read_jsonl(folder / "results" / "problems" / "temperature=1.0" / "sft.jsonl")
    assert len(answers) == 16 and all(len(row["samples"]) == 5 for row in answers)


@pytest.mark.slow
def test_learners_small(tmp_path):
    folder = tmp_path / "learners"
    command = [sys.executable, TRAINING / "quickstart" / "learners.py", "--small", "--output_dir", folder]
    result = run_command(command).expect(0)
    assert "Traceback" not in result.stdout + result.stderr
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name in ("SFT", "DPO", "RLOO, K = 4", "PPO, n = 1", "MA-PPO, n = 5", "best of 16 of SFT"):
        assert f"| {name} " in page and name in result.stdout
    assert "refuel against sft, scores" in page
    assert "published" not in page, "the published rates are of other dialogues"
    for picture in ("gold-against-kl.png", "dialogues/win-rates.png"):
        assert f"({picture})" in page and (folder / picture).read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "rloo" / "train_config.json").read_text())
    assert (config["advantage_estimator"], config["samples_per_prompt"]) == ("rloo", 4)
    assert not (folder / "rloo" / "critic").exists() and (folder / "ma-ppo" / "critic").exists()
    updates = {
        json.loads((folder / name / "run.json").read_text())["batches"]["total_updates"] for name in ("rloo", "ppo")
    }
    assert len(updates) == 1, "RLOO draws as many responses as PPO"
