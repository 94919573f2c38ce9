# SPDX-License-Identifier: Apache-2.0
"""Rubrics, which say how a judge model compares or grades responses, and the files that hold them.

`dschat judge --rubric` and `dschat ppo --reward_judge` read the same files; docs/evaluation.md describes them.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from dschat.base.errors import UserError
from dschat.base.jsonl import without_repeats

# Keys of answers; the name of each criterion is one, too.
REASON = "reason"  # why, in words
SCORE_KEY = "score"  # points without criteria
COMPARISON = "comparison"
VERDICT_KEYS = ("verdict", "overall_verdict", "final_verdict", "overall", "winner")
RESERVED_KEYS = (REASON, SCORE_KEY, COMPARISON, *VERDICT_KEYS)
CRITERION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TAG_WORD = r"^[a-z][a-z0-9-]*$"  # a word in a tag around the material

Judging = Literal["points", "ranking"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Tag = Annotated[str, StringConstraints(pattern=TAG_WORD)]


@dataclass(frozen=True)
class Rubric:
    """How a judge model scores responses, or compares two of them.

    Attributes:
        task: what is judged, and what makes a good response.
        judge: how scores are made: `points` gives each response 0 to 10 on each criterion, `ranking` ranks the
            responses to a prompt together; not read by comparisons.
        prompt_name: word for the prompt, in the tag around it.
        response_name: word for a response.
        criteria: name → question; empty if the task says everything.
        weights: criterion → its weight in the score; read by points alone.
        separate: whether each criterion has its own verdict, before the overall one; read by comparisons alone.
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
        return tuple(self.criteria) or (SCORE_KEY,)


# -- files


def _free_name(name: str) -> str:
    """The name of a criterion, which is a key of the answer beside the reserved ones."""
    if not CRITERION_NAME.fullmatch(name) or name.lower() in RESERVED_KEYS:
        raise ValueError(f"a name must be letters, digits and _, and none of {', '.join(RESERVED_KEYS)}")
    return name


def _with_question(value: object) -> object:
    """A criterion as a table; in a file it may be its question alone."""
    return value if isinstance(value, dict) else {"question": value}


class _Criterion(BaseModel):
    """A criterion in a file: its question alone, or a table."""

    model_config = ConfigDict(strict=True, extra="forbid")

    question: Text
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)


class _RubricFile(BaseModel):
    """The keys of a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task: Text
    judge: Judging = "points"
    prompt: Tag = "prompt"
    response: Tag = "response"
    criteria: dict[
        Annotated[str, AfterValidator(_free_name)], Annotated[_Criterion, BeforeValidator(_with_question)]
    ] = {}
    separate: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises ValueError if keys contradict each other."""
        # Texts are kept by tag: a prompt with the tag of a response would be replaced by it.
        tags = rf"{self.response}|(first|second)-{self.response}|{self.response}-\d+"
        if re.fullmatch(tags, self.prompt):
            raise ValueError(f"'prompt' is {self.prompt!r}, the tag of a response: give another word")
        if self.separate and not self.criteria:
            raise ValueError("'separate' asks for a verdict on each of 'criteria': add some")
        weighted = [name for name, criterion in self.criteria.items() if "weight" in criterion.model_fields_set]
        if self.judge == "ranking" and weighted:
            raise ValueError(f"'criteria.{weighted[0]}.weight': a ranking gives no points to weight")
        return self


def read_rubric(path: str | Path, flag: str) -> Rubric:
    """Read the rubric that a flag names.

    Raises:
        UserError: the file cannot be read, or a key is missing, unknown or has a bad value; the message names
            flag, file and key.
    """
    try:
        content = _RubricFile.model_validate(_read_content(Path(path)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]") or "its keys"
        problem = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{flag} {path}: {key}: {problem}. docs/evaluation.md describes the keys of a rubric."
        ) from error
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); give the file of a rubric.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path}: not readable as TOML or JSON ({error}); correct it.") from error
    questions = {name: criterion.question for name, criterion in content.criteria.items()}
    weights = {name: criterion.weight for name, criterion in content.criteria.items()}
    return Rubric(
        task=content.task,
        judge=content.judge,
        prompt_name=content.prompt,
        response_name=content.response,
        criteria=questions,
        weights=weights,
        separate=content.separate,
    )


def _read_content(path: Path) -> dict[str, object]:
    """The keys and values of a TOML or JSON file. Raises ValueError if it is neither, or no object."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() != ".json":
        return tomllib.loads(text)
    content = json.loads(text, object_pairs_hook=without_repeats)
    if not isinstance(content, dict):
        raise ValueError("it must be an object with keys")
    return content
