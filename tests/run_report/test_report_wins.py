# SPDX-License-Identifier: Apache-2.0
"""Win rates between runs in the report of step 3, against numbers worked out by hand."""

import pytest

from dschat.run_report.build import build_report, read_runs
from dschat.run_report.summary import compare_runs
from report_runs import edit_rows, make_run, make_two_runs, table_of

# Two of two, by Wilson: from 2 / (2 + z²) = 2 / 5.841459 = 34.2 % up; none of two: up to 65.8 %.
BOTH = ["100.0 [34.2, 100.0]", "0.0", "0.0 [0.0, 65.8]", "100.0", "2"]
# One of two: (1 + z²/2) / (2 + z²) = 1/2 ± 1.959964 / 5.841459 · √(1/2 + 0.960365) = 1/2 ± 0.405469.
ONE = "50.0 [9.5, 90.5]"


def outcome_of(runs):
    return compare_runs(*read_runs(runs), "Runs", [])


@pytest.mark.parametrize("names", [("PPO", "MA-PPO"), ("MA-PPO", "PPO")])
def test_the_highest_run_against_the_others_and_each_against_sft(tmp_path, names):
    """Gold 0.1, 0.3 of SFT; 0.4, 0.6 of PPO; 0.5, 0.9 of MA-PPO; the scores are ten times that."""
    runs = make_two_runs(tmp_path)
    outcome = outcome_of({name: runs[name] for name in names})
    table = table_of(outcome, "wins")
    assert table.headers == ["win rates (%)", "judge", "win", "tie", "loss", "win + ½ tie", "prompts"]
    pairs = ["MA-PPO against PPO", *[f"{name} against SFT" for name in names]]
    judges = ["gold score", "reward-model score"]
    assert table.rows == [[pair, judge, *BOTH] for pair in pairs for judge in judges]
    assert "bootstrap over prompts" in outcome.remarks[-1]


def test_ties_and_losses(tmp_path):
    """By prompt: gold 0.5 beside 0.5 and 0.9 beside 0.6; the scores were changed to 1, 1 beside 2, 0."""
    runs = {"a": make_run(tmp_path / "a", [0.5, 0.9]), "b": make_run(tmp_path / "b", [0.6, 0.5], prompts=("p1", "p0"))}
    for name, scores in (("a", (1, 1)), ("b", (0, 2))):
        mean = {"eval/scores": sum(scores) / 2}
        edit_rows(runs[name] / "metrics.jsonl", lambda i, row, mean=mean: row | (mean if i == 11 else {}))
        file = runs[name] / "samples" / "update-000010.jsonl"
        edit_rows(file, lambda i, row, scores=scores: row | {"score": scores[i]})
    rows = table_of(outcome_of(runs), "wins").rows
    # A win and a tie: draws of 1 and 1/2 with replacement have a mean between 1/2 and 1.
    assert rows[0] == ["a against b", "gold score", ONE, "50.0", "0.0 [0.0, 65.8]", "75.0 [50.0, 100.0]", "2"]
    assert rows[1] == ["a against b", "reward-model score", ONE, "0.0", ONE, "50.0 [0.0, 100.0]", "2"]


def test_pairs_without_all_samples_or_with_other_prompts_are_left_out(tmp_path):
    runs = make_two_runs(tmp_path) | {"other": make_run(tmp_path / "o", [0.1, 0.2], prompts=("x", "y"))}
    wider = {"eval/gold_scores": 0.45}
    edit_rows(runs["PPO"] / "metrics.jsonl", lambda index, row: row | (wider if index == 11 else {}))
    rows = [row[:2] for row in table_of(outcome_of(runs), "wins").rows]
    assert rows == [
        ["MA-PPO against PPO", "reward-model score"],
        ["PPO against SFT", "reward-model score"],
        ["MA-PPO against SFT", "gold score"],
        ["MA-PPO against SFT", "reward-model score"],
        ["other against SFT", "gold score"],
        ["other against SFT", "reward-model score"],
    ]


def test_without_any_pair_there_is_no_table(tmp_path, no_pictures):
    run = make_run(tmp_path / "a", [0.4, 0.6])
    wider = {"eval/gold_scores": 0.9, "eval/scores": 9.0}
    edit_rows(run / "metrics.jsonl", lambda index, row: row | (wider if index == 11 else {}))
    outcome = build_report({"a": run}, tmp_path / "out")
    assert table_of(outcome, "wins") is None
    assert "win rates" not in outcome.text().lower()
    assert "win rates" not in (tmp_path / "out" / "report.html").read_text().lower()


def test_page_and_text_hold_the_table(built):
    outcome, page = built.outcome, built.page
    assert len(page.of_class("wins")) == 1
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in outcome.text().splitlines()]
    for row in [table_of(outcome, "wins").headers, *table_of(outcome, "wins").rows]:
        assert "".join(row) in page.text
        assert row in cells
