# SPDX-License-Identifier: Apache-2.0
"""Compares log-probs of the sampling engine with the actor's in every iteration: do both have the same weights?"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.engines import PolicyEngine
from dschat.models.layout import PassSize
from dschat.run.distributed import gather_objects
from dschat.training.ppo.models import response_logprobs
from dschat.training.selfcheck import tolerance_of
from macro_actions.types import Rollout, select_rows

STALE_GAP = 1.0  # nats per token; a policy that moves further in one iteration is broken
MISMATCH = 0.1  # nats of a token, above which its two probabilities count as different
GAP_ROWS = 8  # rows per process whose log-probs are computed for the comparison alone


def check_gap(
    rollout: Rollout,
    logprobs: Tensor | None,
    actor: PolicyEngine,
    temperature: float,
    size: PassSize,
    is_stale: bool = False,
    must_be_close: bool = True,
) -> dict[str, float]:
    """Compares the log-probs of the engine that sampled a rollout with the actor's. Every rank must call it.

    Args:
        rollout: this rank's responses; without log-probs of the engine there is nothing to compare.
        logprobs: shape ``(B, R)``, the actor's; with None they are computed for GAP_ROWS rows.
        actor: the engine of the actor.
        temperature: sampling temperature.
        size: maximum size of a forward pass.
        is_stale: the tokens were sampled with the weights of one iteration ago, so that gaps up to STALE_GAP are
            expected.
        must_be_close: whether a larger mean ends the run.

    Returns:
        rollout/logprob_gap and rollout/logprob_gap_max, the mean and the largest absolute difference in nats over the
        response tokens of all ranks; rollout/logprob_mismatch, the share of tokens that differ by more than MISMATCH.
        {} without log-probs of the engine.

    Raises:
        UserError: on every rank, if the mean is larger than rounding (or one iteration) explains.
    """
    sampled_logprobs = rollout.drawn_logprobs
    if sampled_logprobs is None:
        return {}

    # The actor's log-probs, unless the rollout has them.
    if logprobs is None:
        num_rows = min(size.rows, GAP_ROWS, len(sampled_logprobs))
        rows = torch.arange(num_rows, device=sampled_logprobs.device)
        rollout = select_rows(rollout, rows)
        sampled_logprobs = sampled_logprobs[rows]
        logprobs = response_logprobs(actor, rollout, temperature, size)

    differences = (logprobs - sampled_logprobs)[rollout.response_mask].double()
    mean, largest, mismatch_share = _gap_over_ranks(differences)
    tolerance = STALE_GAP if is_stale else tolerance_of(actor)
    if must_be_close and not mean <= tolerance:
        cause = "an iteration" if is_stale else "rounding"
        raise UserError(
            f"--rollout_engine: the engine's log-probs differ from the actor's by {mean:.3g} on average"
            f" ({cause} explains {tolerance:g}): it samples with other weights than the actor's, or computes this"
            " model in another way. Use --rollout_engine continuous, and please report the model."
        )
    return {
        "rollout/logprob_gap": mean,
        "rollout/logprob_gap_max": largest,
        "rollout/logprob_mismatch": mismatch_share,
    }


def _gap_over_ranks(differences: Tensor) -> tuple[float, float, float]:
    """Mean and largest absolute difference over all ranks' tokens, and the share of mismatches.

    Args:
        differences: shape ``(N,)``, the actor's log-probs minus the engine's, at this rank's response tokens.
    """
    gaps = differences.abs()
    local_sum = float(gaps.sum())
    local_largest = float(gaps.amax()) if gaps.numel() else 0.0
    local_mismatches = int((gaps > MISMATCH).sum())

    all_ranks = gather_objects((local_sum, gaps.numel(), local_largest, local_mismatches))
    sums, counts, largest, mismatches = zip(*all_ranks, strict=True)
    tokens = max(sum(counts), 1)
    mean = sum(sums) / tokens
    return mean, max(largest), sum(mismatches) / tokens
