# SPDX-License-Identifier: Apache-2.0
"""The settings of the advantage estimators, apart from their functions: reading them loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorSettings:
    """Numbers and choices that the estimators read; each estimator reads only some of them.

    Attributes:
        kl_coef: weight of the KL penalty on every token; 0 is no penalty.
        kl_estimator: ``k1``, ``k2`` or ``k3``, see :func:`macro_actions.rewards.kl_estimate`.
        clip_reward_value: scores are clamped to ± this value; not at all with ``None``.
        missing_eos_penalty: subtracted from the score of a response without EOS; nothing with ``None``.
        longest: longest response in tokens, see :func:`macro_actions.rewards.penalise_length`.
        length_buffer: tokens over which the length penalty grows; no length penalty with ``None``.
        length_penalty: largest length penalty.
        gamma: discount per macro action.
        lam: λ of GAE per macro action.
        lam_alpha: α of :func:`macro_actions.estimators.adaptive_lam`, which replaces ``lam``; ``lam`` is used with
            ``None``.
        lam_critic: λ of the critic's returns; the λ of the advantages with ``None``.
        value_function: σ, see :func:`macro_actions.segments.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the token rewards of a macro action.
        samples: K, the responses per prompt, which are consecutive rows; 1 in evaluations.
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
