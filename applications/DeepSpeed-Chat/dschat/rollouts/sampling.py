# SPDX-License-Identifier: Apache-2.0
"""Token sampling: the settings of a response, the random numbers of each row, and one token per row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from macro_actions.splitmix import random_words, shift_right

BLOCK = 256  # ids per block of `block_sums`; any number gives the same samples, up to rounding
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: the flags, and the ids of the policy's tokenizer."""

    max_new_tokens: int
    end_ids: tuple[int, ...]  # any of them ends a response
    pad_id: int
    bos_id: int | None = None
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    def limits(self, rows: int, limits: Sequence[int] | None) -> Sequence[int]:
        """Maximum tokens of each response: `limits` if there are any, else `max_new_tokens` for every row."""
        return [self.max_new_tokens] * rows if limits is None else limits

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that are never sampled: pad and BOS, unless one of them ends responses (GPT-2's BOS is its EOS)."""
        forbidden = {self.pad_id}
        if self.bos_id is not None:
            forbidden.add(self.bos_id)
        return frozenset(forbidden.difference(self.end_ids))

    def generation_config(self) -> GenerationConfig:
        """These settings for transformers, including every field that a checkpoint would otherwise fill in."""
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
    """First numbers of each seed's random sequence, multiples of 2^-53 in [0, 1).

    Number t of a row is the upper 53 bits of SplitMix64's output t for the row's seed.

    Args:
        seeds: shape (B,), long.
        count: numbers per seed, T.

    Returns:
        Shape (B, T), float64.
    """
    return shift_right(random_words(seeds, count), 11).double() / 2**53


def row_seed(*parts: int) -> int:
    """A 63-bit seed of one row, derived from all parts, for instance the run's seed, the iteration and the prompt."""
    (word,) = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return int(word) >> 1


class TokenSampler:
    """Samples tokens from logits as a `Sampling` says."""

    def __init__(
        self, sampling: Sampling, vocab_size: int, device: torch.device, missing: Collection[int] = ()
    ) -> None:
        """Moves the ids to the device.

        Args:
            sampling: the settings.
            vocab_size: V, number of logits.
            device: device of the logits.
            missing: ids without a token, whose logits are −inf already; see `dschat.models.vocabulary`.
        """
        excluded = sampling.forbidden.union(missing)
        allowed = [i for i in range(vocab_size) if i not in excluded]
        self._temperature = sampling.temperature
        forbidden = sorted(sampling.forbidden)
        self._forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)
        self._is_forbidden = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._is_forbidden[self._forbidden] = True
        self._allowed = torch.tensor(allowed, device=device)
        self._end_ids = torch.tensor(sampling.end_ids, device=device)
        self._no_ids = torch.LongTensor()  # the warpers do not read them
        self._truncation = LogitsProcessorList()
        if sampling.temperature > 0 and sampling.top_k > 0:
            self._truncation.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._truncation.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Samples one token per row.

        Args:
            logits: shape (N, V). A logit of −inf beside finite ones is a token that is never sampled.
            uniform: shape (N,), float64 in [0, 1).

        Returns:
            ids (N,) long, and their log-probs (N,) float32 under softmax(logits / temperature) of the whole vocabulary
            (softmax(logits) when the temperature is 0), NaN if a row's logits are not finite.
        """
        logits = logits.float()
        if self._temperature not in (0, 1):
            logits = logits / self._temperature
        forbidden_logits = logits.index_select(1, self._forbidden).double()
        logits = torch.where(self._is_forbidden, -torch.inf, logits)  # on a CPU faster than masked_fill

        ids, log_z = self._sample(logits, uniform)
        if self._temperature == 0:
            ids = torch.where(log_z.isfinite(), logits.argmax(-1), ids)
        elif self._truncation:
            truncated = self._truncation(self._no_ids, logits)
            ids, _ = self._sample(truncated, uniform)

        # The log-prob counts the whole vocabulary, forbidden ids included.
        sampled_logits = logits.gather(1, ids[:, None])[:, 0].double()
        log_z = torch.cat([log_z[:, None], forbidden_logits], dim=1)
        log_z = log_z.logsumexp(-1)
        logprobs = (sampled_logits - log_z).float()
        # x − x is 0, but NaN if x is infinite.
        return ids, logprobs + (logprobs - logprobs)

    def ended(self, ids: Tensor) -> Tensor:
        """Whether each of the ids (N,) ends its response, (N,) bool."""
        return (ids[:, None] == self._end_ids).any(1)

    def _sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Ids by the inverse CDF, and log Z; rows whose logits are not finite sample evenly from the allowed ids."""
        ids, log_z = inverse_cdf(logits, uniform)
        even_ids = self._allowed[(uniform * len(self._allowed)).long()]
        return torch.where(log_z.isfinite(), ids, even_ids), log_z


def inverse_cdf(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The id of each row where the running sum of exp(logit) passes u · Z; its logit is above −inf.

    The search goes over blocks of ids first and then inside one block, so that no running sum is as wide as the
    vocabulary; running sums are float64.

    Args:
        logits: shape (N, V), float32.
        uniform: u, shape (N,), float64 in [0, 1).

    Returns:
        ids (N,) long, and log Z (N,) float64 of each row, Z being the sum over all ids. Where log Z is not finite,
        because the row's logits are not, the id means nothing.
    """
    num_ids = logits.shape[1]
    largest, sums = block_sums(logits)

    # The block in which the running sum passes the target.
    running = sums.cumsum(-1)
    total = running[:, -1:]
    target = uniform[:, None] * total
    last_block = sums.shape[1] - 1
    block = torch.searchsorted(running, target, right=True).clamp(max=last_block)
    previous = (block - 1).clamp(min=0)
    before = torch.where(block > 0, running.gather(1, previous), 0.0)

    # The id inside that block.
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    weights = (logits.gather(1, ids.clamp(max=num_ids - 1)) - largest).exp().double()
    inside = torch.where(ids < num_ids, weights, 0.0).cumsum(-1)
    # The block's float32 sum may be above that of float64, and the target behind its end.
    last_weighted = torch.nextafter(inside[:, -1:], torch.zeros_like(before))
    position = torch.searchsorted(inside, torch.minimum(target - before, last_weighted), right=True)
    sampled = (block * BLOCK + position).clamp(max=num_ids - 1)
    log_z = largest.double() + total.log()
    return sampled[:, 0], log_z[:, 0]


def block_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp(logit − largest logit of the row) over each BLOCK successive ids.

    Each block is first summed relative to its own largest logit. A block is small enough that a compiled kernel reads
    its logits once; reductions as wide as the vocabulary can be compiled to kernels that take longer than the model.

    Args:
        logits: shape (N, V), float32.

    Returns:
        The largest logit of each row (N, 1), and the sums (N, blocks) float64, of which the last may be of fewer ids;
        NaN if a logit is NaN or +inf, 0 where all are −inf.
    """
    num_ids = logits.shape[1]
    remainder = num_ids % BLOCK
    parts = []
    if num_ids >= BLOCK:
        full_blocks = logits[:, : num_ids - remainder]
        parts.append(full_blocks.unflatten(1, (-1, BLOCK)))
    if remainder:
        last_block = logits[:, num_ids - remainder :]
        parts.append(last_block[:, None])

    largest_of_blocks = []
    relative_sums = []
    for part in parts:
        largest_of_block = part.amax(-1, keepdim=True).clamp(min=LOWEST)  # so that −inf − −inf does not occur
        weights = (part - largest_of_block).exp_()
        relative_sums.append(weights.sum(-1))
        largest_of_blocks.append(largest_of_block[..., 0])
    block_maxima = torch.cat(largest_of_blocks, dim=1)
    largest = block_maxima.amax(-1, keepdim=True)
    sums = torch.cat(relative_sums, dim=1) * (block_maxima - largest).exp()
    return largest, sums.double()
