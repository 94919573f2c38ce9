# SPDX-License-Identifier: Apache-2.0
"""The figures of a group's settings, over the seeds that are finished; their tables and pictures.

Curves are one number per PPO iteration, smoothed as in the product's reports: `dschat.lab.run_summary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import bootstrap

from dschat.base.pictures import COLOURS, plain_axes
from dschat.base.statistics import RESAMPLES, SEED, MeanInterval
from dschat.lab.run_summary import Numbers, final, first_at, trailing_mean, window_of
from harness import svg, table, table_of
from trials.matrix import Group, Options, Result, Results

Curve = Sequence[float] | Numbers
Runs = Mapping[int, Result]  # by seed

DASHES = ("--", "-.", ":")  # of what is not token PPO


@dataclass(frozen=True)
class Interval(MeanInterval):
    """A statistic over seeds with its 95 % bootstrap interval; without one where all seeds agree or there is one."""

    seeds: int = 0


@dataclass(frozen=True)
class ComparisonRow:
    """One setting beside the group's first, its baseline; each pair of runs has a seed in common."""

    setting: str
    seeds: list[int]
    updates: Interval | None  # to the baseline's final gold: median over the seeds that reached it
    speed_up: Interval  # median
    faster: int  # seeds on which it is above 1
    gold: Interval  # at the end: mean
    gain: Interval  # the same, minus the baseline's
    gold_at_length: Interval  # the same, at the baseline's response length
    at_kl: list[Interval | None]  # gold at the group's levels of KL: mean over the seeds that came so far
    over_best: list[Interval | None]  # the same, minus that of the best token PPO of the group
    last: dict[str, float]  # other curves at the end: mean
    explained_first: float  # variance at mid-response that the critic explains, in the first updates
    seconds: float  # of a run: median


def read_group(group: Group, results: Results) -> dict[str, Runs]:
    """Setting → finished runs."""
    found = {
        name: {seed: results.read(group.spec(name, seed)) for seed in range(group.seeds)} for name in group.settings
    }
    return {name: {seed: run for seed, run in runs.items() if run is not None} for name, runs in found.items()}


def rows_of(group: Group, results: Results) -> list[ComparisonRow]:
    """Every setting of which a seed is finished together with the baseline's."""
    finished = read_group(group, results)
    baseline = finished[next(iter(group.settings))]
    tokens = [finished[name] for name, options in group.settings.items() if is_token_ppo(options)]
    best = {level: _best(level, tokens) for level in group.kl_levels}
    paired = {name: {seed: runs[seed] for seed in runs if seed in baseline} for name, runs in finished.items()}
    return [_row(name, runs, baseline, best) for name, runs in paired.items() if runs]


def is_token_ppo(options: Options) -> bool:
    """Whether a setting is PPO over tokens with some λ, and nothing else."""
    return options.get("ngram") == 1 and options.keys() <= {"ngram", "lam"}


def _row(name: str, runs: Runs, baseline: Runs, best: Mapping[float, Mapping[int, float]]) -> ComparisonRow:
    pairs = [(run.curves, baseline[seed].curves) for seed, run in runs.items()]
    needed = [updates_to(run["gold"], final(base["gold"])) for run, base in pairs]
    times = [speed_up(run["gold"], base["gold"]) for run, base in pairs]
    longer = [final(run["gold_per_token"]) * (final(run["length"]) - final(base["length"])) for run, base in pairs]
    golds = [final(run["gold"]) for run, _ in pairs]
    first = [run["explained_variance_middle"][: window_of(len(run["gold"]))] for run, _ in pairs]
    levels, over_best = [], []
    for level, best_of_seed in best.items():
        come = _gold_at(level, runs)
        levels.append(over_seeds(list(come.values())) if come else None)
        above = [come[seed] - best_of_seed[seed] for seed in come if seed in best_of_seed]
        over_best.append(over_seeds(above) if above else None)
    return ComparisonRow(
        setting=name,
        seeds=sorted(runs),
        updates=usual_updates(needed),
        speed_up=over_seeds(times, median=True),
        faster=sum(time > 1 for time in times),
        gold=over_seeds(golds),
        gain=over_seeds([gold - final(base["gold"]) for gold, (_, base) in zip(golds, pairs, strict=True)]),
        gold_at_length=over_seeds([gold - more for gold, more in zip(golds, longer, strict=True)]),
        at_kl=levels,
        over_best=over_best,
        last={key: float(np.mean([final(run[key]) for run, _ in pairs])) for key in pairs[0][0]},
        explained_first=float(np.mean(first)),
        seconds=float(np.median([run.seconds for run in runs.values()])),
    )


def _gold_at(level: float, runs: Runs) -> dict[int, float]:
    """Seed → gold at a KL, of the seeds that come there."""
    found = {seed: at_kl(run.curves["gold"], run.curves["kl"], level) for seed, run in runs.items()}
    return {seed: gold for seed, gold in found.items() if gold is not None}


def _best(level: float, settings: Sequence[Runs]) -> dict[int, float]:
    """Seed → gold at a KL of the setting whose mean over seeds is the highest, among those that all seeds bring there.

    Where none brings all seeds there, the one that brings most.
    """
    found = [come for runs in settings if (come := _gold_at(level, runs))]
    return max(found, key=lambda come: (len(come), float(np.mean(list(come.values())))), default={})


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


def usual_updates(needed: Sequence[int | None]) -> Interval | None:
    """The median over the seeds that came there; None if none did."""
    reached = [float(n) for n in needed if n is not None]
    return over_seeds(reached, median=True) if reached else None


def updates_text(updates: Interval | None, seeds: int) -> str:
    """The median, and how many of the seeds came there if not all did."""
    reached, median = (0, "–") if updates is None else (updates.seeds, updates.text(0))
    return median if reached == seeds else f"{median} ({reached}/{seeds})"


def at_kl(gold: Curve, kl: Curve, level: float) -> float | None:
    """The smoothed gold score where the smoothed KL first passes a level; None if it stays below."""
    smooth_kl, smooth_gold = trailing_mean(kl), trailing_mean(gold)
    above = smooth_kl >= level
    if not above.any():
        return None
    last = int(above.argmax()) + 1
    around = slice(max(last - 2, 0), last)
    return float(np.interp(level, smooth_kl[around], smooth_gold[around]))


def over_seeds(values: Sequence[float], median: bool = False) -> Interval:
    """The mean or the median of one value per seed, at least one, with a percentile bootstrap over seeds."""
    statistic = np.median if median else np.mean
    value = float(statistic(values))
    if len(set(values)) < 2:
        return Interval(value, seeds=len(values))
    low, high = resampled(np.asarray(values), statistic)
    return Interval(value, float(low), float(high), len(values))


def resampled(values: Numbers, statistic: Callable[[Numbers], object]) -> tuple[Numbers, Numbers]:
    """Ends of the 95 % intervals of a statistic over the first dimension: of one number or one curve per seed."""
    rng = np.random.default_rng(SEED)
    found = bootstrap((values,), statistic, n_resamples=RESAMPLES, method="percentile", rng=rng, batch=500)
    return found.confidence_interval.low, found.confidence_interval.high


def learning_table(rows: Sequence[ComparisonRow]) -> str:
    """How fast, and how far."""
    varies = any(abs(row.last["length"] - rows[0].last["length"]) > 0.05 for row in rows)
    lengths: list[tuple[str, Callable[[ComparisonRow], str]]] = [
        ("at PPO's length", lambda row: row.gold_at_length.text(3)),
        ("length", lambda row: f"{row.last['length']:.1f}"),
    ]
    columns: list[tuple[str, Callable[[ComparisonRow], str]]] = [
        ("", lambda row: row.setting),
        ("seeds", lambda row: str(len(row.seeds))),
        ("updates to PPO's final score", lambda row: updates_text(row.updates, len(row.seeds))),
        ("times faster", lambda row: row.speed_up.text(2)),
        ("faster on", lambda row: f"{row.faster}/{len(row.seeds)}"),
        ("final gold", lambda row: row.gold.text(3)),
        ("minus PPO's", lambda row: row.gain.text(3)),
        *(lengths if varies else []),
        ("KL", lambda row: f"{row.last['kl']:.1f}"),
        ("λ_eff", lambda row: _known(row.last["lambda_eff"], 3)),
        ("EV, first / last", lambda row: " / ".join(map(_known, _explained(row)))),
        ("rms A", lambda row: _known(row.last["advantage_rms"])),
        ("rms return", lambda row: _known(row.last["return_rms"])),
        ("s", lambda row: f"{row.seconds:.0f}"),
    ]
    return table_of(columns, rows)


def _explained(row: ComparisonRow) -> tuple[float, float]:
    return row.explained_first, row.last["explained_variance_middle"]


def _known(number: float, digits: int = 2) -> str:
    """A number; – for one that a run without a critic has not."""
    return "–" if math.isnan(number) else f"{number:.{digits}f}"


def kl_table(rows: Sequence[ComparisonRow], levels: Sequence[float]) -> str:
    """Gold at equal KL, and how far above the best token PPO of the same group that is."""
    head = ["", *(f"KL {level:g}" for level in levels), *(f"minus best PPO, KL {level:g}" for level in levels)]

    def counted(gold: Interval | None, seeds: int) -> str:
        if gold is None:
            return "–"
        return f"{gold.value:.3f}" + (f" ({gold.seeds}/{seeds})" if gold.seeds < seeds else "")

    def signed(gain: Interval | None) -> str:
        if gain is None:
            return "–"
        return f"{gain.value:+.3f}" + ("" if gain.low is None else f" [{gain.low:+.3f}, {gain.high:+.3f}]")

    golds = ([counted(gold, len(row.seeds)) for gold in row.at_kl] for row in rows)
    return table(
        head, [[row.setting, *own, *map(signed, row.over_best)] for row, own in zip(rows, golds, strict=True)]
    )


def draw(groups: Sequence[Group], results: Results) -> bytes:
    """Gold over updates, above gold over KL, side by side for some groups; bands are 95 % intervals over seeds."""
    width = max(8.4, 4.2 * len(groups))  # room for the names below

    def plot(figure: Figure) -> None:
        axes = figure.subplots(2, len(groups), squeeze=False, sharey="col")
        handles: dict[str, Artist] = {}
        for column, group in enumerate(groups):
            _draw_group(axes[0, column], axes[1, column], group, results)
            for ax in axes[:, column]:
                handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        shown, columns = list(handles.values()), int(width // 2.8)
        figure.legend(shown, list(handles), loc="outside lower center", ncols=columns, frameon=False)

    return svg((width, 7.2), "learning", plot)


def _draw_group(over_updates: Axes, over_kl: Axes, group: Group, results: Results) -> None:
    for i, (name, runs) in enumerate(read_group(group, results).items()):
        if not runs:
            continue
        gold, kl = (np.stack([trailing_mean(run.curves[key]) for run in runs.values()]) for key in ("gold", "kl"))
        dash = "-" if is_token_ppo(group.settings[name]) else DASHES[i // len(COLOURS)]
        colour = COLOURS[i % len(COLOURS)]
        updates, mean = np.arange(1, gold.shape[1] + 1), gold.mean(0)
        over_updates.plot(updates, mean, label=name, linewidth=1.6, color=colour, linestyle=dash)
        if len(gold) > 1:
            over_updates.fill_between(updates, *resampled(gold, np.mean), color=colour, alpha=0.13, linewidth=0)
        over_kl.plot(kl.mean(0), mean, linewidth=1.6, color=colour, linestyle=dash)
        if i == 0:
            level = float(np.mean([final(run.curves["gold"]) for run in runs.values()]))
            label = f"where {name} ends"
            over_updates.axhline(level, color="#444444", linestyle=":", linewidth=1.2, label=label)
    plain_axes(over_updates, f"{group.name} ({group.task})", "updates", "gold score")
    plain_axes(over_kl, "", "KL to SFT, nats per response", "gold score")
