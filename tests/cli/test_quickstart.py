# SPDX-License-Identifier: Apache-2.0
"""The quickstart with --small: every part runs and the report stands."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from cli_runs import Result, evaluation_rows, read_jsonl, run_command, warm_programs
from dschat.programs.levels import weakness
from dschat.quickstart import reviews
from dschat.quickstart.inputs import RUNS, SFT_CRITIC_RUNS
from dschat.quickstart.options import QuickstartOptions
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from warm_python import PROGRAM_OF_CHILDREN


def run_small(example: list[str], folder: Path, *flags: object, **variables: str) -> Result:
    """Runs an example of the quickstart; without a sandbox, its commands start without the seconds of imports."""
    command = [sys.executable, "-m", "dschat", "quickstart", *example, "--small", "--output_dir", folder, *flags]
    if not example:
        variables[PROGRAM_OF_CHILDREN] = str(warm_programs() / "python")
    result = run_command(command, **variables).expect(0)
    assert "Traceback" not in result.stdout + result.stderr
    return result


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "train_config.json").read_text())


def test_the_runs_of_all(monkeypatch, tmp_path):
    """Their flags: nothing is trained here. The last one has λ = .95^(1/5)."""
    commands, reported = [], []
    for name in ("train_sft", "train_reward_model"):
        monkeypatch.setattr(reviews, name, lambda *_: None)
    monkeypatch.setattr(reviews, "make_inputs", lambda *_: (tmp_path, tmp_path))
    monkeypatch.setattr(reviews, "run_policies", lambda runs, *_: commands.extend(runs))
    monkeypatch.setattr(reviews, "build_report", lambda runs, *_, **__: reported.extend(runs) or MagicMock())
    reviews.run(QuickstartOptions(output_dir=tmp_path, seed=7, all=True))
    assert reported == [*RUNS, *SFT_CRITIC_RUNS]
    found = {}
    for words in commands:
        flat = parse(PPOConfig, words).flat()
        critic = Path(flat["critic_model_name_or_path"]).name
        found[Path(flat["output_dir"]).name] = (flat["ngram"], flat["lam"], flat["value_function"], critic)
        assert (flat["seed"], flat["missing_eos_penalty"], flat["whiten_advantages"]) == (7, 5, True)
        assert flat["termination_condition"] == "fixed"
    assert found == {
        "step3-ppo": (1, 0.95, "equal", "step2-reward"),
        "step3-ma-ppo": (5, 0.95, "first", "step2-reward"),
        "step3-ppo-sft-critic": (1, 0.95, "equal", "step1-sft"),
        "step3-ma-ppo-sft-critic": (5, 0.95, "equal", "step1-sft"),
        "step3-ppo-99-sft-critic": (1, 0.99, "equal", "step1-sft"),
    }


def test_small(tmp_path):
    folder = tmp_path / "quick"
    result = run_small([], folder, "--seed", 1234)
    assert len(json.loads((folder / "report.json").read_text())["runs"]) == len(RUNS)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page), "it opens without network"
    for name in ("SFT", *RUNS, "the gold score of"):
        assert name in page and name in result.stdout
    assert "report.html" in result.stdout.splitlines()[-1]
    (difference,) = [line for line in (folder / "report.md").read_text().splitlines() if " in gold score: " in line]
    assert "± one standard error" in difference

    runs = {"step3-ppo": (1, "equal"), "step3-ma-ppo": (5, "first")}
    assert config_of(folder / "step2-reward")["reward_loss"] == "per_sample"
    before = {}
    for name, settings in runs.items():
        config = config_of(folder / name)
        assert (config["ngram"], config["value_function"]) == settings
        assert config["critic_model_name_or_path"].endswith("step2-reward")
        rows = evaluation_rows(folder / name)
        before[name] = {key: value for key, value in rows[0].items() if key != "seconds"}
        assert f"{rows[-1]['eval/gold_scores']:.3f}" in page, "the table shows the last evaluation"
    assert before["step3-ppo"] == before["step3-ma-ppo"], "both start from the same model and prompts"


@pytest.mark.slow
@pytest.mark.xdist_group("sandbox")
@pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))
def test_programs_small(tmp_path):
    folder = tmp_path / "programs"
    result = run_small(["programs"], folder)
    assert "pass@1, %" in result.stdout and "pass@5, %" in (folder / "pass-at-k.txt").read_text()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "MA-PPO (n = 10)" in page and "pass@5" in page
    answers = read_jsonl(folder / "results" / "problems" / "temperature=1.0" / "sft.jsonl")
    assert len(answers) == 16 and all(len(row["samples"]) == 5 for row in answers)
