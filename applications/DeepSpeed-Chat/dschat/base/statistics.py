# SPDX-License-Identifier: Apache-2.0
"""Means with standard errors; rates with 95 % intervals, by the formulas of statsmodels and scipy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

RESAMPLES = 9999  # of a bootstrap
SEED = 1234  # of a bootstrap: the same file gives the same interval
BOOTSTRAP = {"level": 0.95, "bootstrap_resamples": RESAMPLES}  # how files of numbers say it
POINTS = {"A": 1.0, "tie": 0.5, "B": 0.0}  # of a counted verdict, for the first model


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; the error is None where the single values are not known."""

    mean: float
    error: float | None = None

    def text(self, digits: int = 3, scale: float = 1.0) -> str:
        """`mean ± error` with the given number of decimals, both multiplied by `scale`."""
        if not math.isfinite(self.mean):
            return "–"
        mean = f"{self.mean * scale:.{digits}f}"
        return mean if self.error is None else f"{mean} ± {self.error * scale:.{digits}f}"


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval; the ends are None where a single value says nothing of the spread."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, digits: int = 3) -> str:
        """`0.620 [0.481, 0.759]`."""
        value = f"{self.value:.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Rate(MeanInterval):
    """A share between 0 and 1 with its interval; the ends are None where there is no interval."""

    @property
    def per_cent(self) -> MeanInterval:
        """The same in per cent."""
        low, high = (None if end is None else 100 * end for end in (self.low, self.high))
        return MeanInterval(100 * self.value, low, high)

    def text(self, digits: int = 1) -> str:
        """In per cent: `62.0 [48.2, 74.1]`."""
        return self.per_cent.text(digits)


@dataclass(frozen=True)
class Tally:
    """How often each verdict was given."""

    wins: int  # of the first model
    ties: int  # neither was better
    losses: int  # wins of the second model
    invalid: int = 0  # answers of a judge that could not be read
    skipped: int = 0  # passes of a person

    @property
    def counted(self) -> int:
        """Wins, ties and losses: the denominator of every rate."""
        return self.wins + self.ties + self.losses

    @property
    def given(self) -> int:
        """All verdicts, with those that are not counted."""
        return self.counted + self.invalid + self.skipped


@dataclass(frozen=True)
class WinRates:
    """A tally as shares of its counted verdicts; None where there is none. For their intervals see `win_rates`."""

    tally: Tally
    win: Rate | None  # of the first model
    tie: Rate | None
    loss: Rate | None  # wins of the second model
    half: Rate | None  # wins plus half of the ties, with a bootstrap interval over items


def score_verdict(first: float, second: float, margin: float = 0.0) -> Literal["A", "tie", "B"]:
    """The higher of two scores as a verdict: A or B; tie where they differ by no more than the margin."""
    if abs(first - second) <= margin:
        return "tie"
    return "A" if first > second else "B"


def win_rates(verdicts: Sequence[str], items: Sequence[Any] | None = None) -> WinRates:
    """Shares of wins, ties and losses.

    Args:
        verdicts: (N,) of A, B, tie, invalid and skip; the last two are counted apart.
        items: (N,) what each verdict is about. Where an item has several, which are not independent of each other,
            all intervals come from a bootstrap that draws items, with all their verdicts.
    """
    number = Counter(verdicts)
    tally = Tally(*(number[verdict] for verdict in ("A", "tie", "B", "invalid", "skip")))
    places = list(range(len(verdicts)) if items is None else items)
    counted = [(place, verdict) for place, verdict in zip(places, verdicts, strict=True) if verdict in POINTS]
    half = bootstrap_ratio(_by_item(counted, POINTS))
    if len({place for place, _ in counted}) == len(counted):
        shares = [wilson(count, tally.counted) for count in (tally.wins, tally.ties, tally.losses)]
    else:
        shares = [bootstrap_ratio(_by_item(counted, {outcome: 1.0})) for outcome in POINTS]
    return WinRates(tally, shares[0], shares[1], shares[2], half)


def _by_item(counted: Iterable[tuple[Any, str]], points: Mapping[str, float]) -> dict[Any, tuple[float, int]]:
    """item → sum of its verdicts' points, and their number."""
    parts: dict[Any, tuple[float, int]] = {}
    for item, verdict in counted:
        total, number = parts.get(item, (0.0, 0))
        parts[item] = (total + points.get(verdict, 0.0), number + 1)
    return parts


def wilson(count: int, total: int) -> Rate | None:
    """The share count / total with Wilson's score interval; None where the total is 0."""
    from statsmodels.stats.proportion import proportion_confint

    if total == 0:
        return None
    low, high = proportion_confint(count, total, alpha=0.05, method="wilson")
    return Rate(count / total, max(0.0, float(low)), min(1.0, float(high)))


def bootstrap_ratio(parts: Mapping[Any, tuple[float, int]]) -> Rate | None:
    """Sum of the first numbers over sum of the second, with a percentile bootstrap interval over items.

    The interval lies between the smallest and the largest ratio of an item (Efron & Tibshirani 1993, chapter 13): that
    of a number that cannot be negative never reaches below 0. None without an item; a rate without interval where
    there is one item, or where all items agree: resampling them says nothing then.

    Args:
        parts: item → (numerator, denominator); the denominators are positive.
    """
    import numpy as np
    from scipy.stats import bootstrap

    if not parts:
        return None
    above, below = (np.array(column, dtype=np.float64) for column in zip(*parts.values(), strict=True))
    value = float(above.sum() / below.sum())
    if len(set((above / below).tolist())) < 2:
        return Rate(value)

    def ratio(above: Any, below: Any, axis: int = -1) -> Any:
        return above.sum(axis=axis) / below.sum(axis=axis)

    interval = bootstrap(
        (above, below),
        ratio,
        paired=True,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // len(above)),
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Rate(value, float(interval.low), float(interval.high))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of at least two values: their standard deviation / √n."""
    return stdev(values) / math.sqrt(len(values))


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, with its standard error where there are two."""
    return Estimate(fmean(values), standard_error(values) if len(values) > 1 else None)


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """The mean of at least one value with Student's interval: mean ± t · standard error."""
    from scipy.stats import t

    mean = fmean(values)
    if len(values) < 2:
        return MeanInterval(mean)
    reach = float(t.ppf(0.975, len(values) - 1)) * standard_error(values)
    return MeanInterval(mean, mean - reach, mean + reach)


def bounded_interval(parts: Sequence[tuple[float, int]]) -> MeanInterval:
    """The mean of a number with bounds, from sum and count of each item, at least one; see `bootstrap_ratio`."""
    rate = bootstrap_ratio(dict(enumerate(parts)))
    assert rate is not None
    return MeanInterval(rate.value, rate.low, rate.high)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of ours − theirs, with the standard error of the differences; both (N,), N > 0, in the same order."""
    return mean_estimate([our - their for our, their in zip(ours, theirs, strict=True)])


def unpaired_error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Standard error of the difference of two independent means of at least two values each."""
    return math.hypot(standard_error(ours), standard_error(theirs))
