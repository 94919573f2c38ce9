# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3, PPO with macro actions, in sections, and the rules between them."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.batches import BatchPlan, plan_rollouts
from dschat.config.common import SCHEDULE_HELP, CommonConfig, Schedule, ZeroStage
from dschat.config.macro_actions import PoolingFlags, TerminationFlags
from dschat.config.programs import ProgramFlags
from dschat.config.rules import default_of, flag
from dschat.errors import UserError

logger = logging.getLogger(__name__)

# Names that a second score may not take: the metrics of step 3 have keys of these names.
METRIC_NAMES = (
    *("kl", "kl_per_token", "kl_coef", "entropy", "scores", "rlhf_reward", "length", "eos_rate"),
    *("prompt", "response", "score", "finished", "tokens"),  # columns of the sample files
)

RolloutEngineName = Literal["compacting", "generate", "vllm"]
EVAL_PROMPTS = 512  # of an evaluation without --eval_prompts and --eval_iters


@dataclass(kw_only=True)
class PPOModelFlags:
    """Models and where the score comes from."""

    _argument_group_name = "models and reward"

    actor_model_name_or_path: str = flag("model of step 1: the actor starts from it, the frozen reference is it")
    critic_model_name_or_path: str | None = flag(
        "reward model of step 2, which the critic starts from; with reward_function or reward_source the default is"
        " the actor with a zero value head",
        None,
    )
    reward_model_name_or_path: str | None = flag(
        "reward model; if not given, that of --critic_model_name_or_path", None
    )
    reward_function: str | None = flag(
        "module.py:function, called with (prompts, responses, rows), that returns one score per row, instead of a"
        " reward model",
        None,
    )
    metric_function: str | None = flag(
        "module.py:function, called like reward_function: a second score, logged at rollouts and evaluations, never"
        " trained on",
        None,
    )


@dataclass(kw_only=True)
class RolloutFlags:
    """Sampling and the sizes of rollouts and updates."""

    _argument_group_name = "rollouts and batches"

    rollout_engine: RolloutEngineName = flag(
        "what draws responses: our own loop, which drops rows that have ended and takes in waiting prompts"
        " (compacting); transformers' generate; or vLLM in the training process (vllm)",
        "compacting",
    )
    per_device_generation_batch_size: int = flag("prompts generated at once on one process", 16)
    generation_batches: int = flag("generation batches of one rollout", 1)
    per_device_training_batch_size: int = flag("prompts per forward pass and process in training", 16)
    eval_prompts: int | None = flag(
        f"held-out prompts answered in an evaluation, on all processes together; 0 = all ({EVAL_PROMPTS}, unless"
        " eval_iters is given)",
        None,
    )
    eval_iters: int | None = flag(
        "batches of per_device_eval_batch_size per process in an evaluation, instead of eval_prompts; 0 = all", None
    )
    per_device_eval_batch_size: int = flag("prompts per process that one of eval_iters stands for", 16)
    ppo_epochs: int = flag("passes over one rollout", 1)
    max_prompt_seq_len: int = flag("longest prompt in tokens; a longer one is dropped", 512)
    max_answer_seq_len: int = flag("longest response in tokens; sampling stops there", 512)
    temperature: float = flag("sampling temperature, also of all log-probs", 1.0)
    top_k: int = flag("sample among the k likeliest tokens; 0 = all", 0)
    top_p: float = flag("sample among the likeliest tokens that make up this probability; 1 = all", 1.0)
    vllm_gpu_memory: float = flag("share of a GPU's memory that vLLM uses while it draws: weights and cache", 0.3)
    rollout_is_clip: float | None = flag(
        "with vllm, a token's policy loss weighs as much as it is likelier under the actor than under vLLM, at most"
        " this; off if not given",
        None,
    )
    print_answers: bool = flag("show some held-out prompts with their responses at each evaluation", False)


@dataclass(kw_only=True)
class PPOLossFlags:
    """Rewards, advantages, losses and optimisers of the two models."""

    _argument_group_name = "PPO"

    actor_learning_rate: float = flag("highest learning rate of the actor", 1.5e-5)
    critic_learning_rate: float = flag("highest learning rate of the critic", 1.5e-5)
    actor_weight_decay: float = flag("weight decay of the actor", 0.1)
    critic_weight_decay: float = flag("weight decay of the critic", 0.1)
    kl_coef: float = flag("coefficient of the KL penalty against the reference", 0.05, aliases=["--kl_ctl"])
    kl_estimator: Literal["k1", "k2", "k3"] = flag("estimator of the KL penalty", "k1")
    adaptive_kl_target: float | None = flag("KL per sequence that kl_coef is steered to; fixed if not given", None)
    adaptive_kl_horizon: int = flag("prompts over which kl_coef is steered", 10000)
    max_kl: float | None = flag("KL per sequence in nats above which kl_action is taken; off if not given", None)
    kl_action: Literal["warn", "stop"] = flag("above max_kl: warn, or save the models and stop the run", "warn")
    gamma: float = flag("discount per macro action", 1.0)
    lam: float = flag("lambda of GAE, per macro action", 0.95)
    cliprange: float = flag("clip range of the probability ratio", 0.2)
    cliprange_value: float = flag("clip range of the values", 0.2)
    clip_reward_value: float | None = flag("clamp scores to plus and minus this; off if not given", None)
    missing_eos_penalty: float | None = flag("subtracted from the score of a response that was cut", None)
    whiten_advantages: bool = flag("scale advantages to mean 0 and variance 1 over all tokens", False)


@dataclass(kw_only=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    _argument_group_name = "memory of actor, critic and reference"

    actor_gradient_checkpointing: bool = flag("recompute the actor's activations in the backward pass", False)
    critic_gradient_checkpointing: bool = flag("recompute the critic's activations in the backward pass", False)
    actor_zero_stage: ZeroStage | None = flag("ZeRO stage of the actor; zero_stage if not given", None)
    critic_zero_stage: ZeroStage | None = flag("ZeRO stage of the critic; zero_stage if not given", None)
    offload_reference_model: bool = flag("keep the reference and the reward model in CPU memory", False)
    actor_lora_dim: int | None = flag("rank of the actor's LoRA adapters; lora_dim if not given", None)
    critic_lora_dim: int | None = flag("rank of the critic's LoRA adapters; lora_dim if not given", None)
    enable_ema: bool = flag("also keep and save a moving average of the actor", False)


@dataclass(kw_only=True)
class PPOConfig(
    PPOModelFlags,
    ProgramFlags,
    RolloutFlags,
    TerminationFlags,
    PoolingFlags,
    PPOLossFlags,
    PPOMemoryFlags,
    CommonConfig,
):
    """Step 3: PPO over macro actions."""

    step: ClassVar[int] = 3

    lr_scheduler_type: Schedule = flag(SCHEDULE_HELP, "linear")

    def __post_init__(self) -> None:
        """Fill in the values that follow from other flags."""
        super().__post_init__()
        self.actor_zero_stage = self.zero_stage if self.actor_zero_stage is None else self.actor_zero_stage
        self.critic_zero_stage = self.zero_stage if self.critic_zero_stage is None else self.critic_zero_stage
        self.actor_lora_dim = self.lora_dim if self.actor_lora_dim is None else self.actor_lora_dim
        self.critic_lora_dim = self.lora_dim if self.critic_lora_dim is None else self.critic_lora_dim
        if self.eval_prompts is None and self.eval_iters is None:
            self.eval_prompts = EVAL_PROMPTS
        if self.reward_model_name_or_path is None and self.reward_function is None and self.reward_source is None:
            self.reward_model_name_or_path = self.critic_model_name_or_path

    @property
    def metric_name(self) -> str | None:
        """The name of the metric function, which is the name of its metric; None without one."""
        return None if self.metric_function is None else self.metric_function.rpartition(":")[2]

    def validate(self) -> None:
        """Check every flag, alone and against the others, and warn of unwise combinations. Raises UserError."""
        super().validate()
        self._check_numbers()
        self._check_models()
        self._check_rollout_engine()
        self.check_termination()
        self.check_programs()
        if self.eval_prompts is not None and self.eval_iters is not None:
            raise UserError("--eval_prompts and --eval_iters both say how many prompts to evaluate: drop one of them.")
        if self._dilutes_score and self.value_function == "first":
            raise UserError(
                "--macro_reward mean with --value_function first gives the score, which sits on the last token, no"
                " weight at all: add --isolate_last_token."
            )
        self._check_kl()
        self._warn()

    def _check_numbers(self) -> None:
        sizes = ["per_device_generation_batch_size", "generation_batches", "per_device_training_batch_size"]
        sizes += ["per_device_eval_batch_size", "ppo_epochs", "max_prompt_seq_len", "max_answer_seq_len"]
        rules.check_numbers(self, [*sizes, "adaptive_kl_horizon"], rules.AT_LEAST_1)
        rates = ["actor_learning_rate", "critic_learning_rate", "actor_weight_decay", "critic_weight_decay"]
        others = ["eval_prompts", "eval_iters", "top_k", "kl_coef", "missing_eos_penalty"]
        others += ["actor_lora_dim", "critic_lora_dim"]
        rules.check_numbers(self, rates + others, rules.AT_LEAST_0)
        above_0 = ["temperature", "cliprange", "cliprange_value", "clip_reward_value", "adaptive_kl_target", "max_kl"]
        rules.check_numbers(self, [*above_0, "rollout_is_clip"], rules.ABOVE_0)
        rules.check_numbers(self, ["gamma", "lam"], rules.ZERO_TO_ONE)
        share_rule = (lambda share: 0 < share <= 1, "a number above 0 and at most 1")
        rules.check_numbers(self, ["top_p", "vllm_gpu_memory"], share_rule)

    def _check_models(self) -> None:
        names = ["actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path"]
        rules.check_not_empty(self, names)
        sources = ("reward_function", "reward_model_name_or_path", "reward_source")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} both give the score: drop one of them.")
        if self.reward_function is None and self.reward_source is None and self.critic_model_name_or_path is None:
            raise UserError(
                "--critic_model_name_or_path is missing: give the reward model of step 2, or score with"
                " --reward_function module.py:function or --reward_source programs."
            )
        for name, value in (("reward_function", self.reward_function), ("metric_function", self.metric_function)):
            if value is not None:
                rules.check_function_path(name, value)
        if self.metric_name in METRIC_NAMES:
            raise UserError(f"--metric_function: a metric is called {self.metric_name} already; rename the function.")

    def _check_rollout_engine(self) -> None:
        if self.rollout_engine == "vllm":
            if find_spec("vllm") is None:
                raise UserError("--rollout_engine vllm needs vLLM: pip install 'ma-rlhf[vllm]'")
            return
        for name in ("vllm_gpu_memory", "rollout_is_clip"):
            value = getattr(self, name)
            if value != default_of(PPOConfig, name):
                raise UserError(f"--{name} {value} does nothing on its own: add --rollout_engine vllm, or drop it.")

    def _check_kl(self) -> None:
        usual = default_of(PPOConfig, "adaptive_kl_horizon")
        if self.adaptive_kl_target is None and self.adaptive_kl_horizon != usual:
            raise UserError(
                f"--adaptive_kl_horizon {self.adaptive_kl_horizon} does nothing on its own: add --adaptive_kl_target,"
                " or drop it."
            )
        if self.adaptive_kl_target is not None and self.kl_coef == 0:
            raise UserError("--adaptive_kl_target cannot steer --kl_coef 0: give a --kl_coef above 0 to start from.")
        if self.max_kl is None and self.kl_action != default_of(PPOConfig, "kl_action"):
            raise UserError(f"--kl_action {self.kl_action} does nothing on its own: add --max_kl, or drop it.")

    @property
    def _dilutes_score(self) -> bool:
        """Whether the score is averaged with other tokens of its macro action."""
        single_tokens = self.ngram == 1 and self.termination_condition == "fixed"
        return self.macro_reward == "mean" and not self.isolate_last_token and not single_tokens

    def _warn(self) -> None:
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
        """
        own_condition = ":" in self.termination_condition
        return plan.updates_per_rollout == 1 and not self.whiten_advantages and not own_condition

    def num_eval_prompts(self, world_size: int) -> int:
        """How many held-out prompts an evaluation answers on all processes together; 0 = all."""
        if self.eval_iters is None:
            return self.eval_prompts or 0
        return self.eval_iters * self.per_device_eval_batch_size * world_size

    @property
    def zero_stages(self) -> list[int]:
        """The ZeRO stages of actor and critic."""
        return [self.actor_zero_stage or 0, self.critic_zero_stage or 0]

    @property
    def lora_ranks(self) -> list[int]:
        """The LoRA ranks of actor and critic."""
        return [self.actor_lora_dim or 0, self.critic_lora_dim or 0]

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
        )
