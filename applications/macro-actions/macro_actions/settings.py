# SPDX-License-Identifier: Apache-2.0
"""Declarations of the advantage estimators: their settings, and what each needs. Importing them loads no torch.

To add an estimator, write its function and its row of ESTIMATORS in `macro_actions.estimators`, and its row of NEEDS
here; a setting of its own is a field of `EstimatorSettings`. `dschat` makes flags, checks and the parts of a run from
both.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

DESCRIPTION = "description"  # key of a field's metadata that holds its SettingDescription
Bounds = Literal["above 0", "at least 0", "at least 1", "0 to 1"]


@dataclass(frozen=True)
class SettingDescription:
    """A field of `EstimatorSettings` as programs show it to users, who choose its value.

    Attributes:
        summary: what the setting is, in one line.
        bounds: what a number must be; None for other values.
        choices: the values to choose from; empty if the value is free.
        only_with: another setting, without which this one does nothing.
    """

    summary: str
    bounds: Bounds | None = None
    choices: tuple[str, ...] = ()
    only_with: str | None = None


def setting(
    default: Any,
    summary: str,
    bounds: Bounds | None = None,
    choices: tuple[str, ...] = (),
    only_with: str | None = None,
) -> Any:
    """Declare a field of `EstimatorSettings` whose value users choose; see `SettingDescription` for the arguments."""
    return field(default=default, metadata={DESCRIPTION: SettingDescription(summary, bounds, choices, only_with)})


@dataclass(frozen=True)
class EstimatorSettings:
    """Numbers and choices that the estimators read; each estimator reads only some of them.

    Attributes:
        kl_coef: weight of the KL penalty on every token; 0 is no penalty.
        longest: longest response in tokens, see :func:`macro_actions.rewards.penalise_length`.
        samples: K, the responses per prompt, which are consecutive rows; 1 in evaluations.
    """

    section = "credit assignment"  # title where programs show the settings

    # These follow from the run.
    kl_coef: float = 0.0
    longest: int = 0
    samples: int = 1

    # Scores and the KL penalty.
    kl_estimator: str = setting(  # see `macro_actions.rewards.kl_estimate`
        "k1",
        "per-token KL estimator (Schulman): k1 = log-ratio, k2 = half its square, k3 = unbiased and never negative",
        choices=("k1", "k2", "k3"),
    )
    clip_reward_value: float | None = setting(
        None, "clip scores to plus or minus this value; off if not given", "above 0"
    )
    missing_eos_penalty: float | None = setting(
        None, "subtracted from the score of a response without EOS", "at least 0"
    )
    length_buffer: int | None = setting(
        None,
        "soft length penalty of DAPO: grows linearly from 0 to length_penalty over the last N tokens before the"
        " maximum length of a response",
        "at least 1",
    )
    length_penalty: float = setting(
        1.0, "penalty of a response of the maximum length", "above 0", only_with="length_buffer"
    )

    # Generalised advantage estimation.
    gamma: float = setting(1.0, "discount factor per macro action; per turn with rloo_turns", "0 to 1")
    lam: float = setting(1.0, "lambda of GAE, per macro action", "0 to 1")
    lam_alpha: float | None = setting(  # α of `macro_actions.returns.adaptive_lam`
        None,
        "length-adaptive lambda, 1 - 1 / (alpha x macro actions of the response), instead of lam; 0.05 in VAPO",
        "above 0",
    )
    lam_critic: float | None = setting(
        None, "lambda of the critic's returns; 1 in VAPO; lambda of the advantages if not given", "0 to 1"
    )

    # Pooling of tokens into macro actions.
    value_function: str = setting(  # σ, see `macro_actions.segments.value_weights`
        "equal",
        "how the value of a macro action is computed from the values of its tokens (sigma): equal weights, the last"
        " token (unit), weights that grow towards the end (position), or the first token",
        choices=("equal", "unit", "position", "first"),
    )
    macro_reward: str = setting(
        "sum", "how the reward of a macro action is computed from the rewards of its tokens", choices=("sum", "mean")
    )


@dataclass(frozen=True)
class Needs:
    """The declaration of an estimator.

    Attributes:
        title: name of what is trained with it, as on model cards.
        summary: what the advantage is, in one line.
        critic: values of states, from a critic that learns the returns.
        group: several responses to each prompt, which are compared with each other.
        macro_actions: advantages differ between the macro actions of a response; else all of its tokens have the same.
        segment_values: values of the states before macro actions, which completions from there measure.
        normalized: advantages are always scaled to mean 0 and variance 1 over all tokens of a rollout.
        kl_apart: the KL penalty is added to the advantages as it is; only what scores give is compared and normalised.
        gates_critic: the critic's values are used only while they explain some of the variance of the returns, so that
            the advantages of a response depend on all responses of the rollout.
        scores: scores are read, from some source.
        rescales_scores: scores are divided by their deviation, so that their scale does not matter.
        reads: settings that not every estimator reads. With an estimator that does not name it, `dschat` refuses such
            a setting if it changes rewards (gamma, macro_reward), and warns of it otherwise.
    """

    title: str
    summary: str
    critic: bool = False
    group: bool = False
    macro_actions: bool = False
    segment_values: bool = False
    normalized: bool = False
    kl_apart: bool = False
    gates_critic: bool = False
    scores: bool = True
    rescales_scores: bool = False
    reads: frozenset[str] = frozenset()


NEEDS = {
    "gae": Needs(
        "PPO with macro actions",
        "generalised advantage estimation with a critic",
        critic=True,
        macro_actions=True,
        reads=frozenset({"gamma", "lam", "lam_alpha", "lam_critic", "value_function", "macro_reward"}),
    ),
    "sae": Needs(
        "PPO with segmental advantage estimation",
        "as gae over tokens, with lambda at the ends of macro actions alone and 1 inside them",
        critic=True,
        macro_actions=True,
        reads=frozenset({"gamma", "lam", "lam_alpha", "lam_critic"}),
    ),
    "evpo": Needs(
        "PPO with macro actions and EVPO's gate",
        "as gae while the critic explains some of the variance of the returns, else return minus the mean return of"
        " the rollout",
        critic=True,
        macro_actions=True,
        gates_critic=True,
        reads=frozenset({"gamma", "lam", "lam_alpha", "lam_critic", "value_function", "macro_reward"}),
    ),
    "rloo": Needs(
        "RLOO, without a critic",
        "reward minus the mean reward of the prompt's other responses, without a critic",
        group=True,
    ),
    "rloo_turns": Needs(
        "RLOO by turns, without a critic",
        "return from each turn on minus the mean of it over the prompt's other responses that reached the turn",
        group=True,
        reads=frozenset({"gamma"}),
    ),
    "grpo": Needs(
        "GRPO, without a critic",
        "score minus the mean score of the prompt's responses, divided by their standard deviation",
        group=True,
        kl_apart=True,
        rescales_scores=True,
    ),
    "dr_grpo": Needs(
        "Dr. GRPO, without a critic", "score minus the mean score of the prompt's responses", group=True, kl_apart=True
    ),
    "reinforce_pp": Needs(
        "REINFORCE++, without a critic",
        "sum of the rewards from the macro action on, normalised over the batch",
        macro_actions=True,
        normalized=True,
        reads=frozenset({"gamma", "macro_reward"}),
    ),
    "reinforce_pp_baseline": Needs(
        "REINFORCE++ with the mean of the group as baseline",
        "as dr_grpo, normalised over the batch",
        group=True,
        kl_apart=True,
        normalized=True,
    ),
    "tempo": Needs(
        "TEMPO, without a critic",
        "as grpo, plus the change in the mean score of the responses with the same prefix",
        group=True,
        kl_apart=True,
        macro_actions=True,
        rescales_scores=True,
    ),
    "segment_mc": Needs(
        "VinePPO by macro actions, without a critic",
        "change in the mean score of mc_samples completions between the beginning and the end of a macro action",
        macro_actions=True,
        segment_values=True,
    ),
    "distillation": Needs(
        "On-policy distillation",
        "the teacher's log-ratio of the macro action, less its KL penalty, without scores and later rewards",
        macro_actions=True,
        scores=False,
        reads=frozenset({"macro_reward"}),
    ),
}
