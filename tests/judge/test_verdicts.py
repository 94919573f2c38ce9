# SPDX-License-Identifier: Apache-2.0
"""Answers of judges as they come from real models."""

import json
import time

import pytest

from dschat.judge.answers import UnreadableAnswer
from dschat.judge.verdicts import read_answer

ASPECTS = ("factual_accuracy", "coherence", "usefulness")
WHOLE = {
    "factual_accuracy": {"comparison": "same facts", "verdict": "tie"},
    "coherence": {"comparison": "the first wanders", "verdict": "second"},
    "usefulness": {"comparison": "the first says more", "verdict": "first"},
    "verdict": "first",
}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"comparison": "x", "verdict": "first"}', "first"),
        ('Sure! Here it is: {"verdict": "tie", "comparison": "a {brace} in it"} I hope this helps.', "tie"),
        ('The sets {x, y} and {"a", "b"} aside, {"Verdict": "Second summary"}', "second"),
        ('{"verdict": 1}', "first"),
        ('My verdict is clear.\n{"verdict": "first", "overall": "The first says more, and is right."}', "first"),
        ('{"verdict": "first"}\nThe verdict is first because it is more complete than the second.', "first"),
        ('{"comparison": "...", "verdict": "first, second or tie"}\n{"verdict": "second"}', "second"),
        ("```\nVerdict: first\n```", "first"),
        ("<answer>\n**Verdict:** first\n</answer>\n---", "first"),
        ('{"overall": {"comparison": "x", "verdict": "second"}}', "second"),
        ('{"verdict": "first"} and again {"verdict": "first"}', "first"),
        ('{"comparison": "one\ntwo\tthree", "verdict": "first"}', "first"),
        ('<think>{"verdict": "second"} no, wait</think>{"verdict": "first"}', "first"),
        ('[THINK]{"verdict": "second"}[/THINK]{"verdict": "first"}', "first"),
        ("Verdict: second\n<think>or rather\nVerdict: first", "second"),
        ('{"comparison": "the first ends in </think>, or <think>", "verdict": "second"}', "second"),
        ("**Final verdict:** Response 1", "first"),
        ("The second one is better.", "second"),
        ("My decision is based on facts alone.\nVerdict: first\n", "first"),
    ],
)
def test_readable(text, place):
    assert read_answer(text, ()).verdict == place


@pytest.mark.parametrize("text", ["\n" * 50_000 + "x", '{"' + " " * 50_000 + '"x', "[" + '{"a":' * 100_000])
def test_repetition_takes_no_long_time(text):
    """With the square of the length, each of them would take more than 5 s."""
    start = time.process_time()
    with pytest.raises(UnreadableAnswer):
        read_answer(text, ASPECTS)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" \n", "empty"),
        ("<think>the first, I would say", "empty"),
        ("Verdict: first </think>", "empty"),
        ('{"comparison": "The first is better because', "broken or cut off"),
        ('{"verdict": "first", "verdict": "second"}', "the key 'verdict' occurs twice"),
        (json.dumps(WHOLE)[:80], "broken or cut off"),  # has a whole verdict on one criterion
        (r'{"comparison": "\(", "coherence": {"verdict": "first"}}', "broken"),  # of one criterion alone
        ('{"verdict": "maybe"}', "no verdict"),
        ('{"verdict": true}', "no verdict"),
        ('{"result": {"verdict": "first"}}', "no verdict"),
        ('It quotes {"verdict": "first"}, but {"verdict": "second"}', "contradict"),
        ('{"verdict": "first"}\nOn reflection that is wrong.\nVerdict: second', "contradict"),
        ('Verdict: second\n{"verdict": "first"}', "contradict"),
        (
            '{"verdict": "first"}\nFinal verdict: second, because it is faithful to the text throughout, and clear',
            "contra",
        ),
        ('{"verdict": "first"}\n{"comparison": "no", "verdict": "the second one, after all"}', "no verdict"),
        ('{"verdict": "first", "overall_verdict": "second"}', "contradict"),
        ("Verdict: first\nVerdict: second", "several verdicts"),
        ("I'm sorry, but I can't help with comparing these.", "no verdict"),
        ("The first is longer, the second is clearer.", "no verdict"),
        ("Verdict: not the first", "no verdict"),
        ("Verdict: first\nWait, I mixed them up. The second is better.", "no verdict"),
        ("Verdict: first\nNo: the second is better than the first", "no verdict"),
        (
            "Verdict: first\nFinal verdict: second, because it is faithful to the text throughout and clear",
            "no verdict",
        ),
        ("a", "no verdict"),
    ],
)
def test_unreadable(text, problem):
    with pytest.raises(UnreadableAnswer, match=problem):
        read_answer(text, ASPECTS)


def test_criteria_have_verdicts_and_reasons():
    reading = read_answer(json.dumps(WHOLE), ASPECTS)
    assert reading.verdict == "first"
    assert reading.aspects == {"factual_accuracy": "tie", "coherence": "second", "usefulness": "first"}
    assert reading.reason.splitlines()[1] == "coherence: the first wanders"
    partly = read_answer('{"coherence": "first", "usefulness": "?", "verdict": "tie"}', ASPECTS)
    assert partly.verdict == "tie" and partly.aspects == {"coherence": "first"}
    assert read_answer('{"comparison": "shorter", "verdict": "tie"}', ()).reason == "shorter"
