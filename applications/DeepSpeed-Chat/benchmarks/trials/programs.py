# SPDX-License-Identifier: Apache-2.0
"""`programs`: several small functions in one response, each run in the sandbox and tested where it ends.

A prompt asks for functions one after another, "the sum plus the maximum; the last one times the minimum; …", and a
response answers by a line of Python for each. A function is called with one list; that its text is run alone, and the
list is always the same, makes a function that was seen before cost nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import product

from dschat.quickstart.problems import JOINTS, QUANTITIES
from dschat.scoring.programs.levels import strongest_level
from dschat.scoring.programs.sandbox import SandboxJob, SandboxLimits, execute
from dschat.scoring.programs.scores import rewards_by_segment

NAMES = "fghk"  # of the functions, in the order in which they are asked for
RIGHT = 0.6  # chance that a place of a demonstration's function is filled rightly
SLIP = 0.1  # chance that it lacks its last bracket
NUMBERS = [29, 14, 26, 15]  # on which no two of the functions agree that do not agree on all lists

# What a prompt says → the expression and its value.
QUESTIONS = {
    f"{first} {joint} {last}": (
        f"{QUANTITIES[first][0]} {JOINTS[joint][0]} {QUANTITIES[last][0]}",
        JOINTS[joint][1](QUANTITIES[first][1](NUMBERS), QUANTITIES[last][1](NUMBERS)),
    )
    for first, joint, last in product(QUANTITIES, JOINTS, QUANTITIES)
}


def prompt_and_response(chance: random.Random) -> tuple[str, str]:
    """What is asked for, and a mediocre answer."""
    places = [[chance.choice(list(those)) for those in (QUANTITIES, JOINTS, QUANTITIES)] for _ in NAMES]
    lines = [demonstration(name, asked, chance) for name, asked in zip(NAMES, places, strict=True)]
    return "; ".join(map(" ".join, places)) + ":", "".join(lines)


def demonstration(name: str, asked: Sequence[str], chance: random.Random) -> str:
    """A function, some places of which may be wrong, or which lacks a bracket."""
    choices = (list(QUANTITIES), list(JOINTS), list(QUANTITIES))
    filled = [
        place if chance.random() < RIGHT else chance.choice([other for other in others if other != place])
        for place, others in zip(asked, choices, strict=True)
    ]
    line = f"def {name}(x): return {QUESTIONS[' '.join(filled)][0]}"
    return (line[:-1] if chance.random() < SLIP else line) + "\n"


def programs(
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[object],
    segments: Sequence[Sequence[str]] | None = None,
) -> list[float] | list[list[float]]:
    """The share of the functions that return what was asked for. Of macro actions, what ends in each."""
    rights = [right_ones(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    if segments is None:
        return [sum(right) / len(NAMES) for right in rights]
    return [
        rewards_by_segment([(n, is_right / len(NAMES)) for n, is_right in enumerate(right)], NAMES, own)
        for right, own in zip(rights, segments, strict=True)
    ]


def right_ones(prompt: str, response: str) -> list[bool]:
    """Of each function that is asked for, whether the last line of the response that defines it returns that."""
    lines = {line[: line.find("(")]: line for line in response.split("\n")}
    wanted = [QUESTIONS[question.strip()][1] for question in prompt.rstrip(":").split(";")]
    texts = [lines.get(f"def {name}") for name in NAMES]
    return [
        text is not None and returned(text, name) == value
        for name, text, value in zip(NAMES, texts, wanted, strict=True)
    ]


@cache
def returned(text: str, name: str) -> object:
    """What a function gives for `NUMBERS`; None where it fails."""
    found = execute(SandboxJob(text, function=name, arguments=(NUMBERS,)), SandboxLimits(), strongest_level("rlimits"))
    try:
        return json.loads(found.output) if found.status == 0 else None
    except ValueError:
        return None
