# SPDX-License-Identifier: Apache-2.0
"""Credit assignment as the flags say: `dschat.rl.ppo_batch`, and whitening over all ranks."""

from dataclasses import replace

import torch
from torch import Tensor

from dschat.config.ppo import PPOConfig
from dschat.rl.masked import masked_moments, whiten
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.rewards import AdaptiveKL, FixedKL
from dschat.rl.types import MacroActions, PPOBatch, Trajectory
from dschat.run.distributed import sum_over_ranks


def kl_controller(config: PPOConfig) -> FixedKL | AdaptiveKL:
    """The KL coefficient of --kl_ctl, steered if --adaptive_kl_target is given."""
    if config.adaptive_kl_target is None:
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.adaptive_kl_target, config.adaptive_kl_horizon)


def assign_credit(trajectory: Trajectory, ends: Tensor | MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """Macro actions, advantages and returns.

    Args:
        trajectory: of this rank.
        ends: (B, R) bool, True where a macro action ends; or the macro actions.
        kl_coef: of this iteration; with --adaptive_kl_target it is not the flag's.
        config: the flags.
    """
    batch = ppo_batch(
        trajectory,
        ends,
        kl_coef=kl_coef,
        gamma=config.gamma,
        lam=config.lam,
        value_function=config.value_function,
        macro_reward=config.macro_reward,
        kl_estimator=config.kl_estimator,
        clip_reward_value=config.clip_reward_value,
        missing_eos_penalty=config.missing_eos_penalty,
    )
    return whiten_advantages(batch) if config.whiten_advantages else batch


def whiten_advantages(batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over the response tokens of all ranks."""
    totals = torch.stack(masked_moments(batch.advantages, batch.response_mask))
    count, total, squares = sum_over_ranks(totals).unbind()
    advantages = whiten(batch.advantages, batch.response_mask, (count, total, squares))
    return replace(batch, advantages=advantages)
