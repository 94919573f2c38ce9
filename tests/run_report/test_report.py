# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences of a report, against numbers worked out by hand."""

import logging

import pytest

from dschat.run_report.build import read_runs
from dschat.run_report.summary import RunReport, compare_runs, metric_label
from report_runs import edit_rows, make_run, table_of


def outcome_of(runs) -> RunReport:
    """What `build_report` returns, without the page and the picture."""
    return compare_runs(*read_runs(runs), "Two runs", ["A remark."])


def results_of(runs):
    return table_of(outcome_of(runs), "results")


def test_table_holds_the_hand_computed_numbers(two_runs):
    outcome = outcome_of(two_runs)
    # Standard error of two values a and b: |a − b| / 2. KL 1.5 and length 3 in every sample.
    assert table_of(outcome, "results").headers[1:] == [
        "gold score",
        "reward-model score",
        "KL to SFT (nats)",
        "length (tokens)",
        "ended by EOS (%)",
        "held-out prompts",
    ]
    same = ["1.500 ± 0.000", "3.0 ± 0.0", "100.0 ± 0.0", "2"]
    assert table_of(outcome, "results").rows == [
        ["SFT", "0.200 ± 0.100", "2.000 ± 1.000", *same],
        ["PPO", "0.500 ± 0.100", "5.000 ± 1.000", *same],
        ["MA-PPO", "0.700 ± 0.200", "7.000 ± 2.000", *same],
    ]
    # Updates, prompts, seconds, macro length, 0.95 and √0.95 = 0.9747, explained variance of update 10 (last tenth).
    assert table_of(outcome, "training").rows == [
        ["PPO", "10", "80", "15", "1.00", "0.950", "1.00"],
        ["MA-PPO", "10", "80", "15", "2.00", "0.975", "1.00"],
    ]


@pytest.mark.parametrize("order", [("PPO", "MA-PPO"), ("MA-PPO", "PPO")])
def test_the_higher_run_is_named_whatever_the_order(tmp_path, order):
    # By prompt MA-PPO − PPO is 0.1 and 0.28: mean 0.19, standard error 0.09.
    runs = {"PPO": make_run(tmp_path / "a", [0.4, 0.6]), "MA-PPO": make_run(tmp_path / "b", [0.5, 0.88], ngram=2)}
    findings = outcome_of({name: runs[name] for name in order}).findings
    assert findings[-1] == (
        "MA-PPO ended higher than PPO in gold score: 0.690 against 0.500, a difference of 0.190 ± 0.090"
        " (± one standard error, 2 held-out prompts, paired). That is more than two standard errors."
    )
    assert sorted(findings[:-1]) == [
        "MA-PPO: gold score from 0.200 (SFT) to 0.690, 3.45 times.",
        "PPO: gold score from 0.200 (SFT) to 0.500, 2.50 times.",
    ]


def test_a_small_lead_is_called_small(tmp_path):
    # By prompt first − second is 0.2 and −0.1: mean 0.05, standard error 0.15.
    runs = {"first": make_run(tmp_path / "a", [0.4, 0.6]), "second": make_run(tmp_path / "b", [0.2, 0.7])}
    assert outcome_of(runs).findings[-1] == (
        "first ended higher than second in gold score: 0.500 against 0.450, a difference of 0.050 ± 0.150"
        " (± one standard error, 2 held-out prompts, paired). That is within two standard errors."
    )


def test_equal_runs_are_called_equal(tmp_path):
    runs = {"b": make_run(tmp_path / "b", [0.4, 0.6]), "a": make_run(tmp_path / "a", [0.6, 0.4])}
    assert outcome_of(runs).findings[-1] == "a and b ended with the same gold score, 0.500."


def test_the_highest_of_three_runs_is_set_against_each_other_one(tmp_path):
    runs = {name: make_run(tmp_path / name, gold) for name, gold in [("a", [0, 1]), ("b", [0.8, 0.8]), ("c", [0, 0])]}
    findings = outcome_of(runs).findings[3:]
    assert [finding.split(" in ")[0] for finding in findings] == ["b ended higher than a", "b ended higher than c"]


def test_a_fall_to_zero_is_given_without_a_ratio(tmp_path):
    findings = outcome_of({"a": make_run(tmp_path / "a", [0.0, 0.0])}).findings
    assert findings == ["a: gold score from 0.200 (SFT) to 0.000."]


def test_prompts_in_another_order_are_paired_by_their_text(tmp_path):
    # By prompt b − a is 0.30 and 0.32: mean 0.31, standard error 0.01.
    runs = {
        "a": make_run(tmp_path / "a", [0.4, 0.6]),
        "b": make_run(tmp_path / "b", [0.92, 0.7], prompts=("p1", "p0")),
    }
    assert "0.310 ± 0.010 (± one standard error, 2 held" in outcome_of(runs).findings[-1]


@pytest.mark.parametrize("prompts", [("x", "y"), ("p0", "p0")])
def test_other_prompts_are_compared_unpaired(tmp_path, prompts):
    runs = {"a": make_run(tmp_path / "a", [0.4, 0.6]), "b": make_run(tmp_path / "b", [0.7, 0.92], prompts=prompts)}
    outcome = outcome_of(runs)
    # √(0.1² + 0.11²) = 0.14866.
    assert "0.310 ± 0.149 (± one standard error, 2 and 2 held-out prompts, unpaired)" in outcome.findings[-1]


def test_samples_that_are_only_a_part_give_no_standard_error(two_runs):
    # The means of more prompts than the samples file holds.
    wider = {"eval/gold_scores": 0.45, "eval/scores": 4.0}
    edit_rows(two_runs["PPO"] / "metrics.jsonl", lambda index, row: row | (wider if index == 11 else {}))
    outcome = outcome_of(two_runs)
    assert table_of(outcome, "results").rows[1][1:3] == ["0.450", "4.000"]
    assert table_of(outcome, "results").rows[1][-1] == "–"
    assert "difference of 0.250 (no standard error" in outcome.findings[-1]
    assert sum("where the samples file does not" in remark for remark in outcome.remarks) == 2


def test_kl_and_length_are_those_of_the_samples(two_runs):
    def longer(index, row):
        return row | {"kl": 1.0 + index, "length": 2 + 2 * index}

    edit_rows(two_runs["PPO"] / "samples" / "update-000010.jsonl", longer)
    # KL 1 and 2, lengths 2 and 4: standard errors 0.5 and 1.
    assert results_of(two_runs).rows[1][3:5] == ["1.500 ± 0.500", "3.0 ± 1.0"]


def test_a_number_that_is_not_finite_gives_no_error(two_runs):
    path = two_runs["PPO"] / "samples" / "update-000010.jsonl"
    edit_rows(path, lambda index, row: row | ({"kl": None} if index else {}))
    assert results_of(two_runs).rows[1][3] == "1.500"


def test_different_starts_get_a_row_each(two_runs):
    other = {"eval/gold_scores": 0.25}
    edit_rows(two_runs["MA-PPO"] / "metrics.jsonl", lambda index, row: row | (other if index == 0 else {}))
    names = [row[0] for row in results_of(two_runs).rows]
    assert names == ["SFT, start of PPO", "SFT, start of MA-PPO", "PPO", "MA-PPO"]


def test_runs_without_a_metric_function_compare_scores(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: {key: row[key] for key in row if "gold" not in key})
    (folder / "config.json").write_text('{"reward_function": "m.py:f"}')
    outcome = outcome_of({"a": folder})
    assert table_of(outcome, "results").headers[1:3] == ["reward-function score", "KL to SFT (nats)"]
    assert outcome.findings == ["a: reward-function score from 2.000 (SFT) to 5.000, 2.50 times."]
    (folder / "config.json").write_text('{"reward_function": ["m.py:f", "m.py:g"]}')
    assert table_of(outcome_of({"a": folder}), "results").headers[1] == "score"
    (folder / "config.json").write_text('{"reward_function": ["m.py:f"], "reward_url": "http://a"}')
    assert table_of(outcome_of({"a": folder}), "results").headers[1] == "score"


def test_runs_with_different_metric_functions_compare_scores(two_runs, caplog):
    for path in [two_runs["PPO"] / "metrics.jsonl", *(two_runs["PPO"] / "samples").iterdir()]:
        path.write_text(path.read_text().replace("gold_scores", "silver"))
    with caplog.at_level(logging.WARNING):
        outcome = outcome_of(two_runs)
    assert "differ in --metric_function" in caplog.text
    assert table_of(outcome, "results").headers[1] == "reward-model score"


def test_the_metric_function_of_the_flags_is_chosen_among_several(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: row | {"eval/another": 1.0})
    assert results_of({"a": folder}).headers[1] == "gold score"


def test_text_holds_the_same_tables_and_sentences(two_runs):
    outcome = outcome_of(two_runs)
    lines = outcome.text().splitlines()
    assert lines[:2] == ["Two runs", ""]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    for row in [row for table in outcome.tables for row in (table.headers, *table.rows)]:
        assert row in cells
    assert all(sentence in lines for sentence in [*outcome.findings, *outcome.remarks, "A remark."])


def test_metric_names_read_as_words():
    assert metric_label("gold_scores") == "gold score"
    assert metric_label("pass_rate") == "pass rate"
