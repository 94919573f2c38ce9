# SPDX-License-Identifier: Apache-2.0
"""The best of N: estimators against hand arithmetic and counting, files, tables, curves."""

import json
import random
from itertools import combinations
from statistics import fmean

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows
from dschat.evaluation import best_of
from dschat.evaluation.best_of import best_of_first, best_of_n, best_of_report, expected_best, sweep_of

TWO_PROMPTS = {0.5: [[1.0, 4.0, 2.0, 3.0], [0.0, -1.0, 6.0, 2.0]], 0.0: [[2.0], [5.0]]}


def rows_of(rewards):
    return [
        {"prompt": f"p{i}", "temperature": temperature, "responses": [""] * len(row), "rewards": row}
        for temperature, prompts in rewards.items()
        for i, row in enumerate(prompts)
    ]


@pytest.fixture
def file(tmp_path):
    return write_jsonl(tmp_path / "ours-v1.5.jsonl", rows_of(TWO_PROMPTS))


@pytest.mark.parametrize(
    ("n", "by_hand"),
    [
        (1, 10 / 4),  # the mean of 1, 2, 3, 4
        (2, (2 * 1 + 3 * 2 + 4 * 3) / 6),  # of 6 pairs 1 has the maximum 2, 2 have 3, 3 have 4
        (4, 4.0),
    ],
)
def test_the_estimator_by_hand(n, by_hand):
    assert expected_best([3.0, 1.0, 4.0, 2.0], n) == pytest.approx(by_hand, abs=1e-12)


def test_the_estimator_is_the_mean_over_all_subsets():
    draw = random.Random(5)
    for size in range(1, 8):
        rewards = [draw.choice([draw.gauss(0, 1), 0.5]) for _ in range(size)]  # some of them equal
        for n in range(1, size + 1):
            subsets = list(combinations(rewards, n))
            assert expected_best(rewards, n) == pytest.approx(fmean(map(max, subsets)), abs=1e-12)


def test_the_first_n_in_the_order_of_the_draws():
    assert [best_of_first([1.0, 4.0, 2.0, 9.0], n) for n in (1, 2, 3, 4)] == [1.0, 4.0, 4.0, 9.0]


def test_the_means_of_a_file_by_hand(file):
    """Prompt 1 holds 1, 2, 3, 4, prompt 2 −1, 0, 2, 6; the interval of two numbers is ± 12.706 · half their gap."""
    means = best_of_n([sweep_of("ours", read_rows(file, "FILE"))], [2, 4])
    found = {(row.temperature, row.n): row for row in means.itertuples()}
    assert list(found) == [(0.0, 1), (0.5, 1), (0.5, 2), (0.5, 4)]
    pairs = found[0.5, 2]
    second = (0 * 1 + 2 * 2 + 6 * 3) / 6
    assert pairs.expected.value == pytest.approx((20 / 6 + second) / 2, abs=1e-12)
    assert pairs.first.value == pytest.approx((4 + 0) / 2)
    assert found[0.5, 1].expected.value == pytest.approx((2.5 + 1.75) / 2)
    assert found[0.5, 1].first.value == pytest.approx((1 + 0) / 2)
    whole = found[0.5, 4]
    assert whole.expected == whole.first and whole.first.value == 5.0
    assert (whole.first.low, whole.first.high) == pytest.approx((5 - 12.7062, 5 + 12.7062), abs=1e-4)
    assert (whole.responses, whole.prompts, found[0.0, 1].responses) == (4, 2, 1)


def values_of_n(folder):
    """model, temperature and n → row of report.json."""
    rows = json.loads((folder / "report.json").read_text())["rows"]
    return {(row["model"], row["temperature"], row["n"]): row for row in rows}


def test_a_report_on_several_models(tmp_path):
    """Of the published numbers those that were drawn. Models with different templates answered the same messages."""
    files = []
    for model, rewards in {"ours-v1.5": TWO_PROMPTS, "theirs": {1.0: 2 * [[1.0, 2.0, 0.0, 0.0]]}}.items():
        rows = []
        for row in rows_of(rewards):
            messages = [{"role": "user", "content": row["prompt"]}]
            rows.append(row | {"prompt": f"<{model}>{row['prompt']}", "prompt_messages": messages})
        files.append(write_jsonl(tmp_path / f"{model}.jsonl", rows))
    text = best_of_report(files, None, tmp_path / "out")
    found = values_of_n(tmp_path / "out")
    ours = {("ours-v1.5", 0.0, 1), ("ours-v1.5", 0.5, 1), ("ours-v1.5", 0.5, 4)}
    assert found.keys() == ours | {("theirs", 1.0, 1), ("theirs", 1.0, 4)}
    assert found["theirs", 1.0, 4]["first"] == {"value": 2.0, "low": 2.0, "high": 2.0}, "both prompts have the same"
    assert text == (tmp_path / "out" / "report.md").read_text() and "5.000 [-7.706, " in text
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_sweeps_that_cannot_be_compared_are_refused(file, tmp_path):
    rows = [row | {"scorer": "rm 12ab12ab12ab"} for row in read_jsonl(file)]
    scored = write_jsonl(tmp_path / "scored.jsonl", rows)
    other = write_jsonl(tmp_path / "other.jsonl", [row | {"scorer": "rm 34cd34cd34cd"} for row in rows])
    fewer = write_jsonl(tmp_path / "fewer.jsonl", rows_of({1.0: [[1.0, 2.0, 0.0, 0.0]]}))
    for files, numbers, message in (
        ([file], [2, 8], "--best_of 8: .*ours-v1.5.jsonl holds 4 responses to a prompt"),
        ([scored, other], [2], "scored.jsonl are by rm 12ab12ab12ab, those of .*other.jsonl by rm 34cd34cd34cd"),
        ([file, fewer], [2], "fewer.jsonl holds other prompts than .*ours"),
    ):
        with pytest.raises(UserError, match=message):
            best_of_report(files, numbers, tmp_path / "out")


def test_curves_show_the_mean_over_all_subsets(file, monkeypatch):
    found = best_of_n([sweep_of("ours", read_rows(file, "FILE"))], [2, 4])
    charts = []
    monkeypatch.setattr(best_of, "draw_charts", lambda given, *_, **__: charts.extend(given))
    best_of.draw_best_of(found)
    lines = {line.look["label"]: line.y for chart in charts for line in chart.lines}
    assert [each.value for each in lines["temperature 0.5"]] == pytest.approx([2.125, 3.5, 5.0])
    assert [each.value for each in lines["ours"]] == pytest.approx([3.5, 2.125]), "a single response, by temperature"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0]}, r"m.jsonl:2: 1 rewards, and 4 in the rows before it"),
        ({"rewards": [1.0, None, 2.0, 2.0]}, r"m.jsonl:2: column 'rewards' must be a list of numbers"),
        ({"temperature": None}, r"m.jsonl:2: no column 'temperature'"),
        ({"prompt": "other"}, r"ours: the prompts at temperature 0 are not those at 0.5"),
    ],
)
def test_other_files_are_refused(change, message, tmp_path):
    rows = rows_of(TWO_PROMPTS)
    rows[1] |= change
    with pytest.raises(UserError, match=message):
        sweep_of("ours", read_rows(write_jsonl(tmp_path / "m.jsonl", rows), "FILE"))
