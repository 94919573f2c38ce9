# SPDX-License-Identifier: Apache-2.0
"""One step of sampling: logits → the drawn tokens and their log-probs, in one pass over the vocabulary."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from dschat.rollouts.sampling import Sampling

BLOCK = 256  # ids that are summed up before the search for the drawn one; any number gives the same draws


class Chooser:
    """Draws tokens as a `Sampling` says."""

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device) -> None:
        forbidden = sorted(sampling.forbidden)
        self._temperature = sampling.temperature
        self._forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)
        self._allowed = torch.tensor([i for i in range(vocab_size) if i not in sampling.forbidden], device=device)
        self._no_ids = torch.LongTensor()  # the warpers do not read them
        self._truncation = LogitsProcessorList()
        if sampling.temperature > 0 and sampling.top_k > 0:
            self._truncation.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._truncation.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """One token for each row.

        Args:
            logits: (N, V), of the model; overwritten.
            uniform: (N,) float64 in [0, 1), which decides the draws.

        Returns:
            ids (N,) long; log-probs (N,) float32 under softmax(logits / temperature) of the whole vocabulary (with
            temperature 0 under softmax(logits)), NaN where a row's logits are not finite. −inf beside finite ones is
            a fine logit: it is a token that is never drawn.
        """
        logits = logits.float()
        if self._temperature not in (0, 1):
            logits = logits / self._temperature
        kept_out = logits.index_select(1, self._forbidden).double()
        logits = logits.index_fill_(1, self._forbidden, -torch.inf)
        if self._truncation:
            log_z = logits.logsumexp(-1).double()
            probs = self._truncation(self._no_ids, logits).softmax(-1)
            ids = self._draw(probs, uniform)
            chosen = logits.gather(1, ids[:, None])[:, 0].double()
        else:
            probs = logits.softmax(-1)
            ids = self._draw(probs, uniform) if self._temperature > 0 else logits.argmax(-1)
            chosen = logits.gather(1, ids[:, None])[:, 0].double()
            log_z = chosen - probs.gather(1, ids[:, None])[:, 0].double().log()
        log_z = torch.cat([log_z[:, None], kept_out], dim=1).logsumexp(-1)
        return ids, (chosen - log_z).float()

    def _draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """Ids by the inverse CDF; rows without probabilities evenly from the ids that are allowed."""
        ids, total = inverse_cdf(probs, uniform)
        evenly = self._allowed[(uniform * len(self._allowed)).long()]
        return torch.where(total > 0, ids, evenly)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The id where the running sum of a row's weights passes u · total; it has a weight above 0.

    The search goes by blocks of ids first and then inside one block, so that no running sum is as wide as the
    vocabulary; running sums are float64.

    Args:
        weights: (N, V) float32, not negative.
        uniform: (N,) float64 in [0, 1).

    Returns:
        ids (N,) long, and total (N,) float64, the sum of all weights; where it is 0 or NaN the id means nothing.
    """
    num_ids = weights.shape[1]
    whole = num_ids - num_ids % BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1) if whole else weights[:, :0]
    if whole < num_ids:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    running = sums.double().cumsum(-1)
    target = uniform[:, None] * running[:, -1:]
    block = torch.searchsorted(running, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp(min=0)), 0.0)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=num_ids - 1)).double()
    inside = torch.where(ids < num_ids, inside, 0.0).cumsum(-1)
    # The block's float32 sum may be above that of float64, and the target behind its end.
    largest = torch.nextafter(inside[:, -1:], torch.zeros_like(before))
    place = torch.searchsorted(inside, torch.minimum(target - before, largest), right=True)
    return (block * BLOCK + place).clamp(max=num_ids - 1)[:, 0], running[:, -1]
