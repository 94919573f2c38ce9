# SPDX-License-Identifier: Apache-2.0
"""Dialogues of two policies: files that are refused, verdicts by the rows' scores, win rates by turn."""

import json

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.base.errors import UserError
from dschat.evaluation.options import ReportOptions
from dschat.evaluation.report import report
from dschat.judge.options import TurnOptions
from dschat.judge.turn_pairs import TurnRates, rates_by_turn, turn_pairs
from dschat.judge.turn_report import draw_turns, run_turns
from dschat.settings.parse import parse

# Scores of three dialogues; by hand: turn 1 A, tie, B; turn 2 A, A; turn 3 B.
SCORES_A = {7: [2.0, 1.0, 0.0], 3: [1.0, 5.0], 5: [0.0]}
SCORES_B = {3: [1.0, 2.0, 9.0], 5: [0.5, 9.0], 7: [1.0, 0.5, 1.0]}


def dialogue(number, replies, scores=None, opening=None):
    messages = []
    for turn, reply in enumerate(replies, start=1):
        asked = opening or f"question {number}" if turn == 1 else f"and {turn}?"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    return {"number": number, "messages": messages} | ({} if scores is None else {"scores": scores})


def scored(folder, name, scores):
    rows = [dialogue(n, [f"{name} says {i}" for i in range(len(row))], row) for n, row in scores.items()]
    return write_jsonl(folder / f"{name}.jsonl", rows)


@pytest.fixture
def files(tmp_path):
    return scored(tmp_path, "a", SCORES_A), scored(tmp_path, "b", SCORES_B)


def compare(a, b, output, *words):
    return run_turns(
        parse(TurnOptions, [*map(str, ("--model_name_a", a, "--model_name_b", b, "--output", output)), *words])
    )


def test_win_rates_by_hand(files, tmp_path, caplog):
    output = tmp_path / "out" / "a-v.s.-b.jsonl"
    text = compare(*files, output, "--by_scores")
    rows = read_jsonl(output)
    assert [(row["number"], row["turn"], row["verdict"]) for row in rows] == [
        *[(7, 1, "A"), (7, 2, "A"), (7, 3, "B")],
        *[(3, 1, "tie"), (3, 2, "A")],
        (5, 1, "B"),
    ]
    who = {(row["kind"], row["rater"], row["model_a"], row["model_b"]) for row in rows}
    assert who == {("reward", "scores", "a", "b")}
    assert (rows[3]["reward_a"], rows[3]["reward_b"]) == (1.0, 1.0)
    assert "2 of 3 dialogues are longer in one file" in caplog.text and "a.jsonl:2 (2 turns, 3 in" in caplog.text
    written = json.loads((tmp_path / "out" / "a-v.s.-b.json").read_text())
    assert written["files"] == [str(output)]
    content = written["comparisons"][0]
    halves = [content["turns"][turn]["half"]["value"] for turn in ("1", "2", "3")]
    assert halves == pytest.approx([1.5 / 3, 1.0, 0.0])
    assert content["all"]["half"]["value"] == pytest.approx((3 + 0.5) / 6)
    # Wilson's interval of n wins in n: n / (n + z²) to 1, with z² = 3.8415; resampling them would show no spread.
    assert written["intervals"]["win, tie, loss"].startswith("Wilson")
    assert content["turns"]["2"]["win"] == {"value": 1.0, "low": pytest.approx(2 / 5.8415, rel=1e-4), "high": 1.0}
    assert content["turns"]["2"]["half"] == {"value": 1.0, "low": None, "high": None}
    assert "| a against b, scores" in text and "1 – 1 – 1 – 0" in text
    assert text.startswith((tmp_path / "out" / "a-v.s.-b.md").read_text())
    assert (tmp_path / "out" / "a-v.s.-b.png").read_bytes().startswith(b"\x89PNG")


def test_intervals_over_all_turns_are_over_dialogues():
    """Twenty dialogues of which one half wins at every turn know as much as twenty verdicts, not as sixty."""
    verdicts = {1: ["A", "B"] * 10, 2: ["A", "B"] * 10, 3: ["A", "B"] * 10}
    common = {"prompt": "p", "response_a": "a", "response_b": "b", "kind": "judge", "rater": "j", "dataset": ""}
    rows = [
        ("f:1", {**common, "model_a": "a", "model_b": "b", "number": n, "turn": turn, "verdict": verdict})
        for turn, given in verdicts.items()
        for n, verdict in enumerate(given)
    ]
    found = rates_by_turn(rows)
    assert found.overall.half.value == found.turns[2].half.value == 0.5
    assert found.overall.half.high - found.overall.half.low == pytest.approx(2 * 1.96 * 0.5 / 20**0.5, rel=0.15)
    rows[5][1]["verdict"] = "invalid"
    assert rates_by_turn(rows).turns[1].half.value == pytest.approx(10 / 19), "invalid answers are not counted"
    rows[7][1]["model_b"] = "c"
    with pytest.raises(UserError, match="f:1: it compares other policies"):
        rates_by_turn(rows)
    with pytest.raises(UserError, match="f:1: no number and turn"):
        rates_by_turn([("f:1", {"verdict": "A"})])


def test_two_judges_of_one_pair_have_different_labels(monkeypatch):
    """Names are cut to 40 characters, of which those of the policies may be all."""
    charts = []
    monkeypatch.setattr("dschat.judge.turn_report.draw_charts", lambda drawn, _: charts.extend(drawn))
    models = ("policy of a long name", "reference of a long name")
    draw_turns({f"{models[0]} against {models[1]}, {rater}": TurnRates(models, rater, {}, None) for rater in "ab"})
    assert [curve.look["label"][:22] for curve in charts[0].lines] == [
        "1: policy of a long na",
        "2: policy of a long na",
    ]


def test_what_is_compared_at_a_turn(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [dialogue(0, ["one\nUser, turn 2:\nbad", "two"])])
    other = dialogue(0, ["eins", "zwei"])
    other["trajectory"] = other.pop("messages")  # as in rows that `dschat refuel-data` has sampled
    b = write_jsonl(tmp_path / "b.jsonl", [other])
    first, second = turn_pairs(a, "--a", b, "--b")
    assert (first.prompt, first.b.response) == ("question 0", "Assistant, turn 1:\n| eins")
    assert first.a.response == "Assistant, turn 1:\n| one\n| User, turn 2:\n| bad"
    assert second.b.response == "Assistant, turn 1:\n| eins\n\nUser, turn 2:\n| and 2?\n\nAssistant, turn 2:\n| zwei"
    assert dict(second.columns) == {"number": 0, "turn": 2} and first.id != second.id


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
GOOD = [USER, ASSISTANT]


@pytest.mark.parametrize(
    ("number", "messages", "scores", "message"),
    [
        ("1", GOOD, None, "column 'number' must hold the dialogue's number, not '1'"),
        (0, GOOD, None, r"number 0 occurs twice .*a\.jsonl:1"),
        (1, [*GOOD, ASSISTANT], None, "message 3 has the role 'assistant' instead of 'user'"),
        (1, [*GOOD, USER], None, "the last message, 3, is the user's"),
        (1, GOOD, [1, 2], "column 'scores' must be a list of 1 numbers"),
        (1, GOOD, ["1"], "scores must be a finite number"),
    ],
)
def test_rows_that_are_no_finished_dialogue(number, messages, scores, message, tmp_path):
    row = {"number": number, "messages": messages, "scores": scores}
    a = write_jsonl(tmp_path / "a.jsonl", [{"number": 0, "messages": GOOD}, row])
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {message}"):
        compare(a, a.with_name("b.jsonl"), tmp_path / "o.jsonl")


def test_files_that_do_not_fit_together(files, tmp_path):
    a, b = files
    fewer = scored(tmp_path, "fewer", {7: [1.0]})
    for pair in ((a, fewer), (fewer, a)):
        with pytest.raises(UserError, match=r"^2 dialogues are in one file only, .*a\.jsonl:2 .number 3."):
            compare(*pair, tmp_path / "o.jsonl", "--by_scores")
    rows = [dialogue(7, ["r"], opening="something else"), dialogue(3, ["r"]), dialogue(5, ["r"])]
    other = write_jsonl(tmp_path / "other.jsonl", rows)
    unscored = write_jsonl(tmp_path / "u.jsonl", [dialogue(n, ["r"] * 2) for n in SCORES_A])
    for second, words, message in (
        (other, [], r"a\.jsonl:1 and .*other\.jsonl:1 .number 7. begin with different messages"),
        (unscored, [], r"--by_scores: .*u\.jsonl:1 has no column 'scores'"),
        (b, ["--dry_run"], "--by_scores asks no judge and costs nothing"),
        (b, ["--max_tokens", "64"], "costs nothing: leave --max_tokens out"),
    ):
        with pytest.raises(UserError, match=message):
            compare(a, second, tmp_path / "o.jsonl", "--by_scores", *words)
    assert not (tmp_path / "o.jsonl").exists()


def test_two_files_of_the_same_policies_are_told_apart(files, tmp_path, monkeypatch):
    """By numbers, in the tables and in the chart, which are those of the files in report.json."""
    charts = []
    monkeypatch.setattr("dschat.judge.turn_report.draw_charts", lambda drawn, _: charts.extend(drawn) or b"png")
    outputs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for output in outputs:
        compare(*files, output, "--by_scores")
    charts.clear()
    text = report(ReportOptions(files=outputs, output=tmp_path / "both"))
    for number in (1, 2):
        assert text.count(f"| {number}: a against b, scores") == 2
        assert charts[0].lines[number - 1].look["label"] == f"{number}: a against b, scores"
    assert json.loads((tmp_path / "both" / "report.json").read_text())["files"] == list(map(str, outputs))
