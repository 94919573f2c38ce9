# SPDX-License-Identifier: Apache-2.0
"""Responses of two models to the same prompts: files, pairs, and verdicts on them."""

import math
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import read_rows, text_of
from dschat.data.formats import PROMPT_MESSAGES
from dschat.data.messages import check_messages, dialogue_text

FILE = "FILE"  # how messages name a file that comes without a flag
REMEDY = "both files must answer the same prompts. Sample both with the same command and seed."


@dataclass(frozen=True)
class Response:
    """A model's response to one prompt."""

    prompt: str  # where a chat template wrote it, the messages without its marks
    response: str
    reward: float | None  # the reward model's score; None where the file gives none
    origin: str  # "file:line"
    row: dict[str, Any]  # as it was read


@dataclass(frozen=True)
class Pair:
    """The responses of two models to the same prompt."""

    id: str  # see `pair_id`
    prompt: str
    a: Response
    b: Response
    columns: Mapping[str, Any] = field(default_factory=dict)  # more that the rows of its verdicts hold


def read_responses(path: Path, flag: str) -> list[Response]:
    """Reads a file of rows with prompt, response and, optionally, reward; raises UserError for anything else.

    Of rows with the prompt's messages, the prompt is what these say.
    """
    responses = []
    for origin, row in read_rows(path, flag):
        prompt, response = text_of(row, "prompt", origin), text_of(row, "response", origin)
        if row.get(PROMPT_MESSAGES) is not None:
            prompt = dialogue_text(check_messages(row[PROMPT_MESSAGES], PROMPT_MESSAGES, None, origin))
        responses.append(Response(prompt, response, number_of(row, "reward", origin), origin, row))
    return responses


def number_of(row: dict[str, Any], column: str, origin: str) -> float | None:
    """The finite number of a column; None where the row has none. Raises UserError for anything else."""
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{origin}: {column} must be a finite number, not {value!r}; correct the row.")
    return float(value)


def numbers_of(row: dict[str, Any], column: str, origin: str, form: str, count: int | None = None) -> list[float]:
    """The finite numbers of a column, at least one, or as many as `count` says; raises UserError with their form."""
    values = row.get(column)
    listed = values if isinstance(values, list) and count in (None, len(values)) else []
    numbers = [number_of({column: value}, column, origin) for value in listed]
    if not numbers or None in numbers:
        raise UserError(f"{origin}: column {column!r} must be a list of {form}")
    return [number for number in numbers if number is not None]


def read_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Pairs the rows of two files by their prompts, in the order of the first; the order of the second is free.

    A prompt that occurs several times is paired in the order of its occurrences. Raises UserError, with flag, file and
    line, where the files have different numbers of rows or different prompts.
    """
    first, second = read_responses(path_a, flag_a), read_responses(path_b, flag_b)
    if len(first) != len(second):
        sizes = f"{flag_a} {path_a} has {len(first)} rows and {flag_b} {path_b} has {len(second)}"
        raise UserError(f"{sizes}: {REMEDY}")
    waiting: dict[str, deque[Response]] = defaultdict(deque)
    for response in second:
        waiting[response.prompt].append(response)
    pairs = []
    for response in first:
        prompt = response.prompt
        if not waiting[prompt]:
            lacks = f"no row of {flag_b} {path_b} answers this prompt ({prompt[:60]!r}…)"
            if (PROMPT_MESSAGES in response.row) != (PROMPT_MESSAGES in second[0].row):
                lacks += f", for only one of the files has the column {PROMPT_MESSAGES}"
            raise UserError(f"{response.origin}: {lacks}: {REMEDY}")
        other = waiting[prompt].popleft()
        pairs.append(Pair(pair_id(prompt, response.response, other.response), prompt, response, other))
    return pairs


def model_names(files: Sequence[Path]) -> list[str]:
    """Names of models from the files of their responses: the file's, without "-sampled".

    Files of the same name in different folders are told apart by their paths below the folder they share.
    """
    stems = [file.name.removesuffix(".jsonl").removesuffix("-sampled") for file in files]
    names = []
    for file, stem in zip(files, stems, strict=True):
        folders = [other.resolve().parent for other, same in zip(files, stems, strict=True) if same == stem]
        names.append(str(file.resolve().parent.relative_to(os.path.commonpath(folders)) / stem))
    return names


def pair_id(prompt: str, a: str, b: str) -> str:
    """Name of a pair of texts: 16 hexadecimal digits of a SHA-256."""
    parts = [text.encode("utf-8", "replace") for text in (prompt, a, b)]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return content_hash(framed)[:16]


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
