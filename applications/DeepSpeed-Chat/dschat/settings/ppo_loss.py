# SPDX-License-Identifier: Apache-2.0
"""Flags of step 3's rewards, advantages and losses."""

from dataclasses import dataclass
from typing import Literal

from dschat.settings.logprobs import KLFlags
from dschat.settings.needs import NEEDS, Needs
from dschat.settings.rules import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, ZERO_TO_ONE, flag


@dataclass(kw_only=True)
class PPOLossFlags(KLFlags):
    """Rewards, advantages, losses and optimisers of the two models."""

    _argument_group_name = "PPO"

    advantage_estimator: str = flag(
        "; ".join(f"{name}: {needs.summary}" for name, needs in NEEDS.items()), "gae", choices=tuple(NEEDS)
    )
    actor_learning_rate: float = flag("peak learning rate of the actor", 1.5e-5, AT_LEAST_0)
    critic_learning_rate: float = flag("peak learning rate of the critic", 1.5e-5, AT_LEAST_0)
    actor_weight_decay: float = flag("weight decay of the actor", 0.1, AT_LEAST_0)
    critic_weight_decay: float = flag("weight decay of the critic", 0.1, AT_LEAST_0)
    kl_estimator: Literal["k1", "k2", "k3"] = flag("estimator of the KL penalty", "k1")
    max_kl: float | None = flag(
        "KL per sequence in nats above which kl_action is taken; off if not given", None, ABOVE_0, FREE
    )
    kl_action: Literal["warn", "stop"] = flag(
        "above max_kl: warn, or save the models and stop the run", "warn", on_resume=FREE, only_with="max_kl"
    )
    gamma: float = flag("discount per macro action", 1.0, ZERO_TO_ONE)
    lam: float = flag("lambda of GAE, per macro action", 0.95, ZERO_TO_ONE)
    lam_alpha: float | None = flag(
        "in the place of lam: 1 - 1 / (this x macro actions of the response); 0.05 in VAPO", None, ABOVE_0
    )
    lam_critic: float | None = flag(
        "lambda of the returns that the critic learns; 1 in VAPO; that of the advantages if not given",
        None,
        ZERO_TO_ONE,
    )
    kl_in: Literal["reward", "loss"] = flag(
        "the KL penalty is part of the rewards, or a term of the policy's loss (GRPO)", "reward"
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
    cliprange: float = flag("clip range of the probability ratio", 0.2, ABOVE_0)
    cliprange_high: float | None = flag(
        "clip range of a ratio above 1; 0.28 in DAPO; cliprange if not given", None, ABOVE_0
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
    cliprange_value: float = flag("clip range of the values", 0.2, ABOVE_0)
    clip_reward_value: float | None = flag("clamp scores to plus and minus this; off if not given", None, ABOVE_0)
    missing_eos_penalty: float | None = flag("subtracted from the score of a response that was cut", None, AT_LEAST_0)
    length_buffer: int | None = flag(
        "over the last so many tokens before max_answer_seq_len, length_penalty grows from 0 in a line (DAPO)",
        None,
        AT_LEAST_1,
    )
    length_penalty: float = flag(
        "subtracted from the score of a response of max_answer_seq_len tokens", 1.0, ABOVE_0, only_with="length_buffer"
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
    vf_coef: float = flag("multiplies the loss of the critic, which has an optimiser of its own", 1.0, ABOVE_0)

    @property
    def needs(self) -> Needs:
        """What the advantage estimator needs of the run."""
        return NEEDS[self.advantage_estimator]

    @property
    def normalized_over(self) -> Literal["row", "batch"] | None:
        """What advantages are normalised over, in either spelling."""
        return "batch" if self.whiten_advantages or self.needs.normalized else self.normalize_advantages

    @property
    def scores_are_rescaled(self) -> bool:
        """Whether the policy's loss divides scores by their deviation, but not the KL: their scale does not matter."""
        by_group = self.advantage_estimator in ("grpo", "tempo")
        return by_group or (self.kl_in == "loss" and self.normalized_over is not None)
