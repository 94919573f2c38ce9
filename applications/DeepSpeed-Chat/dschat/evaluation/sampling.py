# SPDX-License-Identifier: Apache-2.0
"""`dschat sample`: chooses rows of a file of responses, the same prompts for every model, to be judged or voted on."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows
from dschat.data.compared_sets import compared_set
from dschat.evaluation.options import SampleOptions
from dschat.evaluation.responses import Response, read_responses

ROWS_PER_GROUP = 5  # rows of one subreddit
ARTICLES = "ARTICLE"
POSTS = "POST without a subreddit"
OTHERS = "other prompts"

RowKey = tuple[str, int]  # a prompt, and the number of its earlier occurrences in the file


def sample(options: SampleOptions) -> str:
    """Writes the chosen rows with all their columns, see `choose_rows`.

    Returns:
        A line about the rows.

    Raises:
        UserError: the data set is unknown, or both paths are the same file.
    """
    source = options.data_path
    target = options.save_path
    dataset = compared_set(options.dataset, own=True)
    if source.resolve() == target.resolve():
        raise UserError(f"--save_path {target} is the file of --data_path; give another one.")
    responses = read_responses(source, "--data_path")
    chosen = choose_rows(responses, dataset, options.num, options.seed)
    rows = [response.row for response in chosen]
    write_rows(target, rows)

    size = f" of {len(responses)}"
    if len(responses) < options.num:
        size = f": all there are, fewer than --num {options.num}"
    groups = ""
    if dataset == "summarize":
        group_count = len({group_of(response.prompt) for response in chosen})
        groups = f", {group_count} subreddits or other groups"
    return f"{len(chosen)} rows{size}{groups}; {target}"


def choose_rows(responses: Sequence[Response], dataset: str, number: int, seed: int) -> list[Response]:
    """Chooses `number` rows, or all if there are fewer: the same from every file that answers the same prompts.

    For summarize, up to ROWS_PER_GROUP rows of each subreddit are chosen (articles are one group), then cut to
    `number`, or filled up with other rows. From other data sets rows are chosen uniformly.
    """
    occurrences: Counter[str] = Counter()
    rows: dict[RowKey, Response] = {}
    for response in responses:
        prompt = response.prompt
        rows[prompt, occurrences[prompt]] = response
        occurrences[prompt] += 1

    if dataset != "summarize":
        keys = _shuffled(rows, seed, "uniform")[:number]
        return [rows[key] for key in keys]

    # Some rows of every group.
    groups: dict[str, list[RowKey]] = defaultdict(list)
    for key in rows:
        groups[group_of(key[0])].append(key)
    candidates: list[RowKey] = []
    for keys_of_group in groups.values():
        candidates += _shuffled(keys_of_group, seed, "group")[:ROWS_PER_GROUP]

    # Cut to `number`, or filled up with the remaining rows.
    chosen = _shuffled(candidates, seed, "trim")[:number]
    remaining = rows.keys() - candidates
    chosen += _shuffled(remaining, seed, "fill")[: number - len(chosen)]
    keys = _shuffled(chosen, seed, "order")
    return [rows[key] for key in keys]


def _shuffled(keys: Iterable[RowKey], seed: int, purpose: str) -> list[RowKey]:
    """Keys in the order of a hash of seed, purpose and key: where a row ends up depends on no other row."""
    return sorted(keys, key=lambda key: content_hash(f"{seed}\n{purpose}\n{key[1]}\n{key[0]}"))


def group_of(prompt: str) -> str:
    """Group of a TL;DR prompt: its subreddit, or one group each for articles, other posts and other prompts."""
    match = re.match(r"\s*(POST|ARTICLE)\n(?:Subreddit: r/(\S+)[ \t]*\n)?", prompt)
    if match is None:
        return OTHERS
    if match[1] == "ARTICLE":
        return ARTICLES
    return f"r/{match[2]}" if match[2] else POSTS
