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

TAG = r"^[a-z][a-z0-9-]*$"  # a word in a tag around the material
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of a criterion, which is a key of the answer
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


# -- files


def _free_name(name: str) -> str:
    """The name of a criterion, which is a key of the answer beside those that it has anyway."""
    if not NAME.fullmatch(name) or name.lower() in TAKEN:
        raise ValueError(f"a name must be letters, digits and _, and none of {', '.join(TAKEN)}")
    return name


def _with_question(value: object) -> object:
    """A criterion of which only the question is written."""
    return {"question": value} if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Tag = Annotated[str, StringConstraints(pattern=TAG)]


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
        # A tag of the prompt that also stands around a response would take its place.
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
        UserError: the file cannot be read, or a key is missing, unknown or has a bad value; names all three.
    """
    try:
        content = _RubricFile.model_validate(_read_content(Path(path)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its keys"
        raise UserError(
            f"{flag} {path}: {key}: {first['msg']}. docs/evaluation.md describes the keys of a rubric."
        ) from error
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); give the file of a rubric.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path}: not readable as TOML or JSON ({error}); correct it.") from error
    return Rubric(
        content.task,
        content.judge,
        content.prompt,
        content.response,
        {name: criterion.question for name, criterion in content.criteria.items()},
        {name: criterion.weight for name, criterion in content.criteria.items()},
        content.separate,
    )


def _read_content(path: Path) -> object:
    """What a TOML or JSON file holds."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=without_repeats)
    return tomllib.loads(text)
