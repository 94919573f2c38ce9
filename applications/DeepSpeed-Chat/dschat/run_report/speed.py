# SPDX-License-Identifier: Apache-2.0
"""How many updates a run needs to come where another one ended."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dschat.run_report.data import RunData

Numbers = npt.NDArray[np.float64]

WINDOW_PART = 0.1  # a number is averaged over this part of the run


def window_of(count: int) -> int:
    """How many of a run's numbers are averaged."""
    return max(1, round(count * WINDOW_PART))


def trailing_mean(numbers: Sequence[float] | Numbers) -> Numbers:
    """(N,): each number's mean with those before it, a tenth of the run in all; fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(numbers, dtype=np.float64)]))
    last = np.arange(1, len(sums))
    first = np.maximum(last - window_of(len(last)), 0)
    return (sums[last] - sums[first]) / (last - first)


def final(numbers: Sequence[float] | Numbers) -> float:
    """The mean of the run's last tenth."""
    return float(np.mean(numbers[-window_of(len(numbers)) :]))


def first_at(numbers: Sequence[float] | Numbers, level: float) -> int | None:
    """Place of the first number whose trailing mean has reached a level; None if none has."""
    reached = trailing_mean(numbers) >= level - 1e-12
    return int(reached.argmax()) if reached.any() else None


def levels_of(baseline: RunData, names: Sequence[str]) -> dict[str, float]:
    """Where the baseline ended on training prompts, by metric; without those that were never logged."""
    numbers = {name: _logged(baseline, name)[1] for name in names}
    return {name: final(values) for name, values in numbers.items() if values}


def updates_to(run: RunData, name: str, level: float) -> int | None:
    """After how many updates the run's smoothed numbers on training prompts reach a level; None if they do not."""
    updates, numbers = _logged(run, name)
    place = first_at(numbers, level) if numbers else None
    return None if place is None else updates[place]


def speed_rows(runs: Sequence[RunData], labels: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table that sets every run beside the first one; no rows for a single run.

    Args:
        runs: the first is what the others are compared with.
        labels: metric → how it is called, of what says which response is better.
    """
    baseline, others = runs[0], runs[1:]
    levels = levels_of(baseline, list(labels))
    head = [f"updates to where {baseline.name} ends"]
    for name in levels:
        head += [labels[name], "times fewer"]
    base = {name: updates_to(baseline, name, level) for name, level in levels.items()}
    rows = []
    for run in others if levels else ():
        cells = [run.name]
        for name, level in levels.items():
            needed, theirs = updates_to(run, name, level), base[name]
            assert theirs is not None  # it ends there
            cells += ["not reached", "–"] if needed is None else [str(needed), f"{theirs / needed:.2f}"]
        rows.append(cells)
    return head, rows


def _logged(run: RunData, name: str) -> tuple[list[int], list[float]]:
    """Updates at which a rollout metric was logged, and the numbers."""
    rows = [row for row in run.train if math.isfinite(row.get(f"objective/{name}", math.nan))]
    return [int(row["update"]) for row in rows], [row[f"objective/{name}"] for row in rows]
