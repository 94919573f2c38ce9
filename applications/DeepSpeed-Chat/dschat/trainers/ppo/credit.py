# SPDX-License-Identifier: Apache-2.0
"""Credit assignment as the flags say: `dschat.rl.ppo_batch` or `rloo_batch`, and whitening over all ranks."""

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from dschat.config.ppo import PPOConfig
from dschat.rl.masked import masked_moments, whiten
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.rewards import AdaptiveKL, FixedKL
from dschat.rl.rloo_batch import rloo_batch
from dschat.rl.types import MacroActions, PPOBatch, Trajectory
from dschat.run.distributed import sum_over_ranks


def kl_controller(config: PPOConfig) -> FixedKL | AdaptiveKL:
    """The KL coefficient of --kl_ctl, steered if --adaptive_kl_target is given."""
    if config.adaptive_kl_target is None:
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.adaptive_kl_target, config.adaptive_kl_horizon)


class _Rewards(TypedDict):
    """What token rewards depend on; see `dschat.rl.rewards`."""

    kl_coef: float
    kl_estimator: str
    clip_reward_value: float | None
    missing_eos_penalty: float | None


def assign_credit(
    trajectory: Trajectory, ends: Tensor | MacroActions, kl_coef: float, config: PPOConfig, samples: int = 1
) -> PPOBatch:
    """Macro actions, advantages and, of a critic, returns.

    Args:
        trajectory: of this rank.
        ends: (B, R) bool, True where a macro action ends; or the macro actions.
        kl_coef: of this iteration; with --adaptive_kl_target it is not the flag's.
        config: the flags.
        samples: responses of each prompt, which are rows in succession.
    """
    rewards = _Rewards(
        kl_coef=kl_coef,
        kl_estimator=config.kl_estimator,
        clip_reward_value=config.clip_reward_value,
        missing_eos_penalty=config.missing_eos_penalty,
    )
    if config.has_critic:
        batch = ppo_batch(
            trajectory,
            ends,
            gamma=config.gamma,
            lam=config.lam,
            value_function=config.value_function,
            macro_reward=config.macro_reward,
            **rewards,
        )
    else:
        batch = rloo_batch(trajectory, ends, samples, **rewards)
    return whiten_advantages(batch) if config.whiten_advantages else batch


def whiten_advantages(batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over the response tokens of all ranks."""
    totals = torch.stack(masked_moments(batch.advantages, batch.response_mask))
    count, total, squares = sum_over_ranks(totals).unbind()
    advantages = whiten(batch.advantages, batch.response_mask, (count, total, squares))
    return replace(batch, advantages=advantages)
