# SPDX-License-Identifier: Apache-2.0
"""What each advantage estimator of `macro_actions.estimators` needs of a run, and the flags of their settings.

To add an estimator, write its function and row of ESTIMATORS there, and its row of NEEDS here; a setting of its own is
a field of `macro_actions.settings.EstimatorSettings` and a row of ESTIMATOR_FLAGS.
"""

from dataclasses import dataclass

from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, ZERO_TO_ONE, Flag, FlagTable


@dataclass(frozen=True)
class Needs:
    """The declaration of an estimator.

    Attributes:
        title: title of what is trained with it, as model cards say.
        summary: summary of the flag's help.
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
        reads: flags that not every estimator reads. With an estimator that does not name it, such a flag is refused if
            it changes rewards (gamma, macro_reward), and warned of otherwise.
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
        "Dr. GRPO, without a critic",
        "score minus the mean score of the prompt's responses",
        group=True,
        kl_apart=True,
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


def flags_of_some() -> list[str]:
    """Flags that some estimators read and others do not, in order."""
    names: dict[str, None] = {}
    for needs in NEEDS.values():
        names |= dict.fromkeys(sorted(needs.reads))
    return list(names)


# Field of EstimatorSettings → its flag. Its other fields follow from the run.
ESTIMATOR_FLAGS = FlagTable(
    "credit assignment",
    {
        "value_function": Flag(
            "how the value of a macro action is computed from the values of its tokens (sigma): equal weights, the"
            " last token (unit), weights that grow towards the end (position), or the first token",
            options={"choices": ("equal", "unit", "position", "first")},
        ),
        "macro_reward": Flag(
            "how the reward of a macro action is computed from the rewards of its tokens",
            options={"choices": ("sum", "mean")},
        ),
        "kl_estimator": Flag(
            "per-token KL estimator (Schulman): k1 = log-ratio, k2 = half its square, k3 = unbiased and never"
            " negative",
            options={"choices": ("k1", "k2", "k3")},
        ),
        "gamma": Flag("discount factor per macro action; per turn with rloo_turns", ZERO_TO_ONE),
        "lam": Flag("lambda of GAE, per macro action", ZERO_TO_ONE),
        "lam_alpha": Flag(
            "length-adaptive lambda, 1 - 1 / (alpha x macro actions of the response), instead of lam; 0.05 in VAPO",
            ABOVE_0,
        ),
        "lam_critic": Flag(
            "lambda of the critic's returns; 1 in VAPO; lambda of the advantages if not given", ZERO_TO_ONE
        ),
        "clip_reward_value": Flag("clip scores to plus or minus this value; off if not given", ABOVE_0),
        "missing_eos_penalty": Flag("subtracted from the score of a response without EOS", AT_LEAST_0),
        "length_buffer": Flag(
            "soft length penalty of DAPO: grows linearly from 0 to length_penalty over the last N tokens before"
            " max_answer_seq_len",
            AT_LEAST_1,
        ),
        "length_penalty": Flag(
            "penalty of a response of max_answer_seq_len tokens", ABOVE_0, only_with="length_buffer"
        ),
    },
)
