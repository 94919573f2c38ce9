# SPDX-License-Identifier: Apache-2.0
"""What the flags promise and this version does not do yet, in one place so that it is easy to lift."""

import logging

from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.errors import UserError

logger = logging.getLogger(__name__)


def check_supported(config: CommonConfig, world_size: int) -> None:
    """Refuse what needs more than one process at ZeRO stage 0, and the parsing condition.

    Args:
        config: a configuration that passed its own checks.
        world_size: number of processes that the launcher started.

    Raises:
        UserError: naming the flag to drop.
    """
    asked = {
        "zero_stage": config.zero_stage,
        "offload": config.offload,
        "lora_dim": config.lora_dim,
    }
    if isinstance(config, PPOConfig):
        asked |= {
            "actor_zero_stage": config.actor_zero_stage or 0,
            "critic_zero_stage": config.critic_zero_stage or 0,
            "actor_lora_dim": config.actor_lora_dim or 0,
            "critic_lora_dim": config.critic_lora_dim or 0,
            "offload_reference_model": config.offload_reference_model,
            "enable_ema": config.enable_ema,
        }
        if config.termination_condition == "parsing":
            raise UserError(
                "--termination_condition parsing needs the constituency parsers, which this version does not include;"
                " use fixed, randomized, ppl or module.py:function."
            )
    for name, value in asked.items():
        if value:
            given = name if value is True else f"{name} {value}"
            raise UserError(
                f"--{given} is not in this version, which runs one process at ZeRO stage 0, trains all weights and"
                f" saves no average: drop --{name}."
            )
    if config.lora_module_name is not None:
        logger.warning("--lora_module_name does nothing without --lora_dim, which is not in this version: drop it.")
    if world_size > 1:
        raise UserError(
            f"The launcher started {world_size} processes, but this version runs one process at ZeRO stage 0: give the"
            " launcher --num_gpus 1."
        )
