# SPDX-License-Identifier: Apache-2.0
"""Samples a file of responses for judges and people: by subreddit for TL;DR, uniformly otherwise."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dschat.common.jsonl import write_rows
from dschat.errors import UserError
from dschat.evaluation.pairs.responses import Response, read_responses

PER_GROUP = 5  # rows of one subreddit
ARTICLES, POSTS, OTHERS = "ARTICLE", "POST without a subreddit", "other prompts"


def sample_file(source: Path, target: Path, dataset: str, number: int = 50, seed: int = 42) -> str:
    """Writes a sample of a file of responses; see `sample_responses`. All columns are kept.

    Args:
        source: the JSON Lines file.
        target: where the sample goes.
        dataset: summarize, hh-rlhf or webgpt.
        number: rows to draw.
        seed: of the shuffles.

    Returns:
        What was drawn, in one line.

    Raises:
        UserError: the number is not positive, or a file cannot be read or written; names flag, file and line.
    """
    if number < 1:
        raise UserError(f"--num must be at least 1, not {number}.")
    if source.resolve() == target.resolve():
        raise UserError(f"--save-path {target} is the file of --data-path; give another one.")
    responses = read_responses(source, "--data-path")
    drawn = sample_responses(responses, dataset, number, seed)
    write_rows(target, [response.row for response in drawn])
    few = f": all there are, fewer than --num {number}" if len(responses) < number else f" of {len(responses)}"
    groups = len({group_of(response.prompt) for response in drawn})
    kinds = f", {groups} subreddits or other groups" if dataset == "summarize" else ""
    return f"{len(drawn)} rows{few}{kinds}; {target}"


def sample_responses(responses: Sequence[Response], dataset: str, number: int, seed: int) -> list[Response]:
    """Draws rows by their prompts: files that answer the same prompts, in whatever order, give the same sample.

    Every prompt has a place in each of a few shuffled orders that follow from the seed and the prompt alone, so there
    is nothing that depends on the other rows or on their order. Rows with the same prompt are told apart by the order
    in which they occur.

    For summarize: up to five of each subreddit, shuffled, then cut to `number`, or filled up with any of the rest. CNN
    / Daily Mail articles are one group. Other data sets: uniformly.

    Args:
        responses: the rows of a file.
        dataset: summarize, hh-rlhf or webgpt.
        number: rows to draw; all, shuffled, if there are no more.
        seed: of the shuffles.

    Returns:
        The rows, shuffled.
    """
    rows = _numbered(responses)

    def shuffled(keys: Sequence[tuple[str, int]], purpose: str) -> list[tuple[str, int]]:
        return sorted(keys, key=lambda key: _rank(seed, purpose, *key))

    if dataset != "summarize":
        return [rows[key] for key in shuffled(list(rows), "uniform")[:number]]
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for key in rows:
        groups[group_of(key[0])].append(key)
    drawn = [key for group in groups.values() for key in shuffled(group, "group")[:PER_GROUP]]
    rest = [key for key in rows if key not in set(drawn)]
    drawn = shuffled(drawn, "trim")[:number]
    return [rows[key] for key in shuffled(drawn + shuffled(rest, "fill")[: number - len(drawn)], "order")]


def group_of(prompt: str) -> str:
    """The subreddit of a TL;DR prompt; articles, posts without a subreddit and other prompts are a group each."""
    match = re.match(r"\s*(POST|ARTICLE)\n(?:Subreddit: r/(\S+)[ \t]*\n)?", prompt)
    if match is None:
        return OTHERS
    if match[1] == "ARTICLE":
        return ARTICLES
    return f"r/{match[2]}" if match[2] else POSTS


def _numbered(responses: Sequence[Response]) -> dict[tuple[str, int], Response]:
    """(prompt, how often it occurred before) → row."""
    seen: dict[str, int] = defaultdict(int)
    rows = {}
    for response in responses:
        rows[response.prompt, seen[response.prompt]] = response
        seen[response.prompt] += 1
    return rows


def _rank(seed: int, purpose: str, prompt: str, occurrence: int) -> bytes:
    framed = f"{seed}\n{purpose}\n{occurrence}\n{prompt}"
    return hashlib.sha256(framed.encode("utf-8", "replace")).digest()
