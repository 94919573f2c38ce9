# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences of a report, against numbers worked out by hand: evaluations, differences, speed."""

import json
import logging

import numpy as np
import pytest

from dschat.evaluation.page import Report
from dschat.evaluation.run_data import read_log, read_run
from dschat.evaluation.run_summary import compare_runs, final, first_at, metric_label, trailing_mean
from dschat.evaluation.runs import evaluation_table, labels_of_runs
from handmade_runs import edit_rows, make_run, table_of, write_lines

WIDER = {"eval/gold_scores": 0.45, "eval/scores": 4.0}  # means of more prompts than the samples file holds


def outcome_of(runs) -> Report:
    """What `build_report` returns, without the page and the picture."""
    data = [read_run(name, folder) for name, folder in runs.items()]
    return compare_runs(data, labels_of_runs(data), "Two runs", ["A remark."])


def labels_of(runs) -> list[str]:
    """What the report calls the scores that runs are compared by."""
    return list(labels_of_runs([read_run(name, folder) for name, folder in runs.items()]).values())


def rows_of(runs, kind):
    return table_of(outcome_of(runs), kind).rows


def widen(folder, means=WIDER):
    """The last evaluation of a run, which is row 11, gets other means."""
    edit_rows(folder / "metrics.jsonl", lambda index, row: row | (means if index == 11 else {}))


def test_table_holds_the_hand_computed_numbers(two_runs):
    outcome = outcome_of(two_runs)
    # Updates, prompts, seconds, macro length, 0.95 and √0.95 = 0.9747, explained variance of update 10 (last tenth).
    assert table_of(outcome, "training").rows == [
        ["PPO", "10", "80", "15", "1.00", "0.950", "1.00"],
        ["MA-PPO", "10", "80", "15", "2.00", "0.975", "1.00"],
    ]
    lines = outcome.text().splitlines()
    assert lines[:2] == ["Two runs", ""]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert all(row in cells for table in outcome.tables for row in (table.headers, *table.rows))
    assert all(sentence in lines for sentence in [*outcome.findings, *outcome.remarks, "A remark."])


def test_the_first_the_best_and_the_last_evaluation_by_hand(two_runs):
    """Scores of MA-PPO: 2 of the SFT model, 9 after five updates, 7 after ten; one run was stopped after the first."""
    metrics = two_runs["MA-PPO"] / "metrics.jsonl"
    middle = {"update": 5, "samples": 40, "seconds": 9.0, "eval/scores": 9.0, "eval/scores_stderr": 0.5}
    metrics.write_text(metrics.read_text() + json.dumps(middle) + "\n")
    stopped = two_runs["PPO"] / "metrics.jsonl"
    stopped.write_text("".join(stopped.read_text().splitlines(keepends=True)[:3]))
    table = evaluation_table([read_log(name, folder) for name, folder in two_runs.items()])
    assert table.headers == ["run", "evaluation", "update", "gold_scores", "scores", "kl", "length", "eos_rate"]
    assert table.rows == [
        ["PPO", "last, best", "0", "0.200", "2.000", "1.500", "3.000", "1.000"],
        ["MA-PPO", "first", "0", "0.200", "2.000", "1.500", "3.000", "1.000"],
        ["MA-PPO", "best", "5", "–", "9.000 ± 0.500", "–", "–", "–"],
        ["MA-PPO", "last", "10", "0.700", "7.000", "1.500", "3.000", "1.000"],
    ]


@pytest.mark.parametrize(("step", "key", "best"), [("sft", "eval/loss", "3"), ("reward", "eval/accuracy", "1")])
def test_the_best_evaluation_is_the_steps_own(tmp_path, step, key, best):
    """Of 0.5, 0.9, 0.7, 0.3 and 0.4 the smallest loss is that of update 3, the highest accuracy of update 1."""
    numbers = [0.5, 0.9, 0.7, 0.3, 0.4]
    head = {"samples": 0, "seconds": 0.0}
    write_lines(tmp_path / "metrics.jsonl", [head | {"update": n, key: x} for n, x in enumerate(numbers)])
    (tmp_path / "run.json").write_text(json.dumps({"step": step}))
    (tmp_path / "train_config.json").write_text("{}")
    rows = evaluation_table([read_log("run", tmp_path)]).rows
    assert [row[1:3] for row in rows] == [["first", "0"], ["best", best], ["last", "4"]]


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
        "MA-PPO: gold score from 0.200 (SFT) to 0.690.",
        "PPO: gold score from 0.200 (SFT) to 0.500.",
    ]


@pytest.mark.parametrize(
    ("golds", "sentence"),
    [
        # By prompt first − second is 0.2 and −0.1: mean 0.05, standard error 0.15.
        (
            {"first": [0.4, 0.6], "second": [0.2, 0.7]},
            "first ended higher than second in gold score: 0.500 against 0.450, a difference of 0.050 ± 0.150"
            " (± one standard error, 2 held-out prompts, paired). That is within two standard errors.",
        ),
        ({"b": [0.4, 0.6], "a": [0.6, 0.4]}, "a and b ended with the same gold score, 0.500."),
        ({"a": [0.0, 0.0]}, "a: gold score from 0.200 (SFT) to 0.000."),
    ],
)
def test_a_small_lead_equal_runs_and_a_fall(tmp_path, golds, sentence):
    findings = outcome_of({name: make_run(tmp_path / name, gold) for name, gold in golds.items()}).findings
    assert findings[-1] == sentence and len(findings) == 2 * len(golds) - 1


def test_the_highest_of_three_runs_is_set_against_each_other_one(tmp_path):
    runs = {name: make_run(tmp_path / name, gold) for name, gold in [("a", [0, 1]), ("b", [0.8, 0.8]), ("c", [0, 0])]}
    findings = outcome_of(runs).findings[3:]
    assert [finding.split(" in ")[0] for finding in findings] == ["b ended higher than a", "b ended higher than c"]


@pytest.mark.parametrize(
    ("prompts", "gold", "words"),
    [
        # In another order, paired by their text: b − a is 0.30 and 0.32, mean 0.31, standard error 0.01.
        (("p1", "p0"), [0.92, 0.7], "0.310 ± 0.010 (± one standard error, 2 held-out prompts, paired)"),
        # Others: √(0.1² + 0.11²) = 0.14866.
        (("x", "y"), [0.7, 0.92], "0.310 ± 0.149 (± one standard error, 2 and 2 held-out prompts, unpaired)"),
        (("p0", "p0"), [0.7, 0.92], "0.310 ± 0.149 (± one standard error, 2 and 2 held-out prompts, unpaired)"),
    ],
)
def test_only_the_same_prompts_are_paired(tmp_path, prompts, gold, words):
    runs = {"a": make_run(tmp_path / "a", [0.4, 0.6]), "b": make_run(tmp_path / "b", gold, prompts=prompts)}
    assert words in outcome_of(runs).findings[-1]


def test_samples_that_are_only_a_part_give_no_standard_error(two_runs):
    widen(two_runs["PPO"])
    outcome = outcome_of(two_runs)
    assert "difference of 0.250 (no standard error" in outcome.findings[-1]


def test_runs_without_a_metric_function_compare_scores(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: {key: row[key] for key in row if "gold" not in key})
    (folder / "train_config.json").write_text('{"reward_function": ["m.py:f"]}')
    outcome = outcome_of({"a": folder})
    assert labels_of({"a": folder}) == ["reward-function score"]
    assert outcome.findings == ["a: reward-function score from 2.000 (SFT) to 5.000."]
    (folder / "train_config.json").write_text('{"environment": "m.py:Game"}')
    assert labels_of({"a": folder})[0] == "reward of the environment"
    for sources in (
        '{"reward_function": ["m.py:f"], "environment": "m.py:Game"}',
        '{"reward_function": ["m.py:f", "m.py:g"]}',
        '{"reward_function": ["m.py:f"], "reward_url": "http"}',
    ):
        (folder / "train_config.json").write_text(sources)
        assert labels_of({"a": folder})[0] == "score"


def test_runs_with_different_metric_functions_compare_scores(two_runs, caplog):
    for path in [two_runs["PPO"] / "metrics.jsonl", *(two_runs["PPO"] / "samples").iterdir()]:
        path.write_text(path.read_text().replace("gold_scores", "silver"))
    with caplog.at_level(logging.WARNING):
        labels = labels_of(two_runs)
    assert "differ in --metric_function" in caplog.text
    assert labels == ["reward-model score"]


def test_without_a_metric_function_no_source_and_no_share_takes_its_place(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: row | ({"eval/unscored": 0.5} if "eval/scores" in row else {}))
    (folder / "train_config.json").write_text(
        '{"reward_function": ["m.py:f", "m.py:gold_scores"], "reward_weights": ["gold_scores=-1"]}'
    )
    assert labels_of({"a": folder})[0] == "score"


@pytest.mark.parametrize(
    "source", [{"reward_function": ["m.py:f"]}, {"reward_url": "http://a"}, {"reward_model_name_or_path": "other"}]
)
def test_runs_that_are_scored_by_different_things_are_told(source, two_runs, caplog):
    config = two_runs["PPO"] / "train_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | source))
    with caplog.at_level(logging.WARNING):
        outcome_of(two_runs)
    assert "The runs differ in what scores them" in caplog.text


def test_the_metric_function_of_the_flags_is_chosen_among_several(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: row | {"eval/another": 1.0})
    assert labels_of({"a": folder})[0] == "gold score"
    assert [metric_label(name) for name in ("gold_scores", "pass_rate")] == ["gold score", "pass rate"]


# speed


def test_means_over_a_tenth_of_the_run():
    """Of 20 numbers two are averaged, of 5 one."""
    assert trailing_mean([0.0, 2, 4, 8] + [8] * 16)[:5].tolist() == [0, 1, 3, 6, 8]
    assert trailing_mean([3.0, 1, 2]).tolist() == [3, 1, 2]
    assert final([0.0] * 18 + [1, 3]) == 2
    assert first_at([0.0, 2, 4, 8] + [8] * 16, 5.0) == 3
    assert first_at([1.0, 2], 3.0) is None
    assert first_at([0.0] * 5 + [0.3] * 95, 0.3) == 14, "a mean of ten times 0.3 is 0.3, up to rounding"


def faster(runs, factor):
    """Gold and scores of MA-PPO grow so many times as fast; those of PPO end at 1 and 10 after ten updates."""

    def change(_, row):
        grown = {key: factor * row[key] for key in ("objective/gold_scores", "objective/scores") if key in row}
        return row | grown

    edit_rows(runs["MA-PPO"] / "metrics.jsonl", change)
    return runs


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_every_run_reaches_its_own_final_level(scale):
    """Means over a window are rounded otherwise than sums from the first value on."""
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(size=1000)
        rising = scale * (1 + np.arange(1000) / 1000 + 1e-3 * noise)
        assert first_at(rising, final(rising)) is not None


def test_speed_is_against_the_first_run(two_runs):
    runs = faster(two_runs, 2)
    table = table_of(outcome_of(runs), "speed")
    times = ("gold score", "speed-up", "reward-model score", "speed-up")
    assert table.headers == ["updates to the final score of PPO", *times]
    assert table.rows == [["MA-PPO", "5", "2.00", "5", "2.00"]]
    turned = dict(reversed(runs.items()))
    assert rows_of(turned, "speed") == [["PPO", "not reached", "–", "not reached", "–"]]
    assert table_of(outcome_of({"PPO": two_runs["PPO"]}), "speed") is None


def test_updates_are_those_of_the_optimiser(two_runs):
    """Four updates per rollout: rows are logged every fourth update."""
    runs = faster(two_runs, 2)
    for folder in runs.values():
        edit_rows(folder / "metrics.jsonl", lambda _, row: row | {"update": 4 * row["update"]})
        (folder / "samples" / "update-000010.jsonl").rename(folder / "samples" / "update-000040.jsonl")
    assert rows_of(runs, "speed") == [["MA-PPO", "20", "2.00", "20", "2.00"]]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_rollouts_that_were_left_out(two_runs, value):
    """The fifth update of MA-PPO has no numbers: it is the sixth that is there."""

    def lose(_, row):
        return row | ({"objective/gold_scores": value} if row["update"] == 5 else {})

    runs = faster(two_runs, 2)
    edit_rows(runs["MA-PPO"] / "metrics.jsonl", lose)
    assert rows_of(runs, "speed")[0][1:3] == ["6", "1.67"]
