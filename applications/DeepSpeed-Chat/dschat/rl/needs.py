# SPDX-License-Identifier: Apache-2.0
"""What each advantage estimator of `dschat.rl.estimators` needs of a run. Without torch, so that flags can read it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The declaration of an estimator.

    Attributes:
        title: of what is trained with it, as model cards say.
        summary: of the flag's help.
        critic: values of states, from a critic that learns the returns.
        group: several responses to each prompt, which are compared with each other.
        macro_actions: advantages differ between the macro actions of a response; else all of its tokens have the same.
        reads: flags that this estimator reads and others do not, where they are refused or of no effect.
    """

    title: str
    summary: str
    critic: bool = False
    group: bool = False
    macro_actions: bool = False
    reads: frozenset[str] = frozenset()


NEEDS = {
    "gae": Needs(
        "PPO with macro actions",
        "generalised advantage estimation with a critic",
        critic=True,
        macro_actions=True,
        reads=frozenset({"gamma", "lam", "value_function", "macro_reward"}),
    ),
    "rloo": Needs(
        "RLOO, without a critic",
        "a response's reward minus the mean of those of the other samples of its prompt, without a critic",
        group=True,
    ),
}
