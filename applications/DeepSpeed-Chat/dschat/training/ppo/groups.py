# SPDX-License-Identifier: Apache-2.0
"""What the scores of a prompt's responses, compared with each other, say about the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.run.distributed import sum_over_ranks
from macro_actions.groups import are_equal, critic_weights
from macro_actions.types import Trajectory


def equal_groups(scores: Tensor, response_mask: Tensor, samples: int) -> Tensor:
    """Prompts whose responses all have the same score, (P,) bool.

    Args:
        scores: shape ``(B,)``, as the score source gave them; the `samples` responses of a prompt follow each other.
        response_mask: shape ``(B, R)``; a response without a token has no score and does not count.
        samples: responses to each prompt.
    """
    counted = response_mask.any(1)
    return are_equal(scores.unflatten(0, (-1, samples)), counted.unflatten(0, (-1, samples)))


def weights_of_groups(trajectory: Trajectory, samples: int, beta: float, floor: float) -> Tensor:
    """Weights (B,) of rows in the critic's loss, relative to their mean over the prompts of all ranks.

    Every rank must call it. Prompts without a scored response do not count. For β and the floor see `critic_weights`.

    Args:
        trajectory: B rows; the samples of a prompt follow each other.
        samples: responses to each prompt.
        beta: power of the variance of a prompt's scores.
        floor: least variance to that power.
    """
    has_score = trajectory.response_mask.any(1)
    scores = trajectory.scores.unflatten(0, (-1, samples))
    weights = critic_weights(scores, beta, floor, has_score.unflatten(0, (-1, samples)))
    total, count = sum_over_ranks(torch.stack([weights.sum(), (weights > 0).sum().float()])).unbind()
    return (weights * count / total.clamp(min=torch.finfo(total.dtype).tiny)).repeat_interleave(samples)
