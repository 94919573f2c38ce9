# SPDX-License-Identifier: Apache-2.0
"""Which rows are held out, and which rows each step takes.

DeepSpeed-Chat's rule decides, index for index, so that runs are comparable with published ones:

    index_k = index_{k-1} + int(round(fraction_k * N));  every index_k, k >= 1, then loses index_last - N
    order   = RandomState(1234).shuffle(arange(N, uint32));  part k = order[index_k : index_{k+1}]

The seed is a constant, so that every run takes the same rows whatever its `--seed`: otherwise PPO with another seed
would train on rows that its reward model was trained on, and evaluate on rows of training.
Rows with the same prompt stay together: see `parts_of_rows`. Where no prompt occurs twice, this changes nothing.
"""

import json
import math
import unicodedata
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dschat.base.errors import UserError
from dschat.data.messages import message_text, messages_of_text
from dschat.data.rows import Row

STEPS = ("SFT", "reward model", "PPO")
PUBLISHED_SPLIT = "2,4,4"  # between the steps, for a published set without --data_split
SPLIT_SEED = 1234  # DeepSpeed-Chat's default

T = TypeVar("T")
PromptOf = Callable[[Row], str]


def opening(row: Row) -> str:
    """What a row asks for: the first message of the user, or the prompt if it is a text without speakers.

    Turns of one dialogue, and dialogues that go on differently, therefore have the same opening. So have texts that
    differ in white space or in how Unicode composes their letters.
    """
    messages = row.messages
    if row.prompt is not None:
        messages = messages_of_text(row.prompt) or [{"role": "user", "content": row.prompt}]
    for message in messages or []:
        if message["role"] == "user":
            return plainly_written(message_text(message))
    return whole_prompt(row)


def plainly_written(text: str) -> str:
    """A text with composed letters and single spaces; equal for texts that differ in nothing else."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def whole_prompt(row: Row) -> str:
    """A text that is equal for rows with the same prompt, be it a text or a conversation."""
    if row.prompt is not None:
        return row.prompt
    return json.dumps([row.messages, row.template_arguments], sort_keys=True, default=str)


def prompt_of_rows(rows: Sequence[Row]) -> PromptOf | None:
    """What the rows of a source are kept together by: their opening, or their whole prompt if all begin alike.

    None if all rows have the same prompt; then each row stands for itself.
    """
    for prompt_of in (opening, whole_prompt):
        if len(set(map(prompt_of, rows))) > 1:
            return prompt_of
    return None


def parts_of_rows(
    prompts: Sequence[Hashable], bounds: Sequence[int], order: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """The part of each row, so that rows with the same prompt are in the same part, unless all have the same prompt.

    Prompts are lined up in the order of their first rows. Each goes to the part in which the middle of its rows lies.

    Args:
        prompts: the prompt of each of N rows.
        bounds: positions of K parts, K + 1 ascending numbers from 0 to N.
        order: rows in shuffled order, shape ``(N,)``.

    Returns:
        Numbers of parts from 0 to K − 1, shape ``(N,)``.
    """
    if len(set(prompts)) == 1:
        prompts = range(len(prompts))
    first_row: dict[Hashable, int] = {}
    for row, prompt in enumerate(prompts):
        first_row.setdefault(prompt, row)
    first_rows = np.array([first_row[prompt] for prompt in prompts], dtype=np.int64)
    num_rows = np.bincount(first_rows, minlength=len(first_rows))  # of each first row's prompt, and 0 of other rows
    ordered = order[num_rows[order] > 0]
    middles = np.cumsum(num_rows[ordered]) - num_rows[ordered] / 2
    part_of_first = np.zeros(len(first_rows), dtype=np.int64)
    part_of_first[ordered] = np.searchsorted(bounds[1:], middles, side="right")
    return part_of_first[first_rows]


def split_indices(
    num_rows: int, data_split: str, part: int, prompts: Sequence[Hashable] | None = None, shuffle: bool = True
) -> npt.NDArray[np.uint32]:
    """Indices of the rows of one part of a split: uint32 of shape ``(n,)``.

    The parts of a split are disjoint and together hold every row.

    Args:
        num_rows: N, the rows of the source.
        data_split: comma-separated fractions, normalised to a sum of 1, for instance "2,4,4".
        part: number of the part; in training 0 = SFT, 1 = reward model, 2 = PPO.
        prompts: prompts of the rows, which stay together; None = each row stands for itself.
        shuffle: whether rows are shuffled before they are divided.

    Raises:
        UserError: `data_split` is not a list of fractions, or has no part number `part`.
    """
    fractions = parse_fractions(data_split)
    if not 0 <= part < len(fractions):
        needed = f"the {STEPS[part]} step" if 0 <= part < len(STEPS) else f"part {part}"
        raise UserError(
            f"--data_split {data_split} has {len(fractions)} parts, none for {needed}: give three, like 2,4,4."
        )
    bounds = split_bounds(num_rows, fractions)
    order = np.arange(num_rows, dtype=np.uint32)
    if shuffle:
        np.random.RandomState(SPLIT_SEED).shuffle(order)
    if prompts is None:
        return order[bounds[part] : bounds[part + 1]]
    parts = parts_of_rows(prompts, bounds, order)
    return order[parts[order] == part]


def split_part(
    rows: Sequence[T],
    data_split: str,
    part: int,
    prompt_of: Callable[[T], Hashable] | None = None,
    shuffle: bool = True,
) -> list[T]:
    """The rows of one part of a split; `prompt_of` as in `prompt_of_rows`; see `split_indices`."""
    prompts = None if prompt_of is None else list(map(prompt_of, rows))
    return [rows[i] for i in split_indices(len(rows), data_split, part, prompts, shuffle)]


def step_rows(
    rows: Sequence[T],
    split: str | None,
    step: int,
    prompt_of: Callable[[T], Hashable] | None = None,
    shuffle: bool = True,
) -> list[T]:
    """The rows that step 1, 2 or 3 takes, in every run the same; see `split_part`.

    `split`: fractions; None gives all rows in the same order as fractions that give this step everything, such as
    0,1,0.
    """
    if split is None:
        return split_part(rows, "1", 0, shuffle=shuffle)
    return split_part(rows, split, step - 1, prompt_of, shuffle)


def split_bounds(num_rows: int, fractions: Sequence[float]) -> list[int]:
    """The bounds of K parts in the shuffled order: K + 1 ascending positions from 0 to N.

    In tiny sources the correction could make a position negative; it stays at 0. The sum of the fractions must be
    above 0.
    """
    total = sum(fractions)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction / total * float(num_rows))))
    excess = bounds[-1] - num_rows
    return [0] + [max(0, bound - excess) for bound in bounds[1:]]


def parse_fractions(data_split: str) -> list[float]:
    """The numbers of a `--data_split`. Raises UserError."""
    try:
        fractions = [float(part) for part in data_split.split(",")]
    except ValueError:
        fractions = []
    are_valid = all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions)
    if not are_valid or sum(fractions) <= 0:
        raise UserError(
            f"--data_split {data_split} is not a list of fractions: give numbers of at least 0, like 2,4,4."
        )
    return fractions


def with_eval_share(share: float) -> str:
    """The fractions of training and held-out rows as a split: .05 gives "0.95,0.05"."""
    return f"{1 - share},{share}"
