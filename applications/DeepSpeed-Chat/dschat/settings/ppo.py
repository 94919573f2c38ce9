# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO with macro actions: its groups of flags, the rules between them, and what follows from them.

`PPO_RULES` lists the rules in the order in which they are checked; warnings come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan, BatchSizes, largest_part, plan_batches
from dschat.settings.common import COMMON_RULES, CommonConfig
from dschat.settings.critic import CRITIC_RULES, CriticFlags
from dschat.settings.flags import GroupRow, default_of
from dschat.settings.kl import KL_RULES, KLFlags
from dschat.settings.macro_actions import TerminationFlags
from dschat.settings.ppo_loss import (
    AdvantageFlags,
    AlarmFlags,
    LossFlags,
    OptimizerFlags,
    PPOMemoryFlags,
    PPOModelFlags,
)
from dschat.settings.rewards import (
    INNER_REWARD_RULES,
    REWARD_RULES,
    SIMULATED_USER,
    SOURCE_FLAGS,
    ProgramFlags,
    RewardFlags,
)
from dschat.settings.rollouts import (
    AHEAD_CLIP,
    EVAL_PROMPTS,
    SERVER_RULES,
    RolloutFlags,
    SamplingFlags,
    VllmFlags,
    require_vllm,
)
from dschat.settings.rules import PPO_MODELS, Check, Rule, Rules, Unread, check_rules_of_groups
from dschat.settings.teacher import TEACHER_RULES, TeacherFlags
from macro_actions.settings import NEEDS, EstimatorSettings

# Flags whose values --actor_NAME and --critic_NAME take if they are not given.
SHARED_DEFAULT_FLAGS = ("gradient_checkpointing", "zero_stage", "lora_dim")

# Flags that a run does not read, by what it lacks. Most warn; those that would change the run otherwise than their
# users expect are refused.
END_FLAGS = ("termination_condition", "ngram", "isolate_last_token")  # other conditions' flags need the first one
REWARD_FLAGS = ("gamma", "macro_reward")
SCORE_FLAGS = ("drop_equal_groups", "normalize_scores", "segment_rewards", "normalize_advantages", "whiten_advantages")
WHOLE_RESPONSE_FLAGS = ("segment_rewards", "rollouts_ahead", "isolate_last_token")
ONLY_OF_A_CRITIC = ("critic_warmup_updates", "critic_group_weight", "cut_answers", "value_head")
CRITIC_FLAGS = (
    "critic_learning_rate",
    "critic_weight_decay",
    "critic_gradient_checkpointing",
    "critic_zero_stage",
    "critic_lora_dim",
    "value_function",
    "lam",
    "lam_alpha",
    "lam_critic",
    "cliprange_value",
    "vf_coef",
    "critic_minibatches",
    "critic_epochs",
    "critic_trains",
)


def _unread_by_estimator(config: PPOConfig) -> list[str]:
    """Flags that other estimators read, and without a critic those of one. REWARD_FLAGS have a rule of their own."""
    needs = config.advantages.needs
    names = [] if needs.critic else list(CRITIC_FLAGS)
    for other in NEEDS.values():
        names += sorted(other.reads)
    # The critic's values follow from flags of both models.
    values = config.flat()
    shared = [f"critic_{name}" for name in SHARED_DEFAULT_FLAGS if values[f"critic_{name}"] == values[name]]
    return [name for name in names if name not in (*needs.reads, *REWARD_FLAGS, *shared)]


def _only_if(unread: bool, names: Sequence[str]) -> Sequence[str]:
    return names if unread else ()


UNREAD: tuple[Unread[PPOConfig], ...] = (
    Unread(_unread_by_estimator, "of no effect with --advantage_estimator {advantage_estimator}."),
    Unread(
        lambda config: _only_if(
            not (
                config.advantages.needs.macro_actions
                or config.loss.is_by_macro_action
                or config.rewards.segment_rewards is not None
            ),
            END_FLAGS,
        ),
        "with --advantage_estimator {advantage_estimator} macro actions change the training only with --policy_ratio"
        " macro or macro_mean, or with --loss_mean macro.",
    ),
    Unread(
        lambda config: _only_if(config.loss.rollout_is_mask is not None, ("cliprange", "cliprange_high")),
        "of no effect with --rollout_is_mask, which clips nothing.",
    ),
    Unread(
        lambda config: _only_if(config.critic.value_head != "linear", ("cliprange_value",)),
        "of no effect with --value_head {value_head}, which clips nothing.",
    ),
)
REFUSED: tuple[Unread[PPOConfig], ...] = (
    Unread(
        lambda config: [name for name in REWARD_FLAGS if name not in config.advantages.needs.reads],
        "--advantage_estimator {advantage_estimator} adds up the rewards of a response, or of a macro action, as they"
        " are. Drop the flag.",
        refused=True,
    ),
    Unread(
        lambda config: _only_if(not config.advantages.needs.scores, SCORE_FLAGS),
        "--advantage_estimator {advantage_estimator} reads no scores: drop it.",
        refused=True,
    ),
    Unread(
        lambda config: _only_if(not config.advantages.needs.critic, ONLY_OF_A_CRITIC),
        "--advantage_estimator {advantage_estimator} has no critic. Drop the flag.",
        refused=True,
    ),
    Unread(
        lambda config: _only_if(config.advantages.needs.segment_values, WHOLE_RESPONSE_FLAGS),
        "the completions of --advantage_estimator {advantage_estimator} are sampled with the current weights, and"
        " scored as whole responses, of at most --mc_max_segments macro actions: drop it.",
        refused=True,
    ),
)


def _check_score_source(config: PPOConfig) -> None:
    """Raises UserError if the estimator reads scores and no flag names a source of them."""
    if config.rewards.source_names or not config.advantages.needs.scores:
        return
    if config.has_teacher:
        raise UserError(
            f"--teacher_model_name_or_path without a source of scores, which --advantage_estimator"
            f" {config.advantages.advantage_estimator} reads: give --advantage_estimator distillation, or such a"
            " source, for example --reward_function module.py:function."
        )
    # With --share_base the critic may start from the actor's base, so that only a reward model is missing.
    needs_critic = config.advantages.needs.critic and not config.memory.share_base
    wanted = "critic_model_name_or_path" if needs_critic else "reward_model_name_or_path"
    cause = "--environment simulated_user gives no rewards, and " if config.has_simulated_user else ""
    raise UserError(
        f"{cause}--{wanted} is missing: give the reward model of step 2, or score with --reward_function"
        " module.py:function, --reward_url, --reward_source programs, --reward_judge rubric.toml or --environment"
        " module.py:Class."
    )


# Normalisation of advantages


def _is_one_macro_action(config: PPOConfig) -> bool:
    """Whether every response is one macro action. In episodes, every turn is at least one."""
    termination = config.termination
    if config.has_episodes or termination.isolate_last_token:
        return False
    if termination.termination_condition == "turn":
        return True
    is_fixed = termination.termination_condition == "fixed"
    return is_fixed and termination.ngram >= config.sampling.max_answer_seq_len


NORMALIZATION_RULES: tuple[Rule[PPOConfig], ...] = (
    Rule(
        lambda config: config.advantages.whiten_advantages and config.advantages.normalize_advantages == "row",
        "--whiten_advantages contradicts --normalize_advantages row: drop one of them.",
    ),
    Rule(
        lambda config: config.advantages.normalize_advantages == "row" and config.advantages.needs.normalized,
        "--normalize_advantages row: --advantage_estimator {advantage_estimator} normalises over the batch. Drop the"
        " flag.",
    ),
    Rule(
        lambda config: config.advantages.normalized_over == "row" and not config.advantages.needs.macro_actions,
        "--normalize_advantages row: --advantage_estimator {advantage_estimator} gives all tokens of a response the"
        " same advantage, which would become 0. Use batch.",
    ),
    Rule(
        lambda config: (
            config.advantages.normalized_over == "row"
            and config.advantages.needs.segment_values
            and config.advantages.mc_max_segments == 1
        ),
        "--normalize_advantages row with --mc_max_segments 1: a response is one macro action, whose tokens have"
        " the same advantage, which would become 0. Use batch.",
    ),
    Rule(
        lambda config: (
            config.advantages.normalized_over == "row"
            and _is_one_macro_action(config)
            and config.advantages.advantage_estimator != "sae"  # whose tokens keep values of their own
        ),
        "--normalize_advantages row with --termination_condition {termination_condition} (--ngram {ngram:g}): a"
        " response is one macro action, whose tokens have the same advantage, which would become 0. Use batch.",
    ),
)


# Advantages and the loss


ADVANTAGE_RULES: tuple[Rule[PPOConfig], ...] = (
    Rule(
        lambda config: config.advantages.needs.group and config.rollouts.samples_per_prompt < 2,
        "--advantage_estimator {advantage_estimator} compares responses to the same prompt with each other: give"
        " --samples_per_prompt of at least 2 (the published runs sample 4).",
    ),
    Rule(
        lambda config: config.estimator.lam_alpha is not None and config.changes_lam,
        "--lam {lam:g} and --lam_alpha {lam_alpha:g}: drop one of them; --lam_alpha none removes the value of a"
        " preset.",
    ),
    Rule(
        lambda config: config.loss.kl_in == "loss" and config.estimator.kl_estimator == "k1",
        "--kl_in loss with --kl_estimator k1: its gradient is 0 on average. Give --kl_estimator k3 (as GRPO) or k2.",
    ),
    Rule(
        lambda config: config.advantages.drop_equal_groups and config.rollouts.samples_per_prompt < 2,
        "--drop_equal_groups compares responses to the same prompt: give --samples_per_prompt of at least 2.",
    ),
    Rule(
        lambda config: config.advantages.refill_rounds > 0 and config.vllm.rollouts_ahead > 0,
        "--refill_rounds with --rollouts_ahead: servers generate the next rollout with older weights, while this one"
        " is refilled with the current ones. Drop one of them.",
    ),
    Rule(
        lambda config: (
            config.advantages.max_token_probability is not None and config.loss.policy_ratio in ("macro", "macro_mean")
        ),
        "--max_token_probability with --policy_ratio {policy_ratio}: the ratio of a macro action includes its likely"
        " tokens. Give --policy_ratio token.",
    ),
    Rule(
        lambda config: config.rewards.segment_rewards is not None and config.estimator.macro_reward == "mean",
        "--segment_rewards with --macro_reward mean divides each reward by the length of its macro action. Give"
        " --macro_reward sum.",
    ),
    Rule(
        lambda config: (config.estimator.length_buffer or 0) > config.sampling.max_answer_seq_len,
        "--length_buffer {length_buffer} is longer than a response: give at most --max_answer_seq_len"
        " {max_answer_seq_len}.",
    ),
)


# The base that actor and critic share


SHARED_BASE_RULES: tuple[Rule[PPOConfig], ...] = (
    Rule(
        lambda config: config.memory.share_base and not all(config.lora_ranks),
        "--share_base keeps the base frozen, so that all trained models need adapters: give --lora_dim, or"
        " --actor_lora_dim and --critic_lora_dim.",
    ),
    Rule(
        lambda config: config.memory.share_base and 3 in config.zero_stages and set(config.zero_stages) != {3},
        "--share_base with ZeRO 3 for one of actor and critic alone: their base is either whole or partitioned. Give"
        " --zero_stage 3 for both, or for neither.",
    ),
)


# Warnings


WARNINGS: tuple[Rule[PPOConfig], ...] = (
    # `PPOConfig.derive` makes the critic's model the reward model.
    Rule(
        lambda config: config.names_no_critic,
        "--critic_model_name_or_path: --advantage_estimator {advantage_estimator} has no critic; the model is read as"
        " the reward model, if scores are read and no other source of them is named.",
        warns=True,
    ),
    Rule(
        lambda config: (
            config.rewards.segment_rewards is not None
            and not config.advantages.needs.critic
            and "macro_reward" not in config.advantages.needs.reads
        ),
        "--segment_rewards: --advantage_estimator {advantage_estimator} adds up the rewards of a response. Use gae or"
        " reinforce_pp.",
        warns=True,
    ),
    Rule(
        lambda config: config.dilutes_score,
        "--macro_reward mean dilutes the score among the other tokens of the last macro action: add"
        " --isolate_last_token.",
        warns=True,
    ),
    Rule(
        lambda config: (
            config.loss.policy_ratio == "sequence_mean"
            and config.loss.cliprange >= 0.05
            and config.loss.rollout_is_mask is None
        ),
        "--cliprange {cliprange:g} with --policy_ratio sequence_mean hardly ever clips: the ratio of a whole response"
        " stays close to 1. GSPO's are --cliprange 3e-4 --cliprange_high 4e-4.",
        warns=True,
    ),
    Rule(
        lambda config: config.rollouts.top_k > 0 or config.rollouts.top_p < 1,
        "--top_k {top_k} and --top_p {top_p:g} truncate the sampler, while log-probs are normalised over all tokens:"
        " the KL is biased. Use --top_k 0 --top_p 1 for an exact one.",
        warns=True,
    ),
)

PPO_RULES: Rules = (
    Check(_check_score_source),
    *REFUSED,
    *TEACHER_RULES,
    Rule(
        lambda config: config.sampling.eval_prompts is not None and config.rollouts.eval_iters is not None,
        "--eval_prompts and --eval_iters both say how many prompts to evaluate: drop one of them.",
    ),
    *KL_RULES,
    *NORMALIZATION_RULES,
    Check(lambda config: config.termination.check_termination()),
    *REWARD_RULES,
    Check(check_rules_of_groups),
    *SERVER_RULES,
    *ADVANTAGE_RULES,
    *CRITIC_RULES,
    *INNER_REWARD_RULES,
    *SHARED_BASE_RULES,
    *UNREAD,
    *WARNINGS,
)


class PPOConfig(CommonConfig):
    """Step 3: PPO over macro actions."""

    step: ClassVar[int] = 3
    saved_models: ClassVar[tuple[str, ...]] = PPO_MODELS
    compares_logprobs: ClassVar[bool] = True
    planned_models: ClassVar[str] = "plan.sampled_steps:ppo_roles"
    too_few_examples: ClassVar[str] = (
        "prompts are fewer than one rollout of {size}. Give {smaller}more data (--data_split) or, where prompts were"
        " too long, a larger --max_prompt_seq_len."
    )
    defaults = {"lr_scheduler_type": "linear", "lam": 0.95}
    helps = {"per_device_eval_batch_size": "prompts per process and evaluation batch, see eval_iters"}
    rules: ClassVar[Rules] = (*COMMON_RULES, *PPO_RULES)

    models: PPOModelFlags
    rewards: RewardFlags
    programs: ProgramFlags
    judge: Annotated[Any, GroupRow("judge.settings:RewardJudgeFlags", "judge.settings:JUDGE_RULES")]
    teacher: TeacherFlags
    sampling: SamplingFlags
    rollouts: RolloutFlags
    episodes: Annotated[Any, GroupRow("turns.settings:EpisodeFlags", "turns.settings:EPISODE_RULES")]
    user: Annotated[Any, GroupRow("turns.user_settings:UserFlags", "turns.user_settings:SIMULATED_USER_RULES")]
    user_requests: Annotated[Any, GroupRow("turns.user_settings:UserRequestFlags")]
    vllm: VllmFlags
    termination: TerminationFlags
    estimator: EstimatorSettings
    advantages: AdvantageFlags
    loss: LossFlags
    critic: CriticFlags
    optimizers: OptimizerFlags
    alarms: AlarmFlags
    kl: KLFlags
    memory: PPOMemoryFlags

    @classmethod
    def derive(cls, values: dict[str, Any]) -> None:
        """Fill in the values that follow from other flags, in place; `values` holds every flag by its name."""
        super().derive(values)
        for name in SHARED_DEFAULT_FLAGS:
            for role in ("actor", "critic"):
                if values[f"{role}_{name}"] is None:
                    values[f"{role}_{name}"] = values[name]
        if values["eval_prompts"] is None and values["eval_iters"] is None:
            values["eval_prompts"] = EVAL_PROMPTS
        if values["rollouts_ahead"] and values["rollout_is_clip"] is None and values["rollout_is_mask"] is None:
            values["rollout_is_clip"] = AHEAD_CLIP

        # Without another source of scores, the critic's model is the reward model, too.
        needs = NEEDS.get(values["advantage_estimator"])
        reads_scores = needs is None or needs.scores
        if reads_scores and all(values[name] in (None, [], SIMULATED_USER) for name in SOURCE_FLAGS):
            values["reward_model_name_or_path"] = values["critic_model_name_or_path"] or None
        if needs is not None and not needs.critic:
            values["critic_model_name_or_path"] = None

    @property
    def names_no_critic(self) -> bool:
        """Whether --critic_model_name_or_path was given though the estimator has no critic."""
        return not self.advantages.needs.critic and self.arguments.get("critic_model_name_or_path") is not None

    @property
    def changes_lam(self) -> bool:
        """Whether --lam has another value than its default."""
        return bool(self.estimator.lam != default_of(type(self), "lam"))

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher's log-ratios are added to the advantages."""
        return self.teacher.teacher_model_name_or_path is not None

    @property
    def has_episodes(self) -> bool:
        """Whether environments answer the policy, in episodes of several turns."""
        return self.rewards.environment is not None

    @property
    def has_simulated_user(self) -> bool:
        """Whether the environment is a simulated user, who gives no rewards."""
        return self.rewards.environment == SIMULATED_USER

    @property
    def recomputes(self) -> bool:
        """Whether activations of actor or critic are recomputed."""
        return bool(self.memory.actor_gradient_checkpointing or self.memory.critic_gradient_checkpointing)

    @property
    def runs_vllm(self) -> bool:
        """Whether the training processes run vLLM themselves."""
        return self.rollouts.uses_vllm and self.vllm.vllm_url is None

    @property
    def samples_here(self) -> bool:
        return not self.rollouts.uses_vllm

    @property
    def keeps_average(self) -> bool:
        return self.memory.enable_ema

    @property
    def shares_process_with_vllm(self) -> bool:
        return self.runs_vllm

    @property
    def scores_are_rescaled(self) -> bool:
        """Whether the scale of scores does not matter: they are divided by their deviation, or no scores are read."""
        if self.advantages.needs.rescales_scores or not self.advantages.needs.scores:
            return True
        is_without_kl = self.loss.kl_in == "loss" or self.advantages.needs.kl_apart
        return is_without_kl and self.advantages.normalized_over is not None

    @property
    def dilutes_score(self) -> bool:
        """Whether the score is averaged with other tokens of its macro action."""
        if self.estimator.macro_reward != "mean" or not self.advantages.needs.scores:
            return False
        if self.estimator.value_function == "unit" and "value_function" in self.advantages.needs.reads:
            return False  # the mean has the weight of the last token alone
        return not (self.termination.isolate_last_token or self.termination.has_single_tokens)

    def check_installed(self) -> None:
        """Check that the packages which the flags need are there. Raises UserError, which says what to install."""
        super().check_installed()
        if self.runs_vllm:
            require_vllm()
        self.rewards.check_installed()

    def credit_is_fused(self, plan: BatchPlan) -> bool:
        """Whether the update's own passes compute the log-probs and values that credit assignment reads.

        Otherwise separate passes compute them before the first update of a rollout. Credit is fused with the update
        of a micro-batch if all of these hold:

        - The estimator has a critic.
        - A rollout is one update of the actor and of the critic, which sees the weights that generated the rollout.
        - The advantages of a response depend on no other response, which may be in another micro-batch. They do with
          a group, with weights of groups or a gate of the critic, and if they are normalised over the batch.
        - The loss compares with the policy that is trained, not with the sampler's log-probs (--rollout_is_mask).
        - Every token counts, for both models. --drop_equal_groups compares responses, and --max_token_probability
          reads the policy's log-probs.
        - The termination condition does not read the policy's log-probs. A user's function may read anything.
        """
        needs = self.advantages.needs
        if not needs.critic or plan.updates_per_rollout != 1 or self.critic_updates(plan) != 1:
            return False
        compares_rows = needs.group or needs.gates_critic or self.advantages.normalized_over == "batch"
        compares_rows = compares_rows or self.critic.critic_group_weight is not None
        excludes_tokens = self.advantages.drop_equal_groups or self.advantages.max_token_probability is not None
        excludes_tokens = excludes_tokens or self.critic.cut_answers == "critic_only"
        excludes_tokens = excludes_tokens or self.loss.rollout_is_mask is not None
        return not (compares_rows or excludes_tokens or self.termination.reads_policy)

    @property
    def critic_passes(self) -> int:
        """Passes of the critic over each rollout; 0 without a critic."""
        if not self.advantages.needs.critic:
            return 0
        return self.critic.critic_epochs or self.rollouts.ppo_epochs

    def critic_plan(self, plan: BatchPlan) -> BatchPlan:
        """Batch sizes of the critic's updates, from those of the actor's."""
        return plan.split(self.critic.critic_minibatches)

    def critic_updates(self, plan: BatchPlan, updates: int | None = None) -> int:
        """The critic's updates in a number of the run's updates, which are the actor's; of a rollout if not given."""
        updates = plan.updates_per_rollout if updates is None else updates
        return updates * self.critic_passes * self.critic.critic_minibatches // self.rollouts.ppo_epochs

    @property
    def longest_example(self) -> tuple[int, str]:
        """Tokens of the longest prompt with the longest response, and the flags that limit them."""
        prompt = self.sampling.max_prompt_seq_len
        response = self.sampling.max_answer_seq_len
        return prompt + response, f"--max_prompt_seq_len {prompt} with --max_answer_seq_len {response}"

    @property
    def zero_stages(self) -> list[int]:
        """The ZeRO stages of the actor and, if the estimator has one, of the critic."""
        stages: list[int] = [self.memory.actor_zero_stage or 0]
        if self.advantages.needs.critic:
            stages.append(self.memory.critic_zero_stage or 0)
        return stages

    @property
    def lora_ranks(self) -> list[int]:
        """The LoRA ranks of the actor and, if the estimator has one, of the critic."""
        ranks = [self.memory.actor_lora_dim or 0]
        if self.advantages.needs.critic:
            ranks.append(self.memory.critic_lora_dim or 0)
        return ranks

    @property
    def model_paths(self) -> list[str]:
        """What actor, critic, reward model and teacher are loaded from."""
        paths = [
            self.models.actor_model_name_or_path,
            self.models.critic_model_name_or_path,
            self.rewards.reward_model_name_or_path,
            self.teacher.teacher_model_name_or_path,
        ]
        return [path for path in paths if path]

    @property
    def num_eval_prompts(self) -> int:
        """How many held-out prompts an evaluation answers on all processes together; 0 = all."""
        if self.rollouts.eval_iters is None:
            return self.sampling.eval_prompts or 0
        return self.rollouts.eval_iters * self.output.per_device_eval_batch_size

    @property
    def batch_sizes(self) -> BatchSizes:
        """The flags that decide the batch sizes."""
        return BatchSizes(
            "per_device_training_batch_size",
            self.rollouts.per_device_training_batch_size,
            self.optimisation.gradient_accumulation_steps,
            self.optimisation.global_batch_size,
            self.sampling.per_device_generation_batch_size,
            self.rollouts.generation_batches,
            self.rollouts.samples_per_prompt,
        )

    def plan_batches(self, world_size: int) -> BatchPlan:
        """Work out the batch sizes; raises UserError when updates do not divide the rollout or cannot be reached."""
        self.vllm.check_neighbours(world_size)
        max_tokens = self.optimisation.max_tokens_per_micro_batch
        plan = plan_batches(self.batch_sizes, world_size, self.rollouts.ppo_epochs, max_tokens)
        minibatches = self.critic.critic_minibatches
        if plan.update_per_rank % minibatches:
            raise UserError(
                f"--critic_minibatches {minibatches} does not divide an update's {plan.update_per_rank} responses per"
                f" process: give {largest_part(plan.update_per_rank, minibatches)}."
            )
        plan.check_whole_rollouts("--max_steps", self.optimisation.max_steps or 0, least=1)
        plan.check_whole_rollouts("--critic_warmup_updates", self.optimizers.critic_warmup_updates, least=0)
        return plan

    def warn_of_warmup(self, total_updates: int) -> None:
        """Warn where the actor's updates end before the warm-up of its learning rate."""
        super().warn_of_warmup(total_updates - self.optimizers.critic_warmup_updates)

    def total_updates(self, num_examples: int, plan: BatchPlan) -> int:
        """Number of optimiser updates of a run on this number of examples, at least those of one iteration.

        Raises:
            UserError: there are fewer examples than one rollout takes, or the whole run would warm up the critic.
        """
        updates = super().total_updates(num_examples, plan)
        plan.check_actor_updates(updates, self.optimizers.critic_warmup_updates)
        return updates
