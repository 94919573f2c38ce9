# SPDX-License-Identifier: Apache-2.0
"""Examples → tensors, padded or packed, and the order in which examples are visited.

Layout of every policy batch: prompts left-padded to P, responses right-padded to R, each to the batch's own maximum.
Ids are long; masks are bool, True = a real token. `pad_id` fills the gaps. Packed, several demonstrations share a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat.base.errors import UserError
from dschat.data.examples import PairExample, PreferenceExample, SFTExample


def collate_sft(examples: Sequence[SFTExample], pad_id: int, sft_on_prompt: bool = False) -> dict[str, Tensor]:
    """B demonstrations → input_ids (B, P+R), attention_mask (B, P+R), response_mask (B, R): what is trained on.

    With `sft_on_prompt` every token but the first is trained on, which alone is then the prompt (P = 1).
    """
    prompts = [example.prompt_ids for example in examples]
    responses = [example.response_ids for example in examples]
    if sft_on_prompt:
        responses = [[*prompt[1:], *response] for prompt, response in zip(prompts, responses, strict=True)]
        prompts = [prompt[:1] for prompt in prompts]
    prompt_ids, prompt_mask = pad(prompts, pad_id, "left")
    response_ids, response_mask = pad(responses, pad_id, "right")
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    for row, example in enumerate(examples):
        if example.targets is not None and not sft_on_prompt:
            response_mask[row, : len(example.targets)] = torch.tensor(example.targets)
    return {
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
        "attention_mask": attention_mask,
        "response_mask": response_mask,
    }


def collate_targets(examples: Sequence[SFTExample], pad_id: int, sft_on_prompt: bool = False) -> dict[str, Tensor]:
    """The same as input_ids (B, T) long, padded on the right to the longest; and targets (N,) long.

    Targets are the places in ``input_ids.flatten()`` of the tokens that are trained on.
    """
    input_ids, _ = pad([[*example.prompt_ids, *example.response_ids] for example in examples], pad_id, "right")
    starts = [row * input_ids.shape[1] for row in range(len(examples))]
    places = [trained_places(example, sft_on_prompt) for example in examples]
    targets = [start + place for start, of_row in zip(starts, places, strict=True) for place in of_row]
    return {"input_ids": input_ids, "targets": torch.tensor(targets, dtype=torch.long)}


def collate_pairs(examples: Sequence[PairExample], pad_id: int) -> dict[str, Tensor]:
    """B comparisons → input_ids and attention_mask (2B, T), right-padded: B chosen sequences, then B rejected ones."""
    sequences = [example.chosen_ids for example in examples] + [example.rejected_ids for example in examples]
    input_ids, attention_mask = pad(sequences, pad_id, "right")
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def update_batches(
    lengths: Sequence[int],
    update_size: int,
    micro_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    balance_tokens: bool = False,
) -> list[list[list[int]]]:
    """One epoch of updates, each a list of micro-batches, each a list of example numbers.

    Which rows an update holds depends on the seed and the epoch alone, never on `micro_size` or `world_size`. Inside
    an update, rows of similar length share a micro-batch, or with `balance_tokens` rows of all lengths. The examples
    that do not fill an update wait for another epoch.

    Args:
        lengths: n example lengths, in tokens.
        update_size: examples per update on all ranks together; a multiple of `world_size`.
        micro_size: examples per forward pass of one rank; the last micro-batch of an update may hold fewer.
        seed: seed of the order, 0 to 2**32 - 1.
        epoch: number of the epoch, which changes the order.
        rank: this process.
        world_size: number of processes; each gets an equal share of every update, without overlap.
        balance_tokens: all micro-batches of an update hold about as many tokens, for examples that are packed.

    Raises:
        UserError: fewer examples than one update needs.
        ValueError: `update_size` is not a multiple of `world_size`.
    """
    if update_size % world_size:
        raise ValueError(f"update_size {update_size} is not a multiple of world_size {world_size}")
    if len(lengths) < update_size:
        raise UserError(
            f"{len(lengths)} examples are left, fewer than the {update_size} of one update: give more rows "
            "(--data_path, --data_split) or smaller batches."
        )
    order = np.arange(len(lengths))
    np.random.RandomState([seed, epoch]).shuffle(order)
    updates = []
    for start in range(0, len(order) - update_size + 1, update_size):
        rows = sorted(order[start : start + update_size].tolist(), key=lambda row: lengths[row])
        own = rows[rank::world_size]
        count = -(-len(own) // micro_size)
        updates.append([own[number::count] for number in range(count)] if balance_tokens else _chunks(own, micro_size))
    return updates


def further_examples(count: int, taken: Collection[int], size: int, seed: int, part: int) -> list[int]:
    """Numbers of further examples for an update of all ranks together, in an order of their own: one part of it.

    Args:
        count: of all examples.
        taken: numbers of those that the update has; they are the last in the order.
        size: examples of a part.
        seed: seed of the order.
        part: number of the part; behind its end the order begins anew.
    """
    order = sorted(np.random.RandomState(seed).permutation(count).tolist(), key=set(taken).__contains__)
    return [order[place % count] for place in range(part * size, (part + 1) * size)]


def eval_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The numbers of all examples once, shortest first, in batches that the ranks share; the last may hold fewer.

    Every rank gets equally many batches: where the examples do not suffice, a rank's list ends with an empty one.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    batches = _chunks(order[rank::world_size], batch_size)
    most = len(_chunks(order[::world_size], batch_size))
    return batches + [[] for _ in range(most - len(batches))]


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def pad(sequences: Sequence[Sequence[int]], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, T) of ragged sequences, padded on one side to the longest."""
    ids = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    mask = [torch.ones_like(sequence, dtype=torch.bool) for sequence in ids]
    return pad_sequence(ids, True, pad_id, side), pad_sequence(mask, True, False, side)


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


def collate_preferences(examples: Sequence[PreferenceExample], pad_id: int) -> dict[str, Tensor]:
    """B comparisons → their 2B sequences, the B chosen ones first, padded on the right to the longest.

    Returns:
        input_ids (2B, T) long; targets (N,) long, the places of the response tokens in ``input_ids.flatten()``; and
        sequence (N,) long, the number of the sequence that each of them belongs to.
    """
    pairs = [(e.prompt_ids, e.chosen_ids) for e in examples] + [(e.prompt_ids, e.rejected_ids) for e in examples]
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    rows = [[*prompt, *response, *[pad_id] * (width - len(prompt) - len(response))] for prompt, response in pairs]
    spans = [(number * width + len(prompt), len(response)) for number, (prompt, response) in enumerate(pairs)]
    return {
        "input_ids": torch.tensor(rows, dtype=torch.long),
        "targets": torch.cat([torch.arange(start, start + count) for start, count in spans]),
        "sequence": torch.repeat_interleave(torch.tensor([count for _, count in spans])),
    }
