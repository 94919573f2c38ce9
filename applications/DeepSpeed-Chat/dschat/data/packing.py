# SPDX-License-Identifier: Apache-2.0
"""Several demonstrations in one row of tokens: the columns that padding would take hold other examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.data.examples import SFTExample


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Puts examples into rows, the longest first, each into the first row that has room.

    Args:
        lengths: of the examples, in tokens.
        width: tokens of a row; a longer example has a row of its own.

    Returns:
        The numbers of each row's examples.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = (row for row, left in enumerate(room) if lengths[number] <= left)
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def collate_packed(
    examples: Sequence[SFTExample], pad_id: int, width: int, sft_on_prompt: bool = False
) -> dict[str, Tensor]:
    """B demonstrations → b ≤ B rows of at most `width` tokens.

    Positions begin at 0 with every example, and again with the padding behind the last one: a model tells by them what
    belongs together.

    Returns:
        input_ids (b, T) long, position_ids (b, T) long, and targets (N,) long, the places in ``input_ids.flatten()``
        of the tokens that are trained on.
    """
    rows = pack([len(example) for example in examples], width)
    longest = max(sum(len(examples[number]) for number in row) for row in rows)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    targets: list[int] = []
    for row in rows:
        tokens: list[int] = []
        places: list[int] = []
        for example in (examples[number] for number in row):
            start = len(ids) * longest + len(tokens)
            targets += [start + place for place in trained_places(example, sft_on_prompt)]
            tokens += [*example.prompt_ids, *example.response_ids]
            places += range(len(example))
        gap = longest - len(tokens)
        ids.append([*tokens, *[pad_id] * gap])
        positions.append([*places, *range(gap)])
    return {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "position_ids": torch.tensor(positions, dtype=torch.long),
        "targets": torch.tensor(targets, dtype=torch.long),
    }


def trained_places(example: SFTExample, sft_on_prompt: bool) -> list[int]:
    """The places in an example of the tokens that are trained on: those of the response, or all but the first."""
    if sft_on_prompt:
        return list(range(1, len(example)))
    first = len(example.prompt_ids)
    targets = example.targets or [True] * len(example.response_ids)
    return [first + place for place, is_target in enumerate(targets) if is_target]
