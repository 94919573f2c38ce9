# SPDX-License-Identifier: Apache-2.0
"""The flags of step 3's rewards, advantages, losses and optimisers."""

from dataclasses import dataclass
from typing import Literal

from dschat.config import rules
from dschat.config.rules import default_of, flag
from dschat.errors import UserError
from dschat.rl.needs import NEEDS, Needs


@dataclass(kw_only=True)
class PPOLossFlags:
    """Rewards, advantages, losses and optimisers of the two models."""

    _argument_group_name = "PPO"

    advantage_estimator: str = flag(
        "; ".join(f"{name}: {needs.summary}" for name, needs in NEEDS.items()), "gae", choices=tuple(NEEDS)
    )
    actor_learning_rate: float = flag("highest learning rate of the actor", 1.5e-5)
    critic_learning_rate: float = flag("highest learning rate of the critic", 1.5e-5)
    actor_weight_decay: float = flag("weight decay of the actor", 0.1)
    critic_weight_decay: float = flag("weight decay of the critic", 0.1)
    kl_coef: float = flag("coefficient of the KL penalty against the reference", 0.05, aliases=["--kl_ctl"])
    kl_estimator: Literal["k1", "k2", "k3"] = flag("estimator of the KL penalty", "k1")
    adaptive_kl_target: float | None = flag("KL per sequence that kl_coef is steered to; fixed if not given", None)
    adaptive_kl_horizon: int = flag("responses over which kl_coef is steered", 10000)
    max_kl: float | None = flag("KL per sequence in nats above which kl_action is taken; off if not given", None)
    kl_action: Literal["warn", "stop"] = flag("above max_kl: warn, or save the models and stop the run", "warn")
    gamma: float = flag("discount per macro action", 1.0)
    lam: float = flag("lambda of GAE, per macro action", 0.95)
    cliprange: float = flag("clip range of the probability ratio", 0.2)
    cliprange_value: float = flag("clip range of the values", 0.2)
    clip_reward_value: float | None = flag("clamp scores to plus and minus this; off if not given", None)
    missing_eos_penalty: float | None = flag("subtracted from the score of a response that was cut", None)
    normalize_scores: bool = flag(
        "train on scores minus the mean of all scores so far, divided by their standard deviation, in which"
        " missing_eos_penalty and clip_reward_value then count",
        False,
    )
    normalize_advantages: Literal["row", "batch"] | None = flag(
        "scale advantages to mean 0 and variance 1 over the tokens of each response (row), or of all (batch)", None
    )
    whiten_advantages: bool = flag("another spelling of --normalize_advantages batch", False)
    vf_coef: float = flag("multiplies the loss of the critic, which has an optimiser of its own", 1.0)

    def check_losses(self) -> None:
        """Check these flags, alone and against each other. Raises UserError."""
        rates = ["actor_learning_rate", "critic_learning_rate", "actor_weight_decay", "critic_weight_decay"]
        rules.check_numbers(self, [*rates, "kl_coef", "missing_eos_penalty"], rules.AT_LEAST_0)
        rules.check_numbers(self, ["adaptive_kl_horizon"], rules.AT_LEAST_1)
        above_0 = ["cliprange", "cliprange_value", "clip_reward_value", "adaptive_kl_target", "max_kl", "vf_coef"]
        rules.check_numbers(self, above_0, rules.ABOVE_0)
        rules.check_numbers(self, ["gamma", "lam"], rules.ZERO_TO_ONE)
        self._check_kl()
        self._check_normalization()

    @property
    def needs(self) -> Needs:
        """What the advantage estimator needs of the run."""
        return NEEDS[self.advantage_estimator]

    @property
    def normalized_over(self) -> Literal["row", "batch"] | None:
        """What advantages are normalised over, in either spelling."""
        return "batch" if self.whiten_advantages else self.normalize_advantages

    def _check_normalization(self) -> None:
        if self.whiten_advantages and self.normalize_advantages == "row":
            raise UserError("--whiten_advantages contradicts --normalize_advantages row: drop one of them.")
        if self.normalized_over == "row" and not self.needs.macro_actions:
            raise UserError(
                f"--normalize_advantages row: --advantage_estimator {self.advantage_estimator} gives all tokens of a"
                " response the same advantage, of which nothing would be left. Use batch."
            )

    def _check_kl(self) -> None:
        usual = default_of(PPOLossFlags, "adaptive_kl_horizon")
        if self.adaptive_kl_target is None and self.adaptive_kl_horizon != usual:
            raise UserError(
                f"--adaptive_kl_horizon {self.adaptive_kl_horizon} does nothing on its own: add --adaptive_kl_target,"
                " or drop it."
            )
        if self.adaptive_kl_target is not None and self.kl_coef == 0:
            raise UserError("--adaptive_kl_target cannot steer --kl_coef 0: give a --kl_coef above 0 to start from.")
        if self.max_kl is None and self.kl_action != default_of(PPOLossFlags, "kl_action"):
            raise UserError(f"--kl_action {self.kl_action} does nothing on its own: add --max_kl, or drop it.")
