# SPDX-License-Identifier: Apache-2.0
"""Examples → padded tensors, and the order in which examples are visited.

Layout of every policy batch: prompts left-padded to P, responses right-padded to R, each to the batch's own maximum.
"""

from collections.abc import Sequence

import numpy as np
import torch

from dschat.data.examples import PairExample, PromptExample, SFTExample
from dschat.errors import UserError


def collate_sft(examples: Sequence[SFTExample], pad_id: int, sft_on_prompt: bool = False) -> dict[str, torch.Tensor]:
    """One batch of demonstrations.

    Args:
        examples: B examples.
        pad_id: id that fills the gaps.
        sft_on_prompt: train on every token but the first, which alone is then the prompt (P = 1).

    Returns:
        input_ids (B, P+R) long, attention_mask (B, P+R) bool, response_mask (B, R) bool; True = a real token.
    """
    prompts = [example.prompt_ids for example in examples]
    responses = [example.response_ids for example in examples]
    if sft_on_prompt:
        responses = [[*prompt[1:], *response] for prompt, response in zip(prompts, responses, strict=True)]
        prompts = [prompt[:1] for prompt in prompts]
    prompt_ids, prompt_mask = _pad(prompts, pad_id, left=True)
    response_ids, response_mask = _pad(responses, pad_id, left=False)
    return {
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "response_mask": response_mask,
    }


def collate_pairs(examples: Sequence[PairExample], pad_id: int) -> dict[str, torch.Tensor]:
    """One batch of comparisons: B chosen sequences, then B rejected ones, in the same order.

    Args:
        examples: B examples.
        pad_id: id that fills the gaps.

    Returns:
        input_ids (2B, T) long and attention_mask (2B, T) bool, right-padded.
    """
    sequences = [example.chosen_ids for example in examples] + [example.rejected_ids for example in examples]
    input_ids, attention_mask = _pad(sequences, pad_id, left=False)
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def collate_prompts(examples: Sequence[PromptExample], pad_id: int) -> dict[str, torch.Tensor]:
    """One batch of prompts.

    Args:
        examples: B examples.
        pad_id: id that fills the gaps.

    Returns:
        input_ids (B, P) long and attention_mask (B, P) bool, left-padded; index (B,) long.
    """
    input_ids, attention_mask = _pad([example.prompt_ids for example in examples], pad_id, left=True)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "index": torch.tensor([example.index for example in examples], dtype=torch.long),
    }


def update_batches(
    lengths: Sequence[int],
    update_size: int,
    micro_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[list[list[int]]]:
    """One epoch of updates. Inside an update, rows of similar length share a micro-batch.

    Which rows an update holds depends on the seed and the epoch alone, never on `micro_size` or `world_size`.

    Args:
        lengths: n example lengths, in tokens.
        update_size: examples per update on all ranks together; a multiple of `world_size`.
        micro_size: examples per forward pass of one rank; the last micro-batch of an update may hold fewer.
        seed: seed of the order, 0 to 2**32 - 1.
        epoch: number of the epoch, which changes the order.
        rank: this process.
        world_size: number of processes; each gets an equal share of every update, without overlap.

    Returns:
        n // update_size updates (the rest of the examples waits for another epoch), each a list of micro-batches, each
        a list of example numbers.

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
        updates.append(_chunks(rows[rank::world_size], micro_size))
    return updates


def eval_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Every example once, shortest first.

    Args:
        lengths: n example lengths, in tokens.
        batch_size: examples per batch; the last may hold fewer.
        rank: this process.
        world_size: number of processes, which share the examples.

    Returns:
        Lists of example numbers, equally many on every rank: where the examples do not suffice, a rank's list ends
        with an empty one. With one rank none is empty.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    batches = _chunks(order[rank::world_size], batch_size)
    most = len(_chunks(order[::world_size], batch_size))
    return batches + [[] for _ in range(most - len(batches))]


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, T) long and mask (B, T) bool of ragged sequences, padded to the longest."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, span] = torch.tensor(sequence, dtype=torch.long)
        mask[row, span] = True
    return ids, mask
