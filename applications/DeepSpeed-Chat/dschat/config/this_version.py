# SPDX-License-Identifier: Apache-2.0
"""What the flags promise and this version does not do yet, in one place so that it is easy to lift."""

from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.errors import UserError


def check_supported(config: CommonConfig) -> None:
    """Refuse the parsing condition.

    Args:
        config: a configuration that passed its own checks.

    Raises:
        UserError: naming the flag to drop.
    """
    if isinstance(config, PPOConfig) and config.termination_condition == "parsing":
        raise UserError(
            "--termination_condition parsing needs the constituency parsers, which this version does not include;"
            " use fixed, randomized, ppl or module.py:function."
        )
