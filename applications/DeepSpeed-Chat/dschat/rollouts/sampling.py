# SPDX-License-Identifier: Apache-2.0
"""How responses are drawn: length, end ids, temperature, truncation; the random numbers; one token of each row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from macro_actions.splitmix import random_words, shift_right

BLOCK = 256  # ids that are summed up before the search for the drawn one; any number gives the same draws


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    end_ids: tuple[int, ...]  # any of them ends a response
    pad_id: int
    bos_id: int | None = None
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    def limits(self, rows: int, given: Sequence[int] | None) -> Sequence[int]:
        """The most tokens of each of so many responses: those that are given, or `max_new_tokens` of all."""
        return [self.max_new_tokens] * rows if given is None else given

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that are never sampled: pad and BOS, unless one of them ends responses (GPT-2's BOS is its EOS)."""
        return frozenset(i for i in (self.pad_id, self.bos_id) if i is not None) - frozenset(self.end_ids)

    def generation_config(self) -> GenerationConfig:
        """The same for transformers, every field that could leak in from a checkpoint given explicitly."""
        options: dict[str, bool | int | float] = {"do_sample": False}
        if self.temperature > 0:
            options = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.end_ids),
            pad_token_id=self.pad_id,
            bos_token_id=self.bos_id,
            suppress_tokens=sorted(self.forbidden),
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            **options,
        )


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """First T numbers of each seed's sequence: seeds (B,) long → (B, T) float64 in [0, 1), multiples of 2^-53.

    Number t of a row is the upper 53 bits of SplitMix64's output t for the row's seed.
    """
    return shift_right(random_words(seeds, count), 11).double() / 2**53


def row_seed(*parts: int) -> int:
    """A 63-bit seed of one row that depends on all parts, for instance the run's seed, the draw and the prompt."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1


class TokenSampler:
    """Draws tokens as a `Sampling` says."""

    def __init__(
        self, sampling: Sampling, vocab_size: int, device: torch.device, missing: Collection[int] = ()
    ) -> None:
        """`missing` are ids that are no tokens: their logits are −inf already, see `dschat.models.vocabulary`."""
        forbidden = sorted(sampling.forbidden)
        excluded = sampling.forbidden.union(missing)
        self._temperature = sampling.temperature
        self._forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)
        self._allowed = torch.tensor([i for i in range(vocab_size) if i not in excluded], device=device)
        self._end_ids = torch.tensor(sampling.end_ids, device=device)
        self._no_ids = torch.LongTensor()  # the warpers do not read them
        self._truncation = LogitsProcessorList()
        if sampling.temperature > 0 and sampling.top_k > 0:
            self._truncation.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._truncation.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """One token for each row, by its logits (N, V), which are overwritten, and `uniform` (N,) float64 in [0, 1).

        Returns ids (N,) long; log-probs (N,) float32 under softmax(logits / temperature) of the whole vocabulary (with
        temperature 0 under softmax(logits)), NaN where a row's logits are not finite. −inf beside finite ones is a
        fine logit: it is a token that is never drawn.
        """
        logits = logits.float()
        if self._temperature not in (0, 1):
            logits = logits / self._temperature
        kept_out = logits.index_select(1, self._forbidden).double()
        logits = logits.index_fill_(1, self._forbidden, -torch.inf)
        # logsumexp, not softmax: over a large vocabulary, the denominator of torch's softmax on a CPU is less exact.
        log_z = logits.logsumexp(-1).double()
        probs = (self._truncation(self._no_ids, logits) if self._truncation else logits).softmax(-1)
        ids = self._draw(probs, uniform) if self._temperature > 0 else logits.argmax(-1)
        chosen = logits.gather(1, ids[:, None])[:, 0].double()
        log_z = torch.cat([log_z[:, None], kept_out], dim=1).logsumexp(-1)
        logprobs = (chosen - log_z).float()
        # x − x is 0, but NaN where x is infinite.
        return ids, logprobs + (logprobs - logprobs)

    def ended(self, ids: Tensor) -> Tensor:
        """(N,) bool: whether each of the ids (N,) ends its response."""
        return (ids[:, None] == self._end_ids).any(1)

    def _draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """Ids by the inverse CDF; rows without probabilities evenly from the ids that are allowed."""
        ids, total = inverse_cdf(probs, uniform)
        evenly = self._allowed[(uniform * len(self._allowed)).long()]
        return torch.where(total > 0, ids, evenly)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The id where the running sum of a row's weights passes u · total; it has a weight above 0.

    Weights (N, V) float32, not negative; u (N,) float64 in [0, 1) → ids (N,) long, and total (N,) float64, the sum of
    all weights; where it is 0 or NaN the id means nothing. The search goes by blocks of ids first and then inside one
    block, so that no running sum is as wide as the vocabulary; running sums are float64.
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
