# SPDX-License-Identifier: Apache-2.0
"""Scores: the reward model reads the sampled ids, a function reads text and is checked."""

import re
import sys
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch

from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.refuel.scores import FunctionDialogueScores
from dschat.scoring import math_answers
from dschat.scoring.function import FunctionScores
from dschat.scoring.source import ResponseTexts
from factories import make_prompt, make_rollout, ragged_rows

ROWS = ragged_rows([2, 5, 9, 1, 3], [7, 1, 4, 3, 2])
TEXT = ResponseTexts(
    ["p"] * 5,
    [f"response {i}" for i in range(5)],
    [make_prompt([], "p", i, {"n": i}).row for i in range(5)],
    [True] * 5,
)
TALKS, FLAG = [dialogue("a", "b")] * 5, "--reward_function"
# How a function is called, and with what beside the rows.
CALLED = {
    "response": (lambda f: FunctionScores(f, FLAG)(make_rollout(ROWS), TEXT), [TEXT.prompts, TEXT.responses]),
    "dialogue": (lambda f: FunctionDialogueScores(f, FLAG)(TALKS, TEXT.rows, TEXT.finished), [TALKS]),
}


@pytest.mark.parametrize("kind", CALLED)
def test_a_function_gets_texts_and_rows(kind):
    call, given = CALLED[kind]
    seen = []

    def length(*args):
        seen.append(list(args))
        return torch.tensor([float(row["n"]) for row in args[-1]], dtype=torch.float64)

    scores = call(length)
    assert seen == [[*given, [{"n": i} for i in range(5)]]]
    assert scores.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and scores.dtype == torch.float32


@pytest.mark.parametrize(
    "result",
    [
        2 * torch.ones(5, requires_grad=True),
        np.arange(5, dtype=">f4")[::-1],
        np.array([1, 2.5, 3, 4, 5], dtype=object),
        pd.Series(range(5), index=range(10, 15)),
    ],
)
def test_anything_with_one_number_each_will_do(result):
    """Also of a model of the function's own, without torch.no_grad(); nothing may be trained through it."""
    scores = CALLED["response"][0](lambda *_: result)
    assert scores.shape == (5,) and scores.dtype == torch.float32 and not scores.requires_grad


@pytest.mark.parametrize("kind", CALLED)
@pytest.mark.parametrize(
    ("result", "words"),
    [
        *((x, "returned shape .* for 5") for x in (torch.ones(4), torch.ones(5, 1), 3.0)),
        *((x, "returned .*, which is not a list of numbers") for x in (None, ["a"] * 5, {"scores": [1] * 5})),
        ([10**400] * 5, "returned list, which is not a list of numbers: "),
    ],
)
def test_what_is_not_one_number_each_is_refused(result, words, kind):
    def reward(*_):
        return result

    with pytest.raises(UserError, match=f"--reward_function: reward {words}") as caught:
        CALLED[kind][0](reward)
    assert "shape" not in words or str(caught.value).endswith(f"for 5 {kind}s; it must return one number per {kind}.")


@pytest.mark.parametrize("kind", CALLED)
def test_what_a_function_changes_nobody_else_sees(kind):
    """Other sources, samples and the next epoch read prompts, responses, dialogues and rows as they were."""
    call, given = CALLED[kind]
    rows = [row.extra for row in TEXT.rows]
    before = deepcopy((given, rows))

    def cleans(*args):
        for row in args[-1]:
            row["n"] = None
            row["seen"] = True
        for texts in args[:-1]:
            if isinstance(texts[0], list):
                texts[0].clear()
            texts[0] = "cleaned"
        return [0.0] * 5

    call(cleans)
    assert (given, rows) == before


def test_load_function(tmp_path):
    """Of a file with a dataclass, a neighbour file, and an import at the call."""
    (tmp_path / "helper_of_mine.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "whole.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport helper_of_mine\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(p, responses, rows):\n    from helper_of_mine import FACTOR\n"
        "    return [Score(FACTOR).value for _ in responses]\n"
    )
    assert load_function(f"{tmp_path / 'whole.py'}:reward", FLAG)([], ["a", "b"], []) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("f", None, "there is no such file"),
        ("", "", "not of the form path/to/module.py:function"),
        ("f", "f = 3\n", "defines no function named 'f'"),
        ("f", "import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("f", "def f(:\n", "SyntaxError"),
        ("f", "async def f(p, r, rows):\n    yield 1\n", "f is an async function; give a plain one"),
        ("f", "class F:\n    async def __call__(self, p, r, rows): pass\nf = F()\n", "f is an async function"),
        ("f", "import os\n\nKEY = os.environ['NO_SUCH_KEY']\n", "failed in .*own.py, line 3: KeyError: 'NO_SUCH_KEY'"),
        ("f", "import sys\nsys.path.pop(0)\nraise RuntimeError('the reason')\n", "line 3: RuntimeError: the reason"),
    ],
)
def test_functions_that_cannot_be_loaded(name, source, message, tmp_path):
    file = tmp_path / "own.py"
    if source is not None:
        file.write_text(source)
    specification = f"{file}:{name}" if name else str(file)
    with pytest.raises(UserError, match=message) as caught:
        load_function(specification, FLAG)
    assert str(caught.value).startswith(f"--reward_function {specification}: ")


def test_a_function_of_other_arguments_is_refused_when_loaded(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def score(dialogues):\n    return []\ndef more(dialogues, rows, weight=1):\n    return []\nlargest = max\n"
    )
    assert load_function(f"{file}:score", FLAG, ["dialogues"])([]) == []
    assert load_function(f"{file}:more", FLAG, ["dialogues", "rows"])([], []) == []
    assert load_function(f"{file}:largest", FLAG, ["dialogues"]) is max, "no signature can be read"
    message = f"{file}:score: it is called with 2 arguments: make it score(dialogues, rows)."
    with pytest.raises(UserError, match=re.escape(message)):
        load_function(f"{file}:score", FLAG, ["dialogues", "rows"])
    with pytest.raises(UserError, match=r"more: it is called with 1 argument: make it more\(dialogues\)\."):
        load_function(f"{file}:more", FLAG, ["dialogues"])


@pytest.mark.parametrize("helpers", ["helpers_1.py", "helpers_2/__init__.py", "helpers_3/score.py"])
def test_two_files_with_a_neighbour_of_one_name_are_refused(helpers, tmp_path):
    """sys.modules holds one module of a name, so that the second file would get the first one's."""
    module = helpers.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for folder in ("a", "b"):
        file = tmp_path / folder / helpers
        file.parent.mkdir(parents=True)
        file.write_text(f"NAME = {folder!r}\n")
        (tmp_path / folder / "reward.py").write_text(f"from {module} import NAME\ndef f():\n    return NAME\n")
        (tmp_path / folder / "unused.py").write_text("")
    neighbour = helpers.partition("/")[0]  # one name per case, as sys.modules keeps them
    assert load_function(f"{tmp_path}/a/reward.py:f", FLAG)() == "a"
    assert load_function(f"{tmp_path}/a/reward.py:f", FLAG)() == "a", "the same file again"
    names = f"{tmp_path}/b/{neighbour} has the name of {tmp_path}/a/{neighbour}"
    with pytest.raises(UserError, match=f"{names}.*: rename"):
        load_function(f"{tmp_path}/b/reward.py:f", FLAG)


def test_data_beside_a_users_file_are_no_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text("def f():\n    pass\n")
    for name in ("rows_of_a_file", "rows_of_a_folder"):
        (tmp_path / "a" / f"{name}.py").write_text("")
    (tmp_path / "a" / "uses.py").write_text("import rows_of_a_file, rows_of_a_folder\ndef f():\n    pass\n")
    (tmp_path / "b" / "rows_of_a_file.jsonl").write_text("")
    (tmp_path / "b" / "rows_of_a_folder").mkdir()
    (tmp_path / "b" / "rows_of_a_folder" / "rows.jsonl").write_text("")
    load_function(f"{tmp_path}/a/uses.py:f", FLAG)
    load_function(f"{tmp_path}/b/reward.py:f", FLAG)


def test_files_of_one_name_in_two_folders_are_both_loaded(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / folder / "reward.py").write_text(f"def f():\n    return {folder!r}\n")
    assert [load_function(f"{tmp_path}/{folder}/reward.py:f", FLAG)() for folder in "aba"] == ["a", "b", "a"]


def test_the_folder_of_a_users_file_is_on_the_path_once_and_no_other(tmp_path):
    before = list(sys.path)
    assert load_function("math", FLAG) is math_answers.math
    for name, text in {"one": "", "two": "", "broken": "1 / 0\n"}.items():
        (tmp_path / f"{name}.py").write_text(f"{text}def f():\n    pass\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_function(f"{tmp_path}/broken.py:f", FLAG)
    assert sys.path == before
    load_function(f"{tmp_path}/one.py:f", FLAG)
    load_function(f"{tmp_path}/two.py:f", FLAG)
    assert sys.path == [*before, str(tmp_path)]


def test_an_error_names_the_users_own_line_and_function(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(
        "import functools, json\nclass Score:\n    def __call__(self, text):\n        return json.loads(text)\n"
        "def score(text, weight=1):\n    return json.loads(text)\n"
        "instance = Score()\nbound = functools.partial(score, weight=2)\ntwice = functools.partial(bound)\n"
    )
    for spec, name, line in [("instance", "Score", 4), ("bound", "score", 6), ("twice", "score", 6)]:
        with pytest.raises(UserError, match=f"{name} failed in {file}, line {line}: JSONDecodeError"):
            call_function(load_function(f"{file}:{spec}", FLAG), FLAG, "{")
