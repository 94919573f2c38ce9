# SPDX-License-Identifier: Apache-2.0
"""What is read from learning curves: one number per PPO iteration, (N,) arrays.

Numbers are smoothed as in the product's reports, see `dschat.run_report.summary`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dschat.run_report.summary import final, first_at, trailing_mean

Curve = npt.NDArray[np.float64]

KL_LEVELS = (5.0, 10.0, 14.0, 20.0)  # nats per response
RESAMPLES, SEED = 9999, 1234  # of a bootstrap


@dataclass(frozen=True)
class Interval:
    """A statistic over seeds with its 95 % bootstrap interval; without one where all seeds agree or there is one."""

    value: float
    low: float | None
    high: float | None
    seeds: int

    def text(self, digits: int) -> str:
        """`2.31 [1.80, 2.95]`."""
        value = f"{self.value:.{digits}f}"
        return value if self.low is None else f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def speed_up(gold: Curve, baseline: Curve) -> float:
    """How many times fewer updates than the baseline, to the lower of both final scores, which both have reached."""
    level = min(final(gold), final(baseline))
    theirs, ours = updates_to(baseline, level), updates_to(gold, level)
    assert theirs is not None and ours is not None
    return theirs / ours


def updates_to(gold: Curve, level: float) -> int | None:
    """Number of PPO iterations after which the trailing mean is at a level; None if it never is."""
    place = first_at(gold, level)
    return None if place is None else place + 1


def at_kl(gold: Curve, kl: Curve, level: float) -> float | None:
    """The smoothed gold score where the smoothed KL first passes a level; None if it stays below."""
    smooth_kl, smooth_gold = trailing_mean(kl), trailing_mean(gold)
    above = smooth_kl >= level
    if not above.any():
        return None
    i = int(above.argmax())
    if i == 0:
        return float(smooth_gold[0])
    share = (level - smooth_kl[i - 1]) / (smooth_kl[i] - smooth_kl[i - 1])
    return float(smooth_gold[i - 1] + share * (smooth_gold[i] - smooth_gold[i - 1]))


def over_seeds(values: Sequence[float], statistic: Callable[..., Any] = np.mean) -> Interval | None:
    """A statistic with a percentile bootstrap over seeds; None without a value.

    Args:
        values: one per seed.
        statistic: np.mean or np.median.
    """
    from scipy.stats import bootstrap

    if not values:
        return None
    value = float(statistic(values))
    if len(set(values)) < 2:
        return Interval(value, None, None, len(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # resamples of few seeds are often all alike
        found = bootstrap(
            (np.asarray(values),),
            statistic,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    return Interval(value, float(found.low), float(found.high), len(values))
