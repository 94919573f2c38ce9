# SPDX-License-Identifier: Apache-2.0
"""Credit assignment without a critic: a response's whole return against those of the other samples of its prompt."""

import torch
from torch import Tensor

from dschat.rl.advantages import rloo
from dschat.rl.macro_actions import segment
from dschat.rl.rewards import penalise_missing_eos, token_rewards
from dschat.rl.types import MacroActions, PPOBatch, Trajectory


def rloo_batch(
    trajectory: Trajectory,
    ends: Tensor | MacroActions,
    samples: int,
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
    clip_reward_value: float | None = None,
    missing_eos_penalty: float | None = None,
) -> PPOBatch:
    """Token rewards → their sum over the response → leave-one-out advantage, on every token of the response.

    Works on any subset of prompts: a row's result depends on the rows of its prompt alone. A row without a response
    token could not be scored: it is no part of the others' baseline.

    Args:
        trajectory: B scored responses; those of a prompt are `samples` rows in succession.
        ends: (B, R) bool, the last tokens of macro actions, or the macro actions. The advantages do not depend on
            them; the losses may, see `dschat.rl.macro_actions.macro_logprobs`.
        samples: K, responses of a prompt; with 1 all advantages are 0.
        kl_coef, kl_estimator, clip_reward_value: see :func:`dschat.rl.rewards.token_rewards`.
        missing_eos_penalty: subtracted from the score of a response that was cut, if given.

    Returns:
        PPOBatch with (B, R) tensors, 0 off the response, and no returns of states.

    Raises:
        ValueError: B is no multiple of `samples`.
    """
    mask = trajectory.response_mask
    if len(mask) % samples:
        raise ValueError(f"{len(mask)} rows are not {samples} samples of each prompt")
    scores = penalise_missing_eos(trajectory.scores, trajectory.rollout.finished, missing_eos_penalty)
    rewards, kl = token_rewards(
        trajectory.logprobs, trajectory.ref_logprobs, scores, mask, kl_coef, kl_estimator, clip_reward_value
    )
    advantages = rloo(rewards.sum(1).view(-1, samples), mask.any(1).view(-1, samples)).flatten()
    return PPOBatch(
        trajectory=trajectory,
        macro=ends if isinstance(ends, MacroActions) else segment(ends, mask),
        kl=kl,
        rewards=rewards,
        advantages=torch.where(mask, advantages[:, None], 0.0),
        returns=None,
    )
