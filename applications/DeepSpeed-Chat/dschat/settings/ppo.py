# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3, PPO with macro actions, in sections, and the rules between them."""

import logging
from dataclasses import dataclass
from typing import ClassVar

from dschat.errors import UserError
from dschat.settings.batches import BatchPlan, plan_rollouts
from dschat.settings.common import CommonConfig, ZeroStage
from dschat.settings.macro_actions import PoolingFlags, TerminationFlags, reads_logprobs
from dschat.settings.ppo_loss import PPOLossFlags
from dschat.settings.rewards import RewardFlags
from dschat.settings.rollouts import AHEAD_CLIP, EVAL_PROMPTS, RolloutFlags
from dschat.settings.rules import (
    AT_LEAST_0,
    FREE,
    NOT_EMPTY,
    Changed,
    default_of,
    flag,
    redeclared,
)

logger = logging.getLogger(__name__)

BOTH_MODELS = ("gradient_checkpointing", "zero_stage", "lora_dim")  # flags of actor and critic, unless one has its own
ENDS = ("termination_condition", "ngram", "isolate_last_token")  # flags that say where macro actions end
# What a run without a critic does not read, unless its estimator does.
CRITIC_FLAGS = (
    *("critic_learning_rate", "critic_weight_decay", "critic_gradient_checkpointing", "critic_zero_stage"),
    *("critic_lora_dim", "value_function", "lam", "lam_alpha", "lam_critic", "cliprange_value", "vf_coef"),
)


@dataclass(kw_only=True)
class PPOModelFlags:
    """Models."""

    _argument_group_name = "models"

    actor_model_name_or_path: str = flag(
        "model of step 1: the actor starts from it, the frozen reference is it",
        rule=NOT_EMPTY,
        on_resume=FREE,
        path=True,
    )
    critic_model_name_or_path: str | None = flag(
        "reward model of step 2, which the critic starts from; if another source of scores is named, the default is"
        " the actor with a zero value head",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
    )


@dataclass(kw_only=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    _argument_group_name = "memory of actor, critic and reference"

    actor_gradient_checkpointing: bool | None = flag(
        "recompute the actor's activations; gradient_checkpointing if not given",
        None,
        on_resume=FREE,
        nargs="?",
        const=True,
    )
    critic_gradient_checkpointing: bool | None = flag(
        "recompute the critic's activations; gradient_checkpointing if not given",
        None,
        on_resume=FREE,
        nargs="?",
        const=True,
    )
    actor_zero_stage: ZeroStage | None = flag("ZeRO stage of the actor; zero_stage if not given", None)
    critic_zero_stage: ZeroStage | None = flag("ZeRO stage of the critic; zero_stage if not given", None)
    offload_reference_model: bool = flag("keep the reference and the reward model in CPU memory", False)
    actor_lora_dim: int | None = flag("rank of the actor's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    critic_lora_dim: int | None = flag("rank of the critic's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    share_base: bool = flag(
        "with LoRA: one frozen base in memory, the actor's, for actor, critic and reference, and for a reward model"
        " that is an adapter over it",
        False,
    )
    enable_ema: bool = flag("also keep and save a moving average of the actor", False)


@dataclass(kw_only=True)
@redeclared(
    lr_scheduler_type="linear",
    per_device_eval_batch_size=Changed(help="prompts per process that one of eval_iters stands for"),
)
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
    too_few_examples: ClassVar[str] = (
        "prompts are fewer than one rollout of {size}. Lower --per_device_generation_batch_size or"
        " --generation_batches, or give more data (--data_split) or, where prompts were too long, a larger"
        " --max_prompt_seq_len."
    )

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        for name in BOTH_MODELS:
            for own in (f"actor_{name}", f"critic_{name}"):
                setattr(self, own, getattr(self, name if getattr(self, own) is None else own))
        if self.eval_prompts is None and self.eval_iters is None:
            self.eval_prompts = EVAL_PROMPTS
        if self.rollouts_ahead and self.rollout_is_clip is None:
            self.rollout_is_clip = AHEAD_CLIP
        if not self.source_names:
            self.reward_model_name_or_path = self.critic_model_name_or_path or None
        self._names_no_critic = not self.needs.critic and self.critic_model_name_or_path is not None
        if self._names_no_critic:
            self.critic_model_name_or_path = None

    def validate(self) -> None:
        """Check every flag, alone and against the others, and warn of unwise combinations. Raises UserError."""
        super().validate()
        self._check_models()
        if self.eval_prompts is not None and self.eval_iters is not None:
            raise UserError("--eval_prompts and --eval_iters both say how many prompts to evaluate: drop one of them.")
        self.check_kl()
        self._check_normalization()
        self.check_termination()
        self.check_rewards(self.ddp_timeout)
        self.check_servers(self.ddp_timeout)
        self._check_estimator()
        self._check_loss()
        self._check_segments()
        self._check_shared_base()
        if self._dilutes_score and self.value_function == "first" and "value_function" in self.needs.reads:
            raise UserError(
                "--macro_reward mean with --value_function first gives the score, which sits on the last token, no"
                " weight at all: add --isolate_last_token."
            )
        self._warn()

    @property
    def recomputes(self) -> bool:
        return bool(self.actor_gradient_checkpointing or self.critic_gradient_checkpointing)

    def check_installed(self) -> None:
        """See `TrackingFlags.check_installed`."""
        super().check_installed()
        self.check_vllm()

    def _check_models(self) -> None:
        if not self.source_names:
            needs_critic = self.needs.critic and not self.share_base  # whose critic may start from the base
            wanted = "critic_model_name_or_path" if needs_critic else "reward_model_name_or_path"
            raise UserError(
                f"--{wanted} is missing: give the reward model of step 2, or score with --reward_function"
                " module.py:function, --reward_url or --reward_source programs."
            )

    def _check_normalization(self) -> None:
        if self.whiten_advantages and self.normalize_advantages == "row":
            raise UserError("--whiten_advantages contradicts --normalize_advantages row: drop one of them.")
        if self.normalize_advantages == "row" and self.needs.normalized:
            raise UserError(
                f"--normalize_advantages row: --advantage_estimator {self.advantage_estimator} normalises over the"
                " batch. Drop the flag."
            )
        if self.normalized_over != "row":
            return
        if not self.needs.macro_actions:
            raise UserError(
                f"--normalize_advantages row: --advantage_estimator {self.advantage_estimator} gives all tokens of a"
                " response the same advantage, of which nothing would be left. Use batch."
            )
        if self.needs.segment_values and self.mc_max_segments == 1:
            raise UserError(
                "--normalize_advantages row with --mc_max_segments 1: a response is one macro action, all with"
                " the same advantage, of which nothing would be left. Use batch."
            )
        if self.ngram >= self.max_answer_seq_len and self.termination_condition == "fixed":
            raise UserError(
                f"--normalize_advantages row with --ngram {self.ngram:g}: a response is one macro action, all with"
                " the same advantage, of which nothing would be left. Use batch."
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

    def _check_loss(self) -> None:
        """What the policy's loss is of, and the mean that it is."""
        if self.lam_alpha is not None and self.lam != default_of(PPOConfig, "lam"):
            raise UserError(
                f"--lam {self.lam:g} and --lam_alpha {self.lam_alpha:g}: drop one of them; --lam_alpha none takes that"
                " of a preset away."
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise UserError(
                "--kl_in loss with --kl_estimator k1: its gradient is 0 on average. Give --kl_estimator k3 (as GRPO)"
                " or k2."
            )
        if self.drop_equal_groups and self.samples_per_prompt < 2:
            raise UserError(
                "--drop_equal_groups compares responses to the same prompt: give --samples_per_prompt of at least 2."
            )
        if self.refill_rounds and not self.drop_equal_groups:
            raise UserError(
                f"--refill_rounds {self.refill_rounds} takes the places of prompts that --drop_equal_groups leaves"
                " out: add --drop_equal_groups, or drop it."
            )
        if self.refill_rounds and self.rollouts_ahead:
            raise UserError(
                "--refill_rounds with --rollouts_ahead: servers draw the next rollout while places in this one are"
                " filled with the weights of now. Drop one of them."
            )
        if self.max_token_probability is not None and self.policy_ratio in ("macro", "macro_mean"):
            raise UserError(
                f"--max_token_probability with --policy_ratio {self.policy_ratio}: the ratio is of all tokens of a"
                " macro action, likely ones included. Give --policy_ratio token."
            )
        if self.length_buffer is not None and self.length_buffer > self.max_answer_seq_len:
            raise UserError(
                f"--length_buffer {self.length_buffer} is longer than a response: give at most --max_answer_seq_len"
                f" {self.max_answer_seq_len}."
            )

    def _check_segments(self) -> None:
        """Rewards and values of macro actions."""
        if self.needs.segment_values and self.isolate_last_token:
            raise UserError(
                f"--isolate_last_token with --advantage_estimator {self.advantage_estimator}, which joins macro"
                " actions where there are more than --mc_max_segments: drop it."
            )
        if self.needs.segment_values:
            for name in ("segment_rewards", "rollouts_ahead"):
                if getattr(self, name):
                    raise UserError(
                        f"--{name} with --advantage_estimator {self.advantage_estimator}, whose completions are drawn"
                        " with the weights of now, and scored as whole responses: drop it."
                    )
        if self.segment_rewards is not None and self.macro_reward == "mean":
            raise UserError(
                "--segment_rewards with --macro_reward mean divides each reward by the length of its macro action."
                " Give --macro_reward sum."
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
        by_macro = self.policy_ratio in ("macro", "macro_mean") or self.mean_of_loss == "macro"
        reads_ends = self.needs.macro_actions or by_macro
        ends = [name for name in ENDS if getattr(self, name) != default_of(PPOConfig, name)]
        if not reads_ends and ends:
            logger.warning(
                "%s: with --advantage_estimator %s macro actions change the training with --policy_ratio macro or"
                " macro_mean, or --loss_mean macro, alone.",
                ", ".join(f"--{name} {getattr(self, name)}" for name in ends),
                self.advantage_estimator,
            )
        if self.segment_rewards is not None and "macro_reward" not in self.needs.reads:
            logger.warning(
                "--segment_rewards: --advantage_estimator %s adds up the rewards of a response. Use gae or"
                " reinforce_pp.",
                self.advantage_estimator,
            )
        if self._dilutes_score:
            logger.warning(
                "--macro_reward mean dilutes the score among the other tokens of the last macro action: add"
                " --isolate_last_token."
            )
        if self.policy_ratio == "sequence_mean" and self.cliprange >= 0.05:
            logger.warning(
                "--cliprange %g with --policy_ratio sequence_mean hardly ever clips: the ratio of a whole response"
                " stays close to 1. GSPO's are --cliprange 3e-4 --cliprange_high 4e-4.",
                self.cliprange,
            )
        if self.top_k > 0 or self.top_p < 1:
            logger.warning(
                "--top_k %d and --top_p %g truncate the sampler, while log-probs are those of all tokens: the KL is"
                " biased. Use --top_k 0 --top_p 1 for an exact one.",
                self.top_k,
                self.top_p,
            )

    def credit_is_fused(self, plan: BatchPlan) -> bool:
        """Whether the one update of a rollout computes itself what credit assignment needs of actor and critic.

        Not with several updates, whitening over all tokens of a rollout, or a user's condition: it may read anything.
        And not where a response's advantage depends on others, which may be in other micro-batches, or where the
        policy's log-probs say what is counted.
        """
        one_update = plan.updates_per_rollout == 1
        row_by_row = self.needs.critic and not self.needs.group and self.normalized_over != "batch"
        reads_policy = reads_logprobs(self.termination_condition, of_policy=True)
        counts_some = self.drop_equal_groups or self.max_token_probability is not None
        return row_by_row and one_update and not reads_policy and not counts_some

    @property
    def longest_example(self) -> tuple[int, str]:
        """A prompt with its response."""
        sizes = self.max_prompt_seq_len, self.max_answer_seq_len
        return sum(sizes), "--max_prompt_seq_len {} with --max_answer_seq_len {}".format(*sizes)

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

    def num_eval_prompts(self, world_size: int) -> int:
        """How many held-out prompts an evaluation answers on all processes together; 0 = all."""
        if self.eval_iters is None:
            return self.eval_prompts or 0
        return self.eval_iters * self.per_device_eval_batch_size * world_size

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when updates do not divide the rollout or cannot be reached."""
        self.check_neighbours(world_size)
        sizes = (self.per_device_training_batch_size, self.gradient_accumulation_steps, self.global_batch_size)
        rollout = self.per_device_generation_batch_size * self.generation_batches
        max_tokens = self.max_tokens_per_micro_batch
        plan = plan_rollouts(*sizes, world_size, rollout, self.ppo_epochs, self.samples_per_prompt, max_tokens)
        plan.check_max_steps(self.max_steps)
        return plan
