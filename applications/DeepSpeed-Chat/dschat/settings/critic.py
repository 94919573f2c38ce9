# SPDX-License-Identifier: Apache-2.0
"""Flags of a critic that learns more of a rollout than the actor does, and the rules of step 3 about them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.settings.flags import ABOVE_0, AT_LEAST_1, flag
from dschat.settings.rules import Check, Rule, Rules


@dataclass(kw_only=True, frozen=True)
class CriticFlags:
    """How a critic is trained that has more to learn from a rollout than the actor."""

    section = "the critic's updates"

    critic_minibatches: int = flag(
        "updates of the critic on the rows of each update of the actor, on a part of the rows each; 4 in EasyPPO",
        1,
        AT_LEAST_1,
    )
    critic_epochs: int | None = flag(
        "passes of the critic over each rollout; ppo_epochs if not given; 2 in SAO", None, AT_LEAST_1
    )
    critic_group_weight: float | None = flag(
        "weight of a prompt in the critic's loss: 1 / its responses' variance of scores to this power, relative to the"
        " mean weight; 0.5 in EasyPPO; off if not given",
        None,
        ABOVE_0,
    )
    critic_group_weight_min: float = flag(
        "least variance to that power, so that prompts with equal scores do not weigh without end",
        0.25,
        ABOVE_0,
        only_with="critic_group_weight",
    )
    value_head: Literal["linear", "hl_gauss"] = flag(
        "the critic's head: a number, trained by squared error (linear); or a distribution over 101 bins of bounded"
        " returns, trained by cross-entropy, whose expectation is the value (hl_gauss)",
        "linear",
    )
    value_range: list[float] | None = flag(
        "LOW HIGH: bounds of the returns, KL and other penalties included; -0.1 1.1 for returns from 0 to 1",
        None,
        only_with="value_head hl_gauss",
    )
    critic_trains: Literal["all", "mlp"] = flag(
        "weights of the critic that are trained: all, or those of its MLPs and value head alone (mlp, as in SAO)",
        "all",
    )
    cut_answers: Literal["train", "critic_only"] = flag(
        "what a response without an end token trains: actor and critic (train), or the critic alone (critic_only, as"
        " in EasyPPO)",
        "train",
    )


def _check_ratio_mask(config: Any) -> None:
    """Raises UserError unless --rollout_is_mask is a range of ratios with 1 inside, and the only correction."""
    limits = config.loss.rollout_is_mask
    if limits is None:
        return
    if len(limits) != 2 or not limits[0] <= 1 <= limits[1]:
        words = " ".join(f"{limit:g}" for limit in limits)
        raise UserError(f"--rollout_is_mask {words}: give two ratios with 1 between them, such as 0.2 4.")
    if config.vllm.rollout_is_clip is not None:
        raise UserError(
            "--rollout_is_mask with --rollout_is_clip: the ratio to the sampling policy is either masked or truncated."
            " Drop one of them."
        )


def _check_value_range(config: Any) -> None:
    """Raises UserError unless --value_head hl_gauss has a range of returns."""
    limits = config.critic.value_range or []
    is_range = len(limits) == 2 and -math.inf < limits[0] < limits[1] < math.inf
    if config.critic.value_head != "linear" and not is_range:
        raise UserError(
            "--value_head hl_gauss has bins between two bounds of the returns: give --value_range LOW HIGH, the lower"
            " one first, such as -0.1 1.1 for scores from 0 to 1 with --kl_in loss. Other KL penalties lower returns."
        )


CRITIC_RULES: Rules = (
    Check(_check_value_range),
    Rule(
        lambda config: (
            config.critic.value_head != "linear" and (config.memory.share_base or not config.finetuning.merge_lora)
        ),
        "--value_head {value_head} gives the critic a head of another size, which no adapter brings to a base: give"
        " neither --share_base nor --no_merge_lora.",
    ),
    Rule(
        lambda config: config.critic.critic_group_weight is not None and config.rollouts.samples_per_prompt < 2,
        "--critic_group_weight reads how the scores of a prompt's responses vary: give --samples_per_prompt of at"
        " least 2.",
    ),
    Check(_check_ratio_mask),
    Rule(
        lambda config: (
            config.critic.critic_trains == "mlp"
            and bool(config.memory.critic_lora_dim or config.finetuning.finetune_mode == "last_layer")
        ),
        "--critic_trains mlp trains whole MLPs of the critic: give --critic_lora_dim 0, without --finetune_mode"
        " last_layer, or drop the flag.",
    ),
)
