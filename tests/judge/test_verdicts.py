# SPDX-License-Identifier: Apache-2.0
"""Answers of judges as they come from real models."""

import json
import time

import pytest

from dschat.judge.answers import UnreadableAnswer
from dschat.judge.verdicts import in_terms_of_models, place_of, read_answer

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
        ('\n```json\n{"comparison": "x",\n "verdict": "SECOND"}\n```\n', "second"),
        ('Sure! Here it is: {"verdict": "tie", "comparison": "a {brace} in it"} I hope this helps.', "tie"),
        ('The set {x, y} aside, {"Verdict": "Second summary"}', "second"),
        ('{"verdict": 1}', "first"),
        ('{"overall": {"comparison": "x", "verdict": "second"}}', "second"),
        ('{"verdict": "first"} and again {"verdict": "first"}', "first"),
        ('<think>{"verdict": "second"} no, wait</think>{"verdict": "first"}', "first"),
        ("Draft: the verdict is first.\nVerdict: first\n</think>\nVerdict: second", "second"),
        ('{"verdict": "first"} no.</think>{"verdict": "second"}', "second"),
        ("<think>first</think> no <think>the first!</think>Verdict: tie", "tie"),
        ("Verdict: second\n<think>or rather\nVerdict: first", "second"),
        ('{"comparison": "the first ends in </think>, or <think>", "verdict": "second"}', "second"),
        ('```json\n{"verdict": "second", "comparison": "the first ends in </think>"}\n```\n', "second"),
        ("Both are short.\nVerdict: second", "second"),
        ("**Final verdict:** Response 1", "first"),
        ("- The overall winner is the second summary.", "second"),
        ("> Verdict = tie", "tie"),
        ("first", "first"),
        ("The second one is better.", "second"),
        ("A tie.", "tie"),
        ('The set {"a", "b"} is in both. {"verdict": "first"}', "first"),
    ],
)
def test_readable(text, place):
    assert read_answer(text, ()).verdict == place


NEARLY_JSON = {
    "a line break": '{"comparison": "one\ntwo", "verdict": "first"}',
    "a tab": '{"comparison": "one\ttwo", "verdict": "first"}',
    "a formula": r'{"comparison": "\(x\) and \frac{a}{b}", "verdict": "first"}',
    "a last comma": '{"comparison": "x", "verdict": "first",}',
    "no comma": '{"comparison": "x"\n "verdict": "first"}',
    "quotes inside": '{"comparison": "the "best" of both", "verdict": "first"}',
    "single quotes": "{'comparison': 'it\\'s so', 'verdict': 'first', 'sure': True}",
    "typographic quotes": "{“comparison”: “x”, “verdict”: “first”}",
    "no quotes": "{comparison: 'x', verdict: first}",
    "a wide colon": '{"verdict"：first}',
    "None": '{"comparison": None, "verdict": "first"}',
    "comments": '{"comparison": "x", // so\n "verdict": first // sure\n}',
    "another spelling": "{'Final Verdict': 'First summary',}",
    "a fence": 'Sure:\n```json\n{"comparison": "a\nb", "verdict": "first",}\n```\nIs that enough?',
    "verdicts inside": r'{"coherence": {"comparison": "\(", "verdict": "second"}, "verdict": "first"}',
    "a quoted verdict": r'{"comparison": "it says \"verdict\": \"second\" \(", "verdict": "first"}',
    "a set before it": 'Of {x: x > 0} and {a: {b: 1}} nothing. {"verdict": "first",}',
    "twice the same": '{"verdict": "first",} or {"verdict": "first"}',
    "other thoughts": '<thinking>{"verdict": "second"}</thinking>{"verdict": "first"}',
    "Mistral's thoughts": '[THINK]{"verdict": "second"}[/THINK]{"verdict": "first"}',
    "channels": '<|channel|>analysis<|message|>{"verdict": "second"}<|channel|>final<|message|>{"verdict": "first"}',
    "a mark of thoughts in a string": '{"comparison": "one\ntwo </think>", "verdict": "first"}',
}


@pytest.mark.parametrize("name", NEARLY_JSON)
def test_nearly_json_is_no_lost_vote(name):
    assert read_answer(NEARLY_JSON[name], ASPECTS).verdict == "first"


def test_deep_nesting_takes_no_long_time():
    with pytest.raises(UnreadableAnswer):
        read_answer("{a:" * 50_000, ASPECTS)
    with pytest.raises(UnreadableAnswer, match="no verdict"):
        read_answer("{a:" * 20_000 + "}" * 20_000, ASPECTS)


@pytest.mark.parametrize(
    "text",
    ["\n" * 50_000 + "x", '{"' + " " * 50_000 + '"x', "```\n" + "\n" * 50_000, "{x" + '"verdict":“' * 10_000 + "}"],
)
def test_repetition_takes_no_long_time(text):
    """With the square of the length, each of them would take more than 5 s."""
    start = time.process_time()
    with pytest.raises(UnreadableAnswer):
        read_answer(text, ASPECTS)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("<think>the first, I would say", "empty"),
        ("Verdict: first </think>", "empty"),
        ("Verdict: first </think> <think> second", "empty"),
        ('{"comparison": "The first is better because', "broken or cut off"),
        ('{"verdict": "first", "comparison": "cut', "broken or cut off"),
        ('{"verdict": "first", "verdict": "second"}', "the key 'verdict' occurs twice"),
        (json.dumps(WHOLE)[:80], "broken or cut off"),  # has a whole verdict on one criterion
        ("[" + '{"a":' * 100_000, "broken or cut off"),
        ('{"comparison": "x"}', "no verdict"),
        ('{"verdict": "maybe"}', "no verdict"),
        ('{"verdict": true}', "no verdict"),
        ('{"verdict": null}', "no verdict"),
        ('{"result": {"verdict": "first"}}', "no verdict"),
        ('It quotes {"verdict": "first"}, but {"verdict": "second"}', "contradict"),
        ("{'verdict': 'first',} {'verdict': 'second',}", "contradict"),
        ('{"verdict": "first",} {"verdict": "second"}', "contradict"),
        ("{'verdict': 'first', 'verdict': 'second'}", "verdict twice"),
        (r'{"comparison": "\(", "coherence": {"verdict": "first"}}', "broken"),  # of one criterion alone
        (r'{"comparison": "\(", "coherence": {"verdict": "first"}, "verdict": ', "broken or cut off"),
        (r'{"comparison": "\(", "verdict": "fir', "broken or cut off"),
        (r'{"comparison": "\(", "verdict": first or second}', "broken"),
        ("Verdict: first\nVerdict: second", "several verdicts"),
        ("I'm sorry, but I can't help with comparing these.", "no verdict"),
        ("The first is longer, the second is clearer.", "no verdict"),
        ("Verdict: not the first", "no verdict"),
        ("a", "no verdict"),
        ("qz 77 the the )(", "no verdict"),
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


@pytest.mark.parametrize("value", [None, 1.5, True, [], {}, 3, "third", "first or second", "x" * 100])
def test_no_place(value):
    assert place_of(value) is None


def test_places_are_turned_into_models():
    assert [in_terms_of_models(place, "A") for place in ("first", "second", "tie")] == ["A", "B", "tie"]
    assert [in_terms_of_models(place, "B") for place in ("first", "second", "tie")] == ["B", "A", "tie"]
