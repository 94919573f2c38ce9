# SPDX-License-Identifier: Apache-2.0
"""Examples → tensors, padded or packed, and the order in which examples are visited.

Layout of policy batches: prompts are padded on the left to P tokens, responses on the right to R tokens, each to the
batch's maximum. Ids are long; masks are bool, True = a real token. `pad_id` fills the gaps. In packed batches, several
demonstrations share a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat.base.errors import UserError
from dschat.data.examples import PairExample, PreferenceExample, SFTExample


def collate_sft(examples: Sequence[SFTExample], pad_id: int, sft_on_prompt: bool = False) -> dict[str, Tensor]:
    """Pads B demonstrations.

    With `sft_on_prompt` every token but the first is trained on; the first alone is then the prompt (P = 1).

    Returns:
        input_ids ``(B, P+R)``, attention_mask ``(B, P+R)``, and response_mask ``(B, R)``, True = trained on.
    """
    prompts = []
    responses = []
    for example in examples:
        prompt_length = 1 if sft_on_prompt else len(example.prompt_ids)
        prompts.append(example.prompt_ids[:prompt_length])
        responses.append([*example.prompt_ids[prompt_length:], *example.response_ids])
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
    """Pads B demonstrations on the right and lists the tokens that are trained on.

    Returns:
        input_ids ``(B, T)`` long, and targets ``(N,)`` long: indices into ``input_ids.flatten()``.
    """
    batch = _collate_rows([[example] for example in examples], pad_id, sft_on_prompt)
    del batch["position_ids"]
    return batch


def collate_pairs(examples: Sequence[PairExample], pad_id: int) -> dict[str, Tensor]:
    """Pads B comparisons on the right: input_ids and attention_mask ``(2B, T)``, the B chosen sequences first."""
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
    """The updates of one epoch: each is a list of micro-batches, and a micro-batch is a list of example indices.

    The examples of an update depend only on the seed and the epoch, never on `micro_size` or `world_size`. Within an
    update, examples of similar length share a micro-batch, or with `balance_tokens` examples of all lengths. Examples
    that do not fill an update are left for another epoch.

    Args:
        lengths: lengths of the examples, in tokens.
        update_size: examples per update on all ranks together; a multiple of `world_size`.
        micro_size: examples per forward pass of one rank; the last micro-batch of an update may hold fewer.
        seed: seed of the order, 0 to 2**32 - 1.
        epoch: number of the epoch, which changes the order.
        rank: this process.
        world_size: number of processes; each gets an equal share of every update, without overlap.
        balance_tokens: give all micro-batches of an update about the same number of tokens, for packed examples.

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
        indices = order[start : start + update_size].tolist()
        by_length = sorted(indices, key=lambda index: lengths[index])
        local_indices = by_length[rank::world_size]
        if balance_tokens:
            num_batches = math.ceil(len(local_indices) / micro_size)
            updates.append([local_indices[first::num_batches] for first in range(num_batches)])
        else:
            updates.append(_chunks(local_indices, micro_size))
    return updates


def further_examples(count: int, taken: Collection[int], size: int, seed: int, part: int) -> list[int]:
    """Indices of additional examples for an update of all ranks together: one part of a shuffled order.

    Args:
        count: number of all examples.
        taken: indices of the examples that the update has already; they come last in the order.
        size: examples of a part.
        seed: seed of the order.
        part: number of the part; after its end the order begins again.
    """
    shuffled = np.random.RandomState(seed).permutation(count).tolist()
    order = sorted(shuffled, key=set(taken).__contains__)
    positions = range(part * size, (part + 1) * size)
    return [order[position % count] for position in positions]


def eval_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Indices of all examples, shortest first, in batches that are shared by the ranks; the last may hold fewer.

    Every rank gets the same number of batches: if the examples do not suffice, a rank's last batch is empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batches = _chunks(order[rank::world_size], batch_size)
    batches_of_first_rank = _chunks(order[::world_size], batch_size)
    while len(batches) < len(batches_of_first_rank):
        batches.append([])
    return batches


def _chunks(indices: list[int], size: int) -> list[list[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def pad(sequences: Sequence[Sequence[int]], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(B, T)`` of sequences of different lengths, padded on one side to the longest."""
    ids = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    mask = [torch.ones_like(sequence, dtype=torch.bool) for sequence in ids]
    return pad_sequence(ids, True, pad_id, side), pad_sequence(mask, True, False, side)


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Packs examples into rows by first-fit decreasing: the longest first, each into the first row with room.

    Args:
        lengths: lengths of the examples, in tokens.
        width: tokens of a row; a longer example gets a row of its own.

    Returns:
        The indices of each row's examples.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for index in longest_first:
        row = 0
        while row < len(rows) and lengths[index] > room[row]:
            row += 1
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def collate_packed(
    examples: Sequence[SFTExample], pad_id: int, width: int, sft_on_prompt: bool = False
) -> dict[str, Tensor]:
    """Packs B demonstrations into b ≤ B rows of at most `width` tokens.

    Positions restart at 0 with every example, and with the padding after the last one: they tell a model which tokens
    belong together.

    Returns:
        input_ids ``(b, T)`` long, position_ids ``(b, T)`` long, and targets ``(N,)`` long: indices into
        ``input_ids.flatten()`` of the tokens that are trained on.
    """
    packed_rows: list[list[SFTExample]] = []
    for indices in pack([len(example) for example in examples], width):
        packed_rows.append([examples[index] for index in indices])
    return _collate_rows(packed_rows, pad_id, sft_on_prompt)


def _collate_rows(packed_rows: Sequence[Sequence[SFTExample]], pad_id: int, sft_on_prompt: bool) -> dict[str, Tensor]:
    """Pads rows of one or more demonstrations on the right; see `collate_packed`."""
    longest = max(sum(map(len, packed)) for packed in packed_rows)
    input_ids: list[list[int]] = []
    position_ids: list[list[int]] = []
    targets: list[int] = []
    for row, packed in enumerate(packed_rows):
        ids: list[int] = []
        positions: list[int] = []
        for example in packed:
            start = row * longest + len(ids)
            targets += [start + position for position in trained_positions(example, sft_on_prompt)]
            ids += example.prompt_ids
            ids += example.response_ids
            positions += range(len(example))
        padding = longest - len(ids)
        input_ids.append(ids + [pad_id] * padding)
        position_ids.append([*positions, *range(padding)])
    return {
        "input_ids": torch.tensor(input_ids, dtype=torch.long),
        "position_ids": torch.tensor(position_ids, dtype=torch.long),
        "targets": torch.tensor(targets, dtype=torch.long),
    }


def trained_positions(example: SFTExample, sft_on_prompt: bool) -> list[int]:
    """Positions in an example of the tokens that are trained on: the response's, or all but the first."""
    if sft_on_prompt:
        return list(range(1, len(example)))
    prompt_length = len(example.prompt_ids)
    targets = example.targets or [True] * len(example.response_ids)
    positions: list[int] = []
    for position, is_target in enumerate(targets):
        if is_target:
            positions.append(prompt_length + position)
    return positions


def collate_preferences(examples: Sequence[PreferenceExample], pad_id: int) -> dict[str, Tensor]:
    """Pads the 2B sequences of B comparisons on the right, the B chosen ones first.

    Returns:
        input_ids ``(2B, T)`` long; targets ``(N,)`` long, indices of the response tokens into
        ``input_ids.flatten()``; and sequence ``(N,)`` long, the row that each of them belongs to.
    """
    sequences = [(example.prompt_ids, example.chosen_ids) for example in examples]
    sequences += [(example.prompt_ids, example.rejected_ids) for example in examples]
    input_ids, _ = pad([prompt + response for prompt, response in sequences], pad_id, "right")
    width = input_ids.shape[1]
    targets = []
    for row, (prompt, response) in enumerate(sequences):
        start = row * width + len(prompt)
        targets.append(torch.arange(start, start + len(response)))
    num_targets = torch.tensor([len(response) for _, response in sequences])
    return {"input_ids": input_ids, "targets": torch.cat(targets), "sequence": torch.repeat_interleave(num_targets)}
