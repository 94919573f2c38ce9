# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from a scored rollout and its macro actions to advantages and, with a critic, returns.

An estimator is a function ``(Trajectory, MacroActions, EstimatorSettings) -> PPOBatch`` and a row of `ESTIMATORS`. Its
settings, and what it needs of a run, are declared in `macro_actions.settings`, from which the trainer reads both.
Where macro actions end is decided once per rollout, before any estimator runs, by a condition of
`macro_actions.conditions`. `macro_actions.returns.macro_gae` needs none of these classes: it takes and returns plain
tensors.

Shapes: B rows, R response positions, M macro actions, P prompts with K samples each.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from macro_actions.returns import adaptive_lam, discounted_sums, gae
from macro_actions.segments import pool_rewards, pool_values, to_tokens
from macro_actions.settings import EstimatorSettings
from macro_actions.trajectory_rewards import batch_without_returns, rewards_and_kl
from macro_actions.types import MacroActions, PPOBatch, Trajectory

# Tensors of the batch have shape (B, R) and are 0 off the response.
Estimator = Callable[[Trajectory, MacroActions, EstimatorSettings], PPOBatch]


def gae_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """MA-PPO: generalised advantage estimation over macro actions. With one token each it is token-level PPO.

    A row's result does not depend on other rows. VAPO (Yue et al. 2025) computes the critic's returns with λ = 1
    (``lam_critic``) and the advantages with a λ that depends on the response's length (``lam_alpha``).

    EVPO (Pan et al. 2026) starts from this batch, too; see :func:`with_mean_baseline`.
    """
    assert trajectory.values is not None  # a critic computed them
    rewards, kl = rewards_and_kl(trajectory, settings)

    # Pool the tokens of each macro action.
    macro_values = pool_values(trajectory.values, macro, settings.value_function)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, settings.value_function)

    # GAE over macro actions.
    lam = _policy_lam(macro, settings)
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


def sae_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Segmental advantage estimation (Gong et al. 2026): GAE over tokens with λ = 1 inside a macro action.

        δ_j = r_j + γ_j V_{j+1} − V_j        Â_j = δ_j + γ_j λ_j Â_{j+1}        Ret_j = Â_j + V_j

    λ_j and γ_j are λ and γ on the last token of a macro action, and 1 on its other tokens. The differences inside a
    macro action cancel, so that the return of its first token f is the one of GAE over macro actions with the value
    function ``first``, and Ret_j is that return without r_f … r_{j−1}. Each token keeps its own value as a baseline.
    The paper ends segments before tokens of low probability: :func:`macro_actions.conditions.surprise`.

    Example: values .5 .1 .2, rewards 0 1 1, macro actions of two tokens and one, γ = 1 and λ = .5. The macro actions'
    values are .5 .2, their rewards 1 1, advantages 1.1 .8 and returns 1.6 1. The tokens' returns are 1.6 1.6 1 and
    their advantages 1.1 1.5 .8.
    """
    values = trajectory.values
    assert values is not None  # a critic computed them
    rewards, kl = rewards_and_kl(trajectory, settings)
    policy_lam = _policy_lam(macro, settings)
    critic_lam = policy_lam if settings.lam_critic is None else settings.lam_critic

    # Returns of macro actions.
    macro_values = pool_values(values, macro, "first")
    macro_rewards = pool_rewards(rewards, macro)
    _, policy_returns = gae(macro_values, macro_rewards, macro.mask, settings.gamma, policy_lam)
    _, critic_returns = gae(macro_values, macro_rewards, macro.mask, settings.gamma, critic_lam)

    # Returns of tokens: rewards before a token are not its own.
    rewards_before = rewards.cumsum(1) - rewards
    before_macro_action = to_tokens(pool_values(rewards_before, macro, "first"), macro)
    earlier_rewards = rewards_before - before_macro_action
    mask = trajectory.response_mask
    advantages = to_tokens(policy_returns, macro) - earlier_rewards - values
    returns = to_tokens(critic_returns, macro) - earlier_rewards

    return PPOBatch(
        trajectory=trajectory,
        macro=macro,
        kl=kl,
        rewards=rewards,
        advantages=torch.where(mask, advantages, 0.0),
        returns=torch.where(mask, returns, 0.0),
    )


def critic_targets(batch: PPOBatch, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """The critic's value of each macro action, and the sum of its reward and all later ones, discounted.

    Args:
        batch: B rows with the critic's values.
        settings: γ, and how values and rewards are pooled.

    Returns:
        Values and sums of rewards, shape ``(B, M)`` each. The sums contain no value, unlike the returns of GAE.
    """
    values = batch.trajectory.values
    assert values is not None  # a critic computed them
    macro_values = pool_values(values, batch.macro, settings.value_function)
    macro_rewards = pool_rewards(batch.rewards, batch.macro, settings.macro_reward, settings.value_function)
    return macro_values, discounted_sums(macro_rewards, batch.macro, settings.gamma)


def with_mean_baseline(batch: PPOBatch, mean_return: float, settings: EstimatorSettings) -> PPOBatch:
    """The batch with advantages Â_τ = Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ' − mean_return, which do not depend on the critic.

    EVPO (Pan et al. 2026) takes these instead of GAE's if the critic explains none of the variance of the
    returns: as a baseline, the critic then adds variance, and the mean return of the batch adds none. The critic's
    own returns stay those of GAE.

    Example: macro rewards 0 1 with γ = 1 and a mean return of .4 give .6 .6.
    """
    _, returns = critic_targets(batch, settings)
    return replace(batch, advantages=to_tokens(returns - mean_return, batch.macro))


def reinforce_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """REINFORCE++ (Hu et al. 2025): Â_τ = Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ', which is GAE with λ = 1 and all values 0.

    The trainer normalises the advantages over the batch. Example: rewards 0 1 −1 with γ = 1 give 0 0 −1.
    """
    rewards, kl = rewards_and_kl(trajectory, settings)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, "equal")
    rewards_to_go = discounted_sums(macro_rewards, macro, settings.gamma)
    return batch_without_returns(trajectory, macro, kl, rewards, to_tokens(rewards_to_go, macro))


def segment_mc_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """VinePPO (Kazemnejad et al. 2024) and SPO-chain (Guo et al. 2025): Â_τ = V̂(after τ) − V̂(before τ).

    V̂ of a state is the mean score of responses that were completed from there. ``trajectory.values`` holds it on the
    first token of each macro action; after the last macro action V̂ is the score. Completions have no KL penalty, so
    the penalties of a macro action and of all later ones are added.

    Example: V̂ .5 .2 and a score of 1 give −.3, .8.
    """
    rewards, kl = rewards_and_kl(trajectory, settings)
    values = trajectory.values
    if values is None:  # evaluations sample no completions
        values = torch.zeros_like(rewards)

    # V̂(after) − V̂(before) is GAE with λ = 0 of the scores alone.
    score_rewards, _ = rewards_and_kl(trajectory, replace(settings, kl_coef=0.0))
    values_before = pool_values(values, macro, "first")
    gains, _ = gae(values_before, pool_rewards(score_rewards, macro), macro.mask, 1.0, 0.0)

    penalties = pool_rewards(-settings.kl_coef * kl, macro)
    advantages = gains + discounted_sums(penalties, macro, 1.0)
    return batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, macro))


def distillation_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """On-policy distillation (Agarwal et al. 2024; Lu et al. 2025): Â_τ = R_τ, without scores and later rewards.

    The rewards are the KL penalty and those for a missing EOS and for length. The trainer adds the teacher's
    log-ratios, as it does to the advantages of every estimator, see :func:`with_teacher`.
    """
    without_scores = replace(trajectory, scores=torch.zeros_like(trajectory.scores))
    rewards, kl = rewards_and_kl(without_scores, settings)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward)
    return batch_without_returns(trajectory, macro, kl, rewards, to_tokens(macro_rewards, macro))


def with_teacher(batch: PPOBatch, coef: float, by_macro_action: bool, settings: EstimatorSettings) -> PPOBatch:
    """The batch with a teacher's log-ratios added to its advantages: Â_j + coef · Σ_{i ∈ τ(j)} (log π_T − log π)_i.

    A log-ratio is a reward whose return does not reach beyond its own macro action (γ = 0), so that no critic has to
    predict it: its expectation over π is −KL(π ‖ π_T) of that macro action. With macro actions of one token this is
    the per-token reverse KL of on-policy distillation. The batch's rewards and returns stay as they are.

    Example: log π_T of −1 −2 −.5 and log π of −2 −2.5 −1 give log-ratios 1 .5 .5; with macro actions of two tokens and
    one, and a coefficient of 2, the advantages grow by 3 3 1, and by tokens by 2 1 1.

    Args:
        batch: B rows with a teacher's log-probs.
        coef: weight of the log-ratios.
        by_macro_action: pool them over each macro action, summed or averaged; otherwise each token has its own.
        settings: which of the two.
    """
    log_ratios = batch.trajectory.teacher_log_ratios
    if by_macro_action:
        pooled = pool_rewards(log_ratios, batch.macro, settings.macro_reward)
        log_ratios = to_tokens(pooled, batch.macro)
    return replace(batch, advantages=batch.advantages + coef * log_ratios)


def _of_groups(name: str) -> Estimator:
    """A function of `macro_actions.group_estimators`, which is imported when the function is first called."""

    def estimator(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
        module = import_module("macro_actions.group_estimators")
        batch: PPOBatch = getattr(module, name)(trajectory, macro, settings)
        return batch

    return estimator


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae_batch,
    "sae": sae_batch,
    "evpo": gae_batch,  # the trainer decides over the whole batch, see `with_mean_baseline`
    "rloo": _of_groups("rloo_batch"),
    "rloo_turns": _of_groups("rloo_turns_batch"),
    "grpo": _of_groups("grpo_batch"),
    "dr_grpo": _of_groups("dr_grpo_batch"),
    "reinforce_pp": reinforce_batch,
    "reinforce_pp_baseline": _of_groups("dr_grpo_batch"),
    "tempo": _of_groups("tempo_batch"),
    "segment_mc": segment_mc_batch,
    "distillation": distillation_batch,
}


def _policy_lam(macro: MacroActions, settings: EstimatorSettings) -> float | Tensor:
    """λ of the advantages: a number, or one for each row, (B,)."""
    if settings.lam_alpha is None:
        return settings.lam
    return adaptive_lam(macro.mask.sum(1), settings.lam_alpha)
