# SPDX-License-Identifier: Apache-2.0
"""Files of responses, as inference writes them, and the pairs that two of them make."""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.jsonl import read_rows, text_of
from dschat.errors import UserError


@dataclass(frozen=True)
class Response:
    """A model's response to one prompt.

    Attributes:
        prompt: the prompt's text.
        response: the response's text.
        reward: the reward model's score; None where the file gives none.
        origin: its place, "file:line".
        row: the row as it was read.
    """

    prompt: str
    response: str
    reward: float | None
    origin: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The responses of two models to the same prompt.

    Attributes:
        id: 16 hexadecimal digits that follow from the three texts.
        prompt: the prompt's text.
        a: response of the first model.
        b: response of the second.
    """

    id: str
    prompt: str
    a: Response
    b: Response


def read_responses(path: Path, flag: str) -> list[Response]:
    """Reads a file of responses: rows with prompt, response and, optionally, reward.

    Args:
        path: the JSON Lines file.
        flag: the command-line flag that named it, for messages.

    Raises:
        UserError: see `read_rows`; or a row lacks one of the texts or holds a reward that is no number.
    """
    return [_response(row, origin) for origin, row in read_rows(path, flag)]


def read_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Pairs the rows of two files by their prompts, in the order of the first; the order of the second is free.

    A prompt that occurs several times is paired in the order of its occurrences.

    Args:
        path_a: responses of the first model.
        flag_a: the flag that named them.
        path_b: responses of the second model.
        flag_b: the flag that named them.

    Raises:
        UserError: the files have different numbers of rows or different prompts; names file and line.
    """
    first, second = read_responses(path_a, flag_a), read_responses(path_b, flag_b)
    if len(first) != len(second):
        raise UserError(
            f"{flag_a} {path_a} has {len(first)} rows and {flag_b} {path_b} has {len(second)}: both must answer the "
            "same prompts. Sample both with the same command and seed."
        )
    waiting: dict[str, deque[Response]] = defaultdict(deque)
    for response in second:
        waiting[response.prompt].append(response)
    pairs = []
    for response in first:
        if not waiting[response.prompt]:
            raise UserError(
                f"{response.origin}: no row of {flag_b} {path_b} answers this prompt ({response.prompt[:60]!r}…): "
                "both files must answer the same prompts. Sample both with the same command and seed."
            )
        other = waiting[response.prompt].popleft()
        pairs.append(
            Pair(pair_id(response.prompt, response.response, other.response), response.prompt, response, other)
        )
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


def _response(row: dict[str, Any], origin: str) -> Response:
    reward = row.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise UserError(f"{origin}: reward must be a number, not {reward!r}; correct the row.")
    if reward is not None and not math.isfinite(reward):
        raise UserError(f"{origin}: reward {reward} is not finite; correct the row.")
    return Response(text_of(row, "prompt", origin), text_of(row, "response", origin), reward, origin, row)
