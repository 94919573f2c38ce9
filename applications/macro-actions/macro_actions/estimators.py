# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from a scored rollout and its macro actions to advantages and, for a critic, returns.

Each is one function of one signature and a row of ESTIMATORS. Where macro actions end is decided before, once per
rollout, by the termination conditions of `macro_actions.termination`: every n tokens, random lengths, perplexity,
spans of a parse. `macro_gae` is the same for tensors of one's own.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from macro_actions.groups import dr_grpo, grpo, prefix_values, rloo, scale
from macro_actions.rewards import penalise_length, penalise_missing_eos, token_rewards
from macro_actions.segments import pool_rewards, pool_values, segment, to_tokens
from macro_actions.settings import EstimatorSettings
from macro_actions.types import MacroActions, PPOBatch, Trajectory

# B scored responses, their macro actions, the settings → PPOBatch with (B, R) tensors, 0 off the response.
Estimator = Callable[[Trajectory, MacroActions, EstimatorSettings], PPOBatch]


def gae_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Token rewards → macro actions → pooled values and rewards → GAE over macro steps → back to tokens.

    Works on any subset of rows: a row's result does not depend on the others. Macro actions of one token make it
    token-level PPO. VAPO (Yue et al. 2025) gives the critic another λ, 1, and the policy one by the response's length.
    """
    assert trajectory.values is not None  # of a critic
    rewards, kl = _token_rewards(trajectory, settings)
    macro_values = pool_values(trajectory.values, macro, settings.value_function)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, settings.value_function)
    lam = settings.lam if settings.lam_alpha is None else adaptive_lam(macro.mask.sum(1), settings.lam_alpha)
    advantages, returns = gae(macro_values, macro_rewards, macro.mask, settings.gamma, lam)
    if settings.lam_critic is not None:
        _, returns = gae(macro_values, macro_rewards, macro.mask, settings.gamma, settings.lam_critic)
    return PPOBatch(
        trajectory=trajectory,
        macro=macro,
        kl=kl,
        rewards=rewards,
        advantages=to_tokens(advantages, macro),
        returns=to_tokens(returns, macro),
    )


def rloo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Token rewards → their sum over the response → minus the mean of its prompt's other responses, on every token.

    RLOO (Ahmadian et al. 2024, "Back to Basics"), whose reward of a response holds the KL penalty: nothing is divided
    by a deviation. Like all estimators that compare the responses of a group, it works on any subset of prompts: a
    row's result depends on the rows of its prompt alone. A row without a response token could not be scored: it is no
    part of the others' baseline. The advantages do not depend on the macro actions; the losses may, see
    `macro_actions.segments.macro_logprobs`.

    Raises:
        ValueError: B is no multiple of the samples of a prompt.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    advantages = rloo(_by_group(rewards.sum(1), settings), _by_group(mask.any(1), settings)).flatten()
    return _batch(trajectory, macro, kl, rewards, torch.where(mask, advantages[:, None], 0.0))


def grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GRPO (Shao et al. 2024): a score minus the mean of its prompt's, divided by their standard deviation; plus the
    KL penalty of the response, which is neither compared nor scaled (see :func:`response_penalty`).

    Example: scores 1, 2, 6 with KLs of .1, 0, .2 nats at a coefficient of .5 → −2/√7 − .05, −1/√7, 3/√7 − .1.
    """
    return _group_batch(trajectory, macro, settings, grpo)


def dr_grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Dr. GRPO (Liu et al. 2025): as GRPO without the standard deviation, which weighs prompts by how hard they are.

    Its loss is divided by a constant length: `macro_actions.losses.loss_weights`. REINFORCE++'s baseline (Hu et al.
    2025) is the same advantage, normalised over the batch afterwards, again without the KL penalty.
    """
    return _group_batch(trajectory, macro, settings, dr_grpo)


def reinforce_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """REINFORCE++ (Hu et al. 2025): Â_τ = Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ', GAE with λ = 1 and values of 0.

    Normalised over the batch afterwards. Example: rewards 0 1 −1 with γ = 1 → 0 0 −1.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, "equal")
    to_go, _ = gae(torch.zeros_like(macro_rewards), macro_rewards, macro.mask, settings.gamma, 1.0)
    return _batch(trajectory, macro, kl, rewards, to_tokens(to_go, macro))


def tempo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """TEMPO (Tran et al. 2025): (r_i − mean + V(after the macro action) − V(before it)) / (std + ε), of scores r.

    V of a prefix is the mean score of the group's responses that begin with it, see
    :func:`macro_actions.groups.prefix_values`; so the difference is 0 but where responses part, and macro actions of
    one token make it the paper's. It draws nothing more than the group. The KL penalty is added as by GRPO.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    counted = _by_group(trajectory.response_mask.any(1), settings)
    ids = torch.where(trajectory.response_mask, trajectory.rollout.response_ids, -1)
    values = prefix_values(_by_group(ids, settings), scores, counted).flatten(0, 1)
    last = macro.lengths.cumsum(1)
    before, after = values.gather(1, last - macro.lengths), values.gather(1, last)
    whole = grpo(scores, counted).flatten()[:, None]
    parts = (after - before) / scale(scores, counted).expand_as(scores).reshape(-1, 1)
    advantages = whole + parts + response_penalty(kl, settings.kl_coef)[:, None]
    return _batch(trajectory, macro, kl, rewards, to_tokens(torch.where(macro.mask, advantages, 0.0), macro))


def segment_mc_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Â_τ = V̂(after the macro action) − V̂(before it); after the last one, the score. VinePPO (Kazemnejad et al. 2024),
    whose steps of reasoning are macro actions of any kind here, and SPO-chain (Guo et al. 2025).

    V̂ of a state is the mean score of responses completed from there; it stands on the first token of each macro
    action. The KL penalty of a macro action and of those after it is added, since no completion has one.

    Example: V̂ .5 .2 and a score of 1 → −.3, .8.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    scored, _ = _token_rewards(trajectory, replace(settings, kl_coef=0.0))
    values = trajectory.values
    if values is None:  # in evaluations
        values = torch.zeros_like(rewards)
    before = pool_values(values, macro, "first")
    steps, _ = gae(before, pool_rewards(scored, macro), macro.mask, 1.0, 0.0)
    penalties = pool_rewards(-settings.kl_coef * kl, macro)
    to_go, _ = gae(torch.zeros_like(before), penalties, macro.mask, 1.0, 1.0)
    return _batch(trajectory, macro, kl, rewards, to_tokens(steps + to_go, macro))


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae_batch,
    "rloo": rloo_batch,
    "grpo": grpo_batch,
    "dr_grpo": dr_grpo_batch,
    "reinforce_pp": reinforce_batch,
    "reinforce_pp_baseline": dr_grpo_batch,
    "tempo": tempo_batch,
    "segment_mc": segment_mc_batch,
}


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over macro steps (Schulman et al. 2016).

    δ_τ = R_τ + γ V_{τ+1} − V_τ, Â_τ = δ_τ + γλ Â_{τ+1}, Ret_τ = Â_τ + V_τ; the value after the last step is 0.

    Example: values .5 .2, rewards 0 1, γ = 1, λ = .5 → δ = −.3, .8; advantages .1, .8; returns .6, 1.

    Args:
        values, rewards: (B, M).
        mask: (B, M) bool or numbers, a prefix of each row.
        gamma, lam: count macro steps, not tokens; λ is a number, or one of each row (B,).

    Returns:
        advantages, returns: (B, M) each, 0 off the mask.
    """
    mask, exact = mask.bool(), torch.promote_types(torch.promote_types(values.dtype, rewards.dtype), torch.float32)
    values, rewards = values.to(exact), rewards.to(exact)
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


@torch.no_grad()
def macro_gae(
    values: Tensor,
    rewards: Tensor,
    ends: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    value_function: str = "equal",
    macro_reward: str = "sum",
) -> tuple[Tensor, Tensor]:
    """GAE over macro actions, on every token: pooled values and rewards → :func:`gae` → back to the tokens.

    Macro actions of one token give token-level GAE. Nothing is whitened. The macro actions of a row follow each other
    over holes of its mask (another turn, a tool's answer), which count no step.

    Example: values .5 .1 .2 .4, rewards 0 0 0 1, ends 0 1 0 1, γ = 1, λ = .5, ``first``: macro values .5 .2 and
    rewards 0 1 → advantages .1 .1 .8 .8, returns .6 .6 1 1.

    Args:
        values: (B, R) float, V of the state before each token; computed in float32 where it has fewer bits.
        rewards: (B, R) float, of the tokens.
        ends: (B, R) bool, as from a termination condition.
        response_mask: (B, R) bool or numbers, 1 on the response's tokens: padded on either side, with or without
            holes.
        gamma, lam: count macro steps, not tokens; λ is a number, or one of each row (B,).
        value_function: σ, see :func:`macro_actions.segments.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the rewards of a macro action's tokens.

    Returns:
        advantages, returns: (B, R) each, 0 off the response, without a gradient; float32, or float64 if values or
        rewards are.

    Raises:
        ValueError: tensors of different shapes, an unknown value_function or macro_reward.
    """
    if not values.shape == rewards.shape == ends.shape == response_mask.shape:
        shapes = [tuple(x.shape) for x in (values, rewards, ends, response_mask)]
        raise ValueError(f"values, rewards, ends and response_mask must be (B, R) each, not {shapes}")
    macro = segment(ends, response_mask)
    macro_values = pool_values(values, macro, value_function)
    macro_rewards = pool_rewards(rewards, macro, macro_reward, value_function)
    advantages, returns = gae(macro_values, macro_rewards, macro.mask, gamma, lam)
    return to_tokens(advantages, macro), to_tokens(returns, macro)


def adaptive_lam(steps: Tensor, alpha: float) -> Tensor:
    """VAPO's λ of each response (Yue et al. 2025): 1 − 1 / (α l), at least 0, for l steps.

    Example: α = .05 → 0 for 20 steps, .8 for 100, .9 for 200. The steps are macro actions, tokens where n = 1.

    Args:
        steps: (B,) whole numbers.
        alpha: α.

    Returns:
        (B,) float32.
    """
    return (1 - 1 / (alpha * steps.clamp(min=1).float())).clamp(min=0)


def penalised(scores: Tensor, finished: Tensor, lengths: Tensor, settings: EstimatorSettings) -> Tensor:
    """Scores (B,) less what a missing EOS and a length in tokens cost; finished and lengths are (B,)."""
    scores = penalise_missing_eos(scores, finished, settings.missing_eos_penalty)
    return penalise_length(scores, lengths, settings.longest, settings.length_buffer, settings.length_penalty)


def _token_rewards(trajectory: Trajectory, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """Rewards and KL (B, R) of the tokens, the penalties for a missing EOS and for length in the score."""
    lengths = trajectory.response_mask.sum(1)
    return token_rewards(
        trajectory.logprobs,
        trajectory.ref_logprobs,
        penalised(trajectory.scores, trajectory.rollout.finished, lengths, settings),
        trajectory.response_mask,
        settings.kl_coef,
        settings.kl_estimator,
        settings.clip_reward_value,
        trajectory.segment_rewards,
    )


def response_penalty(kl: Tensor, kl_coef: float) -> Tensor:
    """−kl_coef · Σ_j kl_j: the KL penalty of a whole response, as estimators that compare scores within a group add it
    to the advantage of each of its tokens.

    Args:
        kl: (B, R) in nats, 0 off the response.
        kl_coef: weight of the penalty.

    Returns:
        (B,).
    """
    return -kl_coef * kl.sum(1)


def _compared_scores(trajectory: Trajectory, settings: EstimatorSettings) -> Tensor:
    """Scores (B,) that the responses of a group are compared by: less penalties, clamped, without the KL."""
    lengths, bound = trajectory.response_mask.sum(1), settings.clip_reward_value
    scores = penalised(trajectory.scores, trajectory.rollout.finished, lengths, settings)
    return scores if bound is None else scores.clamp(-bound, bound)


def _group_batch(
    trajectory: Trajectory,
    macro: MacroActions,
    settings: EstimatorSettings,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> PPOBatch:
    """A batch whose responses have one advantage each: the score, compared with its prompt's, plus the KL penalty."""
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    compared = compare(scores, _by_group(mask.any(1), settings)).flatten()
    advantages = compared + response_penalty(kl, settings.kl_coef)
    return _batch(trajectory, macro, kl, rewards, torch.where(mask, advantages[:, None], 0.0))


def _by_group(x: Tensor, settings: EstimatorSettings) -> Tensor:
    """(B, …) → (P, K, …). Raises ValueError where B is no multiple of K."""
    if len(x) % settings.samples:
        raise ValueError(f"{len(x)} rows are not {settings.samples} samples of each prompt")
    return x.unflatten(0, (-1, settings.samples))


def _batch(trajectory: Trajectory, macro: MacroActions, kl: Tensor, rewards: Tensor, advantages: Tensor) -> PPOBatch:
    """A batch without a critic."""
    return PPOBatch(trajectory, macro, kl=kl, rewards=rewards, advantages=advantages, returns=None)
