# SPDX-License-Identifier: Apache-2.0
"""Slow scalar references for the tests of the core: plain Python floats, one row at a time, written from the rules.

Nothing here imports torch or dschat. A row's macro actions are a list of lengths; an empty response is the empty list.
"""

import math
from collections.abc import Sequence


def fixed_lengths(length: int, ngram: float) -> list[int]:
    """Macro-action lengths of one response cut every `ngram` tokens; the remainder is a shorter last one."""
    lengths = []
    while length > 0:
        lengths.append(int(min(ngram, length)))
        length -= lengths[-1]
    return lengths


def ends_row(lengths: Sequence[int], width: int) -> list[bool]:
    """One row of `ends`: True on the last token of every macro action, False elsewhere and on the padding."""
    row = [False] * width
    position = 0
    for length in lengths:
        position += length
        row[position - 1] = True
    return row


def lengths_of(ends: Sequence[bool], length: int) -> list[int]:
    """Read macro-action lengths back from one row of `ends`; fails unless they fill the response exactly."""
    cuts = [j + 1 for j, end in enumerate(ends) if end]
    assert (cuts[-1] if cuts else 0) == length, f"the last end is at {cuts[-1:]}, the response has {length} tokens"
    return [stop - start for start, stop in zip([0, *cuts], cuts, strict=False)]


def chunks(row: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """Cut the response part of one row into its macro actions."""
    start, result = 0, []
    for length in lengths:
        result.append(list(row[start : start + length]))
        start += length
    return result


def sigma(m: int, value_function: str) -> list[float]:
    """The weights of a macro action of m tokens."""
    if value_function == "equal":
        return [1.0 / m] * m
    if value_function == "unit":
        return [0.0] * (m - 1) + [1.0]
    if value_function == "first":
        return [1.0] + [0.0] * (m - 1)
    if value_function == "position":
        harmonic = sum(1.0 / k for k in range(1, m + 1))
        return [1.0 / ((m - i) * harmonic) for i in range(m)]
    raise ValueError(value_function)


def pool(row: Sequence[float], lengths: Sequence[int], value_function: str) -> list[float]:
    """The sigma-weighted mean of every macro action of one row."""
    return [
        sum(s * x for s, x in zip(sigma(len(c), value_function), c, strict=True)) if c else 0.0
        for c in chunks(row, lengths)
    ]


def broadcast(per_action: Sequence[float], lengths: Sequence[int], width: int) -> list[float]:
    """Give every token the number of its macro action; 0 on the padding."""
    row = [x for x, length in zip(per_action, lengths, strict=True) for _ in range(length)]
    return row + [0.0] * (width - len(row))


def gae(
    values: Sequence[float], rewards: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantages by their definition, the double sum, and the returns of one row."""
    steps = len(values)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(steps)]
    advantages = [sum((gamma * lam) ** k * delta[t + k] for k in range(steps - t)) for t in range(steps)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def sae(
    values: Sequence[float], rewards: Sequence[float], lengths: Sequence[int], gamma: float, lam: float
) -> list[float]:
    """Segmental advantages of one row by their recursion over tokens: λ and γ act behind the last token of a segment.

    Args:
        values: of each token.
        rewards: of each token.
        lengths: of the segments.
        gamma: discount of a segment.
        lam: λ of a segment.
    """
    advantages = [0.0] * len(values)
    position = len(values)
    following_value, following_advantage = 0.0, 0.0
    for length in reversed(lengths):
        discount, decay = gamma, lam  # of the segment's last token
        for _ in range(length):
            position -= 1
            delta = rewards[position] + discount * following_value - values[position]
            following_advantage = delta + discount * decay * following_advantage
            following_value = values[position]
            advantages[position] = following_advantage
            discount, decay = 1.0, 1.0
    return advantages


def kl_estimate(logprob: float, ref_logprob: float, estimator: str) -> float:
    """One sample of KL(policy, reference)."""
    d = logprob - ref_logprob
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def ppo_row(
    logprobs: Sequence[float],
    ref_logprobs: Sequence[float],
    values: Sequence[float],
    score: float,
    lengths: Sequence[int],
    *,
    kl_coef: float,
    gamma: float,
    lam: float,
    value_function: str = "equal",
    macro_reward: str = "sum",
    kl_estimator: str = "k1",
    clip_reward_value: float | None = None,
) -> dict[str, list[float]]:
    """One row from log-probs to advantages, by the rules.

    Returns:
        kl, rewards, advantages and returns, each as wide as `logprobs`, 0 on the padding.
    """
    width, count = len(logprobs), sum(lengths)
    kl = [kl_estimate(logprobs[j], ref_logprobs[j], kl_estimator) for j in range(count)]
    rewards = [-kl_coef * x for x in kl]
    if clip_reward_value is not None:
        score = max(-clip_reward_value, min(clip_reward_value, score))
    if count:
        rewards[-1] += score
    if macro_reward == "sum":
        macro_rewards = [sum(c) for c in chunks(rewards, lengths)]
    else:
        macro_rewards = pool(rewards, lengths, "equal" if value_function == "first" else value_function)
    advantages, returns = gae(pool(values, lengths, value_function), macro_rewards, gamma, lam)
    blank = [0.0] * (width - count)
    return {
        "kl": kl + blank,
        "rewards": rewards + blank,
        "advantages": broadcast(advantages, lengths, width),
        "returns": broadcast(returns, lengths, width),
    }
