# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3's models, advantages, losses and optimisers."""

from dataclasses import dataclass
from typing import Literal

from dschat.settings.common import ZeroStage
from dschat.settings.estimators import NEEDS, Needs
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, flag


@dataclass(kw_only=True, frozen=True)
class PPOModelFlags:
    """Models."""

    section = "models"

    actor_model_name_or_path: str = flag(
        "model of step 1: the actor starts from it, the frozen reference is it",
        range=NOT_EMPTY,
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


@dataclass(kw_only=True, frozen=True)
class PPOMemoryFlags:
    """Memory of the four models."""

    section = "memory of actor, critic and reference"

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


@dataclass(kw_only=True, frozen=True)
class AdvantageFlags:
    """How advantages are estimated, which tokens count, and what is normalised."""

    section = "PPO"

    advantage_estimator: str = flag(
        "; ".join(f"{name}: {needs.summary}" for name, needs in NEEDS.items()), "gae", choices=NEEDS
    )
    mc_samples: int = flag(
        "completions of a response from where each of its macro actions begins",
        4,
        AT_LEAST_1,
        only_with="advantage_estimator segment_mc",
    )
    mc_max_segments: int = flag(
        "the most macro actions of a response; neighbours are joined where there are more",
        8,
        AT_LEAST_1,
        only_with="advantage_estimator segment_mc",
    )
    drop_equal_groups: bool = flag(
        "leave prompts out of the policy's loss whose responses all have the same score, as it was given", False
    )
    refill_rounds: int = flag(
        "with drop_equal_groups: at most so many times in an iteration, further prompts are answered, as many as a"
        " rollout has, for the places of those left out (DAPO)",
        0,
        AT_LEAST_0,
    )
    max_token_probability: float | None = flag(
        "leave tokens out of the policy's loss that were likelier than this when they were drawn; 0.9 in SPO",
        None,
        (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    )
    normalize_scores: bool = flag(
        "train on scores minus the mean of all scores so far, divided by their standard deviation, in which"
        " missing_eos_penalty, length_penalty and clip_reward_value then count",
        False,
    )
    normalize_advantages: Literal["row", "batch"] | None = flag(
        "scale advantages to mean 0 and variance 1 over the tokens of each response (row), or of all (batch; always"
        " of reinforce_pp and reinforce_pp_baseline)",
        None,
    )
    whiten_advantages: bool = flag("another spelling of --normalize_advantages batch", False)

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
        "probability ratio per token; per macro action (product), or its geometric mean; or that of the whole response"
        " (GSPO)",
        "token",
    )
    loss_mean: Literal["token", "macro", "response", "length"] | None = flag(
        "the policy's loss is a mean over tokens (DAPO), over macro actions, over responses (GRPO), or the sum over"
        " tokens divided by a constant length (Dr. GRPO); token if not given, but macro with policy_ratio macro, and"
        " response with sequence_mean",
        None,
    )
    cliprange: float = flag("clip range of the probability ratio", 0.2, ABOVE_0)
    cliprange_high: float | None = flag(
        "clip range of a ratio above 1; 0.28 in DAPO; cliprange if not given", None, ABOVE_0
    )
    cliprange_value: float = flag("clip range of the values", 0.2, ABOVE_0)
    vf_coef: float = flag("multiplies the loss of the critic, which has an optimiser of its own", 1.0, ABOVE_0)
    kl_in: Literal["reward", "loss"] = flag(
        "the KL penalty is part of the rewards, or a term of the policy's loss (GRPO)", "reward"
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


@dataclass(kw_only=True, frozen=True)
class AlarmFlags:
    """What is done when the policy goes too far."""

    section = "PPO"

    max_kl: float | None = flag(
        "KL per sequence in nats above which kl_action is taken; off if not given", None, ABOVE_0, FREE
    )
    kl_action: Literal["warn", "stop"] = flag(
        "above max_kl: warn, or save the models and stop the run", "warn", on_resume=FREE, only_with="max_kl"
    )
