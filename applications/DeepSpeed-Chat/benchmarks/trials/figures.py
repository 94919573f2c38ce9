# SPDX-License-Identifier: Apache-2.0
"""The figures of a group's settings, over the seeds that are finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dschat.run_report.summary import final, window_of
from trials.measures import KL_LEVELS, Curve, Interval, at_kl, over_seeds, speed_up, updates_to
from trials.plan import Group
from trials.pool import Results

Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Row:
    """One setting beside the group's first, its baseline; each pair of runs has a seed in common."""

    setting: str
    seeds: list[int]
    updates: Interval | None  # to the baseline's final gold score: median over the seeds that reached it
    reached: int  # seeds that did
    speed_up: Interval  # median
    faster: int  # seeds on which it is above 1
    gold: Interval  # at the end: mean
    gain: Interval  # the same, minus the baseline's
    gold_at_length: Interval  # the same, at the baseline's response length
    at_kl: list[Interval | None]  # gold at `KL_LEVELS`: mean over the seeds that came so far
    over_best: list[Interval | None]  # the same, minus that of the best token PPO of the group
    last: dict[str, float]  # other curves at the end: mean
    explained_first: float  # variance at mid-response that the critic explains, in the first updates
    seconds: float  # of a run: median


def read_group(group: Group, results: Results) -> dict[str, dict[int, dict[str, Any]]]:
    """Setting → seed → finished run."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for setting in group.settings:
        runs = {seed: results.read(group.spec(setting, seed)) for seed in range(group.seeds)}
        found[setting] = {seed: run for seed, run in runs.items() if run is not None}
    return found


def curves_of(run: Mapping[str, Any]) -> Curves:
    """Name → (N,) array."""
    return {name: np.asarray(numbers, dtype=np.float64) for name, numbers in run["curves"].items()}


def rows_of(group: Group, results: Results) -> list[Row]:
    """Every setting of which a seed is finished together with the baseline's."""
    found = read_group(group, results)
    curves = {name: {seed: curves_of(run) for seed, run in runs.items()} for name, runs in found.items()}
    baseline = curves[next(iter(group.settings))]
    tokens = [name for name, options in group.settings.items() if is_token_ppo(options)]
    best = [_best(level, [curves[name] for name in tokens]) for level in KL_LEVELS]
    rows = []
    for name, runs in curves.items():
        seeds = [seed for seed in runs if seed in baseline]
        if seeds:
            seconds = float(np.median([found[name][seed]["seconds"] for seed in seeds]))
            rows.append(_row(name, {seed: runs[seed] for seed in seeds}, baseline, best, seconds))
    return rows


def is_token_ppo(options: Mapping[str, Any]) -> bool:
    """Whether a setting is PPO over tokens with some λ, and nothing else."""
    return options.get("ngram") == 1 and options.keys() <= {"ngram", "lam"}


def _row(
    name: str,
    runs: Mapping[int, Curves],
    baseline: Mapping[int, Curves],
    best: Sequence[Mapping[int, float]],
    seconds: float,
) -> Row:
    pairs = [(run, baseline[seed]) for seed, run in runs.items()]
    needed = [updates_to(run["gold"], final(base["gold"])) for run, base in pairs]
    times = [speed_up(run["gold"], base["gold"]) for run, base in pairs]
    golds = [final(run["gold"]) for run, _ in pairs]
    gains = [final(run["gold"]) - final(base["gold"]) for run, base in pairs]
    at_length = [
        final(run["gold"]) - final(run["gold_per_token"]) * (final(run["length"]) - final(base["length"]))
        for run, base in pairs
    ]
    levels, over_best = [], []
    for level, best_of_seed in zip(KL_LEVELS, best, strict=True):
        here = {seed: at_kl(run["gold"], run["kl"], level) for seed, run in runs.items()}
        come = {seed: gold for seed, gold in here.items() if gold is not None}
        levels.append(over_seeds(list(come.values())))
        over_best.append(over_seeds([come[seed] - best_of_seed[seed] for seed in come if seed in best_of_seed]))
    updates, ratio = over_seeds([n for n in needed if n is not None], np.median), over_seeds(times, np.median)
    means = [over_seeds(numbers) for numbers in (golds, gains, at_length)]
    assert ratio is not None and means[0] is not None and means[1] is not None and means[2] is not None
    return Row(
        setting=name,
        seeds=sorted(runs),
        updates=updates,
        reached=sum(n is not None for n in needed),
        speed_up=ratio,
        faster=sum(time > 1 for time in times),
        gold=means[0],
        gain=means[1],
        gold_at_length=means[2],
        at_kl=levels,
        over_best=over_best,
        last={key: float(np.mean([final(run[key]) for run in runs.values()])) for key in next(iter(runs.values()))},
        explained_first=float(np.mean([_first(run["explained_variance_middle"]) for run in runs.values()])),
        seconds=seconds,
    )


def _first(numbers: Curve) -> float:
    """The mean of the run's first tenth."""
    return float(numbers[: window_of(len(numbers))].mean())


def _best(level: float, settings: Sequence[Mapping[int, Curves]]) -> dict[int, float]:
    """Seed → gold at a KL of the setting whose mean over seeds is the highest, among those that all seeds bring there.

    Where none brings all seeds there, the one that brings most.
    """
    found = []
    for runs in settings:
        here = {seed: at_kl(run["gold"], run["kl"], level) for seed, run in runs.items()}
        come = {seed: gold for seed, gold in here.items() if gold is not None}
        if come:
            found.append((len(come), float(np.mean(list(come.values()))), come))
    return max(found, key=lambda entry: entry[:2])[2] if found else {}
