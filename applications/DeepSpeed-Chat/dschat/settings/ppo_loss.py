# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3's models, advantages, losses and optimisers."""

from dataclasses import dataclass
from typing import Literal

from dschat.settings.common import ZeroStage
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, UP_TO_1, flag
from macro_actions.settings import NEEDS, Needs


@dataclass(kw_only=True, frozen=True)
class PPOModelFlags:
    """Models."""

    section = "models"

    actor_model_name_or_path: str = flag(
        "model from step 1: initialises the actor, and is the frozen reference",
        range=NOT_EMPTY,
        on_resume=FREE,
        path=True,
    )
    critic_model_name_or_path: str | None = flag(
        "reward model from step 2, which initialises the critic; optional if scores come from another source: the"
        " critic is then the actor with a zero value head",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
    )


@dataclass(kw_only=True, frozen=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    section = "memory of actor, critic and reference"

    actor_gradient_checkpointing: bool | None = flag(
        "gradient checkpointing of the actor; gradient_checkpointing if not given", None, on_resume=FREE
    )
    critic_gradient_checkpointing: bool | None = flag(
        "gradient checkpointing of the critic; gradient_checkpointing if not given", None, on_resume=FREE
    )
    actor_zero_stage: ZeroStage | None = flag("ZeRO stage of the actor; zero_stage if not given", None)
    critic_zero_stage: ZeroStage | None = flag("ZeRO stage of the critic; zero_stage if not given", None)
    offload_reference_model: bool = flag("keep the reference, reward and teacher models in CPU memory", False)
    actor_lora_dim: int | None = flag("rank of the actor's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    critic_lora_dim: int | None = flag("rank of the critic's LoRA adapters; lora_dim if not given", None, AT_LEAST_0)
    share_base: bool = flag(
        "with LoRA: keep one frozen copy of the actor's base model in memory for actor, critic, reference, and a"
        " reward model that is an adapter on it",
        False,
    )
    enable_ema: bool = flag("also keep and save an exponential moving average of the actor", False)


@dataclass(kw_only=True, frozen=True)
class AdvantageFlags:
    """How advantages are estimated, which tokens count, and what is normalised."""

    section = "PPO"

    advantage_estimator: str = flag(
        "; ".join(f"{name}: {needs.summary}" for name, needs in NEEDS.items()), "gae", choices=NEEDS
    )
    mc_samples: int = flag(
        "completions that are sampled from the beginning of each macro action to estimate its value",
        4,
        AT_LEAST_1,
        only_with="advantage_estimator segment_mc",
    )
    mc_max_segments: int = flag(
        "most macro actions per response; neighbouring ones are joined if there are more",
        8,
        AT_LEAST_1,
        only_with="advantage_estimator segment_mc",
    )
    drop_equal_groups: bool = flag(
        "exclude prompts whose responses all have the same score from the policy loss", False
    )
    refill_rounds: int = flag(
        "with drop_equal_groups: replace excluded prompts by generating for more prompts, as many as a rollout has,"
        " at most this many times per iteration (dynamic sampling of DAPO)",
        0,
        AT_LEAST_0,
        only_with="drop_equal_groups",
    )
    max_token_probability: float | None = flag(
        "exclude tokens from the policy loss whose probability was higher than this when they were sampled; 0.9 in"
        " SPO",
        None,
        UP_TO_1,
    )
    normalize_scores: bool = flag(
        "normalise scores by the running mean and standard deviation of all scores so far; missing_eos_penalty,"
        " length_penalty and clip_reward_value then apply to normalised scores",
        False,
    )
    normalize_advantages: Literal["row", "batch"] | None = flag(
        "normalise advantages to mean 0 and variance 1 over the tokens of each response (row) or of the whole rollout"
        " (batch; always with reinforce_pp and reinforce_pp_baseline)",
        None,
    )
    whiten_advantages: bool = flag("same as --normalize_advantages batch", False)

    @property
    def needs(self) -> Needs:
        """What the advantage estimator needs of the run."""
        return NEEDS[self.advantage_estimator]

    @property
    def normalized_over(self) -> Literal["row", "batch"] | None:
        """What advantages are normalised over, in either spelling."""
        if self.whiten_advantages or self.needs.normalized:
            return "batch"
        return self.normalize_advantages


@dataclass(kw_only=True, frozen=True)
class LossFlags:
    """The losses of actor and critic."""

    section = "PPO"

    policy_ratio: Literal["token", "macro", "macro_mean", "sequence_mean"] = flag(
        "probability ratio per token (token), per macro action as the product over its tokens (macro) or their"
        " geometric mean (macro_mean), or per response as the geometric mean (sequence_mean, GSPO)",
        "token",
    )
    loss_mean: Literal["token", "macro", "response", "length"] | None = flag(
        "average the policy loss over tokens (token, DAPO), macro actions (macro), or responses (response, GRPO), or"
        " divide the sum over tokens by a constant length (length, Dr. GRPO); if not given: macro with policy_ratio"
        " macro, response with sequence_mean, otherwise token",
        None,
    )
    cliprange: float = flag("clip range of the probability ratio (epsilon)", 0.2, ABOVE_0)
    cliprange_high: float | None = flag(
        "clip range for ratios above 1; 0.28 in DAPO; cliprange if not given", None, ABOVE_0
    )
    rollout_is_mask: list[float] | None = flag(
        "LOW HIGH: instead of clipping, leave out of the policy loss what has a ratio of the trained policy to the"
        " sampling one outside of these, by token, macro action or response as policy_ratio says; 0.2 4 with SAO's"
        " masks",
        None,
        AT_LEAST_0,
    )
    cliprange_value: float = flag("clip range of the value function", 0.2, ABOVE_0)
    vf_coef: float = flag("weight of the critic's loss; the critic has an optimiser of its own", 1.0, ABOVE_0)
    kl_in: Literal["reward", "loss"] = flag(
        "add the KL penalty to the rewards (reward), or to the policy loss (loss, as in GRPO)", "reward"
    )

    @property
    def mean_of_loss(self) -> str:
        """--loss_mean, or what follows from --policy_ratio."""
        if self.loss_mean is not None:
            return self.loss_mean
        return {"macro": "macro", "sequence_mean": "response"}.get(self.policy_ratio, "token")

    @property
    def is_by_macro_action(self) -> bool:
        """Whether the loss depends on macro actions, whatever the advantages are."""
        return self.policy_ratio in ("macro", "macro_mean") or self.mean_of_loss == "macro"


@dataclass(kw_only=True, frozen=True)
class OptimizerFlags:
    """The optimisers of actor and critic."""

    section = "PPO"

    actor_learning_rate: float = flag("peak learning rate of the actor", 1.5e-5, AT_LEAST_0)
    critic_learning_rate: float = flag("peak learning rate of the critic", 1.5e-5, AT_LEAST_0)
    actor_weight_decay: float = flag("weight decay of the actor", 0.1, AT_LEAST_0)
    critic_weight_decay: float = flag("weight decay of the critic", 0.1, AT_LEAST_0)
    critic_warmup_updates: int = flag(
        "train the critic alone in the first N updates, on rollouts of the unchanged policy; the actor's learning-rate"
        " schedule starts after them",
        0,
        AT_LEAST_0,
    )


@dataclass(kw_only=True, frozen=True)
class AlarmFlags:
    """What is done when the policy goes too far."""

    section = "PPO"

    max_kl: float | None = flag(
        "KL to the reference in nats per response, above which kl_action is taken; if not given, 20, or 1 per token of"
        " responses under 20 tokens, or 0.1 per token of responses over 200",
        None,
        ABOVE_0,
        FREE,
    )
    kl_action: Literal["warn", "stop"] = flag(
        "action where the KL is too large: warn, or save the models and stop the run", "warn", on_resume=FREE
    )
