# SPDX-License-Identifier: Apache-2.0
"""Rubrics, which say how a judge model compares or grades responses, and the files that hold them.

`dschat judge --rubric` and `dschat ppo --reward_judge` read the same files; docs/evaluation.md describes them.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.base.jsonl import without_repeats

TAG = re.compile(r"[a-z][a-z0-9-]*")  # a word in a tag around the material
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of a criterion, which is a key of the answer
KEYS = ("task", "judge", "prompt", "response", "criteria", "separate")
CRITERION_KEYS = ("question", "weight")
# Keys of answers.
REASON = "reason"  # why, in words
WHOLE = "score"  # points without criteria
COMPARISON = "comparison"
VERDICT_KEYS = ("verdict", "overall_verdict", "final_verdict", "overall", "winner")
TAKEN = (REASON, WHOLE, COMPARISON, *VERDICT_KEYS)
Judging = Literal["points", "ranking"]


@dataclass(frozen=True)
class Rubric:
    """How a judge model scores responses, or compares two of them.

    Attributes:
        task: what is judged, and what makes a good response.
        judge: of scores: points: each response gets 0 to 10 points on each criterion; ranking: the responses to a
            prompt are ranked together.
        prompt_name: word for the prompt, in the tag around it.
        response_name: word for a response.
        criteria: name → question; empty if the task says everything.
        weights: criterion → its weight in the score; of points alone.
        separate: of comparisons: each criterion has its own verdict, before the overall one.
    """

    task: str
    judge: Judging = "points"
    prompt_name: str = "prompt"
    response_name: str = "response"
    criteria: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    separate: bool = False

    @property
    def ranks(self) -> bool:
        """Whether responses to one prompt are ranked, instead of graded one by one."""
        return self.judge == "ranking"

    @property
    def graded(self) -> tuple[str, ...]:
        """Keys of an answer that hold points."""
        return tuple(self.criteria) or (WHOLE,)


def read_rubric(path: str | Path, flag: str) -> Rubric:
    """Read the rubric that a flag names.

    Raises:
        UserError: the file cannot be read, or a key is missing, unknown or has a bad value; names all three.
    """
    try:
        content = _read_content(Path(path))
        task = _read_task(content)
        judge = content.get("judge", "points")
        if judge not in ("points", "ranking"):
            raise UserError(f'key \'judge\' must be "points" or "ranking", not {judge!r}.')
        prompt_name = _read_tag(content, "prompt")
        response_name = _read_tag(content, "response")
        if prompt_name == response_name:
            raise UserError(f"keys 'prompt' and 'response' are both {prompt_name!r}: give two words.")
        # A tag of the prompt that also stands around a response would take its place.
        if re.fullmatch(rf"(first|second)-{response_name}|{response_name}-\d+", prompt_name):
            raise UserError(f"key 'prompt' is {prompt_name!r}, the tag of a response: give another word.")
        criteria, weights = _read_criteria(content.get("criteria", {}), judge)
        separate = content.get("separate", False)
        if not isinstance(separate, bool):
            raise UserError("key 'separate' must be true or false.")
        if separate and not criteria:
            raise UserError("key 'separate' asks for a verdict on each of 'criteria': add some.")
    except UserError as error:
        raise UserError(f"{flag} {path}: {error}") from error
    return Rubric(task, judge, prompt_name, response_name, criteria, weights, separate)


def _read_content(path: Path) -> dict[str, Any]:
    """The object in a TOML or JSON file, whose keys are known."""
    if path.suffix not in (".toml", ".json"):
        raise UserError("give a file that ends in .toml or .json.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_toml = path.suffix == ".toml"
        content = tomllib.loads(text) if is_toml else json.loads(text, object_pairs_hook=without_repeats)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror}); give the file of a rubric.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"not readable as {path.suffix[1:].upper()} ({error}); correct it.") from error
    if not isinstance(content, dict):
        raise UserError(f"must hold one object with the keys {', '.join(KEYS)}.")
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}; a rubric has {', '.join(KEYS)}.")
    return content


def _read_task(content: Mapping[str, Any]) -> str:
    value = content.get("task")
    if not isinstance(value, str) or not value.strip():
        problem = "is missing or empty" if value is None or isinstance(value, str) else "must be text"
        raise UserError(f"key 'task' {problem}; say what is graded or compared, and what makes a good response.")
    return value.strip()


def _read_tag(content: Mapping[str, Any], key: str) -> str:
    """The word for a prompt or a response; by default its key."""
    value = content.get(key, key)
    if not isinstance(value, str) or not TAG.fullmatch(value):
        example = "question" if key == "prompt" else "answer"
        form = f'one word of lower-case letters, digits and -, such as "{example}", not {value!r}'
        raise UserError(f"key {key!r} must be {form}.")
    return value


def _read_criteria(value: object, judge: Judging) -> tuple[dict[str, str], dict[str, float]]:
    """Questions and weights by criterion: each is a question as text, or a table of question and weight."""
    if not isinstance(value, dict):
        raise UserError("key 'criteria' must hold names, each with a question, or with question and weight.")
    criteria: dict[str, str] = {}
    weights: dict[str, float] = {}
    for name, item in value.items():
        criterion = item if isinstance(item, dict) else {"question": item}
        unknown = [key for key in criterion if key not in CRITERION_KEYS]
        if unknown:
            raise UserError(f"unknown key 'criteria.{name}.{unknown[0]}'; a criterion has question and weight.")
        question = criterion.get("question")
        if not NAME.fullmatch(name) or name.lower() in TAKEN:
            form = f"letters, digits and _, and none of {', '.join(TAKEN)}, which the answer needs itself"
            raise UserError(f"key 'criteria.{name}': a criterion's name must be {form}.")
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"key 'criteria.{name}' must be text: the question that it asks.")
        weight = criterion.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"key 'criteria.{name}.weight' must be a number above 0, not {weight!r}.")
        if judge == "ranking" and "weight" in criterion:
            raise UserError(
                f"key 'criteria.{name}.weight': a ranking gives no points to weight. Drop it, or set judge ="
                ' "points".'
            )
        criteria[name] = question.strip()
        weights[name] = float(weight)
    return criteria, weights
