# SPDX-License-Identifier: Apache-2.0
"""pass@k: the estimator against counting, files against hand arithmetic, the published rows against each other."""

import json
from pathlib import Path

import pytest

from cli_runs import write_jsonl
from dschat.base.errors import UserError
from dschat.cli import main
from dschat.programs.pass_at_k import pass_at_k, pass_rates, pass_table


def problem(difficulty: str, *statuses: str) -> dict:
    """A row of results."""
    return {"prompt": "p", "difficulty": difficulty, "samples": [{"status": status} for status in statuses]}


@pytest.fixture
def results(tmp_path) -> Path:
    rows = [
        problem("interview", "passed", "wrong", "wrong", "timeout", "wrong"),
        problem("interview", *["wrong"] * 5),
        problem("introductory", "passed", "passed", "compile_error", "wrong", "wrong"),
    ]
    return write_jsonl(tmp_path / "model.jsonl", rows)


@pytest.mark.parametrize(
    ("n", "c", "k", "by_hand"), [(5, 1, 1, 0.2), (5, 2, 5, 1.0), (10, 3, 5, 1 - 21 / 252), (4, 0, 2, 0)]
)
def test_the_estimator_by_hand(n, c, k, by_hand):
    assert pass_at_k(n, c, k) == pytest.approx(by_hand, abs=1e-12)


def test_rates_of_a_file(results):
    rates = pass_rates([results], (1, 5))
    interview, introductory, everything = rates.to_dict("records")
    assert (interview["model"], interview["difficulty"], interview["problems"]) == ("model", "interview", 2)
    assert interview["pass@1"].value == pytest.approx(0.1) and interview["pass@5"].value == pytest.approx(0.5)
    assert introductory["pass@1"].value == pytest.approx(0.4) and introductory["pass@5"].value == 1
    assert everything["pass@1"].value == pytest.approx(0.2) and everything["pass@5"].value == pytest.approx(2 / 3)
    assert everything["pass@1"].low < 0.2 < everything["pass@1"].high
    table = pass_table(rates)
    assert "model" in table and "20.0 [" in table


def test_files_of_one_name_are_told_apart(tmp_path):
    """A model at two temperatures, in the folders that `dschat programs` writes to."""
    folders = [tmp_path / f"temperature={temperature}" for temperature in (0.5, 1.0)]
    for folder in folders:
        folder.mkdir()
    files = [write_jsonl(folder / "m.jsonl", [problem("", "passed")]) for folder in folders]
    assert list(pass_rates(files, (1,))["model"]) == ["temperature=0.5/m", "temperature=1.0/m"]


def test_programs_that_were_not_run_are_no_samples(tmp_path, caplog):
    """pass@3 of two problems, one of whose samples was not run: that of the other alone. Neither has four samples."""
    rows = [problem("", "invalid", "passed", "wrong"), problem("", "passed", "passed", "wrong")]
    rates = pass_rates([write_jsonl(tmp_path / "m.jsonl", rows)], (1, 3, 4))
    (row,) = rates.to_dict("records")
    assert row["problems"] == 2 and row["pass@1"].value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert row["pass@3"].value == 1.0 and row["pass@4"] is None
    assert "m.jsonl: pass@3 leaves out 1 of 2 problems" in caplog.text and "pass@1" not in caplog.text
    assert "published" not in pass_table(rates) and "–" in pass_table(rates)


def test_other_files_are_named(tmp_path):
    file = write_jsonl(tmp_path / "m.jsonl", [{"prompt": "p", "difficulty": "", "samples": 3}])
    with pytest.raises(UserError, match="m.jsonl:1: column 'samples'"):
        pass_rates([file], (1,))


def test_the_commands(results, tmp_path, capsys):
    assert main(["pass-at-k", str(results), "-k", "1", "3"]) == 0
    assert "pass@3, %" in capsys.readouterr().out
    assert main(["report", str(results), "--output", str(tmp_path / "report")]) == 0
    assert "pass@5, %" in capsys.readouterr().out
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["programs"][2]["rates"]["pass@1"]["value"] == pytest.approx(0.2)
