# SPDX-License-Identifier: Apache-2.0
"""Verdicts on pairs of responses: the rows that judges and people write and the report reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dschat.common.jsonl import read_rows, text_of
from dschat.errors import UserError
from dschat.evaluation.pairs.responses import pair_id

Verdict = Literal["A", "B", "tie", "invalid", "skip"]
Kind = Literal["judge", "human", "reward"]
VERDICTS: tuple[str, ...] = get_args(Verdict)
KINDS: tuple[str, ...] = get_args(Kind)
MIRRORED = {"A": "B", "B": "A"}


@dataclass(frozen=True)
class Comparison:
    """One rater's verdict on one pair. The fields are the columns of the file; `details` are further columns.

    Attributes:
        id: of the pair, see `dschat.evaluation.pairs.responses.pair_id`.
        prompt: the prompt's text.
        response_a: text of the first model's response.
        response_b: text of the second's.
        verdict: the better one; tie; invalid = the judge's answer could not be read; skip = the person passed.
        kind: who judged: a language model, a person, or the reward model.
        rater: name of the judge model, the person or the reward model.
        model_a: name of the first model.
        model_b: name of the second.
        dataset: summarize, hh-rlhf, webgpt, or empty.
        details: more of the verdict. Judges write `orders`: a list with one {"first": "A" or "B", "verdict": …} per
            order in which the responses were shown, each verdict in terms of the models (not of the places); people
            write `first`, `comment` and `seconds`.
    """

    id: str
    prompt: str
    response_a: str
    response_b: str
    verdict: Verdict
    kind: Kind
    rater: str
    model_a: str = "A"
    model_b: str = "B"
    dataset: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The row of the file: the fields in order, then the details."""
        return {**{k: v for k, v in vars(self).items() if k != "details"}, **self.details}


def read_comparisons(path: Path, flag: str) -> list[Comparison]:
    """Reads a file of verdicts.

    Args:
        path: the JSON Lines file.
        flag: the command-line flag that named it, for messages.

    Raises:
        UserError: see `read_rows`; or a row is no comparison; names file and line.
    """
    return [comparison_of(row, origin) for origin, row in read_rows(path, flag)]


def comparison_of(row: Mapping[str, Any], origin: str) -> Comparison:
    """One row as a Comparison; the id is worked out where it is missing.

    Raises:
        UserError: a column is missing or holds something else than it should.
    """
    prompt, a, b = (text_of(row, column, origin) for column in ("prompt", "response_a", "response_b"))
    for column, allowed in (("verdict", VERDICTS), ("kind", KINDS)):
        if row.get(column) not in allowed:
            raise UserError(f"{origin}: {column} must be one of {', '.join(allowed)}, not {row.get(column)!r}.")
    names = {"rater": row["kind"], "model_a": "A", "model_b": "B", "dataset": ""}
    names |= {name: text_of(row, name, origin) for name in names if name in row}
    known = {"id", "prompt", "response_a", "response_b", "verdict", "kind", *names}
    return Comparison(
        id=text_of(row, "id", origin) if "id" in row else pair_id(prompt, a, b),
        prompt=prompt,
        response_a=a,
        response_b=b,
        verdict=row["verdict"],
        kind=row["kind"],
        details={key: value for key, value in row.items() if key not in known},
        **names,
    )


def mirrored(verdict: str) -> str:
    """The verdict with A and B exchanged."""
    return MIRRORED.get(verdict, verdict)
