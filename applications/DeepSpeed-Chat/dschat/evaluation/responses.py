# SPDX-License-Identifier: Apache-2.0
"""Responses of two models to the same prompts: files, pairs, and verdicts on them."""

import logging
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import read_rows, text_of
from dschat.data.formats import PROMPT_MESSAGES
from dschat.data.messages import check_messages, dialogue_text

logger = logging.getLogger(__name__)

FILE_FLAG = "FILE"  # how messages name a positional file
SCORER = "scorer"  # column: name of what gave the rewards, and a hash of its content
REMEDY = "both files must answer the same prompts. Sample both with the same command."


@dataclass(frozen=True)
class Response:
    """A model's response to one prompt."""

    prompt: str  # without the marks of a chat template
    response: str
    reward: float | None  # the reward model's score; None if the file gives none
    origin: str  # "file:line"
    row: dict[str, Any]  # row of the file

    @property
    def scorer(self) -> str:
        """What gave the reward; empty if the file does not say."""
        return scorer_of(self.row)


@dataclass(frozen=True)
class Pair:
    """The responses of two models to the same prompt."""

    id: str  # see `pair_id`
    prompt: str
    a: Response
    b: Response
    columns: Mapping[str, Any] = field(default_factory=dict)  # further columns of the rows of its verdicts


def read_responses(path: Path, flag: str) -> list[Response]:
    """Read a file of rows with prompt, response and, optionally, reward; raises UserError for anything else."""
    responses = []
    for origin, row in read_rows(path, flag):
        prompt = shown_prompt(row, origin)
        response = text_of(row, "response", origin)
        responses.append(Response(prompt, response, number_of(row, "reward", origin), origin, row))
    return responses


def shown_prompt(row: dict[str, Any], origin: str) -> str:
    """The prompt of a row without the marks of a chat template: of one with messages the text of these."""
    prompt = text_of(row, "prompt", origin)
    if row.get(PROMPT_MESSAGES) is None:
        return prompt
    return dialogue_text(check_messages(row[PROMPT_MESSAGES], PROMPT_MESSAGES, None, origin))


def number_of(row: dict[str, Any], column: str, origin: str) -> float | None:
    """Finite number of a column; None if the row has none. Raises UserError for anything else."""
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{origin}: {column} must be a finite number, not {value!r}; correct the row.")
    return float(value)


def numbers_of(row: dict[str, Any], column: str, origin: str, form: str, count: int | None = None) -> list[float]:
    """Finite numbers of a list in a column.

    Args:
        row, column, origin: where the list is, with the row's "file:line".
        form: what the list must hold, for messages.
        count: number of numbers that the list must have; with None it must have at least one.

    Raises:
        UserError: the column holds anything else.
    """
    values = row.get(column)
    if not isinstance(values, list) or not values or count not in (None, len(values)) or None in values:
        raise UserError(f"{origin}: column {column!r} must be a list of {form}")
    numbers = []
    for value in values:
        number = number_of({column: value}, column, origin)
        assert number is not None
        numbers.append(number)
    return numbers


def read_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Pair the rows of two files by their prompts, in the order of the first file.

    A prompt that occurs several times is paired in the order of its occurrences.

    Raises:
        UserError: the files have different numbers of rows or different prompts; names flag, file and line.
    """
    first = read_responses(path_a, flag_a)
    second = read_responses(path_b, flag_b)
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
            problem = f"no row of {flag_b} {path_b} answers this prompt ({prompt[:60]!r}…)"
            if (PROMPT_MESSAGES in response.row) != (PROMPT_MESSAGES in second[0].row):
                problem += f", for only one of the files has the column {PROMPT_MESSAGES}"
            raise UserError(f"{response.origin}: {problem}: {REMEDY}")
        other = waiting[prompt].popleft()
        pairs.append(Pair(pair_id(prompt, response.response, other.response), prompt, response, other))
    return pairs


def scorer_of(row: Mapping[str, Any]) -> str:
    """What gave the rewards of a row; empty if it does not say: without the column, and with null or blanks in it."""
    scorer = row.get(SCORER)
    return "" if scorer is None else " ".join(str(scorer).split())


def require_same_scorer(scorers: Mapping[str, str]) -> None:
    """Checks that the rewards of several places may be compared.

    Rewards that do not say what gave them are compared with any others. Where only some of them do not, a warning says
    so: rows of two files may have been put together.

    Args:
        scorers: where rewards are, a file or "file:line" → what gave them, see `scorer_of`.

    Raises:
        UserError: two of them were given by different reward models or functions.
    """
    stated = [(origin, scorer) for origin, scorer in scorers.items() if scorer]
    silent = [origin for origin, scorer in scorers.items() if not scorer]
    if stated and silent:
        logger.warning(
            "%s: no column %r says what gave the rewards (%d of %d). They are taken to be by %s, as those of %s are.",
            silent[0],
            SCORER,
            len(silent),
            len(scorers),
            stated[0][1],
            stated[0][0],
        )
    for (origin, scorer), (other_origin, other_scorer) in pairwise(stated):
        if not is_same_scorer(scorer, other_scorer):
            raise UserError(
                f"the rewards of {origin} are by {scorer}, those of {other_origin} by {other_scorer}: rewards of"
                " different reward models cannot be compared. Score both with the same one, or leave out one of them."
            )


def is_same_scorer(scorer: str, other: str) -> bool:
    """Whether two results of `scorer_of` end with the same hash, are the same without one, or one of them is empty."""
    return not scorer or not other or _identity_of(scorer) == _identity_of(other)


def _identity_of(scorer: str) -> str:
    """The hash behind a scorer's name; the whole name if a user has given one without."""
    last_word = scorer.split()[-1]
    return last_word if re.fullmatch("[0-9a-f]{12}", last_word) else scorer


def model_names(files: Sequence[Path]) -> list[str]:
    """Names of models, taken from the files of their responses, without "-sampled".

    Files of the same name in different folders are distinguished by their paths below the folder they share.
    """
    stems: list[str] = []
    folders: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        stem = file.name.removesuffix(".jsonl").removesuffix("-sampled")
        stems.append(stem)
        folders[stem].append(file.resolve().parent)
    names = []
    for file, stem in zip(files, stems, strict=True):
        shared_folder = os.path.commonpath(folders[stem])
        subfolder = file.resolve().parent.relative_to(shared_folder)
        names.append(str(subfolder / stem))
    return names


def with_origins(path: Path, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows about to be written to a file, each with its origin "file:line", as `read_rows` gives them."""
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def pair_id(prompt: str, a: str, b: str) -> str:
    """Name of a prompt with two responses: 16 hexadecimal digits of a SHA-256."""
    framed = b""
    for text in (prompt, a, b):
        encoded = text.encode("utf-8", "replace")
        framed += len(encoded).to_bytes(8, "big") + encoded
    return content_hash(framed)[:16]


Side = Literal["A", "B"]  # one of the two models
Verdict = Literal["A", "B", "tie", "invalid", "skip"]  # invalid: not readable; skip: the person passed
Kind = Literal["judge", "human", "reward"]  # kind of rater: a language model, a person, the reward model
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
KINDS: tuple[Kind, ...] = get_args(Kind)
Details = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One rater's verdict on one pair: a row of a file of verdicts, whose columns are the fields and the details.

    Judges write `orders`: a list with one {"first": "A" or "B", "verdict": …} per order in which the responses were
    shown, each verdict in terms of the models (not of the places). People write `first`, `comment` and `seconds`.
    """

    id: str  # id of the pair, see `pair_id`
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
        """Row of the file: the fields in order, then the details."""
        row = dict(vars(self))
        details = row.pop("details")
        return row | details


def compared(
    pair: Pair,
    verdict: Verdict,
    kind: Kind,
    rater: str,
    models: tuple[str, str],
    dataset: str,
    details: dict[str, Any],
) -> Comparison:
    """Verdict on a pair of responses of two models; see `Comparison` for the arguments."""
    return Comparison(
        id=pair.id,
        prompt=pair.prompt,
        response_a=pair.a.response,
        response_b=pair.b.response,
        verdict=verdict,
        kind=kind,
        rater=rater,
        model_a=models[0],
        model_b=models[1],
        dataset=dataset,
        details={**pair.columns, **details},
    )


def comparison_of(row: Mapping[str, Any], origin: str) -> Comparison:
    """Comparison of a file's row, with an id in any case; raises UserError if a column is missing or wrong."""
    texts = {}
    for name in ("prompt", "response_a", "response_b"):
        texts[name] = text_of(row, name, origin)
    for column, allowed in (("verdict", VERDICTS), ("kind", KINDS)):
        if row.get(column) not in allowed:
            raise UserError(f"{origin}: {column} must be one of {', '.join(allowed)}, not {row.get(column)!r}.")
    if "model_a" not in row or "model_b" not in row:
        raise UserError(f"{origin}: the row does not name its models; add the columns model_a and model_b.")
    defaults = {"id": pair_id(*texts.values()), "rater": row["kind"], "dataset": ""}
    for name in ("id", "rater", "model_a", "model_b", "dataset"):
        texts[name] = text_of({**defaults, **row}, name, origin)
    columns = {*texts, "verdict", "kind"}
    details = {name: value for name, value in row.items() if name not in columns}
    return Comparison(verdict=row["verdict"], kind=row["kind"], details=details, **texts)


def mirrored(verdict: Verdict) -> Verdict:
    """Verdict with the models A and B exchanged."""
    exchanged: dict[Verdict, Verdict] = {"A": "B", "B": "A"}
    return exchanged.get(verdict, verdict)


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Combined verdict of both orders: a model wins only if it wins in both.

    Opposite verdicts are a tie, and so are a win and a tie. If one is skip or invalid, so is the result.
    """
    for uncounted in ("skip", "invalid"):
        if uncounted in verdicts:
            return uncounted
    return verdicts[0] if len(set(verdicts)) == 1 else "tie"
