# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from a scored rollout and its macro actions to advantages and, for a critic, returns.

Each is one function of one signature, a row of ESTIMATORS, and a row of `dschat.rl.needs.NEEDS` that says what it
needs. Where macro actions end is decided before, once per rollout: the termination conditions are
`dschat.rl.termination` (every n tokens, random lengths, perplexity, spans of a parse), and `dschat.conditions` calls
the one that the flags name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.rl.macro_actions import pool_rewards, pool_values, to_tokens
from dschat.rl.rewards import penalise_missing_eos, token_rewards
from dschat.rl.types import MacroActions, PPOBatch, Trajectory


@dataclass(frozen=True)
class EstimatorSettings:
    """What the estimators depend on; each reads what it needs.

    Attributes:
        kl_coef, kl_estimator, clip_reward_value: see :func:`dschat.rl.rewards.token_rewards`.
        missing_eos_penalty: subtracted from the score of a response that was cut, if given.
        gamma, lam: of GAE, counted in macro steps.
        value_function: σ, see :func:`dschat.rl.macro_actions.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the token rewards of a macro action.
        samples: K, responses of a prompt, which are rows in succession; 1 in evaluations.
    """

    kl_coef: float
    kl_estimator: str = "k1"
    clip_reward_value: float | None = None
    missing_eos_penalty: float | None = None
    gamma: float = 1.0
    lam: float = 1.0
    value_function: str = "equal"
    macro_reward: str = "sum"
    samples: int = 1


# B scored responses, their macro actions, the settings → PPOBatch with (B, R) tensors, 0 off the response.
Estimator = Callable[[Trajectory, MacroActions, EstimatorSettings], PPOBatch]


def gae_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Token rewards → macro actions → pooled values and rewards → GAE over macro steps → back to tokens.

    Works on any subset of rows: a row's result does not depend on the others. Macro actions of one token make it
    token-level PPO.
    """
    assert trajectory.values is not None  # of a critic
    rewards, kl = _token_rewards(trajectory, settings)
    macro_values = pool_values(trajectory.values, macro, settings.value_function)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, settings.value_function)
    advantages, returns = gae(macro_values, macro_rewards, macro.mask, settings.gamma, settings.lam)
    return PPOBatch(
        trajectory=trajectory,
        macro=macro,
        kl=kl,
        rewards=rewards,
        advantages=to_tokens(advantages, macro),
        returns=to_tokens(returns, macro),
    )


def rloo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Token rewards → their sum over the response → leave-one-out advantage, on every token of the response.

    Works on any subset of prompts: a row's result depends on the rows of its prompt alone. A row without a response
    token could not be scored: it is no part of the others' baseline. With one sample all advantages are 0. They do
    not depend on the macro actions; the losses may, see `dschat.rl.macro_actions.macro_logprobs`.

    Raises:
        ValueError: B is no multiple of the samples of a prompt.
    """
    mask, samples = trajectory.response_mask, settings.samples
    if len(mask) % samples:
        raise ValueError(f"{len(mask)} rows are not {samples} samples of each prompt")
    rewards, kl = _token_rewards(trajectory, settings)
    advantages = rloo(rewards.sum(1).view(-1, samples), mask.any(1).view(-1, samples)).flatten()
    return PPOBatch(
        trajectory=trajectory,
        macro=macro,
        kl=kl,
        rewards=rewards,
        advantages=torch.where(mask, advantages[:, None], 0.0),
        returns=None,
    )


ESTIMATORS: dict[str, Estimator] = {"gae": gae_batch, "rloo": rloo_batch}


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over macro steps (Schulman et al. 2016).

    δ_τ = R_τ + γ V_{τ+1} − V_τ, Â_τ = δ_τ + γλ Â_{τ+1}, Ret_τ = Â_τ + V_τ; the value after the last step is 0.

    Example: values .5 .2, rewards 0 1, γ = 1, λ = .5 → δ = −.3, .8; advantages .1, .8; returns .6, 1.

    Args:
        values, rewards: (B, M).
        mask: (B, M) bool, a prefix of each row.
        gamma, lam: count macro steps, not tokens.

    Returns:
        advantages, returns: (B, M) each, 0 off the mask.
    """
    zeros = torch.zeros_like(values)
    values, rewards = torch.where(mask, values, zeros), torch.where(mask, rewards, zeros)
    following = torch.cat([values[:, 1:], zeros[:, :1]], dim=1)
    deltas = rewards + gamma * following - values
    advantages = torch.empty_like(values)
    running = values.new_zeros(values.shape[0])
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + gamma * lam * running
        advantages[:, step] = running
    return advantages, advantages + values


def rloo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """Each score minus the mean of the other scores of its prompt (Ahmadian et al. 2024, "Back to Basics").

    Example: 1, 2, 6 → 1 − 4, 2 − 3.5, 6 − 1.5.

    Args:
        scores: (P, K), of K responses to each of P prompts.
        counted: (P, K) bool; False leaves a score out, as if that response had not been drawn. All count when None.

    Returns:
        advantages (P, K): 0 where a score is left out or no other of its prompt counts.
    """
    counted = torch.ones_like(scores, dtype=torch.bool) if counted is None else counted
    scores = torch.where(counted, scores, 0.0)
    others = counted.sum(1, keepdim=True) - 1
    baseline = (scores.sum(1, keepdim=True) - scores) / others.clamp(min=1)
    return torch.where(counted & (others > 0), scores - baseline, 0.0)


def _token_rewards(trajectory: Trajectory, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """Rewards and KL (B, R) of the tokens, the penalty for a missing EOS in the score."""
    return token_rewards(
        trajectory.logprobs,
        trajectory.ref_logprobs,
        penalise_missing_eos(trajectory.scores, trajectory.rollout.finished, settings.missing_eos_penalty),
        trajectory.response_mask,
        settings.kl_coef,
        settings.kl_estimator,
        settings.clip_reward_value,
    )
