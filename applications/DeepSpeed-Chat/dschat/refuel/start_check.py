# SPDX-License-Identifier: Apache-2.0
"""The check of both settings of REFUEL before their first update."""

import math

from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.training.selfcheck import check_weights, tolerance_of


def check_start(policy: TrainedPolicy, logprobs: Tensor, earlier: Tensor, tokens: int) -> None:
    """Checks that the policy gives replies the log-probs that it gave them when the pairs were made ready.

    Then D = 0, and the loss is the mean of (η ΔR)².

    Args:
        policy: engine of the policy.
        logprobs: shape ``(B,)``, now, of whole replies.
        earlier: shape ``(B,)``, those of the pairs.
        tokens: number of tokens of the longest reply.

    Raises:
        UserError: log-probs differ by more than rounding.
    """
    # Rounding errors of single tokens add up like a random walk.
    tolerance = 2 * tolerance_of(policy, math.sqrt(tokens))
    gap = float((logprobs - earlier).abs().max())
    check_weights(policy, gap)
    if not gap <= tolerance:
        raise UserError(
            f"self-check: before the first update, log-probs of replies of up to {tokens} tokens differ by {gap:.6g} "
            f"from the pairs' own (rounding explains {tolerance:g}). Remove the file of reference log-probs if there "
            "is one, or report the model. --no_self_checks skips this check."
        )
