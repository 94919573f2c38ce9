# SPDX-License-Identifier: Apache-2.0
"""Statistics of a section of votes: win rates, position and length bias, agreement of raters."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from dschat.base.statistics import (
    POINTS,
    MeanInterval,
    Rate,
    WinRates,
    bootstrap_ratio,
    mean_estimate,
    paired_difference,
    wilson,
    win_rates,
)
from dschat.evaluation.votes import VoteSection

CATEGORIES = ("A", "tie", "B")  # verdicts that count
# Points that each model must have for the regression on length; with fewer its standard errors are unreliable.
MIN_POINTS = 5

Numbers = npt.NDArray[np.float64]
Column: TypeAlias = "pd.Series[Any]"
Row = dict[str, Any]  # row of a table of results
Kinds = Mapping[str, str]  # rater → judge, human or reward


@dataclass(frozen=True)
class SectionResult:
    """Statistics of one pair of models on one data set. The keys of the rows are those of report.json."""

    models: tuple[str, str]  # names of the first and the second model
    dataset: str  # its name, or empty
    items: int  # number of different items
    means: dict[str, Row | None]  # means of characters, words and rewards (None if unknown), see `model_means`
    raters: list[Row]  # judges; all people together where there are several, then each; the reward model
    agreement: list[Row]  # agreement of each two raters, see `agreement`
    group_agreement: list[Row]  # of three or more raters of a kind or of any, see `group_agreement`

    @property
    def names(self) -> tuple[str, str]:
        """Names of the models, with a suffix where they are the same."""
        first, second = self.models
        return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def section_result(section: VoteSection) -> SectionResult:
    """Compute the statistics of a section."""
    votes = section.votes
    items = votes.drop_duplicates("item")
    responses = items[["response_a", "response_b"]]
    words = responses.map(str.split).map(len)
    characters = responses.map(len)
    rewards = votes[votes["kind"] == "reward"]
    means = {
        "characters": model_means(characters["response_a"], characters["response_b"]),
        "words": model_means(words["response_a"], words["response_b"]),
        "reward": model_means(rewards["reward_a"], rewards["reward_b"]) if len(rewards) else None,
    }
    kinds = dict(zip(votes["rater"], votes["kind"], strict=True))
    verdicts = counted_verdicts(votes)
    columns = [column for _, column in verdicts.items()]
    pairs = combinations(columns, 2)
    return SectionResult(
        models=section.models,
        dataset=section.dataset,
        items=len(items),
        means=means,
        raters=_rater_results(votes),
        agreement=list(starmap(agreement, pairs)),
        group_agreement=group_agreements(verdicts, kinds),
    )


def _rater_results(votes: pd.DataFrame) -> list[Row]:
    """A row for each rater; before the first of several people, a row for all people together."""
    people = votes[votes["kind"] == "human"]
    people_count = people["rater"].nunique()
    pooled_is_due = people_count > 1
    rows = []
    for rater, votes_of_rater in votes.groupby("rater", sort=False):
        row = rater_result(str(rater), votes_of_rater)
        if pooled_is_due and row["kind"] == "human":
            rows.append(rater_result(f"all {people_count} humans", people, pooled=True))
            pooled_is_due = False
        rows.append(row)
    return rows


def rater_result(rater: str, votes: pd.DataFrame, pooled: bool = False) -> Row:
    """Statistics of one rater, or of all people together (`pooled`), whose votes are counted one by one.

    Returns:
        A row with `rater`, `kind`, `pooled`, the number of different `items`, `rates`, `length_controlled`, `position`
        (None if no vote records an order) and `aspects`: a judge's rates by criterion.
    """
    lengths = votes[["response_a", "response_b"]].map(len)
    length_differences = lengths["response_a"] - lengths["response_b"]
    orders_are_known = votes["orders"].map(len).any()
    return {
        "rater": rater,
        "kind": votes["kind"].iloc[0],
        "pooled": pooled,
        "items": votes["item"].nunique(),
        "rates": win_rates(votes["verdict"], votes["item"]),
        "length_controlled": length_controlled(votes["verdict"], length_differences, votes["item"]),
        "position": position_bias(votes) if orders_are_known else None,
        "aspects": aspect_rates(votes),
    }


def aspect_rates(votes: pd.DataFrame) -> dict[str, WinRates]:
    """Rates of the verdicts on each criterion, by its name, in the order in which the votes mention them."""
    items: dict[str, list[int]] = defaultdict(list)
    verdicts: dict[str, list[str]] = defaultdict(list)
    for item, aspects in zip(votes["item"], votes["aspects"], strict=True):
        for name, verdict in aspects.items():
            items[name].append(item)
            verdicts[name].append(verdict)
    return {name: win_rates(verdicts[name], items[name]) for name in verdicts}


def position_bias(votes: pd.DataFrame) -> Row:
    """Effect of the display order on a rater's verdicts.

    Returns:
        `both_orders`: items shown in both orders with a readable verdict in each. `consistent`: share of these items
        with the same verdict in both. `decided`: showings in which one response was preferred. `first_place`: share of
        these showings in which the response shown first was preferred, bootstrapped by item; 1/2 means no bias. Rates
        without a verdict are None.
    """
    both_orders = 0
    consistent = 0
    first_won: dict[Any, list[bool]] = defaultdict(list)  # item → whether the response shown first was preferred
    for item, orders in zip(votes["item"], votes["orders"], strict=True):
        first_models = {first for first, _ in orders}
        verdicts = {verdict for _, verdict in orders}
        if len(first_models) == 2 and verdicts <= POINTS.keys():
            both_orders += 1
            consistent += len(verdicts) == 1
        for first, verdict in orders:
            if verdict in ("A", "B"):
                first_won[item].append(verdict == first)
    return {
        "both_orders": both_orders,
        "consistent": wilson(consistent, both_orders),
        "decided": sum(map(len, first_won.values())),
        "first_place": bootstrap_ratio(map(sum, first_won.values()), map(len, first_won.values())),
    }


def model_means(first: Column, second: Column) -> Row:
    """Means of a number of both models' responses to the same items, (N,) each, and of first − second."""
    numbers_a = first.tolist()
    numbers_b = second.tolist()
    return {
        "first": mean_estimate(numbers_a),
        "second": mean_estimate(numbers_b),
        "difference": paired_difference(numbers_a, numbers_b),
        "items": len(numbers_a),
    }


def counted_verdicts(votes: pd.DataFrame) -> pd.DataFrame:
    """Table of verdicts with a row per item and a column per rater; NaN for none, for invalid and for skip."""
    raters = votes["rater"].drop_duplicates()
    table = votes.pivot(index="item", columns="rater", values="verdict")
    table = table.reindex(columns=raters)
    return table.where(table.isin(CATEGORIES))


def group_agreements(verdicts: pd.DataFrame, kinds: Kinds) -> list[Row]:
    """Agreement of the people, of the judges, and of all raters, where they are three or more."""
    raters = list(verdicts.columns)
    people = [rater for rater in raters if kinds[rater] == "human"]
    judges = [rater for rater in raters if kinds[rater] == "judge"]
    groups = {"humans": people, "judges": judges}
    if len(raters) not in (len(people), len(judges)):
        groups["all raters"] = raters
    rows = []
    for name, members in groups.items():
        if len(members) > 2:
            rows.append(group_agreement(name, verdicts[members]))
    return rows


def agreement(first: Column, second: Column) -> Row:
    """Agreement of two raters on the items on which both gave a verdict that counts.

    Args:
        first: (N,) verdicts by item, NaN if the rater gave none that counts; its name is the rater's.
        second: (N,) verdicts of the other rater.

    Returns:
        A row with the `raters`, the number of common `items`, the share with the `same` verdict, Cohen's `kappa`, the
        number of `decided` items (neither verdict is a tie) and the share of these with the same verdict,
        `same_decided`. Rates of nothing are None, and so is kappa where both always gave the same single verdict.
    """
    common = pd.DataFrame({"first": first, "second": second}).dropna()
    decided = common[(common != "tie").all(axis=1)]
    same_count = int((common["first"] == common["second"]).sum())
    same_decided_count = int((decided["first"] == decided["second"]).sum())
    return {
        "raters": (first.name, second.name),
        "items": len(common),
        "same": wilson(same_count, len(common)),
        "kappa": _cohens_kappa(common),
        "decided": len(decided),
        "same_decided": wilson(same_decided_count, len(decided)),
    }


def _cohens_kappa(common: pd.DataFrame) -> MeanInterval | None:
    from statsmodels.stats.inter_rater import cohens_kappa

    if len(set(common.to_numpy().flat)) < 2:
        return None
    counts = pd.crosstab(common["first"], common["second"])
    counts = counts.reindex(index=CATEGORIES, columns=CATEGORIES, fill_value=0)
    with np.errstate(divide="ignore", invalid="ignore"):  # in its test of kappa = 0, which is not used
        result = cohens_kappa(counts.to_numpy())
    low = float(result.kappa_low)
    high = float(result.kappa_upp)
    # Where the raters never (or always) differ, the formula's standard error is 0 but for rounding: no interval.
    if not high - low > 1e-6:
        return MeanInterval(float(result.kappa))
    return MeanInterval(float(result.kappa), max(-1.0, low), min(1.0, high))


def group_agreement(name: str, verdicts: pd.DataFrame) -> Row:
    """Agreement of three or more raters on the items on which all gave a verdict that counts.

    Args:
        name: name of the group.
        verdicts: a column per rater, as from `counted_verdicts`.

    Returns:
        A row with the `name`, the `raters`, the number of common `items`, `same` (share of equal pairs of verdicts on
        an item, mean over items; None without an item) and Fleiss' `kappa` (None if all verdicts are the same).
    """
    from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

    common = verdicts.dropna()
    size = verdicts.shape[1]
    same = None
    kappa = None
    if len(common):
        counts, categories = aggregate_raters(common.to_numpy())
        equal_pairs = int((counts * (counts - 1)).sum())
        same = equal_pairs / (len(common) * size * (size - 1))
        if len(categories) > 1:
            kappa = float(fleiss_kappa(counts, method="fleiss"))
    return {"name": name, "raters": tuple(verdicts.columns), "items": len(common), "same": same, "kappa": kappa}


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate; None if it cannot be estimated."""

    rate: Rate | None = None  # probability that the first model wins at equal length, ties as half
    slope: float | None = None  # coefficient of the length term: positive where longer responses win more often
    remark: str = ""  # why there is no rate, or a caveat


def length_controlled(verdicts: Sequence[str], differences: Sequence[float], items: Sequence[Any]) -> LengthControlled:
    """Fit logit P(first wins) = a + b · tanh(difference / sd of the differences); the rate is P at difference 0.

    As in length-controlled AlpacaEval (Dubois et al. 2024), for one pair of models and without its term for the
    prompt. A tie is half a win. The interval is that of a ± 1.96 standard errors, robust, clustered by item.

    Args:
        verdicts: (N,) of A, B, tie; others are left out.
        differences: (N,) length of the first response minus length of the second.
        items: (N,) item that each verdict is about.
    """
    votes = pd.DataFrame({"verdict": list(verdicts), "gap": list(differences), "item": list(items)})
    votes = votes[votes["verdict"].isin(POINTS)]
    points = votes["verdict"].map(POINTS).to_numpy(dtype=np.float64)
    gaps = votes["gap"].to_numpy(dtype=np.float64)
    clusters, names = pd.factorize(votes["item"])

    fewer_points = min(points.sum(), (1 - points).sum())
    if fewer_points < MIN_POINTS:
        return LengthControlled(
            remark=f"too few points for one of the models: {fewer_points:g}, the regression needs {MIN_POINTS}"
        )
    if points.min() == points.max():
        return LengthControlled(Rate(0.5), 0.0, "every verdict is a tie")
    if gaps.min() == gaps.max():
        return LengthControlled(remark="every pair differs by the same length")
    terms = np.tanh(gaps / gaps.std())
    if _separated(points, terms):
        return LengthControlled(remark="length tells wins from losses without exception")
    if len(names) < 2 * MIN_POINTS:
        return LengthControlled(remark=f"too few items: {len(names)}, the regression needs {2 * MIN_POINTS}")

    fit = _fit_logit(points, terms, clusters)
    if fit is None:
        return LengthControlled(remark="length tells wins from losses almost without exception")
    rate, slope = fit
    one_sided = gaps.min() > 0 or gaps.max() < 0
    remark = "extrapolated: one model's responses are always the longer ones" if one_sided else ""
    return LengthControlled(rate, slope, remark)


def _separated(points: Numbers, terms: Numbers) -> bool:
    """Whether some length separates wins from losses, so that the coefficients would grow without bound.

    The ranges of both must overlap by more than a point. Ties between wins and losses would keep the coefficients
    finite, but say little about them, and are left out; without wins, or without losses, ties take that side.
    """
    won = terms[points == points.max()]
    lost = terms[points == points.min()]
    won_by_longer = won.min() >= lost.max()
    won_by_shorter = lost.min() >= won.max()
    return bool(won_by_longer or won_by_shorter)


def _fit_logit(points: Numbers, terms: Numbers, clusters: Any) -> tuple[Rate, float] | None:
    """Rate at equal length and slope; None if the search for the coefficients does not converge."""
    from scipy.special import expit
    from statsmodels.discrete.discrete_model import Logit
    from statsmodels.tools.sm_exceptions import ConvergenceWarning, PerfectSeparationWarning

    not_converged = (ConvergenceWarning, PerfectSeparationWarning, RuntimeWarning)
    with warnings.catch_warnings():
        for warning in not_converged:
            warnings.simplefilter("error", warning)
        try:
            regressors = np.column_stack([np.ones_like(terms), terms])
            model = Logit(points, regressors)
            result = model.fit(disp=False, cov_type="cluster", cov_kwds={"groups": clusters})
        except (*not_converged, np.linalg.LinAlgError):
            return None
    intercept, slope = result.params
    low, high = result.conf_int(alpha=0.05)[0]
    if not np.isfinite([low, high, slope]).all():
        return None
    value, low_end, high_end = expit([intercept, low, high]).tolist()
    return Rate(value, low_end, high_end), float(slope)
