# SPDX-License-Identifier: Apache-2.0
"""Small programming problems made by code, in the columns of codeparrot/apps, with tests and solutions.

A problem combines two quantities of some numbers, or two forms of a word: "Print the sum times the maximum." Its
program is a fixed frame with two or three places to fill, so a small model can learn it in minutes. `write_problems`
makes two sources: demonstrations for step 1, most of whose solutions have a wrong place or a slip, and problems with
right solutions for step 3 and for evaluation.
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

RIGHT = 0.55  # chance that a place of a demonstration's solution is filled rightly
SLIP = 0.1  # chance that it lacks its last bracket
TESTS = 2  # of a problem

# What a question says → the expression, and what it is.
QUANTITIES: Mapping[str, tuple[str, Callable[[list[int]], int]]] = {
    "the sum": ("sum(x)", sum),
    "the maximum": ("max(x)", max),
    "the minimum": ("min(x)", min),
    "the last one": ("x[-1]", lambda x: x[-1]),
}
JOINTS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
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
    """A form of problems: its text and program, with places for two quantities or forms and for what joins them."""

    question: str
    program: str
    starter: str = ""  # of a function that the tests call
    of_words: bool = False
    joined: bool = True  # by one of JOINTS

    @property
    def choices(self) -> list[Sequence[str]]:
        """What may stand in each place of the question."""
        first = list(FORMS if self.of_words else QUANTITIES)
        return [first, list(JOINTS), first] if self.joined else [first, first]


FRAMES = (
    Frame("Read numbers from one line. Print {} {} {}.", "x = list(map(int, input().split()))\nprint({} {} {})\n"),
    Frame("Return {} {} {} of a list x.", "def f(x):\n    return {} {} {}\n", "def f(x):"),
    Frame("Return a list of {} and {} of a list x.", "def f(x):\n    return [{}, {}]\n", "def f(x):", joined=False),
    Frame(
        "Read a word. Print it {}, then {}, without a space.",
        "x = input()\nprint({} + {})\n",
        of_words=True,
        joined=False,
    ),
)
PROBLEMS = [(frame, places) for frame in FRAMES for places in product(*frame.choices)]


def make_row(index: int, seed: int, kind: Kind, split: str = "train") -> dict[str, object]:
    """Makes row number `index` of a source, a function of its arguments alone, in the columns of APPS.

    A problem's tests follow from the problem, so that the same program on it is the same run.
    """
    rng = random.Random(f"{seed} {kind} {split} {index}")
    frame, places = rng.choice(PROBLEMS)
    filled = list(places)
    if kind == "demonstrations":
        filled = [
            place if rng.random() < RIGHT else rng.choice([other for other in others if other != place])
            for place, others in zip(places, frame.choices, strict=True)
        ]
    program = frame.program.format(*({**QUANTITIES, **JOINTS, **FORMS}[place][0] for place in filled))
    if kind == "demonstrations" and rng.random() < SLIP:
        program = program.rstrip()[:-1] + "\n"
    return {
        "id": index,
        "question": frame.question.format(*places),
        "solutions": json.dumps([program]),
        "input_output": json.dumps(_tests(frame, places)),
        "difficulty": f"{len(places)} places",
        "url": "",
        "starter_code": frame.starter,
    }


def write_problems(folder: Path, demonstrations: int, problems: int, held_out: int, seed: int) -> None:
    """Writes `demonstrations/` for step 1 and `problems/` for step 3, each as train.jsonl and test.jsonl."""
    sizes: dict[Kind, int] = {"demonstrations": demonstrations, "problems": problems}
    for kind, size in sizes.items():
        write_rows(folder / kind / "train.jsonl", (make_row(i, seed, kind) for i in range(size)))
        write_rows(folder / kind / "test.jsonl", (make_row(i, seed, kind, "test") for i in range(held_out)))


def _tests(frame: Frame, places: Sequence[str]) -> dict[str, object]:
    """Inputs and outputs of a problem, the latter from its meaning, not from its program."""
    rng = random.Random(frame.question + "".join(places))
    inputs: list[object] = []
    outputs: list[object] = []
    for _ in range(TESTS):
        if frame.of_words:
            word = rng.choice(WORDS)
            inputs.append(f"{word}\n")
            outputs.append(f"{FORMS[places[0]][1](word)}{FORMS[places[1]][1](word)}\n")
            continue
        numbers = rng.sample(range(2, 20), rng.randint(3, 5))
        first, last = QUANTITIES[places[0]][1](numbers), QUANTITIES[places[-1]][1](numbers)
        result: object = JOINTS[places[1]][1](first, last) if frame.joined else [first, last]
        inputs.append([numbers] if frame.starter else " ".join(map(str, numbers)) + "\n")
        outputs.append(result if frame.starter else f"{result}\n")
    tests: dict[str, object] = {"inputs": inputs, "outputs": outputs}
    return tests | ({"fn_name": "f"} if frame.starter else {})
