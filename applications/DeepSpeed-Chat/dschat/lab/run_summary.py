# SPDX-License-Identifier: Apache-2.0
"""What the runs of a report came to: tables, sentences, and how fast each run came where the first one ended."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dschat.base.glossary import HEAD
from dschat.base.statistics import (
    Estimate,
    Rate,
    WinRates,
    paired_difference,
    score_verdict,
    standard_error,
    unpaired_error,
    win_rates,
)
from dschat.lab.page import Report, Table
from dschat.lab.run_data import EVAL_NAMES, HeldOut, RunData

Numbers = npt.NDArray[np.float64]

WINDOW_PART = 0.1  # a number is averaged over this part of the run
TRAINING_HEADERS = [
    *("run", "updates", "responses", "seconds"),
    *("macro length (tokens)", "λ_eff per token", "explained variance"),
]
# Metric → header, scale and decimals of its column.
SPEEDS = {
    "time/sampled_per_second": ("sampled (tokens/s)", 1.0, 0),
    "time/bandwidth": ("of memory bandwidth (%)", 100.0, 1),
    "time/trained_per_second": ("trained (tokens/s)", 1.0, 0),
    "time/mfu": ("MFU (%)", 100.0, 1),
}
WIN_HEADERS = ["win rates (%)", "judge", "win", "tie", "loss", "win + ½ tie", "prompts"]
WIN_REMARK = (
    "Win rates: of two responses to a held-out prompt the one with the higher score wins. [ ] holds 95 %: Wilson's"
    " interval for win and loss, a bootstrap over prompts for the rate with ties as half."
)
THROUGHPUT_REMARK = (
    "Tokens per second, and shares of the GPUs' measured peaks, are means over the second half of a run."
)
SPEED_REMARK = (
    "Updates: until the mean over a tenth of the run, on training prompts, has come to where that of the first run"
    " ended. One seed: another may give another number."
)


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


def speed_rows(runs: Sequence[RunData], labels: Mapping[str, str]) -> tuple[list[str], list[list[object]]]:
    """Head and rows of the table that sets every run beside the first one; no rows for a single run.

    `labels` are those of what says which response is better, see `judges_of`.
    """
    baseline, others = runs[0], runs[1:]
    levels = levels_of(baseline, list(labels))
    head = [f"updates to where {baseline.name} ends"]
    for name in levels:
        head += [labels[name], "times fewer"]
    base = {name: updates_to(baseline, name, level) for name, level in levels.items()}
    rows = []
    for run in others if levels else ():
        cells: list[object] = [run.name]
        for name, level in levels.items():
            needed, theirs = updates_to(run, name, level), base[name]
            assert theirs is not None  # it ends there
            cells += ["not reached", None] if needed is None else [needed, f"{theirs / needed:.2f}"]
        rows.append(cells)
    return head, rows


def _logged(run: RunData, name: str) -> tuple[list[int], list[float]]:
    """Updates at which a rollout metric was logged, and the numbers."""
    rows = [row for row in run.train if math.isfinite(row.get(f"objective/{name}", math.nan))]
    return [int(row["update"]) for row in rows], [row[f"objective/{name}"] for row in rows]


def metric_label(name: str) -> str:
    """A metric's name as words: gold_scores → gold score."""
    words = name.replace("_", " ").strip()
    return words[:-1] if words.endswith("scores") else words


def labels_of(runs: Sequence[RunData], metric: str | None) -> dict[str, str]:
    """What runs are compared by → how it is called: the metric function that all have, if any, then the rest.

    `scores` are of the reward model, unless all runs were scored by a function, a server, or by running programs. A
    sum of several has no name but score.
    """
    sources = {
        "reward_function": "reward-function score",
        "reward_url": "score of a server",
        "reward_source": "score of programs",
    }
    source = next((label for flag, label in sources.items() if all(run.config.get(flag) for run in runs)), None)
    if any(_sources_of(run) > 1 for run in runs):
        source = "score"
    return ({metric: metric_label(metric)} if metric else {}) | {
        "scores": source or "reward-model score",
        "kl": "KL to SFT (nats)",
        "length": "length (tokens)",
        "eos_rate": "ended by EOS (%)",
    }


def _sources_of(run: RunData) -> int:
    """How many sources of scores a run added up."""
    given = [run.config.get(f"reward_{name}") for name in ("function", "model_name_or_path", "url", "source")]
    return sum(len(value) if isinstance(value, list) else 1 for value in given if value)


def judges_of(labels: Mapping[str, str]) -> dict[str, str]:
    """The metric function and the scores, of the labels: what says which response is better."""
    return {name: label for name, label in labels.items() if name not in EVAL_NAMES - {"scores"}}


def compare_runs(runs: Sequence[RunData], labels: Mapping[str, str], title: str, notes: Sequence[str]) -> Report:
    """Work out the tables and sentences of a report on at least one run; for the labels see `labels_of`."""
    models = [*_sft_models(runs, labels), *[_model(run.name, run.last, labels) for run in runs]]
    wins = win_rows(runs, judges_of(labels))
    headers = ["model", *labels.values(), "held-out prompts"]
    tables = [Table(headers, [_cells(model) for model in models], "results")]
    head, speed = speed_rows(runs, judges_of(labels))
    if speed:
        tables.append(Table(head, speed, "speed"))
    if wins:
        tables.append(Table(WIN_HEADERS, wins, "wins"))
    tables.append(Table(TRAINING_HEADERS, [_training_cells(run) for run in runs], "training"))
    throughput = throughput_table(runs)
    if throughput is not None:
        tables.append(throughput)
    name, label = next(iter(labels.items()))
    findings = [*(_against_sft(run, name, label) for run in runs), *_ranking(runs, name, label)]
    remarks = [*_remarks(models, len(runs)), *([SPEED_REMARK] if speed else []), *([WIN_REMARK] if wins else [])]
    if throughput is not None:
        remarks.append(THROUGHPUT_REMARK)
    return Report(title, tables, findings, remarks, notes)


def _difference(name: str, higher: HeldOut, lower: HeldOut) -> tuple[Estimate, str]:
    """`higher` minus `lower`, and how the error was worked out.

    Where both answered the same prompts the error is that of the differences prompt by prompt (paired); else the two
    errors are added in squares.
    """
    gap = higher.mean(name) - lower.mean(name)
    ours, theirs, matches = higher.values(name), lower.values(name), higher.matches(lower)
    if ours is None or theirs is None:
        return Estimate(gap), "no standard error: the samples files do not hold every response"
    if matches is None:
        error = unpaired_error(ours, theirs)
        return Estimate(gap, error), f"± one standard error, {len(ours)} and {len(theirs)} held-out prompts, unpaired"
    paired = paired_difference(ours, [theirs[match] for match in matches])
    return Estimate(gap, paired.error), f"± one standard error, {len(ours)} held-out prompts, paired"


class _Model(NamedTuple):
    """SFT or a run on the held-out prompts, whose number is None when the samples file holds only some of them."""

    name: str
    estimates: dict[str, Estimate]
    prompts: int | None


def _model(name: str, evaluation: HeldOut, labels: Mapping[str, str]) -> _Model:
    """Means, with the standard error sd / √n of the samples where they are all of the evaluation."""
    values = {metric: evaluation.values(metric) for metric in ("scores", *labels)}
    errors = {metric: None if found is None else standard_error(found) for metric, found in values.items()}
    estimates = {metric: Estimate(evaluation.mean(metric), errors[metric]) for metric in labels}
    return _Model(name, estimates, None if values["scores"] is None else len(evaluation.samples))


def _sft_models(runs: Sequence[RunData], labels: Mapping[str, str]) -> list[_Model]:
    """One for SFT, or one per run where their first evaluations differ."""
    models = [_model("SFT", run.first, labels) for run in runs]
    if all(model.estimates == models[0].estimates for model in models):
        return models[:1]
    return [_model(f"SFT, start of {run.name}", run.first, labels) for run in runs]


def _cells(model: _Model) -> list[object]:
    formats = {"length": (1, 1.0), "eos_rate": (1, 100.0)}
    cells = [estimate.text(*formats.get(name, (3, 1.0))) for name, estimate in model.estimates.items()]
    return [model.name, *cells, model.prompts]


def _training_cells(run: RunData) -> list[str]:
    return [
        *(run.name, *(f"{run.largest(key):.0f}" for key in HEAD)),
        Estimate(run.train_mean("macro/length")).text(2),
        Estimate(run.train_mean("macro/lambda_eff")).text(3),
        Estimate(run.train_mean("val/explained_variance", last=0.1)).text(2),
    ]


def throughput_table(runs: Sequence[RunData]) -> Table | None:
    """How fast each run sampled and trained, by the metrics that some run has; None where no run has any."""
    logged = [name for name in SPEEDS if any(name in row for run in runs for row in run.train)]
    if not logged:
        return None
    rows: list[list[object]] = []
    for run in runs:
        cells: list[object] = [run.name]
        for name in logged:
            _, scale, decimals = SPEEDS[name]
            cells.append(Estimate(run.train_mean(name, last=0.5)).text(decimals, scale))
        rows.append(cells)
    return Table(["run", *(SPEEDS[name][0] for name in logged)], rows, "throughput")


def _against_sft(run: RunData, name: str, label: str) -> str:
    start, end = run.first.mean(name), run.last.mean(name)
    ratio = f", {end / start:.2f} times" if start > 0 and end > 0 else ""
    return f"{run.name}: {label} from {start:.3f} (SFT) to {end:.3f}{ratio}."


def _ranking(runs: Sequence[RunData], name: str, label: str) -> list[str]:
    """The run that ended highest against each other one, whatever the order they were given in."""
    ends = [run.last for run in runs if math.isfinite(run.last.mean(name))]
    ends.sort(key=lambda end: (-end.mean(name), end.model))
    sentences = []
    for best, other in ((ends[0], other) for other in ends[1:]):
        highest, mean = best.mean(name), other.mean(name)
        if highest == mean:
            sentences.append(f"{best.model} and {other.model} ended with the same {label}, {highest:.3f}.")
            continue
        gap, how = _difference(name, best, other)
        sentence = (
            f"{best.model} ended higher than {other.model} in {label}: {highest:.3f} against {mean:.3f},"
            f" a difference of {gap.text()} ({how})."
        )
        if gap.error is not None:
            within = "within" if gap.mean <= 2 * gap.error else "more than"
            sentence += f" That is {within} two standard errors."
        sentences.append(sentence)
    return sentences


def _remarks(models: Sequence[_Model], num_runs: int) -> list[str]:
    errors = [estimate.error for model in models for estimate in model.estimates.values()]
    remarks = ["SFT is the model before the first update; the runs are at their last evaluation."]
    if any(error is not None for error in errors):
        more = ": runs of other seeds may differ by more." if num_runs > 1 else "."
        remarks.append(f"± is one standard error over held-out prompts, not over seeds{more}")
    if None in errors:
        remarks.append("No ± where the samples file does not give the number for every response.")
    if any(model.prompts is None for model in models):
        remarks.append("No number of prompts where the samples file does not hold every response evaluated.")
    remarks.append(
        "Macro length and λ_eff = λ^(1/macro length) are means over the run; the critic's explained variance is the"
        " mean of its last tenth."
    )
    return remarks


def win_rows(runs: Sequence[RunData], judges: Mapping[str, str]) -> list[list[object]]:
    """Rows of the table of win rates, under WIN_HEADERS, of at least one run.

    The run that ended highest by the first judge against each other one, then each run against SFT. A judge, a score
    in the samples, prefers of two responses to a prompt the one it scores higher. Pairs whose samples files do not
    hold all responses, or hold other prompts, are left out.
    """

    def rank(end: HeldOut) -> tuple[float, str]:
        mean = end.mean(next(iter(judges)))
        return (-mean if math.isfinite(mean) else math.inf), end.model

    best, *others = sorted((run.last for run in runs), key=rank)
    rows: list[list[object]] = []
    for one, other in [*((best, other) for other in others), *((run.last, run.first) for run in runs)]:
        for name, label in judges.items():
            rates = _rates(name, one, other)
            if rates is not None:
                tie = None if rates.tie is None else Rate(rates.tie.value)
                shares = (rates.win, tie, rates.loss, rates.half)
                rows.append([f"{one.model} against {other.model}", label, *shares, rates.tally.counted])
    return rows


def _rates(name: str, one: HeldOut, other: HeldOut) -> WinRates | None:
    ours, theirs, matches = one.values(name), other.values(name), one.matches(other)
    if ours is None or theirs is None or matches is None:
        return None
    return win_rates([score_verdict(our, theirs[match]) for our, match in zip(ours, matches, strict=True)])
