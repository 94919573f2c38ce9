# SPDX-License-Identifier: Apache-2.0
"""Samples of files of responses for judges and people: the same prompts from every model's file."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows
from dschat.data.hub import compared_set
from dschat.lab.options import SampleOptions
from dschat.lab.responses import Response, read_responses

PER_GROUP = 5  # rows of one subreddit
ARTICLES = "ARTICLE"
POSTS = "POST without a subreddit"
OTHERS = "other prompts"

RowKey = tuple[str, int]  # a prompt, and the number of its earlier occurrences in the file


def sample(options: SampleOptions) -> str:
    """Write a sample of a file of responses with all columns, see `sample_responses`; returns a line about it."""
    source = options.data_path
    target = options.save_path
    dataset = compared_set(options.dataset, own=True)
    if options.num < 1:
        raise UserError(f"--num must be at least 1, not {options.num}.")
    if source.resolve() == target.resolve():
        raise UserError(f"--save_path {target} is the file of --data_path; give another one.")
    responses = read_responses(source, "--data_path")
    sampled = sample_responses(responses, dataset, options.num, options.seed)
    write_rows(target, [response.row for response in sampled])

    size = f" of {len(responses)}"
    if len(responses) < options.num:
        size = f": all there are, fewer than --num {options.num}"
    kinds = ""
    if dataset == "summarize":
        group_count = len({group_of(response.prompt) for response in sampled})
        kinds = f", {group_count} subreddits or other groups"
    return f"{len(sampled)} rows{size}{kinds}; {target}"


def sample_responses(
    responses: Sequence[Response],
    dataset: str,
    number: int,
    seed: int,
) -> list[Response]:
    """Sample `number` rows, or all if there are no more: the same from every file that answers the same prompts.

    Rows are shuffled by a hash of seed, purpose and prompt, so that a row's rank depends on no other row. For
    summarize up to five rows of each subreddit are taken (articles are one group), shuffled, and cut to `number` or
    filled up with any of the others. Other data sets are sampled from uniformly.
    """
    occurrences: Counter[str] = Counter()
    rows: dict[RowKey, Response] = {}
    for response in responses:
        rows[response.prompt, occurrences[response.prompt]] = response
        occurrences[response.prompt] += 1

    def shuffled(
        keys: Iterable[RowKey],
        purpose: str,
    ) -> list[RowKey]:
        return sorted(keys, key=lambda key: content_hash(f"{seed}\n{purpose}\n{key[1]}\n{key[0]}"))

    if dataset != "summarize":
        return [rows[key] for key in shuffled(rows, "uniform")[:number]]

    groups: dict[str, list[RowKey]] = defaultdict(list)
    for key in rows:
        groups[group_of(key[0])].append(key)
    of_groups: list[RowKey] = []
    for group in groups.values():
        of_groups += shuffled(group, "group")[:PER_GROUP]
    others = rows.keys() - of_groups
    sampled = shuffled(of_groups, "trim")[:number]
    sampled += shuffled(others, "fill")[: number - len(sampled)]
    return [rows[key] for key in shuffled(sampled, "order")]


def group_of(prompt: str) -> str:
    """Subreddit of a TL;DR prompt; articles, posts without a subreddit and other prompts are a group each."""
    match = re.match(r"\s*(POST|ARTICLE)\n(?:Subreddit: r/(\S+)[ \t]*\n)?", prompt)
    if match is None:
        return OTHERS
    if match[1] == "ARTICLE":
        return ARTICLES
    return f"r/{match[2]}" if match[2] else POSTS
