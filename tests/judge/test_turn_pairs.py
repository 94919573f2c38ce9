# SPDX-License-Identifier: Apache-2.0
"""The judge on dialogues turn by turn: what it is shown, the verdicts, and what a run that was stopped leaves."""

import json

from cli_runs import read_jsonl, write_jsonl
from dschat.judge.options import TurnOptions
from dschat.judge.turn_report import run_turns
from dschat.settings.parse import parse
from fake_judge import shown_in

# By `more_good`, which counts in all that is shown: dialogue 0 A, A; 1 B, tie; 2 the same text at turn 1, then B.
REPLIES_A = [["good good", "bad"], ["bad", "good good"], ["same", "bad"]]
REPLIES_B = [["good", "bad"], ["good", "good"], ["same", "good"]]


def dialogues(folder, name, replies):
    rows = []
    for number, texts in enumerate(replies):
        messages = []
        for turn, text in enumerate(texts):
            messages.append({"role": "user", "content": f"question {number}.{turn}"})
            messages.append({"role": "assistant", "content": text})
        rows.append({"number": number, "messages": messages})
    return write_jsonl(folder / f"{name}.jsonl", rows)


def test_verdicts_by_turn_by_hand(server, tmp_path):
    a, b = dialogues(tmp_path, "a", REPLIES_A), dialogues(tmp_path, "b", REPLIES_B)
    files = ["--model_name_a", str(a), "--model_name_b", str(b), "--output", str(tmp_path / "o.jsonl")]
    text = run_turns(parse(TurnOptions, [*files, *server.words(), "--concurrency", "1"]))
    rows = read_jsonl(tmp_path / "o.jsonl")
    assert [(row["number"], row["turn"], row["verdict"]) for row in rows] == [
        *[(0, 1, "A"), (0, 2, "A"), (1, 1, "B"), (1, 2, "tie"), (2, 1, "tie"), (2, 2, "B")]
    ]
    assert [len(row["orders"]) for row in rows] == [2, 2, 2, 2, 0, 2], "the same text is a tie and not asked about"
    turns = json.loads((tmp_path / "o.json").read_text())["comparisons"][0]["turns"]
    assert turns["1"]["half"]["value"] == turns["2"]["half"]["value"] == 0.5
    assert "10 requests" in text and "50.0" in text
    first = shown_in(server.bodies[0]["messages"])
    assert first["prompt"] == "question 0.0"
    assert {first["first"], first["second"]} == {"Assistant, turn 1:\n| good good", "Assistant, turn 1:\n| good"}
    assert "above all in their last reply" in server.bodies[0]["messages"][0]["content"]
