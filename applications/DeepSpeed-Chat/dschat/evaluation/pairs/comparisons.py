# SPDX-License-Identifier: Apache-2.0
"""Verdicts on pairs of responses: the rows that judges and people write and the report reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dschat.common.jsonl import text_of
from dschat.errors import UserError
from dschat.evaluation.pairs.responses import Pair, pair_id

Side = Literal["A", "B"]  # one of the two models
Verdict = Literal["A", "B", "tie", "invalid", "skip"]  # invalid: not readable; skip: the person passed
Kind = Literal["judge", "human", "reward"]  # a language model, a person, the reward model
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
KINDS: tuple[Kind, ...] = get_args(Kind)
Details = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One rater's verdict on one pair. The fields are the columns of the file; `details` are further columns.

    Judges write `orders`: a list with one {"first": "A" or "B", "verdict": …} per order in which the responses were
    shown, each verdict in terms of the models (not of the places). People write `first`, `comment` and `seconds`.
    """

    id: str  # of the pair, see `pair_id`
    prompt: str
    response_a: str
    response_b: str
    verdict: Verdict
    kind: Kind
    rater: str  # name of the judge model, the person or the reward model
    model_a: str
    model_b: str
    dataset: str  # summarize, hh-rlhf, webgpt, a name of the user's own, or empty
    details: Details

    def to_row(self) -> dict[str, Any]:
        """The row of the file: the fields in order, then the details."""
        return {**{k: v for k, v in vars(self).items() if k != "details"}, **self.details}


def compared(
    pair: Pair,
    verdict: Verdict,
    kind: Kind,
    rater: str,
    models: tuple[str, str],
    dataset: str,
    details: dict[str, Any],
) -> Comparison:
    """A verdict on a pair of responses."""
    texts = (pair.prompt, pair.a.response, pair.b.response)
    return Comparison(pair.id, *texts, verdict, kind, rater, *models, dataset, {**pair.columns, **details})


def comparison_of(row: Mapping[str, Any], origin: str) -> Comparison:
    """One row as a Comparison, with an id in any case; raises UserError where a column is missing or wrong."""
    prompt, a, b = (text_of(row, column, origin) for column in ("prompt", "response_a", "response_b"))
    for column, allowed in (("verdict", VERDICTS), ("kind", KINDS)):
        if row.get(column) not in allowed:
            raise UserError(f"{origin}: {column} must be one of {', '.join(allowed)}, not {row.get(column)!r}.")
    if "model_a" not in row or "model_b" not in row:
        raise UserError(f"{origin}: the row does not name its models; add the columns model_a and model_b.")
    given = {"id": pair_id(prompt, a, b), "rater": row["kind"], "dataset": "", **row}
    names = {name: text_of(given, name, origin) for name in ("id", "rater", "model_a", "model_b", "dataset")}
    known = {"prompt", "response_a", "response_b", "verdict", "kind", *names}
    details = {key: value for key, value in row.items() if key not in known}
    return Comparison(
        prompt=prompt, response_a=a, response_b=b, verdict=row["verdict"], kind=row["kind"], details=details, **names
    )


def mirrored(verdict: Verdict) -> Verdict:
    """The verdict with A and B exchanged."""
    exchanged: dict[Verdict, Verdict] = {"A": "B", "B": "A"}
    return exchanged.get(verdict, verdict)


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of both orders: a model wins only if it wins in each.

    Opposite verdicts, and a win beside a tie, are a tie. One that is invalid or a pass makes the whole so.
    """
    for uncounted in ("skip", "invalid"):
        if uncounted in verdicts:
            return uncounted
    return verdicts[0] if len(set(verdicts)) == 1 else "tie"
