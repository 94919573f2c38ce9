# SPDX-License-Identifier: Apache-2.0
"""Win rate at equal length: what a logistic regression on the difference in length gives where that is zero."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dschat.common.statistics import POINTS, Rate

FEWEST = 5  # points that either model must have for the regression: below, its errors are not to be trusted


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate; None where it cannot be estimated."""

    rate: Rate | None  # probability that the first model wins at equal length, ties as half
    slope: float | None  # coefficient of the length term: positive where longer responses win more often
    remark: str = ""  # why there is no rate, or what to know about it


def length_controlled(
    verdicts: Sequence[str], differences: Sequence[float], items: Sequence[Hashable]
) -> LengthControlled:
    """Fits logit P(first wins) = a + b · tanh(difference / sd of the differences) and gives P at difference 0.

    As in length-controlled AlpacaEval (Dubois et al. 2024), for one pair of models and without its term for the
    prompt. A tie is half a win. The interval is that of a ± 1.96 standard errors, robust, clustered by item.

    Args:
        verdicts: (N,) of A, B, tie; others are left out.
        differences: (N,) length of the first response minus length of the second.
        items: (N,) what each verdict is about.
    """
    import numpy as np

    kept = [index for index, verdict in enumerate(verdicts) if verdict in POINTS]
    points = np.array([POINTS[verdicts[index]] for index in kept])
    gaps = np.array([differences[index] for index in kept], dtype=np.float64)
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items[index] for index in kept))}
    fewer = min(points.sum(), (1 - points).sum())
    if fewer < FEWEST:
        return _none(f"too few points for one of the models: {fewer:g}, the regression needs {FEWEST}")
    if points.min() == points.max():
        return LengthControlled(Rate(0.5), 0.0, "every verdict is a tie")
    if len(set(gaps.tolist())) < 2:
        return _none("every pair differs by the same length")
    terms = np.tanh(gaps / gaps.std())
    if _separated(points, terms):
        return _none("length tells wins from losses without exception")
    if len(numbers) < 2 * FEWEST:
        return _none(f"too few items: {len(numbers)}, the regression needs {2 * FEWEST}")
    fitted = _fit(points, terms, np.array([numbers[items[index]] for index in kept]))
    if fitted is None:
        return _none("length tells wins from losses almost without exception")
    aside = "" if gaps.min() <= 0 <= gaps.max() else "extrapolated: one model's responses are always the longer ones"
    return LengthControlled(*fitted, aside)


def _none(reason: str) -> LengthControlled:
    return LengthControlled(None, None, reason)


def _separated(points: Any, terms: Any) -> bool:
    """Whether some length splits what was won from what was lost: the coefficients grow without end then.

    Their ranges must overlap by more than a point. Ties between wins and losses would keep the coefficients finite,
    but say little about them, and are left out; where nothing was won, or nothing lost, ties take that side.
    """
    won, lost = terms[points == points.max()], terms[points == points.min()]
    return bool(won.min() >= lost.max() or lost.min() >= won.max())


def _fit(points: Any, terms: Any, groups: Any) -> tuple[Rate, float] | None:
    """Rate at 0 and slope; None where the search for the coefficients does not settle."""
    import numpy as np
    from scipy.special import expit
    from statsmodels.discrete.discrete_model import Logit
    from statsmodels.tools.sm_exceptions import ConvergenceWarning, PerfectSeparationWarning

    unsettled = (ConvergenceWarning, PerfectSeparationWarning, RuntimeWarning)
    with warnings.catch_warnings():
        for warning in unsettled:
            warnings.simplefilter("error", warning)
        try:
            model = Logit(points, np.column_stack([np.ones_like(terms), terms]))
            result = model.fit(disp=False, cov_type="cluster", cov_kwds={"groups": groups})
        except (*unsettled, np.linalg.LinAlgError):
            return None
    at_zero, slope = result.params
    low, high = result.conf_int(alpha=0.05)[0]
    if not np.isfinite([low, high, slope]).all():
        return None
    return Rate(*(float(expit(logit)) for logit in (at_zero, low, high))), float(slope)
