# SPDX-License-Identifier: Apache-2.0
"""From ids to a Rollout: prompts padded on the left, responses on the right."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat.rl.types import Rollout
from dschat.rollouts.sampling import Sampling


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """B prompts → input_ids (B, P) long and attention_mask (B, P) bool, padded on the left to the longest."""
    ids = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    mask = [torch.ones_like(prompt, dtype=torch.bool) for prompt in ids]
    return (
        pad_sequence(ids, True, pad_id, "left").to(device),
        pad_sequence(mask, True, False, "left").to(device),
    )


def assemble(prompts: tuple[Tensor, Tensor], tokens: Tensor, sampling: Sampling) -> Rollout:
    """A rollout of what was drawn, each row cut behind its first end token.

    Args:
        prompts: input_ids (B, P) and attention_mask (B, P), padded on the left.
        tokens: (B, T) long, drawn ids; anything may follow an end token.
        sampling: how they were drawn.
    """
    ended = torch.isin(tokens, torch.tensor(sampling.end_ids, device=tokens.device))
    mask = (ended.cumsum(1) - ended.long()) == 0
    width = int(mask.sum(1).max())
    mask, tokens = mask[:, :width], tokens[:, :width]
    return Rollout(
        input_ids=torch.cat([prompts[0], torch.where(mask, tokens, sampling.pad_id)], dim=1),
        attention_mask=torch.cat([prompts[1], mask], dim=1),
        response_mask=mask,
        prompt_index=torch.arange(len(tokens), device=tokens.device),
        finished=ended.any(1),
    )
