# SPDX-License-Identifier: Apache-2.0
"""Rows and tables of what the harness returns; the harness itself is in tests/frameworks/test_lm_eval.py."""

import json
import sys

from dschat.cli import main
from dschat.evaluation.benchmarks import result_rows
from dschat.evaluation.options import ReportOptions
from dschat.evaluation.report import report

# A group of two tasks, and a task whose answers pass two filters, as lm_eval 0.4.13 returns them.
RESULTS = {
    "results": {
        "exams": {"sample_len": 6, "acc,none": 0.5, "acc_stderr,none": 0.2, "sample_count": {"acc,none": 6}},
        "history": {"sample_len": 2, "acc,none": 1.0, "acc_stderr,none": 0.0},
        "law": {"sample_len": 4, "acc,none": 0.25, "acc_stderr,none": 0.25},
        "sums": {
            "sample_len": 10,
            "exact_match,strict": 0.125,
            "exact_match_stderr,strict": "N/A",
            "bits,none": float("nan"),
            "bits_stderr,none": "N/A",
        },
    },
    "groups": {"exams": {"acc,none": 0.5}},
    "group_subtasks": {"exams": ["history", "law"]},
    "versions": {"exams": "2.0", "history": 1.0, "law": 1.0, "sums": 3.0},
    "n-shot": {"exams": 0, "history": 0, "law": 0, "sums": 5},
    "higher_is_better": {"exams": {"acc": True}, "sums": {"exact_match": True, "bits": False}},
    "lm_eval_version": "0.4.13",
}


def test_models_side_by_side(tmp_path):
    """Values share a line only where they were measured in the same way."""
    other = json.loads(json.dumps(RESULTS)) | {"n-shot": RESULTS["n-shot"] | {"sums": 8}}
    for name, results in {"SFT": RESULTS, "PPO": other}.items():
        lines = [json.dumps(row) for row in result_rows(name, results, chat_template=False)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [tmp_path / "SFT.jsonl", tmp_path / "PPO.jsonl"]
    text = report(ReportOptions(files=files, output=tmp_path / "out"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[0] == ["task", "version", "metric", "shots", "prompts", "rows", "SFT", "PPO"]
    assert cells[2:5] == [
        ["exams", "2.0", "acc ↑", "0", "plain", "6", "0.500 ± 0.200", "0.500 ± 0.200"],
        ["sums", "3.0", "exact_match (strict) ↑", "5", "plain", "10", "0.125", "–"],
        ["sums", "3.0", "exact_match (strict) ↑", "8", "plain", "10", "–", "0.125"],
    ]
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["value"] for row in numbers["models"]["PPO"]] == [0.5, 1.0, 0.25, 0.125, None]


def test_without_the_harness_its_extra_is_named(monkeypatch, capsys, caplog):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "m", "--tasks", "gsm8k", "--output_dir", "out"]) == 2
    assert "dschat evaluate needs lm_eval" in caplog.text and "pip install 'ma-rlhf[bench]'" in caplog.text
