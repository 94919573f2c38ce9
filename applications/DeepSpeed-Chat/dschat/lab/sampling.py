# SPDX-License-Identifier: Apache-2.0
"""Samples of files of responses, for judges and people: the same rows of every model's."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows
from dschat.data.hub import compared_set
from dschat.lab.options import SampleOptions
from dschat.lab.responses import Response, read_responses

PER_GROUP = 5  # rows of one subreddit
ARTICLES, POSTS, OTHERS = "ARTICLE", "POST without a subreddit", "other prompts"

RowKey = tuple[str, int]  # a prompt, and how often it occurred before in the file


def sample(options: SampleOptions) -> str:
    """Writes a sample of a file of responses with all columns, see `sample_responses`; says what was drawn."""
    source, target, number = options.data_path, options.save_path, options.num
    dataset = compared_set(options.dataset, own=True)
    if number < 1:
        raise UserError(f"--num must be at least 1, not {number}.")
    if source.resolve() == target.resolve():
        raise UserError(f"--save_path {target} is the file of --data_path; give another one.")
    responses = read_responses(source, "--data_path")
    drawn = sample_responses(responses, dataset, number, options.seed)
    write_rows(target, [response.row for response in drawn])
    few = f": all there are, fewer than --num {number}" if len(responses) < number else f" of {len(responses)}"
    groups = len({group_of(response.prompt) for response in drawn})
    kinds = f", {groups} subreddits or other groups" if dataset == "summarize" else ""
    return f"{len(drawn)} rows{few}{kinds}; {target}"


def sample_responses(responses: Sequence[Response], dataset: str, number: int, seed: int) -> list[Response]:
    """Draws `number` rows, or all if there are no more: the same from every file that answers the same prompts.

    A shuffle sorts by a hash of seed, purpose and prompt, so that a row's place depends on no other row. For summarize
    up to five rows of each subreddit are taken (articles are one group), shuffled, and cut to `number` or filled up
    with any of the rest. Other data sets are drawn from uniformly.
    """
    occurred: dict[str, int] = defaultdict(int)
    rows: dict[RowKey, Response] = {}
    for response in responses:
        rows[response.prompt, occurred[response.prompt]] = response
        occurred[response.prompt] += 1

    def shuffled(keys: Iterable[RowKey], purpose: str) -> list[RowKey]:
        return sorted(keys, key=lambda key: content_hash(f"{seed}\n{purpose}\n{key[1]}\n{key[0]}"))

    if dataset != "summarize":
        return [rows[key] for key in shuffled(rows, "uniform")[:number]]
    groups: dict[str, list[RowKey]] = defaultdict(list)
    for key in rows:
        groups[group_of(key[0])].append(key)
    drawn = [key for group in groups.values() for key in shuffled(group, "group")[:PER_GROUP]]
    rest = rows.keys() - drawn
    drawn = shuffled(drawn, "trim")[:number]
    drawn += shuffled(rest, "fill")[: number - len(drawn)]
    return [rows[key] for key in shuffled(drawn, "order")]


def group_of(prompt: str) -> str:
    """The subreddit of a TL;DR prompt; articles, posts without a subreddit and other prompts are a group each."""
    match = re.match(r"\s*(POST|ARTICLE)\n(?:Subreddit: r/(\S+)[ \t]*\n)?", prompt)
    if match is None:
        return OTHERS
    if match[1] == "ARTICLE":
        return ARTICLES
    return f"r/{match[2]}" if match[2] else POSTS
