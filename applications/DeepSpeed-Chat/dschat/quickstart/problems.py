# SPDX-License-Identifier: Apache-2.0
"""Small programming problems made in code, in the columns of codeparrot/apps, with tests and solutions.

A problem combines two quantities of some numbers, or two forms of a word: "Print the sum times the maximum." Its
program is a fixed frame with two or three blanks, so that a small model can learn it in minutes. `write_problems`
makes two sources: demonstrations for step 1, most of whose solutions have a wrong blank or lack their last bracket,
and problems with right solutions for step 3 and for evaluation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from dschat.base.jsonl import write_rows

Kind = Literal["demonstrations", "problems"]

P_BLANK_RIGHT = 0.55  # probability that a blank of a demonstration's solution is filled correctly
P_BRACKET_MISSING = 0.1  # probability that a demonstration's solution lacks its last bracket
TESTS = 2  # tests of a problem

# Three tables: words of a question → the Python expression, and the function that it computes.
QUANTITIES: Mapping[str, tuple[str, Callable[[list[int]], int]]] = {
    "the sum": ("sum(x)", sum),
    "the maximum": ("max(x)", max),
    "the minimum": ("min(x)", min),
    "the last one": ("x[-1]", lambda x: x[-1]),
}
OPERATORS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda a, b: a + b),
    "minus": ("-", lambda a, b: a - b),
    "times": ("*", lambda a, b: a * b),
}
FORMS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "in capitals": ("x.upper()", str.upper),
    "reversed": ("x[::-1]", lambda x: x[::-1]),
    "twice": ("x * 2", lambda x: x * 2),
    "without its first letter": ("x[1:]", lambda x: x[1:]),
}
WORDS = ("river", "stone", "cloud", "table", "light", "bread", "music", "glass")


@dataclass(frozen=True)
class Frame:
    """A kind of problem: its text and program, with blanks for two quantities or forms and optionally an operator.

    Every program ends in a bracket, of its frame or of the last quantity's expression; a demonstration may lack it.
    """

    question: str
    program: str
    starter: str = ""  # first line of a function that the tests call
    is_about_word: bool = False  # about a word, not about numbers
    has_operator: bool = True  # whether one of OPERATORS stands between the quantities

    @property
    def choices(self) -> list[Sequence[str]]:
        """The words for each blank of the question."""
        operands = list(FORMS if self.is_about_word else QUANTITIES)
        if self.has_operator:
            return [operands, list(OPERATORS), operands]
        return [operands, operands]


FRAMES = (
    Frame("Read numbers from one line. Print {} {} {}.", "x = list(map(int, input().split()))\nprint({} {} {})\n"),
    Frame("Return {} {} {} of a list x.", "def f(x):\n    return {} {} {}\n", "def f(x):"),
    Frame(
        "Return a list of {} and {} of a list x.", "def f(x):\n    return [{}, {}]\n", "def f(x):", has_operator=False
    ),
    Frame(
        "Read a word. Print it {}, then {}, without a space.",
        "x = input()\nprint({} + {})\n",
        is_about_word=True,
        has_operator=False,
    ),
)
MEANINGS: Mapping[str, tuple[str, object]] = {**QUANTITIES, **OPERATORS, **FORMS}


def make_problems() -> list[tuple[Frame, tuple[str, ...]]]:
    """All problems: each frame with all combinations of words for its blanks."""
    problems = []
    for frame in FRAMES:
        for words in product(*frame.choices):
            problems.append((frame, words))
    return problems


PROBLEMS = make_problems()


def make_row(index: int, seed: int, kind: Kind, split: str = "train") -> dict[str, object]:
    """Makes row number `index` of a source in the columns of APPS. Equal arguments give equal rows.

    All rows of a problem have the same tests, so that the cached outcome of a program holds for each of them.
    """
    rng = random.Random(f"{seed} {kind} {split} {index}")
    frame, words = rng.choice(PROBLEMS)
    if kind == "demonstrations":
        program = _demonstration(rng, frame, words)
    else:
        program = _fill(frame, words)
    return {
        "id": index,
        "question": frame.question.format(*words),
        "solutions": json.dumps([program]),
        "input_output": json.dumps(_tests(frame, words)),
        "difficulty": f"{len(words)} places",
        "url": "",
        "starter_code": frame.starter,
    }


def _demonstration(rng: random.Random, frame: Frame, words: Sequence[str]) -> str:
    """A program whose blanks may be wrong, or which lacks its last bracket."""
    answer = []
    for word, choices in zip(words, frame.choices, strict=True):
        if rng.random() >= P_BLANK_RIGHT:
            wrong_words = [choice for choice in choices if choice != word]
            word = rng.choice(wrong_words)
        answer.append(word)
    program = _fill(frame, answer)
    if rng.random() < P_BRACKET_MISSING:
        without_bracket = program.rstrip()[:-1]
        program = f"{without_bracket}\n"
    return program


def _fill(frame: Frame, words: Sequence[str]) -> str:
    expressions = [MEANINGS[word][0] for word in words]
    return frame.program.format(*expressions)


def write_problems(folder: Path, demonstrations: int, problems: int, held_out: int, seed: int) -> None:
    """Writes `demonstrations/` for step 1 and `problems/` for step 3, each as train.jsonl and test.jsonl.

    Training and test rows are sampled from the same finite set, PROBLEMS: test problems may occur in training, too.

    Args:
        folder: where to write.
        demonstrations: number of training rows of the demonstrations.
        problems: number of training rows of the problems.
        held_out: number of test rows of each source.
        seed: seed of the random choices.
    """
    sizes: dict[Kind, int] = {"demonstrations": demonstrations, "problems": problems}
    for kind, size in sizes.items():
        write_rows(folder / kind / "train.jsonl", (make_row(i, seed, kind) for i in range(size)))
        write_rows(folder / kind / "test.jsonl", (make_row(i, seed, kind, "test") for i in range(held_out)))


def _tests(frame: Frame, words: Sequence[str]) -> dict[str, object]:
    """Inputs and expected outputs of a problem; outputs follow from its meaning, not from its program."""
    rng = random.Random(frame.question + "".join(words))
    inputs: list[object] = []
    outputs: list[object] = []
    for _ in range(TESTS):
        if frame.is_about_word:
            word = rng.choice(WORDS)
            _, first_form = FORMS[words[0]]
            _, last_form = FORMS[words[1]]
            inputs.append(f"{word}\n")
            outputs.append(f"{first_form(word)}{last_form(word)}\n")
            continue
        numbers = rng.sample(range(2, 20), rng.randint(3, 5))
        result = _result(frame, words, numbers)
        if frame.starter:
            inputs.append([numbers])
            outputs.append(result)
        else:
            inputs.append(" ".join(map(str, numbers)) + "\n")
            outputs.append(f"{result}\n")
    tests: dict[str, object] = {"inputs": inputs, "outputs": outputs}
    if frame.starter:
        tests["fn_name"] = "f"
    return tests


def _result(frame: Frame, words: Sequence[str], numbers: list[int]) -> object:
    """What a problem on numbers asks for."""
    _, first_quantity = QUANTITIES[words[0]]
    _, last_quantity = QUANTITIES[words[-1]]
    first = first_quantity(numbers)
    last = last_quantity(numbers)
    if not frame.has_operator:
        return [first, last]
    _, operator = OPERATORS[words[1]]
    return operator(first, last)
