# SPDX-License-Identifier: Apache-2.0
"""Rewards for answers: which answer of a response is read, what is equal to it, and the short names of the flag."""

import json
import os
import sys
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.base.user_function import load_function
from dschat.data.formats import parse_row
from dschat.scoring import math_answers
from dschat.scoring.math_answers import gsm8k, math, math_format
from dschat.settings.common import ColumnFlags
from dschat.settings.rewards import RewardFlags
from dschat.settings.rules import check_function_path
from dschat.training.steps.functions import function_scores
from published_set_copies import gsm8k_rows

LOCAL_COPY = Path(os.environ.get("MA_RLHF_DATA", "")) / "gsm8k"

# Response, reference, whether it is right, whether it marks an answer.
ANSWERS = [
    ("So 6 × 12 = 72.\n#### 72", "72", 1, 1),
    ("#### $1,200", "1200", 1, 1),
    ("#### 18 eggs", "18", 1, 1),
    ("#### 5x", "5", 0, 1),
    ("#### 20%", "20", 1, 1),
    ("#### 20%", "0.2", 1, 1),
    ("#### 20 percent", "0.2", 1, 1),
    (r"\boxed{20 percentage points}", "0.2", 0, 1),
    ("The answer is 20%.", "0.2", 1, 0),
    ("#### 3/4", "0.75", 1, 1),
    (r"\boxed{\dfrac{6}{8}}", "0.75", 1, 1),
    (r"\boxed{1{,}000}", "1000", 1, 1),
    (r"\boxed{\text{18 dollars}}", "18", 1, 1),
    ("#### −3", "-3", 1, 1),
    ("#### 3", "-3", 0, 1),
    ("#### **18**.", "18", 1, 1),
    (r"First \boxed{5}, no: \boxed{7}", "7", 1, 1),
    (r"In a box \boxed{9}, then" + "\n#### 7\nDone: 3", "7", 1, 1),
    ("#### 5\n#### 7", "7", 1, 1),
    ("#### 10 or 12", "10", 0, 1),
    ("#### 2^3", "2", 0, 1),
    ("#### 1/0", "3", 0, 1),
    ("#### 1000000000000000001", "1000000000000000000", 0, 1),  # equal as floats
    ("#### Step 1: read\n#### Step 2: add\nThat is \\boxed{5}.", "5", 1, 1),
    ("#### 1. Add\n3+4=7\nThe answer is 7.", "7", 1, 0),
    ("#### A", "A", 1, 1),
    ("As 3 is odd:\n#### A.\n", "A", 1, 1),
    ("#### 18. Check: 9*2 = 18 and 20-2.", "18", 1, 1),
    ("#### 5√2", "5", 0, 1),
    ("#### 10 | 12", "12", 0, 1),
    ("#### 45°", "45", 1, 1),
    ("####\n**18**\nas 9 * 2", "18", 1, 1),
    (r"\boxed{\text{B}}", "B", 1, 1),
    ("#### A sum\nThe result is 5.", "5", 1, 0),
    ("#### 7\nor rather \\boxed{8}", "8", 1, 1),
    ("#### 3" + " " * 20_000 + "4", "3", 0, 1),  # a pattern that goes back would take hours
    ("#### 3" + " an a an" * 30 + " 4", "3", 0, 1),
    (r"\boxed{2 x}", "2", 0, 1),
    (r"\boxed{2\frac{1}{2}}", "10.5", 0, 1),
    ("#### 6 miles per hour", "6", 1, 1),
    (r"\boxed{0.00008}", "8e-05", 1, 1),  # as JSON's 8e-5 is written
    (r"\boxed{5000}", "5e3", 1, 1),
    ("the answer is 4\n##### 3 apples", "4", 0, 0),
    ("#### 2 million", "2 million", 1, 1),
    ("#### 3 and a half", "3", 0, 1),
    ("#### 2 pi", "2", 0, 1),
    ("#### 2 pies", "2", 1, 1),
    ("The answer is 18.", "18", 1, 0),
    ("It is 12-3", "3", 1, 0),
    ("Nothing at all", "3", 0, 0),
]
EXPRESSIONS = [
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{2}", 0),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
]


@pytest.mark.parametrize(("response", "reference", "right", "marked"), ANSWERS)
def test_answers_by_hand(response, reference, right, marked):
    assert math([""], [response], [{"answer": reference}]) == [right]
    assert math_format([""], [response], [{"answer": reference}]) == [marked]


@pytest.mark.parametrize(("response", "reference", "right"), EXPRESSIONS)
def test_expressions_are_compared_by_math_verify(response, reference, right):
    pytest.importorskip("math_verify")
    assert math([""], [response], [{"answer": reference}]) == [right]


def test_expressions_are_compared_as_texts_without_the_library(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    math_answers._warn_of_missing_library.cache_clear()
    rows = [{"answer": r"\sqrt{8}"}] * 2
    assert math(["", ""], [r"\boxed{ \sqrt{8} }", r"\boxed{2\sqrt{2}}"], rows) == [1, 0]
    assert caplog.text.count("pip install 'ma-rlhf[math]'") == 1


def test_the_reward_of_the_published_runs_wants_the_mark():
    responses = ["#### 7", r"\boxed{7}", "It is 7", "#### 8"]
    assert gsm8k([""] * 4, responses, [{"answer": "7"}] * 4) == [1, 0, 0, 0]


def test_rows_of_gsm8k_are_prompts_responses_and_references():
    raw = gsm8k_rows(2)[1]
    row = parse_row(raw, ColumnFlags(), "rows:2")
    instruction = ' Let\'s think step by step and output the final answer after "####".'
    assert row.prompt == f"Ann has 1 apples and buys one. How many has she?{instruction}\n"
    assert row.chosen == "1 and one are 1+1 = <<1+1=2>>2.\n#### 2" and row.rejected is None
    assert gsm8k([""], [row.chosen], [row.extra]) == [1]
    row = parse_row(raw, ColumnFlags(apply_chat_template=True), "rows:2")
    assert row.messages == [{"role": "user", "content": f"{raw['question']}{instruction}"}]
    row = parse_row(raw, ColumnFlags(prompt_key="question", response_key="answer"), "rows:2")
    assert (row.prompt, row.chosen) == (raw["question"], raw["answer"])


def test_a_row_with_other_responses_is_not_of_gsm8k():
    raw = {"question": "1+1?", "answer": "It is\n#### 2", "chosen": "2", "rejected": "3"}
    with pytest.raises(UserError, match="no column 'prompt'"):
        parse_row(raw, ColumnFlags(), "rows:1")
    row = parse_row(raw, ColumnFlags(prompt_key="question"), "rows:1")
    assert (row.prompt, row.chosen, row.rejected) == ("1+1?", "2", "3")


def test_the_flag_takes_short_names():
    flags = RewardFlags(reward_function=["math", "math_format"], reward_weights=["math_format=0.1"])
    assert flags.weights == {"math": 1, "math_format": 0.1}
    for name in ("math", "math_format", "gsm8k"):
        check_function_path("reward_function", name)
        assert load_function(name, "--reward_function").__name__ == name
    with pytest.raises(UserError, match="--reward_function maths is not of the form module.py:function"):
        check_function_path("reward_function", "maths")
    assert function_scores("gsm8k", "--reward_function").name == "gsm8k"


def test_a_row_without_a_reference_is_refused():
    with pytest.raises(UserError, match="no column 'answer' with the right answer, only 'prompt', 'result'"):
        math([""], ["1"], [{"prompt": "1", "result": "1"}])


@pytest.mark.slow
@pytest.mark.skipif(not LOCAL_COPY.is_dir(), reason="reads gsm8k in MA_RLHF_DATA")
def test_the_solution_of_every_published_row_gets_the_full_reward():
    rows = []
    for split in ("train", "test"):
        with open(LOCAL_COPY / f"{split}.jsonl", encoding="utf-8") as file:
            rows += list(map(json.loads, file))
    solutions = [row["answer"] for row in rows]
    for function in (math, math_format, gsm8k):
        assert sum(function([""] * len(rows), solutions, rows)) == len(rows) == 8_792
