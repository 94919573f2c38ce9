# SPDX-License-Identifier: Apache-2.0
"""Runs of the judge from files to files, against a server on loopback."""

import json

import pandas as pd
import pytest

from dschat.base.errors import UserError
from dschat.evaluation.responses import comparison_of
from fake_judge import judged, judged_rows, two_files, verdicts

BY_HAND = ["A", "B", "tie", "A"]  # of the files of `two_files`, by `more_good`
OOPS = (500, {"error": {"message": "oops"}}, {})


def test_verdicts_of_both_orders(server, tmp_path):
    line = judged(server, tmp_path, "--price_in", 5, "--price_out", 15, output="out/a-b.jsonl")
    rows = judged_rows(tmp_path, "out/a-b.jsonl")
    assert [row["prompt"] for row in rows] == ["p0", "p1", "p2", "p3"]
    assert [row["verdict"] for row in rows] == BY_HAND
    assert [[(o["first"], o["verdict"]) for o in row["orders"]] for row in rows] == [
        [("A", verdict), ("B", verdict)] for verdict in BY_HAND
    ]
    assert len(server.bodies) == 8
    assert "a against b on summarize, gpt-4o-2024-05-13, both orders: 2 wins, 1 ties, 1 losses, 0 invalid of 4" in line
    assert "8 requests (0 more from the cache), 800 + 80 tokens, $0.0052" in line  # 800 · 5 $/M + 80 · 15 $/M
    assert line.endswith(str(tmp_path / "out" / "a-b.jsonl"))
    one = comparison_of(rows[1], "o:2")
    assert (one.kind, one.rater, one.model_a, one.model_b) == ("judge", "gpt-4o-2024-05-13", "a", "b")
    assert (one.dataset, one.response_a, one.response_b) == ("summarize", "bad", "good")
    said = {"reply": '{"comparison": "counted", "verdict": "second"}', "reason": "counted", "served_by": "served"}
    assert one.details["orders"][0] == {"first": "A", "verdict": "B", "repaired": False} | said
    pd.DataFrame(rows).to_parquet(tmp_path / "verdicts.parquet")  # which cannot hold empty objects
    assert not (tmp_path / "out" / "a-b.jsonl.partial").exists()


def test_a_single_order_shows_each_pair_once_with_sides_by_chance(server, tmp_path):
    """A judge that always takes the first shows who was first: by the seed, by text and not by file."""
    server.answer = lambda messages: '{"comparison": "", "verdict": "first"}'
    two_files(tmp_path, [f"a{i}" for i in range(30)], [f"b{i}" for i in range(30)])
    line = judged(server, tmp_path, "--single_order")
    assert len(server.bodies) == 30 and "one order" in line
    found = verdicts(tmp_path)
    assert [row["orders"][0]["first"] for row in judged_rows(tmp_path)] == found
    assert 5 < found.count("A") < 25  # 30 fair coins leave this range once in 3,000 times
    judged(server, tmp_path, "--single_order", output="m.jsonl", models="ba")
    assert verdicts(tmp_path, "m.jsonl") == [{"A": "B", "B": "A"}[v] for v in found]
    assert len(server.bodies) == 30
    judged(server, tmp_path, "--single_order", "--seed", "7", output="s.jsonl")
    assert verdicts(tmp_path, "s.jsonl") != found


def test_the_same_text_twice_is_a_tie_and_not_asked_about(server, tmp_path):
    """And an answer in parts is read."""
    two_files(tmp_path, ["same", "good"], ["same", "bad"])
    server.plan.append(("stop", {"content": [{"type": "text", "text": text} for text in ('{"verdict":', '"first"}')]}))
    judged(server, tmp_path, "--concurrency", 1)
    assert verdicts(tmp_path) == ["tie", "A"] and judged_rows(tmp_path)[0]["orders"] == []
    assert len(server.bodies) == 2


def test_a_reply_that_cannot_be_read_is_asked_for_once_more(server, tmp_path):
    """p0: half an answer, then a whole one. p1: a refusal, then a whole one."""
    two_files(tmp_path, ["good", "bad"], ["bad", "good"])
    server.plan.extend(["half an answer", "ok", "ok", "refusal", "ok", "ok"])
    judged(server, tmp_path, "--concurrency", 1)
    rows = judged_rows(tmp_path)
    assert [row["verdict"] for row in rows] == ["A", "B"]
    assert [[o["repaired"] for o in row["orders"]] for row in rows] == [[True, False], [True, False]]
    assert rows[1]["orders"][0]["first_reply"] == "I will not judge that."
    assert len(server.bodies) == 6
    *before, answered, request = server.bodies[1]["messages"]
    assert before == server.bodies[0]["messages"] and answered["content"].startswith('{"compar')
    assert "broken or cut off" in request["content"]


def test_an_answer_that_was_repaired_costs_nothing_when_the_comparison_is_repeated(server, tmp_path):
    """The judge would answer otherwise the second time."""
    server.plan.append("half an answer")
    judged(server, tmp_path)
    verdicts_before = verdicts(tmp_path)
    assert len(server.bodies) == 9
    server.answer = lambda messages: json.dumps({"verdict": "tie"})
    assert "0 requests (8 more from the cache)" in judged(server, tmp_path, "--overwrite")
    assert verdicts(tmp_path) == verdicts_before


WHOLE = json.dumps({"comparison": "same", "verdict": "tie"})


@pytest.mark.parametrize(
    ("end", "message", "told"),
    [
        ("length", {"content": WHOLE[:20]}, "broken or cut off; it was cut off after --max_tokens 77: give"),
        ("stop", {"reasoning_content": "a tie"}, "reasoning alone (reasoning_content): give a larger --max_tokens"),
        ("content_filter", {}, "the server's content filter stopped it"),
    ],
)
def test_a_run_without_a_single_verdict_fails_and_says_what_came(server, tmp_path, end, message, told):
    server.plan.extend([(end, message)] * 16)  # two orders of four pairs, and each repair
    with pytest.raises(UserError, match=r"no pair of 4 got a verdict: .*\(8 times\)") as error:
        judged(server, tmp_path, "--max_tokens", 77)
    assert told in str(error.value) and str(tmp_path / "o.jsonl") in str(error.value)
    assert verdicts(tmp_path) == ["invalid"] * 4


STRANGE = {"error": {"message": "Request rejected by rule 17."}}  # no words that a client could know


def six_files(folder, bad):
    """Six pairs that A wins; the text of the one at `bad` holds POISON."""
    two_files(folder, ["good POISON" if i == bad else f"good {i}" for i in range(6)], ["bad"] * 6)


@pytest.mark.parametrize(("bad", "concurrency"), [(0, 1), (3, 8)])
def test_one_text_that_the_server_rejects_spoils_its_own_pair_only(server, tmp_path, bad, concurrency):
    server.fail_on("POISON", (422, STRANGE, {}))
    six_files(tmp_path, bad)
    assert "5 wins, 0 ties, 0 losses, 1 invalid of 6" in judged(server, tmp_path, "--concurrency", concurrency)
    assert verdicts(tmp_path) == ["invalid" if i == bad else "A" for i in range(6)]
    problem = judged_rows(tmp_path)[bad]["orders"][0]["problem"]
    assert "answers 422: Request rejected by rule 17." in problem
    for body in server.bodies:
        if "POISON" not in json.dumps(body["messages"]):
            assert body["response_format"]["type"] == "json_schema"  # the form stays


@pytest.mark.parametrize(("bad", "concurrency"), [(0, 1), (3, 8)])
def test_one_pair_without_an_answer_is_left_and_asked_for_again(server, tmp_path, bad, concurrency):
    server.fail_on("POISON", OOPS)
    six_files(tmp_path, bad)
    words = ["--concurrency", concurrency, "--max_tries", 2]
    with pytest.raises(UserError) as error:
        judged(server, tmp_path, *words)
    place = f"{tmp_path / 'a.jsonl'}:{bad + 1}"
    assert f"1 pairs got no answer, among them {place}: no answer with --max_tries 2: " in str(error.value)
    assert "5 of 6 pairs are judged and kept; the same command asks only for the 1 that are left" in str(error.value)
    assert not (tmp_path / "o.jsonl").exists()
    server.bodies.clear()
    server.fail_on("never", None)
    judged(server, tmp_path, *words)
    assert verdicts(tmp_path) == ["A"] * 6
    assert len(server.bodies) == 2 and all("POISON" in json.dumps(body) for body in server.bodies)
