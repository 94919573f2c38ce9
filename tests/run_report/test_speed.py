# SPDX-License-Identifier: Apache-2.0
"""How many updates a run needs to where another ended: by hand, and in the report's table and picture."""

import pytest

from dschat.run_report.build import build_report, goal_levels, read_runs
from dschat.run_report.summary import compare_runs, final, first_at, trailing_mean
from report_runs import Page, edit_rows, table_of


def outcome_of(runs):
    return compare_runs(*read_runs(runs), "Runs", [])


def test_means_over_a_tenth_of_the_run():
    """Of 20 numbers two are averaged, of 5 one."""
    assert trailing_mean([0.0, 2, 4, 8] + [8] * 16)[:5].tolist() == [0, 1, 3, 6, 8]
    assert trailing_mean([3.0, 1, 2]).tolist() == [3, 1, 2]
    assert final([0.0] * 18 + [1, 3]) == 2
    assert first_at([0.0, 2, 4, 8] + [8] * 16, 5.0) == 3
    assert first_at([1.0, 2], 3.0) is None


def faster(runs, factor):
    """Gold and scores of MA-PPO grow so many times as fast; those of PPO end at 1 and 10 after ten updates."""

    def change(_, row):
        grown = {key: factor * row[key] for key in ("objective/gold_scores", "objective/scores") if key in row}
        return row | grown

    edit_rows(runs["MA-PPO"] / "metrics.jsonl", change)
    return runs


def test_table(two_runs):
    table = table_of(outcome_of(faster(two_runs, 2)), "speed")
    assert table.headers == [
        "updates to where PPO ends",
        *("gold score", "times fewer", "reward-model score", "times fewer"),
    ]
    assert table.rows == [["MA-PPO", "5", "2.00", "5", "2.00"]]


def test_the_first_run_is_what_others_are_compared_with(two_runs):
    runs = dict(reversed(faster(two_runs, 2).items()))
    assert table_of(outcome_of(runs), "speed").rows == [["PPO", "not reached", "–", "not reached", "–"]]


def test_updates_are_those_of_the_optimiser(two_runs):
    """Four updates per rollout: rows are logged every fourth update."""
    runs = faster(two_runs, 2)
    for folder in runs.values():
        edit_rows(folder / "metrics.jsonl", lambda _, row: row | {"update": 4 * row["update"]})
        (folder / "samples" / "update-000010.jsonl").rename(folder / "samples" / "update-000040.jsonl")
    assert table_of(outcome_of(runs), "speed").rows == [["MA-PPO", "20", "2.00", "20", "2.00"]]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_rollouts_that_were_left_out(two_runs, value):
    """The fifth update of MA-PPO has no numbers: it is the sixth that is there."""

    def lose(_, row):
        return row | ({"objective/gold_scores": value} if row["update"] == 5 else {})

    runs = faster(two_runs, 2)
    edit_rows(runs["MA-PPO"] / "metrics.jsonl", lose)
    assert table_of(outcome_of(runs), "speed").rows[0][1:3] == ["6", "1.67"]


def test_one_run_has_nothing_to_be_compared_with(two_runs):
    runs = {"PPO": two_runs["PPO"]}
    assert table_of(outcome_of(runs), "speed") is None
    assert goal_levels(*read_runs(runs)) == {}


def test_lines_of_the_picture(two_runs):
    levels = goal_levels(*read_runs(two_runs))
    assert levels == {"objective/gold_scores": pytest.approx(1.0), "objective/scores": 10.0}


def test_page(two_runs, tmp_path, no_pictures):
    build_report(faster(two_runs, 2), tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert "updates to where PPO ends" in page.text and "where PPO ends" in page.text
