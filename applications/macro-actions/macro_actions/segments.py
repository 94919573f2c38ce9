# SPDX-License-Identifier: Apache-2.0
"""Segments of the response: from ends to macro actions, pooling to macro steps, and broadcasting back to tokens.

Pooling adds up the tokens of each macro action directly (never by differences of cumulative sums), so that macro
actions of one token give back the token's own number bit for bit. It is done in float32, or in float64 where the
numbers are: bfloat16's 8 bits would lose a log-probability of many tokens.
"""

import torch
from torch import Tensor

from macro_actions.masked import last_true
from macro_actions.types import MacroActions

VALUE_FUNCTIONS = ("equal", "unit", "position", "first")
MEANS = {"macro": False, "macro_mean": True}  # ratio of macro actions → whether it is a geometric mean


def segment(ends: Tensor, response_mask: Tensor) -> MacroActions:
    """Numbers the macro actions of each row.

    With ends 0 1 0 0 1 on five response tokens: index 0 0 1 1 1, lengths 2 3. The number of columns M is read from
    the device, which waits for it.

    Args:
        ends: (B, R) bool, True on the last token of each macro action. Entries off the response are ignored. A macro
            action never spans a hole of the mask: the last token before one always ends it.
        response_mask: (B, R), 1 or True on the tokens of the response, wherever in the row they are.

    Returns:
        MacroActions with M the largest count of a row (0 for a batch without response tokens).
    """
    response_mask = response_mask.bool()
    started = torch.zeros_like(response_mask, dtype=torch.long)
    started[:, 1:] = ((ends.bool() & response_mask) | last_true(response_mask))[:, :-1]
    index = torch.where(response_mask, started.cumsum(1), -1)
    rows, width = index.shape
    count = int(index.max()) + 1 if rows and width else 0
    lengths = _sum_by_macro(response_mask.long(), index, count)
    return MacroActions(index=index, lengths=lengths, mask=lengths > 0)


def pool_values(values: Tensor, macro: MacroActions, value_function: str = "equal") -> Tensor:
    """Macro values V_τ = Σ_j σ_j V_j, with σ as in :func:`value_weights`. (B, R) → (B, M), 0 off ``macro.mask``."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = value_weights(macro, value_function, dtype=values.dtype)
    weighted = torch.where(weights > 0, weights * values, torch.zeros_like(values))
    return _sum_by_macro(weighted, macro.index, macro.lengths.shape[1])


def pool_rewards(
    rewards: Tensor, macro: MacroActions, reduction: str = "sum", value_function: str = "equal"
) -> Tensor:
    """Macro rewards R_τ: the sum of the token rewards, or their σ-weighted mean.

    Args:
        rewards: (B, R) float.
        macro: the segments.
        reduction: ``sum`` (§3.2.2 of the paper with ρ = 1) or ``mean`` (as in the released code).
        value_function: the σ of ``mean``.

    Returns:
        (B, M), 0 off ``macro.mask``.

    Raises:
        ValueError: unknown reduction.
    """
    if reduction == "mean":
        return pool_values(rewards, macro, value_function)
    if reduction != "sum":
        raise ValueError(f"reduction must be sum or mean, not {reduction!r}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    kept = torch.where(macro.index >= 0, rewards, torch.zeros_like(rewards))
    return _sum_by_macro(kept, macro.index, macro.lengths.shape[1])


def to_tokens(x: Tensor, macro: MacroActions) -> Tensor:
    """Gives every token its macro action's number. (B, M) → (B, R), 0 off the response."""
    padded = torch.cat([x, x.new_zeros(x.shape[0], 1)], dim=1)
    return padded.gather(1, torch.where(macro.index >= 0, macro.index, x.shape[1]))


def on_last_tokens(x: Tensor, macro: MacroActions) -> Tensor:
    """Puts each macro action's number on its last token. (B, M) → (B, R), 0 elsewhere."""
    return torch.where(value_weights(macro, "unit") > 0, to_tokens(x, macro), 0.0)


def value_weights(macro: MacroActions, value_function: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights σ of App. D.1; for a macro action of m tokens and i = 0…m−1:

    ``equal`` 1/m · ``unit`` the last token · ``position`` 1/((m−i)·H_m) with H_m = Σ_{k=1..m} 1/k · ``first`` the
    first token, that is the value of the state before the macro action.

    Args:
        macro: the segments.
        value_function: one of the four names.
        dtype: of the result.

    Returns:
        (B, R), 0 off the response; the weights of each macro action add up to 1.

    Raises:
        ValueError: unknown name.
    """
    if value_function not in VALUE_FUNCTIONS:
        raise ValueError(f"value_function must be one of {', '.join(VALUE_FUNCTIONS)}, not {value_function!r}")
    on_response = macro.index >= 0
    length = to_tokens(macro.lengths, macro).clamp(min=1)
    tokens_before = to_tokens(macro.lengths.cumsum(1) - macro.lengths, macro)
    i = on_response.cumsum(1) - 1 - tokens_before
    if value_function == "equal":
        weights = 1 / length.double()
    elif value_function == "position":
        harmonic = (1 / torch.arange(1, macro.index.shape[1] + 1, device=length.device).double()).cumsum(0)
        weights = 1 / ((length - i).clamp(min=1) * harmonic[length - 1])
    else:
        weights = (i == (length - 1 if value_function == "unit" else 0)).double()
    return torch.where(on_response, weights, 0.0).to(dtype)


def macro_logprobs(logprobs: Tensor, macro: MacroActions, mean: bool) -> Tensor:
    """Log-probability of each macro action, on each of its tokens: Σ_j logprobs_j, or that divided by the length.

    exp of the difference of two such tensors is the policy ratio of Eq. 4 (sum) or its geometric mean.

    Args:
        logprobs: (B, R) float, differentiable.
        macro: the segments.
        mean: divide by the number of tokens.

    Returns:
        (B, R), 0 off the response.
    """
    return to_tokens(pool_rewards(logprobs, macro, "mean" if mean else "sum", "equal"), macro)


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean log-probability of the whole response, on each of its tokens: the ratio of GSPO (Zheng et al. 2025).

    The numbers are those of `macro_logprobs` with ``mean`` and one macro action per response. The gradient is that of
    the token's own log-probability (GSPO-token): the same for a response with one advantage, and where its tokens have
    several, each keeps its own. (B, R) → (B, R), 0 off the response.
    """
    kept = torch.where(response_mask, logprobs, 0.0)
    mean = kept.detach().sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(response_mask, mean + (kept - kept.detach()), 0.0)


def _sum_by_macro(x: Tensor, index: Tensor, count: int) -> Tensor:
    """(B, R) summed into (B, count) by macro action; index −1 falls into a column that is dropped."""
    sums = x.new_zeros(x.shape[0], count + 1)
    sums = sums.scatter_add(1, torch.where(index >= 0, index, count), x)
    return sums[:, :count]
