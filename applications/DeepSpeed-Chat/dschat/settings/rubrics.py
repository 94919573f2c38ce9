# SPDX-License-Identifier: Apache-2.0
"""Rubric files, which say how a judge model compares or grades responses; and the rubric of --reward_judge.

Errors name the key of the file; the reader of a flag adds the flag and the file.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.base.jsonl import without_repeats

TAG = re.compile(r"[a-z][a-z0-9-]*")  # a word in a tag around the material
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of a criterion, which is a key of the answer
Judging = Literal["points", "ranking"]


# -- what all rubrics have


def read_content(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The object in a TOML or JSON file.

    Raises:
        UserError: the file cannot be read, or has a key that is none of `keys`.
    """
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
        raise UserError(f"must hold one object with the keys {', '.join(keys)}.")
    unknown = [key for key in content if key not in keys]
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}; a rubric has {', '.join(keys)}.")
    return content


def read_task(content: Mapping[str, Any], wanted: str) -> str:
    """The text of the key task; `wanted` is what it must say, for messages."""
    value = content.get("task")
    if not isinstance(value, str) or not value.strip():
        problem = "is missing or empty" if value is None or isinstance(value, str) else "must be text"
        raise UserError(f"key 'task' {problem}; say {wanted}.")
    return value.strip()


def read_tag(content: Mapping[str, Any], key: str) -> str:
    """The word for a prompt or a response; by default its key."""
    value = content.get(key, key)
    if not isinstance(value, str) or not TAG.fullmatch(value):
        example = "question" if key == "prompt" else "answer"
        form = f'one word of lower-case letters, digits and -, such as "{example}", not {value!r}'
        raise UserError(f"key {key!r} must be {form}.")
    return value


def refuse_response_tag(prompt_name: str, response_tags: str) -> None:
    """Refuses a tag for the prompt that also stands around a response, which would take its place.

    Args:
        prompt_name: value of the key `prompt`.
        response_tags: pattern of the tags around responses.

    Raises:
        UserError: the prompt's tag matches.
    """
    if re.fullmatch(response_tags, prompt_name):
        raise UserError(f"key 'prompt' is {prompt_name!r}, the tag of a response: give another word.")


def check_criterion(
    name: str,
    question: object,
    taken: Sequence[str],
) -> str:
    """The question of a criterion.

    Args:
        name: name of the criterion.
        question: as the file has it.
        taken: keys that every answer has, in lower case.

    Raises:
        UserError: the name or the question cannot be used.
    """
    if not NAME.fullmatch(name) or name.lower() in taken:
        form = f"letters, digits and _, and none of {', '.join(taken)}, which the answer needs itself"
        raise UserError(f"key 'criteria.{name}': a criterion's name must be {form}.")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"key 'criteria.{name}' must be text: the question that it asks.")
    return question.strip()


# -- the rubric of --reward_judge

SCORE_KEYS = ("task", "judge", "prompt", "response", "criteria")
CRITERION_KEYS = ("question", "weight")
REASON = "reason"  # key of every answer: why, in words
WHOLE = "score"  # key of an answer without criteria


@dataclass(frozen=True)
class ScoreRubric:
    """How a judge model scores responses.

    Attributes:
        task: what is graded or ranked, and what makes a good response.
        judge: points: each response gets 0 to 10 points on each criterion; ranking: the responses to a prompt are
            ranked together.
        prompt_name: word for the prompt, in the tag around it.
        response_name: word for a response.
        criteria: name → question; empty if the task says everything.
        weights: criterion → its weight in the score; of points alone.
    """

    task: str
    judge: Judging = "points"
    prompt_name: str = "prompt"
    response_name: str = "response"
    criteria: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> bool:
        """Whether responses to one prompt are ranked, instead of graded one by one."""
        return self.judge == "ranking"

    @property
    def graded(self) -> tuple[str, ...]:
        """Keys of an answer that hold points."""
        return tuple(self.criteria) or (WHOLE,)


def read_score_rubric(path: str) -> ScoreRubric:
    """Read the rubric of --reward_judge, see docs/rewards.md.

    Raises:
        UserError: the file cannot be read, or a key is missing, unknown or has a bad value; names both.
    """
    try:
        content = read_content(Path(path), SCORE_KEYS)
        task = read_task(content, "what is graded, and what makes a good response")
        judge = content.get("judge", "points")
        if judge not in ("points", "ranking"):
            raise UserError(f'key \'judge\' must be "points" or "ranking", not {judge!r}.')
        prompt_name = read_tag(content, "prompt")
        response_name = read_tag(content, "response")
        if prompt_name == response_name:
            raise UserError(f"keys 'prompt' and 'response' are both {prompt_name!r}: give two words.")
        if judge == "ranking":
            refuse_response_tag(prompt_name, rf"{response_name}-\d+")
        criteria, weights = _weighted_criteria(content.get("criteria", {}), judge)
    except UserError as error:
        raise UserError(f"--reward_judge {path}: {error}") from error
    return ScoreRubric(task, judge, prompt_name, response_name, criteria, weights)


def _weighted_criteria(value: object, judge: Judging) -> tuple[dict[str, str], dict[str, float]]:
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
        criteria[name] = check_criterion(name, criterion.get("question"), (REASON, WHOLE))
        weight = criterion.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"key 'criteria.{name}.weight' must be a number above 0, not {weight!r}.")
        if judge == "ranking" and "weight" in criterion:
            raise UserError(
                f"key 'criteria.{name}.weight': a ranking gives no points to weight. Drop it, or set judge ="
                ' "points".'
            )
        weights[name] = float(weight)
    return criteria, weights
