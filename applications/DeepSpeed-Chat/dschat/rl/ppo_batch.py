# SPDX-License-Identifier: Apache-2.0
"""MA-RLHF's credit assignment on one screen: from a scored rollout and its macro actions to advantages and returns.

Where macro actions end is decided before, once per rollout: the termination conditions are `dschat.rl.termination`
(every n tokens, random lengths, perplexity, spans of a parse), and `dschat.conditions` calls the one that the flags
name.
"""

from torch import Tensor

from dschat.rl.advantages import gae
from dschat.rl.macro_actions import pool_rewards, pool_values, segment, to_tokens
from dschat.rl.rewards import penalise_missing_eos, token_rewards
from dschat.rl.types import MacroActions, PPOBatch, Trajectory


def ppo_batch(
    trajectory: Trajectory,
    ends: Tensor | MacroActions,
    *,
    kl_coef: float,
    gamma: float,
    lam: float,
    value_function: str = "equal",
    macro_reward: str = "sum",
    kl_estimator: str = "k1",
    clip_reward_value: float | None = None,
    missing_eos_penalty: float | None = None,
) -> PPOBatch:
    """Token rewards → macro actions → pooled values and rewards → GAE over macro steps → back to tokens.

    Works on any subset of rows: a row's result does not depend on the others. One host synchronisation.

    Args:
        trajectory: B scored responses, with values.
        ends: (B, R) bool, the last tokens of macro actions, from a termination condition; all True is token-level
            PPO. Or the macro actions themselves, which spares the synchronisation.
        kl_coef, kl_estimator, clip_reward_value: see :func:`dschat.rl.rewards.token_rewards`.
        gamma, lam: of GAE, counted in macro steps.
        value_function: σ, see :func:`dschat.rl.macro_actions.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the token rewards of a macro action.
        missing_eos_penalty: subtracted from the score of a response that was cut, if given.

    Returns:
        PPOBatch with (B, R) tensors, 0 off the response.
    """
    mask, values = trajectory.response_mask, trajectory.values
    assert values is not None  # of a critic
    scores = penalise_missing_eos(trajectory.scores, trajectory.rollout.finished, missing_eos_penalty)
    rewards, kl = token_rewards(
        trajectory.logprobs, trajectory.ref_logprobs, scores, mask, kl_coef, kl_estimator, clip_reward_value
    )
    macro = ends if isinstance(ends, MacroActions) else segment(ends, mask)
    macro_values = pool_values(values, macro, value_function)
    macro_rewards = pool_rewards(rewards, macro, macro_reward, value_function)
    advantages, returns = gae(macro_values, macro_rewards, macro.mask, gamma, lam)
    return PPOBatch(
        trajectory=trajectory,
        macro=macro,
        kl=kl,
        rewards=rewards,
        advantages=to_tokens(advantages, macro),
        returns=to_tokens(returns, macro),
    )
