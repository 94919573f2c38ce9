# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the engine that samples, compared with the actor's in every iteration: are its weights the actor's?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.engines import PolicyEngine
from dschat.models.layout import PassSize
from dschat.run.distributed import gather_objects
from dschat.training.ppo.models import response_logprobs
from dschat.training.selfcheck import tolerance_of
from macro_actions.types import Rollout, select_rows

STALE_GAP = 1.0  # nats per token that no policy should move in one iteration
GAP_ROWS = 8  # of a rollout on each process, where log-probs are computed for the comparison alone


def check_gap(
    rollout: Rollout,
    logprobs: Tensor | None,
    actor: PolicyEngine,
    temperature: float,
    size: PassSize,
    clip: float | None = None,
    is_stale: bool = False,
) -> dict[str, float]:
    """How far the log-probs of the engine that sampled the tokens are from the actor's. Every rank must call it.

    Args:
        rollout: this rank's responses; there is nothing to compare if its engine has no log-probs of its own.
        logprobs: shape ``(B, R)``, the actor's; None computes them for GAP_ROWS rows.
        actor: computes log-probs.
        temperature: of sampling.
        size: of a forward pass.
        clip: the largest importance weight.
        is_stale: the tokens were sampled with the weights of an iteration ago, so that a gap below STALE_GAP is no
            fault.

    Returns:
        rollout/logprob_gap and rollout/logprob_gap_max, the mean and the largest difference in nats over the response
        tokens of all ranks; with a clip also rollout/importance_clipped, the share of tokens whose weight it bounds.
        {} without log-probs of the engine.

    Raises:
        UserError: on every rank, where the mean is more than rounding explains.
    """
    sampled_logprobs = rollout.drawn_logprobs
    if sampled_logprobs is None:
        return {}
    if logprobs is None:
        rows = torch.arange(
            min(size.rows, GAP_ROWS, len(sampled_logprobs)),
            device=sampled_logprobs.device,
        )
        rollout = select_rows(rollout, rows)
        sampled_logprobs = sampled_logprobs[rows]
        logprobs = response_logprobs(actor, rollout, temperature, size)

    # Mean and largest difference over all ranks.
    differences = (logprobs - sampled_logprobs)[rollout.response_mask].double()
    gaps = differences.abs()
    largest_here = float(gaps.amax()) if gaps.numel() else 0.0
    clipped_here = 0 if clip is None else int((differences > math.log(clip)).sum())
    of_ranks = gather_objects((float(gaps.sum()), gaps.numel(), largest_here, clipped_here))
    sums, counts, largest, clipped = zip(*of_ranks, strict=True)
    tokens = max(sum(counts), 1)
    mean = sum(sums) / tokens

    tolerance = STALE_GAP if is_stale else tolerance_of(actor)
    if not mean <= tolerance:
        cause = "an iteration" if is_stale else "rounding"
        raise UserError(
            f"--rollout_engine: the engine's log-probs differ from the actor's by {mean:.3g} on average"
            f" ({cause} explains {tolerance:g}): it samples with other weights than the actor's, or computes this"
            " model in another way. Use --rollout_engine continuous, and please report the model."
        )
    metrics = {"rollout/logprob_gap": mean, "rollout/logprob_gap_max": max(largest)}
    if clip is not None:
        metrics["rollout/importance_clipped"] = sum(clipped) / tokens
    return metrics
