# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling: corrects for tokens that were drawn by a policy slightly other than the actor."""

from torch import Tensor


def importance_weights(logprobs: Tensor, drawn_logprobs: Tensor, clip: float) -> Tensor:
    """min(π_old / π_drawn, clip) of every token.

    An engine that computes the actor's log-probs in its own way, with other kernels or in lower precision, draws from
    π_drawn, not from π_old. Under π_drawn, advantages times these weights have the mean that they have under π_old
    without them, but for the truncation, which bounds their variance.

    Args:
        logprobs: (B, R), log π_old, of the trainer.
        drawn_logprobs: (B, R), log π_drawn, of the engine that drew the tokens.
        clip: the largest weight.

    Returns:
        (B, R), without gradient.
    """
    return (logprobs - drawn_logprobs).detach().exp().clamp(max=clip)
