# SPDX-License-Identifier: Apache-2.0
"""Files of responses, as inference writes them, and the pairs that two of them make."""

import hashlib
import math
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.common.jsonl import read_rows, text_of
from dschat.data.formats import PROMPT_MESSAGES, check_messages, dialogue_text
from dschat.errors import UserError

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
                lacks += f", for only one of the files has the column {PROMPT_MESSAGES}, which older ones lack"
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
    return hashlib.sha256(framed).hexdigest()[:16]
