# SPDX-License-Identifier: Apache-2.0
"""Means with standard errors; rates with 95 % intervals, by the formulas of statsmodels and scipy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

# Resamples and seed of every bootstrap: the same file gives the same interval.
RESAMPLES = 9999
NUMBERS_AT_ONCE = 4_000_000  # of resampled items, 32 MB in each of a few arrays
SEED = 1234
# Description of the intervals of win rates in report.json.
INTERVALS = {
    "level": 0.95,
    "win, tie, loss": "Wilson; with several verdicts on an item, as half",
    "half": "percentile bootstrap over items",
    "bootstrap_resamples": RESAMPLES,
}
# Verdicts that count, with the points of the first model.
POINTS = {"A": 1.0, "tie": 0.5, "B": 0.0}


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; the error is None if the single values are not known."""

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
    """A mean with its 95 % interval, whose ends are None for a single value.

    The interval contains its value: an end that a formula puts on the other side of it, by its rounding or because it
    is not centred, becomes the value.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is not None:
            object.__setattr__(self, "low", min(self.low, self.value))
        if self.high is not None:
            object.__setattr__(self, "high", max(self.high, self.value))

    def text(self, digits: int = 3) -> str:
        """`0.620 [0.481, 0.759]`."""
        value = f"{self.value:.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Rate(MeanInterval):
    """A share between 0 and 1 with its interval, whose ends are None if there is no interval."""

    @property
    def per_cent(self) -> MeanInterval:
        """Value and interval in per cent."""
        low = None if self.low is None else 100 * self.low
        high = None if self.high is None else 100 * self.high
        return MeanInterval(100 * self.value, low, high)

    def text(self, digits: int = 1) -> str:
        """The share and its interval in per cent, such as `62.0 [48.2, 74.1]`."""
        return self.per_cent.text(digits)


@dataclass(frozen=True)
class Tally:
    """How often each verdict was given."""

    wins: int  # wins of the first model
    ties: int
    losses: int  # wins of the second model
    invalid: int = 0  # unreadable answers of a judge
    skipped: int = 0  # items that a rater skipped

    @property
    def counted(self) -> int:
        """Wins, ties and losses: the denominator of every rate."""
        return self.wins + self.ties + self.losses

    @property
    def total(self) -> int:
        """Number of all verdicts, counted or not."""
        return self.counted + self.invalid + self.skipped


@dataclass(frozen=True)
class WinRates:
    """A tally as shares of its counted verdicts; None if there is none. For their intervals see `win_rates`."""

    tally: Tally
    win: Rate | None  # win rate of the first model
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
        items: (N,) what each verdict is about; None if every verdict is about another item. Where an item has several
            verdicts, which depend on each other, all intervals come from a bootstrap that resamples items with all
            their verdicts. Otherwise they are Wilson's, but for the one of `half`.
    """
    import pandas as pd

    number = Counter(verdicts)
    tally = Tally(number["A"], number["tie"], number["B"], number["invalid"], number["skip"])
    votes = pd.DataFrame({"verdict": list(verdicts)})
    votes["item"] = range(len(votes)) if items is None else list(items)
    votes = votes[votes["verdict"].isin(POINTS)].copy()

    def bootstrapped(points: Mapping[str, float]) -> Rate | None:
        votes["points"] = votes["verdict"].map(points)
        by_item = votes.groupby("item", sort=False)["points"]
        return bootstrap_ratio(by_item.sum(), by_item.count())

    half = bootstrapped(POINTS)
    if votes["item"].is_unique:
        win = wilson(tally.wins, tally.counted)
        tie = wilson(tally.ties, tally.counted)
        loss = wilson(tally.losses, tally.counted)
    else:
        win = bootstrapped({"A": 1.0, "tie": 0.0, "B": 0.0})
        tie = bootstrapped({"A": 0.0, "tie": 1.0, "B": 0.0})
        loss = bootstrapped({"A": 0.0, "tie": 0.0, "B": 1.0})
    return WinRates(tally, win, tie, loss, half)


def wilson(count: int, total: int) -> Rate | None:
    """The share count / total with Wilson's score interval; None if the total is 0."""
    from statsmodels.stats.proportion import proportion_confint

    if total == 0:
        return None
    low, high = proportion_confint(count, total, alpha=0.05, method="wilson")
    return Rate(count / total, max(0.0, float(low)), min(1.0, float(high)))


def bootstrap_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Rate | None:
    """Sum of the numerators over sum of the denominators, with a percentile bootstrap interval over items.

    The interval lies between the smallest and the largest ratio of an item (Efron & Tibshirani 1993, chapter 13), so
    that of a number which cannot be negative never reaches below 0.

    Args:
        numerators: (N,) one number per item.
        denominators: (N,) positive.

    Returns:
        None without an item. A rate without interval where there is one item, or where all items have the same ratio,
        because resampling them shows no spread.
    """
    import numpy as np
    from scipy.stats import bootstrap

    numerator_array = np.array(list(numerators), dtype=np.float64)
    denominator_array = np.array(list(denominators), dtype=np.float64)
    if len(numerator_array) == 0:
        return None
    value = float(numerator_array.sum() / denominator_array.sum())
    if len(set((numerator_array / denominator_array).tolist())) < 2:
        return Rate(value)

    def ratio(numerators: Any, denominators: Any, axis: int = -1) -> Any:
        return numerators.sum(axis=axis) / denominators.sum(axis=axis)

    interval = bootstrap(
        (numerator_array, denominator_array),
        ratio,
        paired=True,
        n_resamples=RESAMPLES,
        batch=max(1, NUMBERS_AT_ONCE // len(numerator_array)),
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Rate(value, float(interval.low), float(interval.high))


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of at least two values: their standard deviation / √n."""
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


def bounded_interval(totals: Sequence[float], counts: Sequence[int]) -> MeanInterval:
    """Mean of a bounded number over at least one item, with the interval of `bootstrap_ratio`.

    Args:
        totals: (N,) sum of the number over each item.
        counts: (N,) of the values behind each sum.
    """
    rate = bootstrap_ratio(totals, counts)
    assert rate is not None
    return MeanInterval(rate.value, rate.low, rate.high)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of ours − theirs, with the standard error of the differences; both (N,), N > 0, in the same order."""
    return mean_estimate([our - their for our, their in zip(ours, theirs, strict=True)])
