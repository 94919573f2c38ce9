# SPDX-License-Identifier: Apache-2.0
"""Results of runs of step 3: tables and sentences of their report, and the speed-up of each run over the first.

`labels` maps the scores that runs are compared by to their names in the report, see `labels_of`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from dschat.base.glossary import HEAD
from dschat.base.statistics import Estimate, paired_difference, unpaired_error
from dschat.evaluation.page import Report, Table
from dschat.evaluation.run_data import HeldOut, Numbers, RunData, column_of
from dschat.settings.rewards import SCORE_SOURCES, SIMULATED_USER, SOURCE_FLAGS

Runs = Sequence[RunData]  # not empty
Labels = Mapping[str, str]  # of the metrics of which higher is better: the metric function if there is one, scores

WINDOW_PART = 0.1  # share of a run's updates that curves and final values are averaged over
TRAINING_HEADERS = [
    "run",
    "updates",
    "responses",
    "seconds",
    "macro length (tokens)",
    "λ_eff per token",
    "explained variance",
]
TRAINING_REMARK = (
    "SFT is the model before the first update; the runs are compared at their last evaluation. Macro length"
    " and λ_eff = λ^(1/macro length) are means over the run; explained variance is the mean of its last tenth."
)
SPEED_REMARK = (
    "Updates until a run's score on training prompts, averaged over a trailing window of a tenth of the run, reaches"
    " the level at which the first run ended. This is one seed; another seed may give another number."
)


def window_of(count: int) -> int:
    """Length of the averaging window for a run of `count` values."""
    return max(1, round(count * WINDOW_PART))


def trailing_mean(numbers: Sequence[float] | Numbers) -> Numbers:
    """Moving mean (N,) over a trailing window of a tenth of the run; the window is shorter at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(numbers, dtype=np.float64)])
    last = np.arange(1, len(sums))
    first = np.maximum(last - window_of(len(last)), 0)
    return (sums[last] - sums[first]) / (last - first)


def final(numbers: Sequence[float] | Numbers) -> float:
    """Mean of the last tenth of a run's values, which are not empty."""
    return float(trailing_mean(numbers)[-1])


def first_at(numbers: Sequence[float] | Numbers, level: float) -> int | None:
    """Index at which the trailing mean first reaches a level; None if it never does.

    A level counts as reached up to the rounding of the mean, which grows with the values.
    """
    rounding = 1e-9 * np.abs(numbers).max(initial=0.0)
    reached = trailing_mean(numbers) >= level - rounding
    return int(reached.argmax()) if reached.any() else None


def levels_of(baseline: RunData, names: Sequence[str]) -> dict[str, float]:
    """Final value of each metric on the baseline's training prompts. Metrics that were never logged are left out."""
    levels = {}
    for name in names:
        logged = _logged(baseline, name)
        if len(logged):
            levels[name] = final(logged.to_numpy())
    return levels


def updates_to(run: RunData, name: str, level: float) -> int | None:
    """Updates until the trailing mean of a metric on training prompts reaches a level; None if it never does."""
    logged = _logged(run, name)
    index = first_at(logged.to_numpy(), level) if len(logged) else None
    return None if index is None else int(logged.index[index])


def _logged(run: RunData, name: str) -> "pd.Series[float]":
    """Finite values of a rollout metric, indexed by update."""
    numbers = pd.Series(column_of(run.train, f"objective/{name}"), index=run.train["update"])
    return numbers[np.isfinite(numbers)]


def speed_table(runs: Runs, labels: Labels) -> Table | None:
    """Table that compares every run with the first one; None for a single run.

    Args:
        runs: at least one.
        labels: names of the scores.
    """
    baseline = runs[0]
    levels = levels_of(baseline, list(labels))
    if len(runs) < 2 or not levels:
        return None
    headers = [f"updates to the final score of {baseline.name}"]
    for name in levels:
        headers += [labels[name], "speed-up"]
    rows = []
    for run in runs[1:]:
        cells: list[object] = [run.name]
        for name, level in levels.items():
            needed = updates_to(run, name, level)
            baseline_needed = updates_to(baseline, name, level)
            assert baseline_needed is not None  # the baseline ends at this level
            cells += ["not reached", None] if needed is None else [needed, f"{baseline_needed / needed:.2f}"]
        rows.append(cells)
    return Table(headers, rows, "speed")


def metric_label(name: str) -> str:
    """Name of a metric as words: gold_scores → gold score."""
    words = name.replace("_", " ").strip()
    return words[:-1] if words.endswith("scores") else words


def labels_of(runs: Runs, metric: str | None) -> dict[str, str]:
    """Labels of the scores that runs are compared by. The metric function comes first if all runs have one.

    The label of `scores` names their source if it is the same in all runs: a function, a server, a judge, programs,
    an environment or a teacher; the reward model if no flag names another source. If a run adds up several sources,
    the label is "score".
    """
    score_label = "reward-model score"
    for source in SCORE_SOURCES:
        if all(run.config.get(source.flag) for run in runs):
            score_label = source.label
    if any(_source_count(run) > 1 for run in runs):
        score_label = "score"
    if all(run.config.get("advantage_estimator") == "distillation" for run in runs):
        score_label = "log-ratio of the teacher (nats)"
    labels = {metric: metric_label(metric)} if metric else {}
    labels["scores"] = score_label
    return labels


def _source_count(run: RunData) -> int:
    """Number of sources whose scores a run adds up."""
    count = 0
    for name in SOURCE_FLAGS:
        value = run.config.get(name)
        if value and value != SIMULATED_USER:
            count += len(value) if isinstance(value, list) else 1
    return count


def compare_runs(runs: Runs, labels: Labels, title: str, notes: Sequence[str]) -> Report:
    """Tables and sentences of a report on at least one run."""
    tables: list[Table] = []
    remarks: list[str] = []
    speed = speed_table(runs, labels)
    if speed is not None:
        tables.append(speed)
        remarks.append(SPEED_REMARK)

    training = [_training_cells(run) for run in runs]
    tables.append(Table(TRAINING_HEADERS, training, "training"))
    remarks.append(TRAINING_REMARK)
    name, label = next(iter(labels.items()))
    findings = [_against_sft(run, name, label) for run in runs]
    findings += _ranking(runs, name, label)
    return Report(title, tables, findings, remarks, notes)


def _training_cells(run: RunData) -> list[str]:
    return [
        run.name,
        *(f"{run.largest(key):.0f}" for key in HEAD),
        Estimate(run.train_mean("macro/length")).text(2),
        Estimate(run.train_mean("macro/lambda_eff")).text(3),
        Estimate(run.train_mean("val/explained_variance", last=0.1)).text(2),
    ]


def _against_sft(run: RunData, name: str, label: str) -> str:
    return f"{run.name}: {label} from {run.first.mean(name):.3f} (SFT) to {run.last.mean(name):.3f}."


def _by_rank(runs: Runs, name: str) -> list[HeldOut]:
    """Last evaluations by descending mean; those without a finite mean come last, equal ones are sorted by name."""

    def rank(end: HeldOut) -> tuple[float, str]:
        mean = end.mean(name)
        return (-mean if math.isfinite(mean) else math.inf), end.model

    return sorted((run.last for run in runs), key=rank)


def _ranking(runs: Runs, name: str, label: str) -> list[str]:
    """Sentences that compare the best run, by its last evaluation, with every other run."""
    best, *others = _by_rank(runs, name)
    comparable = [other for other in others if math.isfinite(other.mean(name))]
    return [_comparison(best, other, name, label) for other in comparable]


def _comparison(best: HeldOut, other: HeldOut, name: str, label: str) -> str:
    highest = best.mean(name)
    mean = other.mean(name)
    if highest == mean:
        return f"{best.model} and {other.model} ended with the same {label}, {highest:.3f}."
    gap, method = _difference(name, best, other)
    sentence = (
        f"{best.model} ended higher than {other.model} in {label}: {highest:.3f} against {mean:.3f},"
        f" a difference of {gap.text()} ({method})."
    )
    if gap.error is None:
        return sentence
    within = "within" if gap.mean <= 2 * gap.error else "more than"
    return f"{sentence} That is {within} two standard errors."


def _difference(name: str, higher: HeldOut, lower: HeldOut) -> tuple[Estimate, str]:
    """Difference of two means, and how its error was computed.

    If both models answered the same prompts, the error is that of the differences prompt by prompt (paired). Otherwise
    it is the root of the sum of the two squared errors (unpaired).
    """
    gap = higher.mean(name) - lower.mean(name)
    values = higher.values(name)
    lower_values = lower.values(name)
    if values is None or lower_values is None:
        return Estimate(gap), "no standard error: the samples files do not hold every response"
    matches = higher.matches(lower)
    if matches is None:
        error = unpaired_error(values, lower_values)
        counts = f"{len(values)} and {len(lower_values)} held-out prompts"
        return Estimate(gap, error), f"± one standard error, {counts}, unpaired"
    matching_values = [lower_values[match] for match in matches]
    paired = paired_difference(values, matching_values)
    return Estimate(gap, paired.error), f"± one standard error, {len(values)} held-out prompts, paired"
