# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3, PPO with macro actions, in sections, and the rules between them."""

import logging
import math
from dataclasses import dataclass
from typing import ClassVar

from dschat.config import rules
from dschat.config.batches import BatchPlan, plan_rollouts
from dschat.config.common import CommonConfig
from dschat.config.macro_actions import PoolingFlags, TerminationFlags
from dschat.config.ppo_loss import PPOLossFlags
from dschat.config.rewards import RewardFlags
from dschat.config.rollouts import EVAL_PROMPTS, RolloutFlags
from dschat.config.rules import default_of, flag
from dschat.config.sections import SCHEDULE_HELP, Schedule, ZeroStage
from dschat.errors import UserError

logger = logging.getLogger(__name__)

BOTH_MODELS = ("gradient_checkpointing", "zero_stage", "lora_dim")  # flags of actor and critic, unless one has its own
# What a run without a critic does not read, unless its estimator does.
CRITIC_FLAGS = (
    *("critic_learning_rate", "critic_weight_decay", "critic_gradient_checkpointing", "critic_zero_stage"),
    *("critic_lora_dim", "value_function", "lam", "cliprange_value", "vf_coef"),
)


@dataclass(kw_only=True)
class PPOModelFlags:
    """Models."""

    _argument_group_name = "models"

    actor_model_name_or_path: str = flag("model of step 1: the actor starts from it, the frozen reference is it")
    critic_model_name_or_path: str | None = flag(
        "reward model of step 2, which the critic starts from; if another source of scores is named, the default is"
        " the actor with a zero value head",
        None,
    )


@dataclass(kw_only=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    _argument_group_name = "memory of actor, critic and reference"

    actor_gradient_checkpointing: bool | None = flag(
        "recompute the actor's activations; gradient_checkpointing if not given", None, nargs="?", const=True
    )
    critic_gradient_checkpointing: bool | None = flag(
        "recompute the critic's activations; gradient_checkpointing if not given", None, nargs="?", const=True
    )
    actor_zero_stage: ZeroStage | None = flag("ZeRO stage of the actor; zero_stage if not given", None)
    critic_zero_stage: ZeroStage | None = flag("ZeRO stage of the critic; zero_stage if not given", None)
    offload_reference_model: bool = flag("keep the reference and the reward model in CPU memory", False)
    actor_lora_dim: int | None = flag("rank of the actor's LoRA adapters; lora_dim if not given", None)
    critic_lora_dim: int | None = flag("rank of the critic's LoRA adapters; lora_dim if not given", None)
    share_base: bool = flag(
        "with LoRA: one frozen base in memory, the actor's, for actor, critic and reference, and for a reward model"
        " that is an adapter over it",
        False,
    )
    enable_ema: bool = flag("also keep and save a moving average of the actor", False)


@dataclass(kw_only=True)
class PPOConfig(
    PPOModelFlags,
    RewardFlags,
    RolloutFlags,
    TerminationFlags,
    PoolingFlags,
    PPOLossFlags,
    PPOMemoryFlags,
    CommonConfig,
):
    """Step 3: PPO over macro actions."""

    step: ClassVar[int] = 3
    compares_logprobs: ClassVar[bool] = True

    lr_scheduler_type: Schedule = flag(SCHEDULE_HELP, "linear")

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        for name in BOTH_MODELS:
            for own in (f"actor_{name}", f"critic_{name}"):
                setattr(self, own, getattr(self, name if getattr(self, own) is None else own))
        if self.eval_prompts is None and self.eval_iters is None:
            self.eval_prompts = EVAL_PROMPTS
        if not self.source_names:
            self.reward_model_name_or_path = self.critic_model_name_or_path
        self._names_no_critic = not self.needs.critic and self.critic_model_name_or_path is not None
        if self._names_no_critic:
            self.critic_model_name_or_path = None

    def validate(self) -> None:
        """Check every flag, alone and against the others, and warn of unwise combinations. Raises UserError."""
        super().validate()
        rules.check_numbers(self, ["actor_lora_dim", "critic_lora_dim"], rules.AT_LEAST_0)
        self._check_models()
        self.check_rollouts()
        self.check_losses()
        self.check_termination()
        self.check_rewards(self.ddp_timeout)
        self._check_estimator()
        self._check_shared_base()
        if self.normalized_over == "row" and self.ngram == math.inf and self.termination_condition == "fixed":
            raise UserError(
                "--normalize_advantages row with --ngram inf: a response is one macro action, all of it with the"
                " same advantage, of which nothing would be left. Use batch."
            )
        if self._dilutes_score and self.value_function == "first":
            raise UserError(
                "--macro_reward mean with --value_function first gives the score, which sits on the last token, no"
                " weight at all: add --isolate_last_token."
            )
        self._warn()

    def check_installed(self) -> None:
        """See `TrackingFlags.check_installed`."""
        super().check_installed()
        self.check_engine_installed()

    def _check_models(self) -> None:
        names = ["actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path"]
        rules.check_not_empty(self, names)
        if not self.source_names:
            needs_critic = self.needs.critic and not self.share_base  # whose critic may start from the base
            wanted = "critic_model_name_or_path" if needs_critic else "reward_model_name_or_path"
            raise UserError(
                f"--{wanted} is missing: give the reward model of step 2, or score with --reward_function"
                " module.py:function, --reward_url or --reward_source programs."
            )

    def _check_estimator(self) -> None:
        """What samples are compared with, and what would change the rewards but is not read."""
        estimator = f"--advantage_estimator {self.advantage_estimator}"
        if self.needs.group and self.samples_per_prompt < 2:
            raise UserError(
                f"{estimator} compares responses to the same prompt with each other: give --samples_per_prompt of at"
                " least 2 (the published runs draw 4)."
            )
        for name in ("gamma", "macro_reward"):
            value = getattr(self, name)
            if name not in self.needs.reads and value != default_of(PPOConfig, name):
                raise UserError(
                    f"--{name} {value}: {estimator} adds up all rewards of a response as they are. Drop the flag."
                )

    def _check_shared_base(self) -> None:
        if not self.share_base:
            return
        if not all(self.lora_ranks):
            raise UserError(
                "--share_base keeps the base frozen, so that all trained models need adapters: give --lora_dim, or"
                " --actor_lora_dim and --critic_lora_dim."
            )
        if 3 in self.zero_stages and set(self.zero_stages) != {3}:
            raise UserError(
                "--share_base with ZeRO 3 for one of actor and critic alone: their base is either whole or in parts."
                " Give --zero_stage 3 for both, or for neither."
            )

    @property
    def _dilutes_score(self) -> bool:
        """Whether the score is averaged with other tokens of its macro action."""
        single_tokens = self.ngram == 1 and self.termination_condition == "fixed"
        return self.macro_reward == "mean" and not self.isolate_last_token and not single_tokens

    def _warn(self) -> None:
        usual = {f"critic_{name}": getattr(self, name) for name in BOTH_MODELS}
        unread = [] if self.needs.critic else [name for name in CRITIC_FLAGS if name not in self.needs.reads]
        given = [name for name in unread if getattr(self, name) != usual.get(name, default_of(PPOConfig, name))]
        if given:
            names = ", ".join(f"--{name}" for name in given)
            logger.warning("%s: of no effect with --advantage_estimator %s.", names, self.advantage_estimator)
        if self._names_no_critic:
            logger.warning(
                "--critic_model_name_or_path: --advantage_estimator %s has no critic; the model is read as the reward"
                " model, if no other source of scores is named.",
                self.advantage_estimator,
            )
        reads_ends = self.needs.macro_actions or self.policy_ratio != "token"
        if not reads_ends and self.termination_condition != "fixed":
            logger.warning(
                "--termination_condition %s: with --advantage_estimator %s macro actions change the training with"
                " --policy_ratio macro or macro_mean alone.",
                self.termination_condition,
                self.advantage_estimator,
            )
        if self._dilutes_score:
            logger.warning(
                "--macro_reward mean dilutes the score among the other tokens of the last macro action: add"
                " --isolate_last_token."
            )
        if self.top_k > 0 or self.top_p < 1:
            logger.warning(
                "--top_k %d and --top_p %g truncate the sampler, while log-probs are those of all tokens: the KL is"
                " biased. Use --top_k 0 --top_p 1 for an exact one.",
                self.top_k,
                self.top_p,
            )

    def credit_is_late(self, plan: BatchPlan) -> bool:
        """Whether the one update of a rollout computes itself what credit assignment needs of actor and critic.

        Not with several updates, whitening over all tokens of a rollout, or a user's condition: it may read anything.
        And not where a response's advantage depends on others, which may be in other micro-batches.
        """
        own_condition = ":" in self.termination_condition
        one_update = plan.updates_per_rollout == 1
        row_by_row = self.needs.critic and not self.needs.group and self.normalized_over != "batch"
        return row_by_row and one_update and not own_condition

    @property
    def zero_stages(self) -> list[int]:
        """The ZeRO stages of actor and critic, where there is one."""
        stages: list[int] = [self.actor_zero_stage or 0, self.critic_zero_stage or 0]
        return stages[: 1 + self.needs.critic]

    @property
    def lora_ranks(self) -> list[int]:
        """The LoRA ranks of actor and critic, where there is one."""
        return [self.actor_lora_dim or 0, self.critic_lora_dim or 0][: 1 + self.needs.critic]

    @property
    def model_paths(self) -> list[str]:
        """What actor, critic and reward model are loaded from."""
        paths = [self.actor_model_name_or_path, self.critic_model_name_or_path, self.reward_model_name_or_path]
        return [path for path in paths if path]

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when updates do not divide the rollout or cannot be reached."""
        return plan_rollouts(
            self.per_device_training_batch_size,
            self.gradient_accumulation_steps,
            self.global_batch_size,
            world_size,
            self.per_device_generation_batch_size * self.generation_batches,
            self.ppo_epochs,
            self.samples_per_prompt,
        )
