# SPDX-License-Identifier: Apache-2.0
"""A rubric of the user's own, from a small TOML or JSON file; docs/evaluation.md describes it."""

import hashlib
import json
import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dschat.errors import UserError
from dschat.evaluation.judge.rubrics import Rubric
from dschat.evaluation.judge.verdicts import VERDICT_KEYS

KEYS = ("task", "prompt", "response", "criteria", "separate")
TAG = re.compile(r"[a-z][a-z0-9-]*")  # what a word around the material may be
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of a criterion: a key of the answer
TAKEN = ("comparison", *VERDICT_KEYS)
PER_VERDICT, PER_SENTENCE = 45, 60  # tokens of an answer: of each criterion with a verdict, and of the rest


def read_rubric(path: Path, dataset: str) -> Rubric:
    """Reads a rubric.

    Args:
        path: the file.
        dataset: what results call the data set.

    Raises:
        UserError: the file cannot be read, or a key is missing, unknown or holds what it cannot; names both.
    """
    content = _parsed(path)
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise UserError(f"--rubric {path}: unknown key {unknown[0]!r}; a rubric has {', '.join(KEYS)}.")
    task = _text(content, "task", path)
    prompt, response = (_tag(content, key, path) for key in ("prompt", "response"))
    criteria = _criteria(content.get("criteria", {}), path)
    separate = content.get("separate", False)
    if not isinstance(separate, bool):
        raise UserError(f"--rubric {path}: key 'separate' must be true or false.")
    if separate and not criteria:
        raise UserError(f"--rubric {path}: key 'separate' asks for a verdict on each of 'criteria': add some.")
    tokens = PER_SENTENCE + PER_VERDICT * len(criteria) * separate
    rubric = Rubric(dataset, prompt, response, task, tokens, criteria, separate)
    said = json.dumps({name: value for name, value in asdict(rubric).items() if name != "dataset"})
    return replace(rubric, digest=hashlib.sha256(said.encode("utf-8", "replace")).hexdigest()[:12])


def _parsed(path: Path) -> dict[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"--rubric {path}: give a file that ends in .toml or .json.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise UserError(f"--rubric {path}: cannot be read ({error.strerror}); give the file of a rubric.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--rubric {path}: not readable as {path.suffix[1:].upper()} ({error}); correct it."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"--rubric {path}: must hold one object with the keys {', '.join(KEYS)}.")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError where it says a key twice, as TOML does."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} stands there twice")
    return dict(pairs)


def _text(content: dict[str, Any], key: str, path: Path) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        problem = "is missing or empty" if value is None or isinstance(value, str) else "must be text"
        raise UserError(f"--rubric {path}: key {key!r} {problem}; say what is compared and which is to be preferred.")
    return value.strip()


def _tag(content: dict[str, Any], key: str, path: Path) -> str:
    """What a prompt, or a response, is called; its own key's name by default."""
    value = content.get(key, key)
    if not isinstance(value, str) or not TAG.fullmatch(value):
        raise UserError(
            f"--rubric {path}: key {key!r} must be one word of lower-case letters, digits and -, such as "
            f'"{"question" if key == "prompt" else "answer"}", not {value!r}.'
        )
    return value


def _criteria(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UserError(f"--rubric {path}: key 'criteria' must hold names, each with a question as text.")
    for name, question in value.items():
        if not NAME.fullmatch(name) or name.lower() in TAKEN:
            raise UserError(
                f"--rubric {path}: key 'criteria.{name}': a criterion's name must be letters, digits and _, and none "
                f"of {', '.join(TAKEN)}, which the answer needs itself."
            )
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"--rubric {path}: key 'criteria.{name}' must be text: the question that it asks.")
    return {name: question.strip() for name, question in value.items()}
