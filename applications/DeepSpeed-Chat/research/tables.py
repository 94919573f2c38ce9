# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of a group's trials, over the seeds that are finished.

Curves have one number per rollout; they are smoothed by the mean over the last tenth of the run.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import bootstrap

from dschat.base.atomic import write_file
from dschat.base.pictures import COLOURS, plain_axes
from dschat.base.statistics import RESAMPLES, SEED, MeanInterval
from trials import Group, Value

Numbers = npt.NDArray[np.float64]
NONE = "–"
DASHES = ("--", "-.", ":")  # lines of settings that are not token-level PPO
SMOOTHED = ("gold", "kl", "length", "lambda_eff", "advantage_rms", "return_rms", "explained_variance_middle")


def is_token_ppo(flags: Mapping[str, Value]) -> bool:
    """Whether a setting is PPO over tokens with some λ, and nothing else."""
    return flags.get("ngram") == 1 and flags.keys() <= {"ngram", "lam"}


# ---- Curves ----


def window_of(count: int) -> int:
    """How many of a run's numbers are averaged."""
    return max(1, round(0.1 * count))


def smooth(curve: pd.Series[float]) -> pd.Series[float]:
    """Each number's mean with those before it, over a tenth of the run; over fewer at the beginning."""
    return curve.rolling(window_of(len(curve)), min_periods=1).mean()


def final(curve: pd.Series[float]) -> float:
    """The mean over the last tenth of a run."""
    return float(smooth(curve).iloc[-1])


def updates_to(curve: pd.Series[float], level: float) -> float:
    """The number of rollouts after which the smoothed curve has reached a level; NaN if it never does."""
    reached = np.flatnonzero(smooth(curve) >= level)
    return float(reached[0] + 1) if len(reached) else math.nan


def speed_up(gold: pd.Series[float], baseline: pd.Series[float]) -> float:
    """How many times fewer updates than the baseline, to the lower of both final scores, which both have reached."""
    level = min(final(gold), final(baseline))
    return updates_to(baseline, level) / updates_to(gold, level)


def gold_at_kl(run: pd.DataFrame, level: float) -> float:
    """The smoothed gold score where the smoothed KL first passes a level; NaN if it stays below."""
    gold = smooth(run["gold"]).to_numpy()
    kl = smooth(run["kl"]).to_numpy()
    above = np.flatnonzero(kl >= level)
    if not len(above):
        return math.nan
    end = int(above[0]) + 1
    around = slice(max(end - 2, 0), end)
    return float(np.interp(level, kl[around], gold[around]))


# ---- Runs and settings ----


def compare_runs(group: Group, curves: pd.DataFrame) -> pd.DataFrame:
    """A row for each finished run whose baseline with the same seed is finished.

    Columns: setting, seed, updates (to the baseline's final score), speed_up, gold, gain (over the baseline),
    gold_at_length (at the baseline's length of responses), final values of SMOOTHED, explained_first, seconds, and
    "KL …" for the gold score at each KL of the group.
    """
    runs = dict(tuple(curves.groupby(["setting", "seed"], sort=False)))
    rows = []
    for (setting, seed), run in runs.items():
        baseline = runs.get((group.baseline, seed))
        if baseline is None:
            continue
        ends = {name: final(run[name]) for name in SMOOTHED}
        base_gold = final(baseline["gold"])
        extra_tokens = ends["length"] - final(baseline["length"])
        explained = run["explained_variance_middle"]
        row = {
            "setting": setting,
            "seed": seed,
            **ends,
            "updates": updates_to(run["gold"], base_gold),
            "speed_up": speed_up(run["gold"], baseline["gold"]),
            "gain": ends["gold"] - base_gold,
            "gold_at_length": ends["gold"] - final(run["gold_per_token"]) * extra_tokens,
            "explained_first": explained[: window_of(len(run))].mean(),
            "seconds": run["seconds"].iloc[0],
        }
        for level in group.kl_levels:
            row[kl_column(level)] = gold_at_kl(run, level)
        rows.append(row)
    return pd.DataFrame(rows)


def kl_column(level: float) -> str:
    """The column of the gold score at a KL."""
    return f"KL {level:g}"


def over_seeds(values: Sequence[float] | pd.Series[float], median: bool = False) -> MeanInterval:
    """The mean or median of one value per seed with a 95 % bootstrap interval; none if all values are equal.

    Of two or three values the interval is the lowest and the highest, and says less than 95 %.
    """
    numbers = np.asarray(values, dtype=np.float64)
    statistic = np.median if median else np.mean
    value = float(statistic(numbers))
    if len(set(numbers)) < 2:
        return MeanInterval(value)
    low, high = bootstrap_ends(numbers, statistic)
    return MeanInterval(value, float(low), float(high))


def bootstrap_ends(values: Numbers, statistic: Callable[[Numbers], object]) -> tuple[Numbers, Numbers]:
    """Ends of the 95 % interval of a statistic over the first dimension: one number or one curve per seed."""
    rng = np.random.default_rng(SEED)
    result = bootstrap((values,), statistic, n_resamples=RESAMPLES, method="percentile", rng=rng, batch=500)
    return result.confidence_interval.low, result.confidence_interval.high


# ---- Tables ----


def markdown(table: pd.DataFrame) -> str:
    """A table of texts as Markdown."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def learning_table(runs: pd.DataFrame) -> str:
    """How fast each setting learns, and how far it comes."""
    rows = []
    lengths = runs.groupby("setting", sort=False)["length"].mean()
    shows_length = bool(((lengths - lengths.iloc[0]).abs() > 0.05).any())
    for setting, seeds in runs.groupby("setting", sort=False):
        means = seeds.mean(numeric_only=True)
        row = {
            "": str(setting),
            "seeds": str(len(seeds)),
            "updates to PPO's final score": median_updates(seeds["updates"]),
            "times faster": over_seeds(seeds["speed_up"], median=True).text(2),
            "faster on": f"{(seeds['speed_up'] > 1).sum()}/{len(seeds)}",
            "final gold": over_seeds(seeds["gold"]).text(3),
            "minus PPO's": over_seeds(seeds["gain"]).text(3),
        }
        if shows_length:
            row["at PPO's length"] = over_seeds(seeds["gold_at_length"]).text(3)
            row["length"] = f"{means['length']:.1f}"
        row |= {
            "KL": f"{means['kl']:.1f}",
            "λ_eff": number_text(means["lambda_eff"], 3),
            "EV, first / last": (
                f"{number_text(means['explained_first'])} / {number_text(means['explained_variance_middle'])}"
            ),
            "rms A": number_text(means["advantage_rms"]),
            "rms return": number_text(means["return_rms"]),
            "s": f"{seeds['seconds'].median():.0f}",
        }
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def median_updates(updates: pd.Series[float]) -> str:
    """The median over the seeds that reached the level, and their number if not all did."""
    reached = updates.dropna()
    text = over_seeds(reached, median=True).text(0) if len(reached) else NONE
    return text if len(reached) == len(updates) else f"{text} ({len(reached)}/{len(updates)})"


def number_text(number: float, digits: int = 2) -> str:
    """A number; a dash for NaN, which a run without a critic has."""
    without_minus_zero = round(number, digits) + 0.0
    return NONE if math.isnan(number) else f"{without_minus_zero:.{digits}f}"


def kl_table(group: Group, runs: pd.DataFrame) -> str:
    """The gold score at equal KL, and its difference from the best token-level PPO of the group on the same seeds."""
    table = pd.DataFrame({"": list(runs["setting"].unique())}).set_index("", drop=False)
    differences = {}
    for level in group.kl_levels:
        gold = runs.pivot(index="seed", columns="setting", values=kl_column(level))
        gold = gold[table.index]
        table[kl_column(level)] = [reached_text(gold[setting]) for setting in table.index]
        best = best_token_ppo(group, gold)
        minus_best = [NONE] * len(table)
        if best is not None:
            gains = gold.sub(gold[best], axis=0)
            minus_best = [gain_text(gains[setting].dropna()) for setting in table.index]
        differences[f"minus best PPO, {kl_column(level)}"] = minus_best
    return markdown(table.assign(**differences))


def best_token_ppo(group: Group, gold: pd.DataFrame) -> str | None:
    """The token-level PPO that most seeds bring to a KL and, among these, the one with the highest mean gold score.

    `gold` has a row for each seed and a column for each setting.
    """
    reached: dict[str, tuple[int, float]] = {}
    for setting in gold.columns:
        scores = gold[setting].dropna()
        if len(scores) and is_token_ppo(group.settings[setting]):
            reached[setting] = (len(scores), float(scores.mean()))
    return max(reached, key=lambda setting: reached[setting], default=None)


def reached_text(gold: pd.Series[float]) -> str:
    """The mean over the seeds that reached a KL, and their number if not all did."""
    reached = gold.dropna()
    if not len(reached):
        return NONE
    text = f"{reached.mean():.3f}"
    return text if len(reached) == len(gold) else f"{text} ({len(reached)}/{len(gold)})"


def gain_text(gains: pd.Series[float]) -> str:
    """A difference with its sign."""
    if not len(gains):
        return NONE
    gain = over_seeds(gains)
    if gain.low is None:
        return f"{gain.value:+.3f}"
    return f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def write_sections(document: Path, sections: Mapping[str, str]) -> None:
    """Replaces what a document has between the comments <!-- learning NAME --> and <!-- /learning NAME -->.

    Raises:
        ValueError: it has no such comments.
    """
    text = document.read_text(encoding="utf-8")
    for name, content in sections.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        section = re.search(pattern, text, re.DOTALL)
        if section is None:
            raise ValueError(f"{document} has no section {name!r}")
        text = text[: section.end(1)] + content + "\n" + text[section.start(2) :]
    write_file(document, text)


# ---- Pictures ----


def draw(groups: Sequence[Group], folder: Path) -> bytes:
    """Gold score over updates, and below over KL, for groups side by side; bands are 95 % intervals over seeds."""
    width = max(8.4, 4.2 * len(groups))  # inches, with room for the names below
    with picture_style():
        figure = Figure(figsize=(width, 7.2), layout="constrained")
        axes = figure.subplots(2, len(groups), squeeze=False, sharey="col")
        handles: dict[str, Artist] = {}
        for column, group in enumerate(groups):
            over_updates, over_kl = axes[:, column]
            draw_group(over_updates, over_kl, group, group.curves(folder))
            lines, labels = over_updates.get_legend_handles_labels()
            handles |= dict(zip(labels, lines, strict=True))
        columns = int(width // 2.8)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False)
        return as_svg(figure)


def picture_style() -> AbstractContextManager[None]:
    """Context in which figures are made and written."""
    return rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9})


def as_svg(figure: Figure) -> bytes:
    """A figure as an SVG, the same bytes whenever it is made."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def draw_group(over_updates: Axes, over_kl: Axes, group: Group, curves: pd.DataFrame) -> None:
    """The curves of a group's settings, each a mean over seeds."""
    for number, setting in enumerate(group.settings):
        runs = curves[curves["setting"] == setting]
        if runs.empty:
            continue
        gold = curves_by_seed(runs, "gold")
        kl = curves_by_seed(runs, "kl").mean(0)
        mean = gold.mean(0)
        updates = np.arange(1, len(mean) + 1)
        colour = COLOURS[number % len(COLOURS)]
        dash = "-" if is_token_ppo(group.settings[setting]) else DASHES[number // len(COLOURS) % len(DASHES)]
        over_updates.plot(updates, mean, label=setting, linewidth=1.6, color=colour, linestyle=dash)
        if len(gold) > 1:
            low, high = bootstrap_ends(gold, np.mean)
            over_updates.fill_between(updates, low, high, color=colour, alpha=0.13, linewidth=0)
        over_kl.plot(kl, mean, linewidth=1.6, color=colour, linestyle=dash)
        if setting == group.baseline:
            label = f"where {setting} ends"
            over_updates.axhline(mean[-1], color="#444444", linestyle=":", linewidth=1.2, label=label)
    plain_axes(over_updates, f"{group.name}\n({group.task})", "updates", "gold score")
    plain_axes(over_kl, "", "KL to SFT, nats per response", "gold score")


def curves_by_seed(runs: pd.DataFrame, name: str) -> Numbers:
    """Smoothed curves, shape (seeds, updates)."""
    curves = [smooth(run[name]).to_numpy() for _, run in runs.groupby("seed")]
    return np.stack(curves)
