# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy of tokens from hidden states, in chunks, so that B×R×V logits never exist at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The most logits held at one time: 80 MB in float32, which is 78 positions of a vocabulary of 256,000. Not fewer: on a
# CPU, glibc gives freed blocks above 32 MiB back to the system and keeps smaller ones, so that a process with smaller
# chunks would grow with every chunk.
CHUNK_ELEMENTS = 20_000_000


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution.

    Chunks of positions go through ``to_logits`` one after another; under autograd each is recomputed in the backward
    pass, so memory stays at one chunk of logits whatever B, R and V are.

    Args:
        hidden: (B, R, H), the states that predict the targets.
        targets: (B, R) long.
        to_logits: maps (N, H) to (N, V), the model's own post-processing included (Gemma-2 soft-caps its logits).
        vocab_size: V, which sets how many positions make a chunk.
        temperature: divides the logits.
        chunk_elements: the most logits held at one time.

    Returns:
        logprobs (B, R) float32, differentiable; entropy (B, R) float32 in nats, without gradient.
    """
    flat_hidden, flat_targets = hidden.flatten(0, 1), targets.flatten()
    size = max(1, chunk_elements // vocab_size)
    recompute = torch.is_grad_enabled()

    def one_chunk(chunk_hidden: Tensor, chunk_targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = to_logits(chunk_hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        log_z = logits.logsumexp(-1)
        chosen = logits.gather(-1, chunk_targets[:, None]).squeeze(-1)
        return chosen - log_z, _entropy(logits.detach(), log_z.detach())

    logprobs, entropies = [], []
    for chunk_hidden, chunk_targets in zip(flat_hidden.split(size), flat_targets.split(size), strict=True):
        if recompute:
            chunk = checkpoint(one_chunk, chunk_hidden, chunk_targets, use_reentrant=False, preserve_rng_state=False)
        else:
            chunk = one_chunk(chunk_hidden, chunk_targets)
        logprobs.append(chunk[0])
        entropies.append(chunk[1])
    if not logprobs:
        empty = hidden.new_zeros(targets.shape, dtype=torch.float32)
        return empty, empty
    return torch.cat(logprobs).view_as(targets), torch.cat(entropies).view_as(targets)


@torch.no_grad()
def _entropy(logits: Tensor, log_z: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): log Z − Σ p·logit. (N, V), (N,) → (N,)."""
    expected = (logits - log_z[:, None]).exp_().mul_(logits)
    return log_z - expected.nan_to_num_(nan=0.0).sum(-1)  # p = 0 at a logit of −inf adds nothing
