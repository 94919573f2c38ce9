# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from a scored rollout and its macro actions to advantages and, with a critic, returns.

An estimator is a function ``(Trajectory, MacroActions, EstimatorSettings) -> PPOBatch`` and a row of `ESTIMATORS`. Its
settings, and what it needs of a run, are declared in `macro_actions.settings`, from which the trainer reads both.
Where macro actions end is decided once per rollout, before any estimator runs, by a condition of
`macro_actions.conditions`. `macro_gae` needs none of these classes: it takes and returns plain tensors.

Shapes: B rows, R response positions, M macro actions, P prompts with K samples each.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from macro_actions.groups import dr_grpo, grpo, prefix_values, rloo, rloo_turns, scale
from macro_actions.masked import last_true, widths
from macro_actions.rewards import penalise_length, penalise_missing_eos, token_rewards
from macro_actions.segments import pool_rewards, pool_values, segment, to_tokens
from macro_actions.settings import EstimatorSettings
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
    rewards, kl = _token_rewards(trajectory, settings)

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
    rewards, kl = _token_rewards(trajectory, settings)
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
    return macro_values, _discounted_sums(macro_rewards, batch.macro, settings.gamma)


def with_mean_baseline(batch: PPOBatch, mean_return: float, settings: EstimatorSettings) -> PPOBatch:
    """The batch with advantages Â_τ = Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ' − mean_return, which do not depend on the critic.

    EVPO (Pan et al. 2026) takes these instead of GAE's if the critic explains none of the variance of the
    returns: as a baseline, the critic then adds variance, and the mean return of the batch adds none. The critic's
    own returns stay those of GAE.

    Example: macro rewards 0 1 with γ = 1 and a mean return of .4 give .6 .6.
    """
    _, returns = critic_targets(batch, settings)
    return replace(batch, advantages=to_tokens(returns - mean_return, batch.macro))


def rloo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """RLOO (Ahmadian et al. 2024, "Back to Basics"): a response's reward minus the mean reward of its prompt's others.

    The reward includes the KL penalty, and nothing is divided by a standard deviation. A response without tokens could
    not be scored and is left out of the others' mean. All tokens of a response share its advantage, whatever the macro
    actions; macro actions matter to the policy ratio only, see `macro_actions.segments.macro_logprobs`.

    Example: rewards 1, 2, 6 of one prompt's responses give advantages −3, −1.5, 4.5.

    Raises:
        ValueError: B is not a multiple of the samples per prompt.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    response_rewards = _by_group(rewards.sum(1), settings)
    counted = _by_group(mask.any(1), settings)
    advantages = rloo(response_rewards, counted).flatten()
    token_advantages = torch.where(mask, advantages[:, None], 0.0)
    return _batch_without_returns(trajectory, macro, kl, rewards, token_advantages)


def rloo_turns_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """RLOO by turns: the return from a turn on minus that of the prompt's other responses that reached the turn.

    A turn is a run of the response mask, whatever the macro actions; its reward is the sum of its token rewards, KL
    penalty included, and ``gamma`` discounts from turn to turn. See :func:`macro_actions.groups.rloo_turns` for the
    baseline. With one turn in each response this is :func:`rloo_batch`.

    Raises:
        ValueError: B is not a multiple of the samples per prompt.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    turns = segment(last_true(mask), mask)
    returns = _discounted_sums(pool_rewards(rewards, turns), turns, settings.gamma)
    reached = _by_group(turns.mask, settings)
    advantages = rloo_turns(_by_group(returns, settings), reached).flatten(0, 1)
    return _batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, turns))


def grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GRPO (Shao et al. 2024): (score − mean of the prompt's scores) / their standard deviation, plus the KL penalty.

    The penalty of a response is neither compared nor scaled, see :func:`response_penalty`.

    Example: scores 1, 2, 6 with KLs of .1, 0, .2 nats and a coefficient of .5 give −2/√7 − .05, −1/√7, 3/√7 − .1.
    """
    return _group_batch(trajectory, macro, settings, grpo)


def dr_grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Dr. GRPO (Liu et al. 2025): GRPO without the division, which would weight prompts by their difficulty.

    Its loss is divided by a constant length, see `macro_actions.losses.loss_weights`. REINFORCE++ with a baseline (Hu
    et al. 2025) has this advantage, too; the trainer normalises it over the batch, without the KL penalty.
    """
    return _group_batch(trajectory, macro, settings, dr_grpo)


def reinforce_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """REINFORCE++ (Hu et al. 2025): Â_τ = Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ', which is GAE with λ = 1 and all values 0.

    The trainer normalises the advantages over the batch. Example: rewards 0 1 −1 with γ = 1 give 0 0 −1.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward, "equal")
    rewards_to_go = _discounted_sums(macro_rewards, macro, settings.gamma)
    return _batch_without_returns(trajectory, macro, kl, rewards, to_tokens(rewards_to_go, macro))


def tempo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """TEMPO (Tran et al. 2025): Â_τ = (score − mean + V(after τ) − V(before τ)) / (std + ε), plus the KL penalty.

    V of a prefix is the mean score of the prompt's responses that begin with it, see
    :func:`macro_actions.groups.prefix_values`. V(after) − V(before) is therefore 0 except where responses part.
    Macro actions of one token give the paper's estimator. The KL penalty is added as in :func:`grpo_batch`.

    Raises:
        ValueError: a response mask has holes, so that the text between turns is a part of the prefixes.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("tempo compares prefixes of single responses: response masks with holes are not supported.")
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    counted = _by_group(mask.any(1), settings)

    # Advantage of the whole response within its group.
    response_advantages = grpo(scores, counted).flatten()

    # What each macro action adds to the value of the prefix, in the same unit.
    ids = torch.where(mask, trajectory.rollout.response_ids, -1)
    values = prefix_values(_by_group(ids, settings), scores, counted).flatten(0, 1)
    tokens_after = macro.lengths.cumsum(1)
    tokens_before = tokens_after - macro.lengths
    gains = values.gather(1, tokens_after) - values.gather(1, tokens_before)
    group_scale = scale(scores, counted).expand_as(scores).reshape(-1, 1)
    parts = gains / group_scale

    penalty = response_penalty(kl, settings.kl_coef)
    advantages = response_advantages[:, None] + parts + penalty[:, None]
    advantages = torch.where(macro.mask, advantages, 0.0)
    return _batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, macro))


def segment_mc_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """VinePPO (Kazemnejad et al. 2024) and SPO-chain (Guo et al. 2025): Â_τ = V̂(after τ) − V̂(before τ).

    V̂ of a state is the mean score of responses that were completed from there. ``trajectory.values`` holds it on the
    first token of each macro action; after the last macro action V̂ is the score. Completions have no KL penalty, so
    the penalties of a macro action and of all later ones are added.

    Example: V̂ .5 .2 and a score of 1 give −.3, .8.
    """
    rewards, kl = _token_rewards(trajectory, settings)
    values = trajectory.values
    if values is None:  # evaluations sample no completions
        values = torch.zeros_like(rewards)

    # V̂(after) − V̂(before) is GAE with λ = 0 of the scores alone.
    score_rewards, _ = _token_rewards(trajectory, replace(settings, kl_coef=0.0))
    values_before = pool_values(values, macro, "first")
    gains, _ = gae(values_before, pool_rewards(score_rewards, macro), macro.mask, 1.0, 0.0)

    penalties = pool_rewards(-settings.kl_coef * kl, macro)
    advantages = gains + _discounted_sums(penalties, macro, 1.0)
    return _batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, macro))


def distillation_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """On-policy distillation (Agarwal et al. 2024; Lu et al. 2025): Â_τ = R_τ, without scores and later rewards.

    The rewards are the KL penalty and those for a missing EOS and for length. The trainer adds the teacher's
    log-ratios, as it does to the advantages of every estimator, see :func:`with_teacher`.
    """
    without_scores = replace(trajectory, scores=torch.zeros_like(trajectory.scores))
    rewards, kl = _token_rewards(without_scores, settings)
    macro_rewards = pool_rewards(rewards, macro, settings.macro_reward)
    return _batch_without_returns(trajectory, macro, kl, rewards, to_tokens(macro_rewards, macro))


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


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae_batch,
    "sae": sae_batch,
    "evpo": gae_batch,  # the trainer decides over the whole batch, see `with_mean_baseline`
    "rloo": rloo_batch,
    "rloo_turns": rloo_turns_batch,
    "grpo": grpo_batch,
    "dr_grpo": dr_grpo_batch,
    "reinforce_pp": reinforce_batch,
    "reinforce_pp_baseline": dr_grpo_batch,
    "tempo": tempo_batch,
    "segment_mc": segment_mc_batch,
    "distillation": distillation_batch,
}


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over macro actions (Schulman et al. 2016).

        δ_τ = R_τ + γ V_{τ+1} − V_τ        Â_τ = δ_τ + γλ Â_{τ+1}        Ret_τ = Â_τ + V_τ

    The value after the last macro action is 0.

    Example: values .5 .2, rewards 0 1, γ = 1, λ = .5: δ = −.3 .8, advantages .1 .8, returns .6 1.

    Args:
        values: shape ``(B, M)``.
        rewards: shape ``(B, M)``.
        mask: shape ``(B, M)``, bools or numbers, True on a prefix of each row.
        gamma: discount per macro action, not per token.
        lam: λ per macro action: a number, or one for each row, shape ``(B,)``.

    Returns:
        advantages and returns, shape ``(B, M)`` each, 0 off the mask.
    """
    mask = mask.bool()
    dtype = torch.promote_types(values.dtype, rewards.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    values = torch.where(mask, values.to(dtype), 0.0)
    rewards = torch.where(mask, rewards.to(dtype), 0.0)

    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    deltas = rewards + gamma * next_values - values

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
    """GAE over macro actions from and to tokens: pool values and rewards, :func:`gae`, broadcast to the tokens.

    Macro actions of one token give token-level GAE. Nothing is whitened. Consecutive macro actions of a row may be
    separated by a hole of its mask (another turn, a tool's answer); a hole is no step.

    Example: values .5 .1 .2 .4, rewards 0 0 0 1, ends 0 1 0 1, γ = 1, λ = .5 and value function ``first`` have macro
    values .5 .2 and macro rewards 0 1; the advantages are .1 .1 .8 .8 and the returns .6 .6 1 1.

    Args:
        values: shape ``(B, R)``, V of the state before each token.
        rewards: shape ``(B, R)``, token rewards.
        ends: shape ``(B, R)``, bool, from a termination condition.
        response_mask: shape ``(B, R)``, bools or numbers, 1 on response tokens; padded on either side, with or without
            holes.
        gamma: discount per macro action, not per token.
        lam: λ per macro action: a number, or one for each row, shape ``(B,)``.
        value_function: σ, see :func:`macro_actions.segments.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the rewards of a macro action's tokens.

    Returns:
        advantages and returns, shape ``(B, R)`` each, 0 off the response, without gradient. They are float64 if values
        or rewards are, otherwise float32.

    Raises:
        ValueError: shapes differ, or value_function or macro_reward is unknown.
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
    """VAPO's λ for each response (Yue et al. 2025): max(0, 1 − 1 / (α l)) for l macro actions.

    Example: with α = .05, λ is 0 for 20 macro actions, .8 for 100, .9 for 200.

    Args:
        steps: shape ``(B,)``, number of macro actions.
        alpha: α.

    Returns:
        Shape ``(B,)``, float32.
    """
    length = steps.clamp(min=1).float()
    return (1 - 1 / (alpha * length)).clamp(min=0)


def penalised(scores: Tensor, finished: Tensor, lengths: Tensor, settings: EstimatorSettings) -> Tensor:
    """Scores minus the penalties for a missing EOS and for length.

    Args:
        scores: shape ``(B,)``.
        finished: shape ``(B,)``, bool, True if the response ends with EOS.
        lengths: shape ``(B,)``, response lengths in tokens.
        settings: the penalties.

    Returns:
        Shape ``(B,)``.
    """
    scores = penalise_missing_eos(scores, finished, settings.missing_eos_penalty)
    return penalise_length(scores, lengths, settings.longest, settings.length_buffer, settings.length_penalty)


def response_penalty(kl: Tensor, kl_coef: float) -> Tensor:
    """KL penalty of a whole response, −kl_coef · Σ_j kl_j.

    Estimators that compare scores within a group add it to the advantage of every token of the response.

    Args:
        kl: shape ``(B, R)`` in nats, 0 off the response.
        kl_coef: weight of the penalty.

    Returns:
        Shape ``(B,)``.
    """
    return -kl_coef * kl.sum(1)


def _token_rewards(trajectory: Trajectory, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """Token rewards and KL, shape (B, R) each; the score includes the penalties for a missing EOS and for length.

    In an episode the last token of each turn that was cut receives the penalty for a missing EOS.
    """
    segment_rewards = trajectory.segment_rewards
    cut_turns = trajectory.rollout.cut_turns
    if segment_rewards is not None and cut_turns is not None and settings.missing_eos_penalty is not None:
        segment_rewards = torch.where(cut_turns, segment_rewards - settings.missing_eos_penalty, segment_rewards)
    return token_rewards(
        trajectory.logprobs,
        trajectory.ref_logprobs,
        _penalised_scores(trajectory, settings),
        trajectory.response_mask,
        settings.kl_coef,
        settings.kl_estimator,
        settings.clip_reward_value,
        segment_rewards,
    )


def _policy_lam(macro: MacroActions, settings: EstimatorSettings) -> float | Tensor:
    """λ of the advantages: a number, or one for each row, (B,)."""
    if settings.lam_alpha is None:
        return settings.lam
    return adaptive_lam(macro.mask.sum(1), settings.lam_alpha)


def _penalised_scores(trajectory: Trajectory, settings: EstimatorSettings) -> Tensor:
    """Scores minus the penalties for a missing EOS, of the response or of each of its turns, and for length. (B,)."""
    scores = trajectory.scores
    finished = trajectory.rollout.finished
    cut_turns = trajectory.rollout.cut_turns
    if cut_turns is not None:
        if settings.missing_eos_penalty is not None:
            scores = scores - settings.missing_eos_penalty * cut_turns.sum(1)
        finished = torch.ones_like(finished)
    return penalised(scores, finished, widths(trajectory.response_mask), settings)


def _discounted_sums(macro_rewards: Tensor, macro: MacroActions, gamma: float) -> Tensor:
    """Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ' for every macro action. (B, M) → (B, M)."""
    sums, _ = gae(torch.zeros_like(macro_rewards), macro_rewards, macro.mask, gamma, 1.0)
    return sums


def _compared_scores(trajectory: Trajectory, settings: EstimatorSettings) -> Tensor:
    """Scores by which a group's responses are compared: with penalties, clamped, without the KL. Shape (B,)."""
    scores = _penalised_scores(trajectory, settings)
    bound = settings.clip_reward_value
    return scores if bound is None else scores.clamp(-bound, bound)


def _group_batch(
    trajectory: Trajectory,
    macro: MacroActions,
    settings: EstimatorSettings,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> PPOBatch:
    """Batch in which a response has one advantage: its score compared with its prompt's, plus its KL penalty."""
    rewards, kl = _token_rewards(trajectory, settings)
    mask = trajectory.response_mask
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    counted = _by_group(mask.any(1), settings)
    advantages = compare(scores, counted).flatten() + response_penalty(kl, settings.kl_coef)
    token_advantages = torch.where(mask, advantages[:, None], 0.0)
    return _batch_without_returns(trajectory, macro, kl, rewards, token_advantages)


def _by_group(x: Tensor, settings: EstimatorSettings) -> Tensor:
    """Rows by prompt: (B, …) → (P, K, …). Raises ValueError if B is not a multiple of K."""
    if len(x) % settings.samples:
        raise ValueError(f"{len(x)} rows are not {settings.samples} samples of each prompt")
    return x.unflatten(0, (-1, settings.samples))


def _batch_without_returns(
    trajectory: Trajectory, macro: MacroActions, kl: Tensor, rewards: Tensor, advantages: Tensor
) -> PPOBatch:
    """Batch of an estimator that trains no critic."""
    return PPOBatch(trajectory, macro, kl=kl, rewards=rewards, advantages=advantages, returns=None)
