# SPDX-License-Identifier: Apache-2.0
"""The task `programs`: several small functions in one response, each of which is run in the sandbox.

A prompt asks for functions, "the sum plus the maximum; the last one times the minimum; …", and a response has a line
of Python for each. A function is called with one list. Its text alone decides the result, so that a function that was
run before costs nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from dschat.programs.levels import strongest_level
from dschat.programs.sandbox import SandboxJob, SandboxLimits, execute
from dschat.programs.segment_rewards import rewards_by_segment
from dschat.quickstart.problems import OPERATORS, QUANTITIES

NAMES = "fghk"  # the functions, in the order in which the prompt asks for them
RIGHT = 0.6  # probability that a part of a demonstration's function is right
SLIP = 0.1  # probability that it lacks its last bracket
NUMBERS = [29, 14, 26, 15]  # functions that agree on these agree on all lists


def make_questions() -> dict[str, tuple[str, int]]:
    """Every question with the expression that answers it and its value for NUMBERS."""
    questions = {}
    for first, joint, last in product(QUANTITIES, OPERATORS, QUANTITIES):
        first_text, first_function = QUANTITIES[first]
        joint_text, joint_function = OPERATORS[joint]
        last_text, last_function = QUANTITIES[last]
        value = joint_function(first_function(NUMBERS), last_function(NUMBERS))
        questions[f"{first} {joint} {last}"] = (f"{first_text} {joint_text} {last_text}", value)
    return questions


QUESTIONS = make_questions()
PARTS: tuple[Mapping[str, object], ...] = (QUANTITIES, OPERATORS, QUANTITIES)  # the parts of a question


def make_prompt_and_response(rng: random.Random) -> tuple[str, str]:
    """A prompt and a mediocre response."""
    questions = []
    for _ in NAMES:
        questions.append([rng.choice(list(choices)) for choices in PARTS])
    lines = []
    for name, question in zip(NAMES, questions, strict=True):
        lines.append(make_demonstration(name, question, rng))
    prompt = "; ".join(" ".join(question) for question in questions)
    return f"{prompt}:", "".join(lines)


def make_demonstration(name: str, question: Sequence[str], rng: random.Random) -> str:
    """A function, parts of which may be wrong, or which lacks a bracket."""
    answer = []
    for part, choices in zip(question, PARTS, strict=True):
        if rng.random() >= RIGHT:
            part = rng.choice([choice for choice in choices if choice != part])
        answer.append(part)
    expression, _ = QUESTIONS[" ".join(answer)]
    line = f"def {name}(x): return {expression}"
    if rng.random() < SLIP:
        line = line[:-1]
    return f"{line}\n"


def programs(
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[object],
    segments: Sequence[Sequence[str]] | None = None,
) -> list[float] | list[list[float]]:
    """The share of the functions that return what the prompt asks for.

    With `segments` (the texts of the macro actions): the share that ends in each of them.
    """
    results = []
    for prompt, response in zip(prompts, responses, strict=True):
        results.append(right_functions(prompt, response))
    if segments is None:
        return [sum(result) / len(NAMES) for result in results]
    by_segment = []
    for result, texts in zip(results, segments, strict=True):
        scores = [(number, is_right / len(NAMES)) for number, is_right in enumerate(result)]
        by_segment.append(rewards_by_segment(scores, NAMES, texts))
    return by_segment


def right_functions(prompt: str, response: str) -> list[bool]:
    """Whether each function returns what the prompt asks for; the last definition of a name counts."""
    lines = {line[: line.find("(")]: line for line in response.split("\n")}
    results = []
    for name, question in zip(NAMES, prompt.rstrip(":").split(";"), strict=True):
        text = lines.get(f"def {name}")
        _, value = QUESTIONS[question.strip()]
        results.append(text is not None and run_function(text, name) == value)
    return results


@cache
def run_function(text: str, name: str) -> object:
    """The result of a function for NUMBERS; None if it fails."""
    job = SandboxJob(text, function=name, arguments=(NUMBERS,))
    result = execute(job, SandboxLimits(), strongest_level("rlimits"))
    if result.status != 0:
        return None
    try:
        return json.loads(result.output)
    except ValueError:
        return None
