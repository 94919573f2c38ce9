# SPDX-License-Identifier: Apache-2.0
"""Rewards of macro actions: every source of scores is asked for them, and says them by hand arithmetic."""

import json
import math
from dataclasses import replace

import pytest
import torch

from closeness import assert_near, near
from dschat.models.scalar import ScalarModel
from dschat.programs.run import ProgramOutcome, ProgramPool
from dschat.programs.scores import ProgramScores
from dschat.programs.segment_rewards import function_ends, rewards_by_segment, rewards_of_tests
from dschat.scoring.function import FunctionScores
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.reward_texts import TextRewardScores
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.segments import Segments
from dschat.scoring.serve import Scorer, ScoreRequest
from dschat.scoring.source import ResponseTexts
from factories import EOS, hf_score, make_classifier, make_prompt, make_rollout, ragged_rows, save_folder

ROWS = ragged_rows([2, 5], [4, 3])
LENGTHS = [[1, 3], [2, 1]]
TEXTS = ResponseTexts(
    ["p", "q"],
    ["ab", "cd"],
    [make_prompt([], prompt, n, {"n": n}).row for n, prompt in enumerate("pq")],
    [True, False],
    Segments([["a", "b"], ["", "cd"]], LENGTHS),
)
PREFIX = replace(TEXTS, segments=replace(TEXTS.segments, by_prefix=True))


def of_function(function, texts=TEXTS, on_error="stop"):
    return FunctionScores(function, "--reward_function", on_error)(make_rollout(ROWS), texts)


def test_rewards_of_numbers():
    """1, 3, 2 add up; of prefixes, each adds what is new; a number alone is the response's; NaN has no reward."""
    segments = Segments([[""] * 3, [""] * 2, [""], [""] * 2], [[1] * 3, [1] * 2, [1], [1] * 2])
    numbers = [[1.0, 3.0, 2.0], 4.0, [5.0], [math.nan, 1.0]]
    scores, rewards = segments.rewards(numbers)
    assert scores[:3].tolist() == [6.0, 4.0, 5.0] and scores[3].isnan()
    assert rewards.tolist() == [[1, 3, 2], [0, 0, 0], [5, 0, 0], [0, 0, 0]]
    for bad in (math.nan, 1e308, math.inf):
        scores, rewards = replace(segments, by_prefix=True).rewards([[1.0, bad, 3.0]])
        assert scores.isnan().all() and not rewards.any(), "in the middle, though the last number is the score"
    scores, rewards = replace(segments, by_prefix=True).rewards(numbers)
    assert scores[:3].tolist() == [2.0, 4.0, 5.0] and scores[3].isnan() and rewards[0].tolist() == [1, 2, -1]
    for by_prefix in (False, True):  # a response without macro actions
        scores, rewards = Segments([[], ["a"]], [[], [1]], by_prefix).rewards([[], [2.0]])
        assert scores.tolist() == [0, 2] and rewards.tolist() == [[0], [2]]


def test_a_function_gets_the_macro_actions_and_gives_each_a_number():
    seen = []

    def function(*args):
        seen.append(args)
        return [[1, 2], torch.tensor([3.0, 5.0])]

    found = of_function(function)
    assert seen == [(["p", "q"], ["ab", "cd"], [{"n": 0}, {"n": 1}], [["a", "b"], ["", "cd"]])]
    assert found.values.tolist() == [3.0, 8.0] and found.segments.tolist() == [[1, 2], [3, 5]]
    found = of_function(lambda *_: (7.0, (1.0, 2.0)))
    assert found.values.tolist() == [7.0, 3.0] and found.segments.tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
def test_a_reward_model_is_read_where_macro_actions_end(kind):
    model = make_classifier(kind)
    ends = [[0, 3], [1, 2]]
    read = [[hf_score(model, p + r[: end + 1]) for end in own] for (p, r), own in zip(ROWS, ends, strict=True)]
    source = RewardModelScores(ScalarModel(model), 2)
    rollout = make_rollout(ROWS, left=2, right=3)
    found = source(rollout, TEXTS)
    assert_near(found.segments, torch.tensor(read))
    assert_near(found.values, torch.tensor(read).sum(1))
    found = source(rollout, PREFIX)
    assert_near(found.values, torch.tensor([own[1] for own in read]))
    assert_near(found.segments, torch.tensor([[own[0], own[1] - own[0]] for own in read]))
    assert_near(found.values, source(rollout, replace(TEXTS, segments=None)))


def test_a_reward_model_with_a_tokenizer_of_its_own_and_its_server(bytes_tokenizer, tmp_path):
    """Each response up to the end of each macro action is a text; EOS follows the last of one that has ended."""
    path = save_folder(tmp_path / "rm", make_classifier(vocab_size=len(bytes_tokenizer)), bytes_tokenizer)
    tokenizer = load_reward_tokenizer(path, False)
    reader = load_reward_model(path, tokenizer, False, torch.device("cpu"), torch.float32, 2)
    rows = [(prompt, [*response[:-1], EOS] if n == 0 else response) for n, (prompt, response) in enumerate(ROWS)]
    rollout = make_rollout(rows)
    rows = [TEXTS.rows[n] for n in (0, 0, 1, 1)]
    upto = ResponseTexts(["p", "p", "q", "q"], ["a", "ab", "", "cd"], rows, [False, True, False, False])
    read = reader.read(upto)[0].view(2, 2)
    found = TextRewardScores(reader)(rollout, TEXTS)
    assert_near(found.segments, read)
    request = ScoreRequest(["p", "q"], ["ab", "cd"], [True, False], [None, None], TEXTS.segments.texts)
    assert_near(torch.tensor(Scorer(reader)(request)["scores"]), read)


def test_texts_that_are_read_for_another_rank_are_not_counted(monkeypatch, caplog):
    """Of four texts the first is too long. The model reads it three times more, since another rank has seven texts."""

    class Reader:
        def read(self, texts):
            too_long = {row: "Too long." for row, text in enumerate(texts.responses) if text == "a"}
            return torch.ones(len(texts.responses)), too_long

    monkeypatch.setattr("dschat.scoring.reward_texts.largest_over_ranks", lambda count: count + 3)
    found = TextRewardScores(Reader(), skips=True)(make_rollout(ROWS), TEXTS)
    assert caplog.messages == ["Too long. Texts without a score: 1 of 4."]
    assert found.values.isnan().tolist() == [True, False]


PROGRAM = "def f(x):\n    return 2 * x\n\n    # of f\ndef g(x):\n    return x + 1\nprint(1)\n"


@pytest.mark.parametrize(
    ("program", "name", "end"),
    [
        (f"So:\n```python\n{PROGRAM}```\nDone.", "f", "return 2 * x"),
        (f"So:\n```python\n{PROGRAM}```\nDone.", None, "print(1)"),
        (f"So:\n```python\n{PROGRAM}```\nDone.", "h", "print(1)"),  # there is none: as the whole program
        ("class Solution:\n    def f(self):\n        return 1\n    def g(self):\n        pass", "f", "return 1"),
        ('def f(\n    a,\n):\n    """Of\nf.\n    """\n# here\n    return a\nx = f(1)\n', "f", "return a"),
        ("x = 1\ndef g(): return 1\ny = 2\n", "g", "return 1"),
        ("def f():\n  return 1\ndef f():\n  return 2\nprint(f())", "f", "return 2"),  # the last one is called
        ("def f():\n  return (1\n", "f", "(1"),  # as far as it can be read
    ],
)
def test_where_functions_of_a_program_end(program, name, end):
    assert program[: function_ends(program, [name])[name]].endswith(end)


def test_what_tests_are_worth():
    """Shares that are the reward together; an error's is of its first test, a compile error's of the program."""
    half = ProgramOutcome(("passed", "wrong"), 2, "namespaces", 0.1)
    assert rewards_of_tests(half, "paper") == [(0, near(0.5)), (1, near(-0.15))]  # 0.35 = −0.3 + 1.3 / 2
    assert rewards_of_tests(half, "ratio") == [(0, 0.5), (1, 0.0)]
    error = ProgramOutcome(("passed", "timeout"), 3, "namespaces", 0.1)
    assert rewards_of_tests(error, "paper") == [(1, -0.6)]
    assert rewards_of_tests(replace(error, tests=("compile_error",)), "paper") == [(None, -1.0)]
    assert rewards_by_segment([(None, -1.0)], ["f"], []) == [], "an empty response"
    found = rewards_by_segment([(0, 0.5), (1, -0.15), (None, 2.0)], ["f", "g"], PROGRAM.splitlines(True))
    assert found == [0, 0.5, 0, 0, 0, -0.15, 2.0]


def test_tests_of_two_functions_are_run_and_stand_where_these_end():
    tests = [
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]},
        {"fn_name": "g", "inputs": [[1]], "outputs": [7]},
    ]
    lines = PROGRAM.splitlines(True)
    row = replace(TEXTS.rows[0], extra={"input_output": json.dumps(tests)})
    texts = ResponseTexts(["p"], [PROGRAM], [row], [True], Segments([lines], [[1] * len(lines)], True))
    found = ProgramScores(ProgramPool("rlimits"), "ratio")(make_rollout(ROWS[:1]), texts)
    assert found.values.tolist() == near([2 / 3])
    assert_near(found.segments, torch.tensor([[0, 2 / 3, 0, 0, 0, 0, 0]]))
