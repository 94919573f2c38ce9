# SPDX-License-Identifier: Apache-2.0
"""What a report says of runs in tables and sentences, and the content of report.json."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dschat.base.glossary import HEAD, HEADLINES
from dschat.base.statistics import Estimate, paired_difference
from dschat.evaluation.page import NONE, Table
from dschat.evaluation.run_data import WINDOW_PART, RunData
from dschat.settings.rewards import SCORE_SOURCES, SIMULATED_USER, SOURCE_FLAGS

Runs = Sequence[RunData]  # not empty
Labels = Mapping[str, str]  # metrics of which higher is better → names in the report, see `labels_of`

OF_PROGRAMS = ("program_reward", "program_block", "max_tests")
# Flags that say where scores come from.
SCORING_FLAGS = (*SOURCE_FLAGS, "reward_weights", "rm_template", *OF_PROGRAMS, "judge_model", "judge_url")
EVALUATED = (*HEADLINES, "length", "eos_rate")  # metrics of the table of evaluations


class ResultColumn(NamedTuple):
    """A column of the table of results."""

    metric: str  # of evaluations
    header: str
    digits: int
    factor: int = 1


RESULTS = (
    ResultColumn("loss", "loss", 3),
    ResultColumn("perplexity", "perplexity", 2),
    ResultColumn("accuracy", "accuracy", 3),
    ResultColumn("scores", "score", 3),
    ResultColumn("kl", "KL to SFT (nats)", 2),
    ResultColumn("length", "length (tokens)", 1),
    ResultColumn("eos_rate", "ended by EOS (%)", 1, factor=100),
)
TRAINING_HEADERS = [
    "run",
    "updates",
    "responses",
    "seconds",
    "macro length (tokens)",
    "λ_eff per token",
    "explained variance",
]


# -- tables


def results_table(runs: Runs, labels: Labels) -> Table:
    """The first evaluation, once if it is the same in every run, and the last one of each run.

    The score is the first one of `labels`, if there are any.
    """
    columns = []
    for column in RESULTS:
        if any(f"eval/{column.metric}" in run.evals for run in runs):
            is_score = column.metric == "scores" and labels
            columns.append(ResultColumn(*first_score(labels), column.digits) if is_score else column)

    def cells(evaluation: Mapping[str, float]) -> list[str]:
        return [_estimate(evaluation, column.metric).text(column.digits, column.factor) for column in columns]

    start_name = "SFT" if runs[0].step == "ppo" else "before training"
    starts: list[list[str]] = []
    ends: list[list[str]] = []
    for run in runs:
        if not run.evals.empty:
            starts.append([f"{run.name}, {start_name}", *cells(run.evals.iloc[0])])
        if len(run.evals) > 1:
            ends.append([run.name, *cells(run.evals.iloc[-1])])
    if starts and all(start[1:] == starts[0][1:] for start in starts):
        starts = [[start_name, *starts[0][1:]]]
    return Table(["model", *(column.header for column in columns)], starts + ends, "results")


def flag_table(runs: Runs, only_different: bool = False) -> Table:
    """Flags with their value in each run: those that differ and, unless they are left out, those that are equal."""
    flags: set[str] = set()
    for run in runs:
        flags.update(run.config)
    rows = []
    for flag in sorted(flags):
        values = [_flag_text(run, flag) for run in runs]
        if len(set(values)) > 1 or not only_different:
            rows.append([f"--{flag}", *values])
    rows.sort(key=lambda row: len(set(row[1:])) == 1)  # those that differ first
    return Table(["flag", *(run.name for run in runs)], rows, "settings")


def _flag_text(run: RunData, flag: str) -> str:
    return json.dumps(run.config[flag], ensure_ascii=False) if flag in run.config else NONE


def evaluation_table(runs: Runs) -> Table:
    """The first, the best and the last evaluation of each run, each number with its standard error."""
    metrics = [run.metric for run in runs if run.metric is not None]
    logged = [name for name in EVALUATED if any(f"eval/{name}" in run.evals for run in runs)]
    names = list(dict.fromkeys([*metrics, *logged]))
    rows: list[list[object]] = []
    for run in runs:
        evaluations = _evaluations(run)
        for label, row in evaluations.items():
            estimates = [_estimate(row, name) for name in names]
            rows.append([run.name, label, f"{row['update']:.0f}", *estimates])
        if not evaluations:
            rows.append([run.name, "none", *[None] * (1 + len(names))])
    return Table(["run", "evaluation", "update", *names], rows, "evaluations")


def _evaluations(run: RunData) -> dict[str, dict[str, float]]:
    """The rows of a run's first, best and last evaluation; the last one is never called first as well."""
    last = len(run.evals) - 1
    if last < 0:
        return {}
    indices: dict[str, int | None] = {"first": 0, "best": run.best, "last": last}
    if run.best == last:
        indices = {"first": 0, "last, best": last}
    rows: dict[str, dict[str, float]] = {}
    for label, index in indices.items():
        if index is not None and (index < last or label.startswith("last")):
            rows[label] = run.evals.iloc[index].to_dict()
    return rows


def _estimate(row: Mapping[str, float], name: str) -> Estimate:
    """A metric of an evaluation, with its standard error if there is one."""
    error = row.get(f"eval/{name}_stderr", math.nan)
    return Estimate(row.get(f"eval/{name}", math.nan), error if math.isfinite(error) else None)


def training_table(runs: Runs) -> Table:
    """How the runs were trained."""
    rows: list[list[object]] = []
    for run in runs:
        counts = [f"{run.largest(key):.0f}" for key in HEAD]
        macro_length = Estimate(run.train_mean("macro/length")).text(2)
        lam = Estimate(run.train_mean("macro/lambda_eff")).text(3)
        explained_variance = Estimate(run.train_mean("val/explained_variance", last=WINDOW_PART)).text(2)
        rows.append([run.name, *counts, macro_length, lam, explained_variance])
    return Table(TRAINING_HEADERS, rows, "training")


def numbers_of(runs: Runs) -> dict[str, Any]:
    """Content of report.json."""
    rows = []
    for run in runs:
        row = {"name": run.name, "folder": str(run.folder), "finished": run.finished, "flags": run.config}
        rows.append(row | {"evaluations": _evaluations(run)})
    return {"step": runs[0].step, "runs": rows}


# -- scores that runs of step 3 are compared by, and sentences


def labels_of(runs: Runs) -> dict[str, str]:
    """Labels of the scores that runs are compared by: of the metric function if it is the same in all, and of scores.

    The label of `scores` names their source; it is "score" where runs differ in it or add up several.
    """
    labels: dict[str, str] = {}
    metric = runs[0].metric
    if metric is not None and all(run.metric == metric for run in runs):
        labels[metric] = metric.replace("_", " ").replace("scores", "score").strip()
    score_labels = set(map(_score_label, runs))
    labels["scores"] = score_labels.pop() if len(score_labels) == 1 else "score"
    return labels


def _score_label(run: RunData) -> str:
    """The source of a run's scores; the reward model if no flag names another."""
    if run.config.get("advantage_estimator") == "distillation":
        return "log-ratio of the teacher (nats)"
    labels: list[str] = []
    for source in SCORE_SOURCES:
        value = run.config.get(source.flag)
        if value and value != SIMULATED_USER:
            labels += [source.label] * (len(value) if isinstance(value, list) else 1)
    if len(labels) > 1:
        return "score"
    return labels[0] if labels else "reward-model score"


def first_score(labels: Labels) -> tuple[str, str]:
    """The metric that decides which run is better, and its label."""
    return next(iter(labels.items()))


def is_scored_alike(runs: Runs, metric: str) -> bool:
    """Whether the runs' scores come from the same models and functions, as far as flags tell."""
    flags = SCORING_FLAGS if metric == "scores" else ("metric_function",)
    scorers = []
    for run in runs:
        values = []
        for flag in flags:
            value = run.config.get(flag)
            # A path has several spellings. Names that are none become paths that are alike if the names are.
            for item in value if isinstance(value, list) else [value]:
                values.append(os.path.abspath(item) if isinstance(item, str) else item)
        scorers.append(values)
    return all(values == scorers[0] for values in scorers)


def headline(runs: Runs, labels: Labels) -> str:
    """The result in one sentence: the first of the scores before and after training, and whether two runs differ."""
    metric, label = first_score(labels)
    subject = f"the {label} of {len(runs[0].last.samples)} held-out prompts"
    clauses: list[str] = []
    for run in runs:
        start = run.first.mean(metric)
        end = run.last.mean(metric)
        verb = "brought"  # to the same score, or to NaN
        if end != start and math.isfinite(end):
            verb = "lowered" if end < start else "raised"
        clauses.append(f"{run.name} {verb} {subject} from {start:.3f} to {end:.3f}")
        subject = "it"
    is_compared = len(runs) == 2 and is_scored_alike(runs, metric)
    difference = _difference(runs[0], runs[1], metric) if is_compared else None
    if difference is not None:
        is_clear = abs(difference.mean) > 2 * (difference.error or 0)
        size = Estimate(abs(difference.mean), difference.error).text()
        extent = "more than" if is_clear else "within"
        clauses.append(f"the difference of {size} is {extent} two standard errors over prompts, with one run each")
    return f"{'; '.join(clauses)}."


def _difference(run: RunData, other: RunData, metric: str) -> Estimate | None:
    """How much higher a run ended, paired by prompt; None if the samples are not those of all of the same prompts."""
    values = run.last.values(metric)
    other_values = other.last.values(metric)
    same_prompts = run.last.samples["prompt"].equals(other.last.samples["prompt"])
    return paired_difference(values, other_values) if values and other_values and same_prompts else None


def compare_runs(runs: Runs, labels: Labels) -> list[str]:
    """Sentences about the first of the scores: the best run against each other one; none if they differ in scorers."""
    metric, label = first_score(labels)
    if not is_scored_alike(runs, metric):
        return []
    finite = [run for run in runs if math.isfinite(run.last.mean(metric))]
    ranked = sorted(finite, key=lambda run: -run.last.mean(metric))
    return [_comparison(ranked[0], other, metric, label) for other in ranked[1:]]


def _comparison(best: RunData, other: RunData, metric: str, label: str) -> str:
    """How much higher one run ended; with the standard error of the differences if they answered the same prompts."""
    highest = best.last.mean(metric)
    mean = other.last.mean(metric)
    if highest == mean:
        return f"{best.name} and {other.name} ended with the same {label}, {highest:.3f}."
    difference = f"{highest - mean:.3f} (no standard error: the samples are not of the same prompts, or not of all)"
    paired = _difference(best, other, metric)
    if paired is not None:
        prompts = len(best.last.samples)
        difference = f"{paired.text()} (± one standard error, {prompts} held-out prompts, paired)"
    return (
        f"{best.name} ended higher than {other.name} in {label}: {highest:.3f} against {mean:.3f}, a difference of"
        f" {difference}."
    )
