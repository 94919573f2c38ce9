# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling, for tokens that were sampled by a policy slightly different from the actor."""

from torch import Tensor


def importance_weights(logprobs: Tensor, drawn_logprobs: Tensor, clip: float) -> Tensor:
    """min(π_old / π_sampler, clip) of every token.

    An engine that computes the actor's log-probabilities with other kernels or in lower precision samples from
    π_sampler, not from π_old. Under π_sampler, the weighted advantages have the mean that unweighted advantages have
    under π_old, except for the truncation, which bounds their variance.

    Args:
        logprobs: shape ``(B, R)``, log π_old, computed by the trainer.
        drawn_logprobs: shape ``(B, R)``, log π_sampler, computed by the engine that sampled the tokens.
        clip: largest weight.

    Returns:
        Shape ``(B, R)``, without gradient.
    """
    return (logprobs - drawn_logprobs).detach().exp().clamp(max=clip)
