# SPDX-License-Identifier: Apache-2.0
"""A rollout engine's log-probs beside the actor's: an engine with old or other weights is noticed at once."""

from dschat.errors import UserError
from dschat.models.engines import Policy
from dschat.rl.types import Trajectory
from dschat.run.distributed import gather_objects
from dschat.trainers.selfcheck import TOLERANCE


def check_gap(trajectory: Trajectory, actor: Policy) -> dict[str, float]:
    """How far the log-probs of the engine that drew the tokens are from the actor's. Every rank must call it.

    Args:
        trajectory: of this rank, scored by the actor as it drew.
        actor: its engine.

    Returns:
        rollout/logprob_gap and rollout/logprob_gap_max, the mean and the largest difference in nats over the response
        tokens of all ranks; {} where the engine has no log-probs of its own.

    Raises:
        UserError: on every rank, where the mean is more than rounding explains.
    """
    if trajectory.drawn_logprobs is None:
        return {}
    gaps = (trajectory.logprobs - trajectory.drawn_logprobs)[trajectory.response_mask].abs().double()
    own = (float(gaps.sum()), gaps.numel(), float(gaps.amax()) if gaps.numel() else 0.0)
    sums, counts, largest = zip(*gather_objects(own), strict=True)
    mean = sum(sums) / max(sum(counts), 1)
    tolerance = TOLERANCE[next(actor.module.parameters()).dtype]
    if not mean <= tolerance:
        raise UserError(
            f"--rollout_engine: the engine's log-probs differ from the actor's by {mean:.3g} on average (rounding "
            f"explains {tolerance:g}): it draws with other weights than the actor's, or computes this model in "
            "another way. Use --rollout_engine compacting, and please report the model."
        )
    return {"rollout/logprob_gap": mean, "rollout/logprob_gap_max": max(largest)}
