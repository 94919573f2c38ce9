# SPDX-License-Identifier: Apache-2.0
"""Examples → tensors, padded or packed; batches.py says which examples a batch holds.

Layout of policy batches: prompts are padded on the left to P tokens, responses on the right to R tokens, each to the
batch's maximum. Ids are long; masks are bool, True = a real token. `pad_id` fills the gaps. In packed batches, several
demonstrations share a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.data.batches import pad
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
