# SPDX-License-Identifier: Apache-2.0
"""The training steps, one row each: all that other parts of the package must know of a step besides its code.

The commands of `dschat` (cli.py), `dschat plan`, the best checkpoint, reports, model cards and the pages read these
rows. A row names the step's flags and its function; neither is imported before it is needed.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class TrainingStep:
    """A training step.

    Attributes:
        name: in run.json and metrics.toml.
        command: its subcommand of `dschat`, and the folder of its presets.
        plan_name: what `dschat plan --step` calls it, too.
        label: its name in texts.
        title: in the cards of its models; empty if the estimator of the run says it.
        summary: its line in `dschat --help`.
        flags: "module:class" of its configuration, below dschat.
        train: "module:function", below dschat; the function takes the configuration and the run's output folder.
        best: the metric that makes a checkpoint the best.
        larger_is_better: whether the best is the largest.
    """

    name: str
    command: str
    plan_name: str
    label: str
    title: str
    summary: str
    flags: str
    train: str
    best: str
    larger_is_better: bool = False

    def flags_class(self) -> type[Any]:
        """Imports the class of its configuration."""
        flags_class: type[Any] = resolve_name(f"dschat.{self.flags}")
        return flags_class


_ROWS = (
    TrainingStep(
        name="sft",
        command="sft",
        plan_name="1",
        label="SFT",
        title="Supervised fine-tuning (step 1)",
        summary="step 1: supervised fine-tuning",
        flags="settings.supervised:SFTConfig",
        train="training.steps.sft:train_sft",
        best="eval/loss",
    ),
    TrainingStep(
        name="reward",
        command="reward",
        plan_name="2",
        label="reward model",
        title="Reward model (step 2)",
        summary="step 2: reward model",
        flags="settings.supervised:RewardConfig",
        train="training.steps.reward:train_reward",
        best="eval/accuracy",
        larger_is_better=True,
    ),
    TrainingStep(
        name="dpo",
        command="dpo",
        plan_name="dpo",
        label="DPO",
        title="Direct preference optimisation (step 2)",
        summary="direct preference optimisation (DPO), instead of steps 2 and 3",
        flags="settings.supervised:DPOConfig",
        train="training.steps.dpo:train_dpo",
        best="eval/loss",
    ),
    TrainingStep(
        name="ppo",
        command="ppo",
        plan_name="3",
        label="step 3",
        title="",
        summary="step 3: PPO with macro actions; also RLOO, GRPO and others",
        flags="settings.ppo:PPOConfig",
        train="training.steps.ppo:train_ppo",
        best="eval/scores",
        larger_is_better=True,
    ),
    TrainingStep(
        name="refuel",
        command="refuel",
        plan_name="refuel",
        label="REFUEL on pairs",
        title="REFUEL on pairs of replies",
        summary="REFUEL on pairs of dialogues that `refuel-data` has made",
        flags="refuel.offline_settings:RefuelConfig",
        train="refuel.steps:train_refuel",
        best="eval/loss",
    ),
    TrainingStep(
        name="refuel_online",
        command="refuel-online",
        plan_name="refuel_online",
        label="REFUEL online",
        title="REFUEL with users from data (step 3)",
        summary="REFUEL on dialogues sampled in training, with the user messages of the data",
        flags="refuel.online_settings:RefuelOnlineConfig",
        train="refuel.steps:train_refuel_online",
        best="eval/scores",
        larger_is_better=True,
    ),
)
STEPS = {step.name: step for step in _ROWS}  # by the name in run.json
STEPS_BY_COMMAND = {step.command: step for step in _ROWS}
