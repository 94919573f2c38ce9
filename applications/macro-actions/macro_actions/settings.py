# SPDX-License-Identifier: Apache-2.0
"""The settings of the advantage estimators, apart from their functions: reading them loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorSettings:
    """What the estimators depend on; each reads what it needs.

    Attributes:
        kl_coef, kl_estimator, clip_reward_value: see :func:`macro_actions.rewards.token_rewards`.
        missing_eos_penalty: subtracted from the score of a response that was cut, if given.
        longest, length_buffer, length_penalty: see :func:`macro_actions.rewards.penalise_length`.
        gamma, lam: of GAE, counted in macro steps.
        lam_alpha: α of :func:`adaptive_lam`, in the place of lam; None = lam.
        lam_critic: λ of the returns that the critic learns; that of the advantages when None.
        value_function: σ, see :func:`macro_actions.segments.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the token rewards of a macro action.
        samples: K, responses of a prompt, which are rows in succession; 1 in evaluations.
    """

    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    clip_reward_value: float | None = None
    missing_eos_penalty: float | None = None
    longest: int = 0
    length_buffer: int | None = None
    length_penalty: float = 1.0
    gamma: float = 1.0
    lam: float = 1.0
    lam_alpha: float | None = None
    lam_critic: float | None = None
    value_function: str = "equal"
    macro_reward: str = "sum"
    samples: int = 1
