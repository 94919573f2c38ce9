# SPDX-License-Identifier: Apache-2.0
"""Stops a run at the first number that is not finite, and names it."""

import math

import torch

from dschat.errors import UserError
from dschat.rl.types import PPOBatch


def check_batch(batch: PPOBatch, update: int) -> None:
    """Looks at what a PPO iteration computed, in the order in which it was computed.

    Args:
        batch: the iteration's batch.
        update: optimiser updates so far, for the message.

    Raises:
        UserError: a field holds NaN or an infinity on the response.
    """
    trajectory, mask = batch.trajectory, batch.response_mask
    fields = {
        "logprobs": trajectory.logprobs,
        "ref_logprobs": trajectory.ref_logprobs,
        "values": trajectory.values,
        "scores": trajectory.scores[:, None],
        "kl": batch.kl,
        "rewards": batch.rewards,
        "advantages": batch.advantages,
        "returns": batch.returns,
    }
    has_response = mask.any(1, keepdim=True)
    bad_rows = torch.stack(
        [(~torch.isfinite(x) & (mask if x.shape == mask.shape else has_response)).any(1) for x in fields.values()]
    )
    bad = bad_rows.any(1)
    if not bool(bad.any()):
        return
    first = int(bad.int().argmax())
    name, rows = list(fields)[first], bad_rows[first].nonzero().flatten().tolist()
    raise UserError(
        f"after {update} updates, {name} is not finite in rows {rows[:8]} of the rollout. Lower the learning rates, "
        "or use --dtype bf16 or fp32 if this is fp16."
    )


def check_number(name: str, value: float, update: int) -> None:
    """Raises UserError if a loss or gradient norm is not finite."""
    if not math.isfinite(value):
        raise UserError(f"after {update} updates, {name} is {value}. Lower the learning rate, or use another --dtype.")
