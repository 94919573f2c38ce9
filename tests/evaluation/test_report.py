# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences of a report, against numbers worked out by hand: evaluations and differences."""

import json

import pytest

from dschat.evaluation.run_comparison import compare_runs, evaluation_table, headline, labels_of, results_table
from dschat.evaluation.run_data import read_log, read_run
from handmade_runs import edit_rows, make_run, tables_of, write_lines


def read_runs(runs):
    return [read_run(name, folder) for name, folder in runs.items()]


def sentences_of(runs) -> list[str]:
    """The sentences of a report."""
    data = read_runs(runs)
    return compare_runs(data, labels_of(data))


def headline_of(runs) -> str:
    """The first sentence of a report."""
    data = read_runs(runs)
    return headline(data, labels_of(data))


def names_of(runs) -> list[str]:
    """What the report calls the scores that runs are compared by."""
    return list(labels_of(read_runs(runs)).values())


def test_table_holds_the_hand_computed_numbers(built):
    outcome = built.outcome
    # Updates, prompts, seconds, macro length, 0.95 and √0.95 = 0.9747, explained variance of update 10 (last tenth).
    assert tables_of(outcome)["training"].rows == [
        ["PPO", "10", "80", "15", "1.00", "0.950", "1.00"],
        ["MA-PPO", "10", "80", "15", "2.00", "0.975", "1.00"],
    ]
    lines = outcome.text().splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert all(row in cells for table in tables_of(outcome).values() for row in (table.headers, *table.rows))
    assert all(sentence in lines for sentence in [outcome.lead, *outcome.remarks, "About.", "A remark."])
    assert "A remark." not in outcome.without_details().text()


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


def test_the_result_in_one_sentence(tmp_path):
    """By prompt the runs differ by 0.1 and 0.28, twice their standard error of 0.09 and more; or by 0.1 and 0.3."""
    low = make_run(tmp_path / "low", [0.4, 0.6])
    same = make_run(tmp_path / "same", [0.5, 0.9])
    runs = {"PPO": low, "MA-PPO": make_run(tmp_path / "high", [0.5, 0.88], ngram=2)}
    start = "PPO raised the gold score of 2 held-out prompts from 0.200 to 0.500; MA-PPO raised it from 0.200 to"
    end = "two standard errors over prompts, with one run each."
    assert headline_of(runs) == f"{start} 0.690; the difference of 0.190 ± 0.090 is more than {end}"
    difference = "MA-PPO ended higher than PPO in gold score: 0.690 against 0.500, a difference of 0.190 ± 0.090"
    for order in (runs, dict(reversed(runs.items()))):
        assert sentences_of(order) == [f"{difference} (± one standard error, 2 held-out prompts, paired)."]
    less = headline_of({"PPO": low, "MA-PPO": same})
    assert less == f"{start} 0.700; the difference of 0.200 ± 0.100 is within {end}"
    worse = make_run(tmp_path / "worse", [0.0, 0.1])
    assert headline_of({"PPO": worse}) == "PPO lowered the gold score of 2 held-out prompts from 0.200 to 0.050."
    level = make_run(tmp_path / "level", [0.1, 0.3])
    assert headline_of({"PPO": level}) == "PPO brought the gold score of 2 held-out prompts from 0.200 to 0.200."
    edit_rows(level / "metrics.jsonl", lambda index, row: row | ({"eval/gold_scores": None} if index == 11 else {}))
    said = "PPO raised the gold score of 2 held-out prompts from 0.200 to 0.500; other brought it from 0.200 to nan."
    assert headline_of({"PPO": low, "other": level}) == said


def test_scores_of_different_functions_are_not_compared(two_runs):
    config = json.loads((two_runs["PPO"] / "train_config.json").read_text())
    config["metric_function"] = "other/synthetic.py:gold_scores"
    (two_runs["PPO"] / "train_config.json").write_text(json.dumps(config))
    assert sentences_of(two_runs) == [] and "difference" not in headline_of(two_runs)
    config |= {"metric_function": "./pkg/../pkg/synthetic.py:gold_scores", "max_tests": 1}  # not of gold scores
    (two_runs["PPO"] / "train_config.json").write_text(json.dumps(config))
    assert sentences_of(two_runs) and "difference" in headline_of(two_runs)


def test_the_table_of_results_has_the_start_once(two_runs):
    """Scores are those that runs are compared by; two runs that start from different models have a start each."""
    data = read_runs(two_runs)
    table = results_table(data, labels_of(data))
    assert table.headers == ["model", "gold score", "KL to SFT (nats)", "length (tokens)", "ended by EOS (%)"]
    assert table.rows == [
        ["SFT", "0.200", "1.50", "3.0", "100.0"],
        ["PPO", "0.500", "1.50", "3.0", "100.0"],
        ["MA-PPO", "0.700", "1.50", "3.0", "100.0"],
    ]
    metrics = two_runs["PPO"] / "metrics.jsonl"
    more = {"eval/gold_scores": 0.3, "eval/gold_scores_stderr": 0.01}
    edit_rows(metrics, lambda index, row: row | (more if index == 0 else {}))
    data = read_runs(two_runs)
    rows = results_table(data, labels_of(data)).rows
    assert [row[:2] for row in rows[:2]] == [["PPO, SFT", "0.300 ± 0.010"], ["MA-PPO, SFT", "0.200"]]


def test_only_all_responses_to_the_same_prompts_give_a_standard_error(tmp_path):
    """Other prompts; and a mean over more prompts than the samples hold."""
    low = make_run(tmp_path / "a", [0.4, 0.6])
    other = make_run(tmp_path / "b", [0.7, 0.92], prompts=("x", "y"))
    assert "a difference of 0.310 (no standard error" in sentences_of({"a": low, "b": other})[-1]
    wider = make_run(tmp_path / "c", [0.7, 0.92])
    more = {"eval/gold_scores": 0.85}
    edit_rows(wider / "metrics.jsonl", lambda index, row: row | (more if index == 11 else {}))
    assert "a difference of 0.350 (no standard error" in sentences_of({"a": low, "c": wider})[-1]


def test_scores_are_called_after_their_source(tmp_path):
    folder = make_run(tmp_path / "a", [0.4, 0.6])
    edit_rows(folder / "metrics.jsonl", lambda _, row: {key: row[key] for key in row if "gold" not in key})
    (folder / "train_config.json").write_text('{"reward_function": ["m.py:f"]}')
    assert names_of({"a": folder}) == ["reward-function score"]
    (folder / "train_config.json").write_text('{"reward_function": ["m.py:f"], "reward_url": "h"}')
    assert names_of({"a": folder}) == ["score"]
    several = make_run(tmp_path / "b", [0.4, 0.6])
    edit_rows(several / "metrics.jsonl", lambda _, row: row | {"eval/another": 1.0, "eval/unscored": 0.5})
    assert names_of({"b": several})[0] == "gold score", "the metric function of the flags"
