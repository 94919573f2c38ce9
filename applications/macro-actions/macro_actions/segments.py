# SPDX-License-Identifier: Apache-2.0
"""Macro actions as segments of the response: from ends to segments, pooling over them, broadcasting back to tokens.

Pooling adds up the tokens of each macro action directly, never by differences of cumulative sums, so that a macro
action of one token has that token's number bit for bit. It is done in float32, or in float64 for float64 inputs:
bfloat16's 8 bits would lose the log-probability of many tokens.
"""

import torch
from torch import Tensor

from macro_actions.masked import last_true
from macro_actions.types import MacroActions

VALUE_FUNCTIONS = ("equal", "unit", "position", "first")
MACRO_RATIOS = ("macro", "macro_mean")  # policy ratios of a macro action: a product over its tokens, a geometric mean


def segment(ends: Tensor, response_mask: Tensor) -> MacroActions:
    """Number the macro actions of each row.

    Example: ends 0 1 0 0 1 on five response tokens give index 0 0 1 1 1 and lengths 2 3.

    M is read on the host, which synchronises with the device.

    Args:
        ends: shape ``(B, R)``, bool, True on the last token of each macro action. Entries off the response are
            ignored; the last token before a hole of the mask always ends a macro action.
        response_mask: shape ``(B, R)``, 1 or True on response tokens, wherever in the row they are.

    Returns:
        MacroActions whose M is the largest number of macro actions in a row; 0 for a batch without response tokens.
    """
    response_mask = response_mask.bool()
    all_ends = (ends.bool() & response_mask) | last_true(response_mask)
    ended_before = torch.zeros_like(response_mask, dtype=torch.long)
    ended_before[:, 1:] = all_ends[:, :-1]
    index = torch.where(response_mask, ended_before.cumsum(1), -1)
    count = int(index.max()) + 1 if index.numel() else 0
    lengths = _sum_by_macro(response_mask.long(), index, count)
    return MacroActions(index=index, lengths=lengths, mask=lengths > 0)


def pool_values(values: Tensor, macro: MacroActions, value_function: str = "equal") -> Tensor:
    """Macro values V_τ = Σ_j σ_j V_j, with σ from :func:`value_weights`.

    Args:
        values: shape ``(B, R)``.
        macro: the segments.
        value_function: name of σ.

    Returns:
        Shape ``(B, M)``, 0 off ``macro.mask``.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = value_weights(macro, value_function, dtype=values.dtype)
    weighted = torch.where(weights > 0, weights * values, 0.0)
    return _sum_by_macro(weighted, macro.index, macro.lengths.shape[1])


def pool_rewards(
    rewards: Tensor, macro: MacroActions, reduction: str = "sum", value_function: str = "equal"
) -> Tensor:
    """Macro rewards R_τ: the sum of the token rewards, or their σ-weighted mean.

    Args:
        rewards: shape ``(B, R)``.
        macro: the segments.
        reduction: ``sum`` (the paper's §3.2.2 with ρ = 1) or ``mean`` (the released code).
        value_function: σ of ``mean``. With ``first``, which says whose state has the value, tokens weigh equally.

    Returns:
        Shape ``(B, M)``, 0 off ``macro.mask``.

    Raises:
        ValueError: the reduction is unknown.
    """
    if reduction == "mean":
        return pool_values(rewards, macro, "equal" if value_function == "first" else value_function)
    if reduction != "sum":
        raise ValueError(f"reduction must be sum or mean, not {reduction!r}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    on_response = torch.where(macro.index >= 0, rewards, 0.0)
    return _sum_by_macro(on_response, macro.index, macro.lengths.shape[1])


def to_tokens(x: Tensor, macro: MacroActions) -> Tensor:
    """Give every token the number of its macro action. (B, M) → (B, R), 0 off the response."""
    zero_column = x.new_zeros(x.shape[0], 1)
    padded = torch.cat([x, zero_column], dim=1)
    column = torch.where(macro.index >= 0, macro.index, x.shape[1])
    return padded.gather(1, column)


def on_last_tokens(x: Tensor, macro: MacroActions) -> Tensor:
    """Put each macro action's number on its last token. (B, M) → (B, R), 0 on all other tokens."""
    is_last = value_weights(macro, "unit") > 0
    return torch.where(is_last, to_tokens(x, macro), 0.0)


def value_weights(macro: MacroActions, value_function: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights σ of the paper's App. D.1, for token i = 0…m−1 of a macro action of m tokens.

        equal      1/m
        unit       1 on the last token
        position   1 / ((m − i) · H_m) with H_m = Σ_{k=1..m} 1/k: later tokens weigh more
        first      1 on the first token: the value of the state before the macro action

    Example: m = 5 with ``position`` gives .088 .109 .146 .219 .438.

    Args:
        macro: the segments.
        value_function: one of the four names.
        dtype: dtype of the weights.

    Returns:
        Shape ``(B, R)``, 0 off the response; the weights of each macro action add up to 1.

    Raises:
        ValueError: the name is unknown.
    """
    if value_function not in VALUE_FUNCTIONS:
        raise ValueError(f"value_function must be one of {', '.join(VALUE_FUNCTIONS)}, not {value_function!r}")
    on_response = macro.index >= 0
    m = to_tokens(macro.lengths, macro).clamp(min=1)
    tokens_before = to_tokens(macro.lengths.cumsum(1) - macro.lengths, macro)
    i = on_response.cumsum(1) - 1 - tokens_before

    if value_function == "equal":
        weights = 1 / m.double()
    elif value_function == "position":
        numbers = torch.arange(1, macro.index.shape[1] + 1, device=m.device)
        harmonic = (1 / numbers.double()).cumsum(0)
        weights = 1 / ((m - i).clamp(min=1) * harmonic[m - 1])
    elif value_function == "unit":
        weights = (i == m - 1).double()
    else:
        weights = (i == 0).double()
    return torch.where(on_response, weights, 0.0).to(dtype)


def macro_logprobs(logprobs: Tensor, macro: MacroActions, policy_ratio: str) -> Tensor:
    """Log-probability of each macro action, on each of its tokens: Σ_j logprobs_j, or that divided by the length.

    exp of the difference of two such tensors is the policy ratio of Eq. 4 or its geometric mean.

    Args:
        logprobs: shape ``(B, R)``, differentiable.
        macro: the segments.
        policy_ratio: ``macro`` for the sum, ``macro_mean`` to divide it by the number of tokens.

    Returns:
        Shape ``(B, R)``, 0 off the response.

    Raises:
        ValueError: the policy ratio is unknown.
    """
    if policy_ratio not in MACRO_RATIOS:
        raise ValueError(f"policy_ratio must be one of {', '.join(MACRO_RATIOS)}, not {policy_ratio!r}")
    reduction = "mean" if policy_ratio == "macro_mean" else "sum"
    pooled = pool_rewards(logprobs, macro, reduction)  # log-probabilities add up like rewards
    return to_tokens(pooled, macro)


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean log-probability of the whole response, on each of its tokens: the ratio of GSPO (Zheng et al. 2025).

    The value equals that of :func:`macro_logprobs` with ``macro_mean`` and one macro action per response. The gradient
    is that of the token's own log-probability (GSPO-token): equal to GSPO's where a response has one advantage, and
    separate for each token where advantages differ.

    Args:
        logprobs: shape ``(B, R)``, differentiable.
        response_mask: shape ``(B, R)``, bool.

    Returns:
        Shape ``(B, R)``, 0 off the response.
    """
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    logprobs = torch.where(response_mask, logprobs, 0.0)
    constant = logprobs.detach()
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)
    mean = constant.sum(1, keepdim=True) / lengths
    zero_with_gradient = logprobs - constant
    return torch.where(response_mask, mean + zero_with_gradient, 0.0)


def _sum_by_macro(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums by macro action: (B, R) → (B, count). Tokens with index −1 go into an extra column that is dropped."""
    sums = x.new_zeros(x.shape[0], count + 1)
    column = torch.where(index >= 0, index, count)
    return sums.scatter_add(1, column, x)[:, :count]
