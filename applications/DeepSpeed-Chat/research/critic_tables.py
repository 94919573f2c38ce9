# SPDX-License-Identifier: Apache-2.0
"""Tables and the picture of `critics.py`, over the finished runs.

`measure_runs` makes a row of numbers for each run, some of which compare it with the baseline of its seed. The tables
have a row for each setting: means over seeds with the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.base.pictures import COLOURS, plain_axes
from dschat.base.statistics import Estimate
from tables import (
    NONE,
    as_svg,
    curves_by_seed,
    final,
    gold_at_kl,
    kl_column,
    markdown,
    number_text,
    picture_style,
    updates_to,
)

SETTING = ["critic", "training", "credit"]
CRITIC_NAMES = {"sft": "SFT model", "reward": "reward model"}


# ---- Runs ----


def measure_runs(curves: pd.DataFrame, kl_levels: Sequence[float]) -> pd.DataFrame:
    """A row for each run that has a baseline: the run of the first setting with the same critic and seed.

    Args:
        curves: curves of all runs, with the columns critic, training, credit and seed.
        kl_levels: KLs, in nats per response, at which the gold score is read.

    Returns:
        The first row is a baseline. Beside the numbers of `measure_run`: gain (in held-out gold score over the
        baseline), updates (to the baseline's final score in training) and more_seconds (than the baseline).
    """
    baseline_setting = tuple(curves[["training", "credit"]].iloc[0])
    rows = []
    for (critic, seed), runs in curves.groupby(["critic", "seed"], sort=False):
        runs_by_setting = dict(tuple(runs.groupby(["training", "credit"], sort=False)))
        baseline = runs_by_setting.get(baseline_setting)
        if baseline is None:
            continue
        for (training, credit), run in runs_by_setting.items():
            row = {"critic": critic, "training": training, "credit": credit, "seed": seed}
            row |= measure_run(run, kl_levels)
            row["gain"] = row["gold"] - held_out_gold(baseline)
            row["updates"] = updates_to(run["gold"], final(baseline["gold"]))
            row["more_seconds"] = row["seconds"] - cpu_seconds(baseline)
            rows.append(row)
    return pd.DataFrame(rows)


def measure_run(run: pd.DataFrame, kl_levels: Sequence[float]) -> dict[str, float]:
    """The numbers of a run that need no other run."""
    first, middle, last = fifths(run["explained_variance_middle"])
    numbers = {
        "gold": held_out_gold(run),
        "gold_in_training": final(run["gold"]),
        "kl": float(run["held-out kl"].iloc[0]),
        "explained_first": first,
        "explained_middle": middle,
        "explained_last": last,
        "explained_returns": fifths(run["explained_variance"])[-1],
        "seconds": cpu_seconds(run),
    }
    for level in kl_levels:
        numbers[kl_column(level)] = gold_at_kl(run, level)
    return numbers


def held_out_gold(run: pd.DataFrame) -> float:
    """The gold score of the responses to the held-out prompts after the last update."""
    return float(run["held-out gold_scores"].iloc[0])


def cpu_seconds(run: pd.DataFrame) -> float:
    """Seconds of one core, evaluations included."""
    return float(run["cpu_seconds"].iloc[0])


def fifths(curve: pd.Series[float]) -> tuple[float, float, float]:
    """Means over the first, the middle and the last fifth of a run."""
    width = max(1, len(curve) // 5)
    middle = (len(curve) - width) // 2
    return curve[:width].mean(), curve[middle : middle + width].mean(), curve[-width:].mean()


# ---- Tables ----


def estimate_text(values: pd.Series[float], digits: int = 3, sign: bool = False) -> str:
    """Mean ± standard error, and the number of seeds that have the number if some have none."""
    present = values.dropna()
    if present.empty:
        return NONE
    mean = round(present.mean(), digits) + 0.0  # no minus sign before a zero
    text = Estimate(mean, present.sem() if len(present) > 1 else None).text(digits)
    if sign and mean >= 0:
        text = f"+{text}"
    return text if len(present) == len(values) else f"{text} ({len(present)}/{len(values)})"


def settings_table(runs: pd.DataFrame, kl_levels: Sequence[float]) -> str:
    """Every setting: where it ends, how well its critic explains, how fast it is, and what it costs."""
    baseline = runs.iloc[0]
    rows = []
    for (critic, training, credit), seeds in runs.groupby(SETTING, sort=False):
        means = seeds.mean(numeric_only=True)
        explained = [number_text(means[f"explained_{part}"]) for part in ("first", "middle", "last")]
        row = {
            "critic from": CRITIC_NAMES[critic],
            "critic, per rollout": training,
            "": credit,
            "seeds": str(len(seeds)),
            "gold score": estimate_text(seeds["gold"]),
            f"minus {baseline['credit']}, {baseline['training']}": estimate_text(seeds["gain"], sign=True),
            "KL": estimate_text(seeds["kl"], 1),
            "EV, first / middle / last fifth": " / ".join(explained),
            "EV of returns, last fifth": number_text(means["explained_returns"]),
            "updates to its score": estimate_text(seeds["updates"], 0),
        }
        for level in kl_levels:
            row[f"gold at {kl_column(level)}"] = estimate_text(seeds[kl_column(level)])
        row["CPU s"] = f"{means['seconds']:.0f} ({means['more_seconds']:+.0f})"
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def remaining_table(runs: pd.DataFrame) -> str:
    """What the other credits add to the first one on the same seeds, where the critics are trained alike."""
    rows = []
    for (critic, training), seeds in runs.groupby(["critic", "training"], sort=False):
        by_credit = seeds.pivot(index="seed", columns="credit")
        credits = list(seeds["credit"].unique())
        first, *others = credits
        explained = [number_text(by_credit["explained_last"][credit].mean()) for credit in credits]
        row = {
            "critic from": CRITIC_NAMES[critic],
            "critic, per rollout": training,
            "seeds": str(len(by_credit)),
            "EV in the last fifth": " / ".join(explained),
            f"gold score, {first}": estimate_text(by_credit["gold"][first]),
        }
        for credit in others:
            gain = by_credit["gold"][credit] - by_credit["gold"][first]
            row[f"{credit}, minus it"] = estimate_text(gain, sign=True)
        for credit in others:
            gain = by_credit["gold_in_training"][credit] - by_credit["gold_in_training"][first]
            row[f"{credit}, minus it, in training"] = estimate_text(gain, sign=True)
        rows.append(row)
    return markdown(pd.DataFrame(rows).fillna(NONE))


# ---- Picture ----


def draw_critics(curves: pd.DataFrame) -> bytes:
    """Explained variance and gold score over updates; bands are standard errors. Returns an SVG.

    There is a column for each critic and each training, if as many of its runs are finished as of the first column's.
    """
    columns = list(curves.groupby(["critic", "training"], sort=False))
    complete = len(columns[0][1])
    drawn = [(names, runs) for names, runs in columns if len(runs) >= complete]
    with picture_style():
        figure = Figure(figsize=(3.2 * len(drawn), 6.2), layout="constrained")
        axes = figure.subplots(2, len(drawn), squeeze=False, sharey="row", sharex=True)
        for column, ((critic, training), runs) in enumerate(drawn):
            explained, gold = axes[:, column]
            draw_credits(explained, runs, "explained_variance_middle")
            draw_credits(gold, runs, "gold")
            plain_axes(explained, f"{CRITIC_NAMES[critic]}, {training}", "", "" if column else "explained variance")
            plain_axes(gold, "", "updates", "" if column else "gold score")
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        return as_svg(figure)


def draw_credits(ax: Axes, runs: pd.DataFrame, name: str) -> None:
    """A curve of the column `name` for each credit, the mean over seeds."""
    for number, (credit, seeds) in enumerate(runs.groupby("credit", sort=False)):
        by_seed = curves_by_seed(seeds, name)
        mean = by_seed.mean(0)
        updates = np.arange(1, len(mean) + 1)
        colour = COLOURS[number]
        ax.plot(updates, mean, label=str(credit), linewidth=1.6, color=colour)
        if len(by_seed) > 1:
            error = by_seed.std(0, ddof=1) / math.sqrt(len(by_seed))
            ax.fill_between(updates, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
