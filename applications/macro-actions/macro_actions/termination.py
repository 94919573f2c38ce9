# SPDX-License-Identifier: Apache-2.0
"""Termination conditions: where macro actions end. Each returns ``ends (B, R)`` bool, True on last tokens.

Every function is pure and vectorised over rows, sets ``ends`` only on the response, and always ends a macro action at
the last token of a row, so that lengths are at least 1 and add up to the row's response length.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from macro_actions.masked import last_true

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: splitmix64's increment


def fixed_ngram_ends(response_mask: Tensor, ngram: float) -> Tensor:
    """Ends a macro action after every ``ngram`` tokens; what remains is a shorter last one.

    Args:
        response_mask: (B, R) bool, a prefix of each row.
        ngram: integer of at least 1 (1 = token-level PPO), or ``math.inf`` for the whole response.

    Returns:
        ends (B, R) bool.

    Raises:
        ValueError: ``ngram`` is below 1 or neither an integer nor infinite.
    """
    if ngram < 1 or (not math.isinf(ngram) and ngram != int(ngram)):
        raise ValueError(f"ngram must be an integer of at least 1, or inf, not {ngram}")
    if math.isinf(ngram):
        return last_true(response_mask)
    position = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    return ((position % int(ngram) == 0) & response_mask) | last_true(response_mask)


def at_most(ends: Tensor, response_mask: Tensor, most: int) -> Tensor:
    """Joins neighbours, so that no response has more than ``most`` macro actions.

    Of M macro actions, number m from 0 comes to number ⌊m · most / M⌋: of 5, the first 3 and the last 2 are joined
    where 2 are left.

    Args:
        ends, response_mask: (B, R) bool.
        most: at least 1.

    Returns:
        ends (B, R) bool.
    """
    last = last_true(response_mask)
    ends = (ends & response_mask) | last
    number = ends.cumsum(1) - ends.long()
    count = ends.sum(1, keepdim=True)
    joined = torch.where(count > most, number * most // count.clamp(min=1), number)
    return ends & (last | (joined != joined.roll(-1, 1)))


def randomized_ngram_ends(
    response_mask: Tensor,
    repeat_times: int,
    lengths: Sequence[int] = (2, 3, 5, 10),
    row_seeds: Tensor | None = None,
) -> Tensor:
    """Per row, shuffles ``lengths`` × ``repeat_times`` and consumes them in order; what is left is one macro action.

    A row's shuffle depends on its seed alone, so a batch equals its rows alone, on any number of ranks.

    Args:
        response_mask: (B, R) bool, a prefix of each row.
        repeat_times: how often each length occurs in the multiset; at least 1.
        lengths: macro-action lengths in tokens, each at least 1.
        row_seeds: (B,) long, as from :func:`make_row_seeds`; the row numbers when None.

    Returns:
        ends (B, R) bool.

    Raises:
        ValueError: ``repeat_times`` or a length is below 1.
    """
    if repeat_times < 1 or not lengths or min(lengths) < 1:
        raise ValueError(f"repeat_times and lengths must be at least 1, not {repeat_times} and {list(lengths)}")
    rows, device = response_mask.shape[0], response_mask.device
    seeds = torch.arange(rows, device=device) if row_seeds is None else row_seeds.to(device)
    multiset = torch.tensor(list(lengths) * repeat_times, device=device)
    draws = mix(seeds[:, None] + GOLDEN * torch.arange(1, len(multiset) + 1, device=device))
    shuffled = multiset[draws.argsort(dim=1, stable=True)]
    return _ends_from_lengths(shuffled, response_mask)


def make_row_seeds(seed: int, prompt_index: Tensor, epoch: int, sample_index: Tensor | None = None) -> Tensor:
    """Seeds for :func:`randomized_ngram_ends`, one per row.

    Args:
        seed: of the run.
        prompt_index: (B,) long, the prompt's index in the data set.
        epoch: pass over the data set, so that a prompt is cut differently the next time.
        sample_index: (B,) long, which of the responses to its prompt a row is; the first, 0, when None.

    Returns:
        (B,) long, well mixed.
    """
    parts = torch.tensor([seed, epoch], dtype=torch.long, device=prompt_index.device) + 1
    mixed = mix(mix(parts[0] * GOLDEN) + parts[1] * GOLDEN)
    seeds = mix(mixed + (prompt_index.long() + 1) * GOLDEN)
    # A first response has the seed of an only one.
    return seeds if sample_index is None else torch.where(sample_index == 0, seeds, mix(seeds + sample_index))


def perplexity_ends(ref_logprobs: Tensor, response_mask: Tensor, mode: str = "chunk") -> Tensor:
    """Cuts where the negative log-likelihood (NLL) under the reference rises. A tie never cuts.

    With token NLLs 1, 1, 2, 1: ``chunk`` and ``prefix`` and ``token`` all cut before the third token.

    Args:
        ref_logprobs: (B, R) float, log-probabilities of the response tokens under the reference model.
        response_mask: (B, R) bool, a prefix of each row.
        mode: ``chunk`` closes the macro action before the first token that would raise the mean NLL of the current
            one; ``prefix`` cuts before token j when the mean NLL of y_≤j exceeds that of y_≤j−1; ``token`` cuts before
            token j when nll_j > nll_j−1.

    Returns:
        ends (B, R) bool.

    Raises:
        ValueError: unknown mode.
    """
    # float64 sums of float32 numbers are exact here, so that equal numbers are seen as ties.
    nll = torch.where(response_mask, -ref_logprobs, torch.zeros_like(ref_logprobs)).double()
    if mode == "token":
        cut_before = nll[:, 1:] > nll[:, :-1]
    elif mode == "prefix":
        count = torch.arange(1, nll.shape[1], device=nll.device)
        cut_before = nll[:, 1:] * count > nll.cumsum(1)[:, :-1]
    elif mode == "chunk":
        cut_before = _chunk_cuts(nll)
    else:
        raise ValueError(f"mode must be chunk, prefix or token, not {mode!r}")
    ends = torch.zeros_like(response_mask)
    ends[:, :-1] = cut_before & response_mask[:, 1:]
    return ends | last_true(response_mask)


def surprise_ends(logprobs: Tensor, response_mask: Tensor, probability: float, count: int) -> Tensor:
    """Begins a macro action at every ``count``-th token that was unlikely: SPO's cutpoints (Guo et al. 2025).

    Example: probabilities .9 .2 .9 .1 .3 with probability .5 and count 2 → the fourth token begins one: lengths 3 2.

    Args:
        logprobs: (B, R) float, log-probabilities of the response tokens under the policy that drew them.
        response_mask: (B, R) bool, a prefix of each row.
        probability: a token below it is unlikely.
        count: how many unlikely tokens a macro action has, at least 1.

    Returns:
        ends (B, R) bool.
    """
    unlikely = response_mask & (logprobs < math.log(probability))
    begins = unlikely & (unlikely.cumsum(1) % count == 0)
    ends = torch.zeros_like(response_mask)
    ends[:, :-1] = begins[:, 1:]
    return ends | last_true(response_mask)


def span_ends(span_lengths: Sequence[Sequence[int]], response_mask: Tensor) -> Tensor:
    """Turns lists of macro-action lengths into ends.

    Args:
        span_lengths: per row the lengths in tokens, each at least 1. Tokens beyond their sum are one more macro
            action; lengths beyond the response are ignored.
        response_mask: (B, R) bool, a prefix of each row.

    Returns:
        ends (B, R) bool.

    Raises:
        ValueError: a length below 1, or not one list per row.
    """
    if len(span_lengths) != response_mask.shape[0]:
        raise ValueError(f"{len(span_lengths)} lists of lengths for {response_mask.shape[0]} rows")
    if any(length < 1 for row in span_lengths for length in row):
        raise ValueError("every macro-action length must be at least 1")
    width = max((len(row) for row in span_lengths), default=0)
    beyond = response_mask.shape[1] + 1
    padded = [list(row) + [beyond] * (width - len(row)) for row in span_lengths]
    lengths = torch.tensor(padded, dtype=torch.long, device=response_mask.device).view(len(padded), width)
    return _ends_from_lengths(lengths, response_mask)


def isolate_last_token(ends: Tensor, response_mask: Tensor) -> Tensor:
    """Makes the last response token of each row a macro action of its own. (B, R), (B, R) → ends (B, R)."""
    before_last = torch.zeros_like(response_mask)
    before_last[:, :-1] = last_true(response_mask)[:, 1:]
    return ends | before_last


def _ends_from_lengths(lengths: Tensor, response_mask: Tensor) -> Tensor:
    """(B, K) lengths of at least 1 in order → ends (B, R); those that reach beyond the row are ignored."""
    rows, width = response_mask.shape
    last = lengths.cumsum(1).clamp(max=width + 1) - 1  # column `width` collects what lies beyond
    ends = torch.zeros(rows, width + 1, dtype=torch.bool, device=response_mask.device)
    ends.scatter_(1, last, torch.ones_like(last, dtype=torch.bool))
    return (ends[:, :width] & response_mask) | last_true(response_mask)


def _chunk_cuts(nll: Tensor) -> Tensor:
    """(B, R) NLLs → (B, R−1) bool: True where a macro action closes before the next token. One pass over positions."""
    rows, width = nll.shape
    cuts = torch.zeros(rows, max(width - 1, 0), dtype=torch.bool, device=nll.device)
    total, count = nll[:, :1].sum(1), torch.ones(rows, dtype=nll.dtype, device=nll.device)
    for j in range(1, width):
        current = nll[:, j]
        cut = current * count > total  # the token lies above the mean of the current macro action
        cuts[:, j - 1] = cut
        total = torch.where(cut, current, total + current)
        count = torch.where(cut, 1.0, count + 1)
    return cuts


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea and Flood 2014), on int64 with wrap-around: any shape → the same shape."""
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own shift keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
