# SPDX-License-Identifier: Apache-2.0
"""Scoring: Rollout → Trajectory."""

import torch
from torch import Tensor

from dschat.models.engines import PolicyForward, ScalarForward
from dschat.rl.types import Rollout, Trajectory, select_rows
from dschat.run.stop import raise_if_stopped


@torch.no_grad()
def score(
    rollout: Rollout,
    scores: Tensor,
    actor: PolicyForward,
    reference: PolicyForward,
    critic: ScalarForward,
    temperature: float,
    batch_size: int,
) -> Trajectory:
    """Log-probs, reference log-probs and values of every response token.

    Args:
        rollout: B responses.
        scores: (B,) from the reward source.
        actor, reference: PolicyModel or its engine.
        critic: ScalarModel or its engine.
        temperature: that of sampling (1 for greedy).
        batch_size: rows per forward pass.

    Returns:
        Trajectory, float32, 0 off the response.
    """
    width = rollout.response_mask.shape[1]
    columns: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for rows in torch.arange(len(rollout.input_ids), device=rollout.input_ids.device).split(batch_size):
        raise_if_stopped()
        part = select_rows(rollout, rows)
        tokens = (part.input_ids, part.attention_mask)
        columns[0].append(actor(*tokens, width, temperature)[0])
        columns[1].append(reference(*tokens, width, temperature)[0])
        columns[2].append(response_values(critic(*tokens), width))
    logprobs, ref_logprobs, values = (torch.where(rollout.response_mask, torch.cat(column), 0.0) for column in columns)
    return Trajectory(rollout, logprobs, ref_logprobs, values, scores.float())


def response_values(values: Tensor, num_response: int) -> Tensor:
    """V(x, y_<j) for every response token j: the critic's number one position earlier. (B, P+R) → (B, R)."""
    return values[:, -num_response - 1 : -1]
