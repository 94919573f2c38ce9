# SPDX-License-Identifier: Apache-2.0
"""A rollout engine's log-probs beside the actor's: an engine with old or other weights is noticed at once."""

import torch

from dschat.errors import UserError
from dschat.models.engines import PolicyEngine
from dschat.rl.types import ScoredRollout, Trajectory, select_rows
from dschat.run.distributed import gather_objects
from dschat.trainers.ppo.models import response_logprobs
from dschat.trainers.selfcheck import TOLERANCE


def check_gap(
    known: Trajectory | ScoredRollout, actor: PolicyEngine, temperature: float, most: int
) -> dict[str, float]:
    """How far the log-probs of the engine that drew the tokens are from the actor's. Every rank must call it.

    Args:
        known: of this rank. Of a scored rollout, the actor's log-probs are computed for a few rows.
        actor: its engine, as it was when the tokens were drawn.
        temperature: that of sampling.
        most: rows of that few.

    Returns:
        rollout/logprob_gap and rollout/logprob_gap_max, the mean and the largest difference in nats over the response
        tokens of all ranks; {} where the engine has no log-probs of its own.

    Raises:
        UserError: on every rank, where the mean is more than rounding explains.
    """
    rollout, drawn = known.rollout, known.rollout.drawn_logprobs
    if drawn is None:
        return {}
    if isinstance(known, Trajectory):
        logprobs = known.logprobs
    else:
        rows = torch.arange(min(most, len(drawn)), device=drawn.device)
        rollout, drawn = select_rows(rollout, rows), drawn[rows]
        logprobs = response_logprobs(actor, rollout, temperature, most)
    gaps = (logprobs - drawn)[rollout.response_mask].abs().double()
    own = (float(gaps.sum()), gaps.numel(), float(gaps.amax()) if gaps.numel() else 0.0)
    sums, counts, largest = zip(*gather_objects(own), strict=True)
    mean = sum(sums) / max(sum(counts), 1)
    tolerance = TOLERANCE[next(actor.module.parameters()).dtype]
    if not mean <= tolerance:
        raise UserError(
            f"--rollout_engine: the engine's log-probs differ from the actor's by {mean:.3g} on average (rounding "
            f"explains {tolerance:g}): it draws with other weights than the actor's, or computes this model in "
            "another way. Use --rollout_engine continuous, and please report the model."
        )
    return {"rollout/logprob_gap": mean, "rollout/logprob_gap_max": max(largest)}
