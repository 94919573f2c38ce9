# SPDX-License-Identifier: Apache-2.0
"""Training from Python."""

from dschat.cli import COMMANDS
from dschat.config.common import CommonConfig
from dschat.errors import UserError
from dschat.main import run_training


def train(config: CommonConfig) -> dict[str, float]:
    """Trains what a configuration says, in this process, or as one of a launcher's.

    Args:
        config: SFTConfig, RewardConfig, DPOConfig, PPOConfig, RefuelConfig or RefuelOnlineConfig.

    Returns:
        The metrics of the last evaluation, by name (docs/metrics.md); models and records are in `config.output_dir`.

    Raises:
        UserError: a value, the data or a model cannot be used; says what to change.
        SystemExit: after SIGTERM or Ctrl-C, when a checkpoint is written.
    """
    steps = [command for command in COMMANDS.values() if command.step]
    command = next((command for command in steps if command.flags_class() is type(config)), None)
    if command is None:
        raise UserError(f"{type(config).__name__} is no configuration of a training step.")
    config.validate()
    config.check_installed()
    return run_training(command.step, config, command.function)
