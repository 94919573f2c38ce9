# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: means with standard errors, the two tables, and what they say in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dschat.common.statistics import Estimate, paired_difference, standard_error, unpaired_error
from dschat.common.tables import text_table
from dschat.run_report.data import RunData, Sample, covering, same_prompts
from dschat.run_report.wins import HEADERS as WIN_HEADERS
from dschat.run_report.wins import win_rows

WIN_REMARK = (
    "Win rates: of two responses to a held-out prompt the one with the higher score wins. [ ] holds 95 %: Wilson's"
    " interval for win and loss, a bootstrap over prompts for the rate with ties as half."
)


@dataclass(frozen=True)
class SummaryRow:
    """One model on the held-out prompts.

    Attributes:
        name: SFT, or the run's name.
        estimates: Estimate by name: the metric function, scores, kl, length, eos_rate.
        prompts: number of held-out prompts, None when the samples file holds only some of them.
    """

    name: str
    estimates: dict[str, Estimate]
    prompts: int | None


@dataclass(frozen=True)
class Summary:
    """What the runs came to.

    Attributes:
        title: the report's title.
        headers: column heads of the table of results.
        rows: SFT and the runs, as text.
        win_headers: column heads of the table of win rates.
        win_rows: pairs of models, as text; empty where the samples files do not give them.
        training_headers: column heads of the table of training.
        training_rows: the runs, as text.
        findings: sentences: which run ended higher and by how much, and each run against SFT.
        remarks: how to read the numbers.
        notes: the caller's remarks.
        models: the numbers behind `rows`.
    """

    title: str
    headers: list[str]
    rows: list[list[str]]
    win_headers: list[str]
    win_rows: list[list[str]]
    training_headers: list[str]
    training_rows: list[list[str]]
    findings: list[str]
    remarks: list[str]
    notes: list[str]
    models: list[SummaryRow]

    def text(self) -> str:
        """The same tables and sentences as plain text for a terminal."""
        tables = [
            text_table(self.headers, self.rows),
            *([text_table(self.win_headers, self.win_rows)] if self.win_rows else []),
            text_table(self.training_headers, self.training_rows),
        ]
        prose = ["\n".join(lines) for lines in (self.findings, self.remarks, self.notes) if lines]
        return "\n\n".join([self.title, *tables, *prose]) + "\n"


def metric_label(name: str) -> str:
    """A metric's name as words: gold_scores → gold score."""
    words = name.replace("_", " ").strip()
    return words[:-1] if words.endswith("scores") else words


def score_label(runs: Sequence[RunData]) -> str:
    """What `scores` are in these runs: of the reward model, unless all scored by a function."""
    by_function = all(run.config.get("reward_function") for run in runs)
    return "reward-function score" if by_function else "reward-model score"


def summarise(runs: Sequence[RunData], metric: str | None, title: str, notes: Sequence[str]) -> Summary:
    """Work out the tables and sentences of a report.

    Args:
        runs: at least one run.
        metric: name of the metric function that all runs have, None when they have none in common.
        title: the report's title.
        notes: remarks to add at the end.
    """
    names = [*([metric] if metric else []), "scores", "kl", "length", "eos_rate"]
    models = [*_sft_rows(runs, names), *[_model_row(run.name, run.evals[-1], run.last, names) for run in runs]]
    labels = {"scores": score_label(runs), "kl": "KL to SFT (nats)", "length": "length (tokens)"}
    labels |= {"eos_rate": "ended by EOS (%)"} | ({metric: metric_label(metric)} if metric else {})
    judged = metric or "scores"
    wins = win_rows(runs, {name: labels[name] for name in (metric, "scores") if name})
    return Summary(
        title=title,
        headers=["model", *[labels[name] for name in names], "held-out prompts"],
        rows=[_cells(model, names) for model in models],
        win_headers=WIN_HEADERS,
        win_rows=wins,
        training_headers=[
            "run",
            "updates",
            "prompts",
            "seconds",
            "macro length (tokens)",
            "λ_eff per token",
            "explained variance",
        ],
        training_rows=[_training_cells(run) for run in runs],
        findings=_against_sft(runs, judged, labels[judged]) + _ranking(runs, judged, labels[judged]),
        remarks=[*_remarks(models, len(runs)), *([WIN_REMARK] if wins else [])],
        notes=list(notes),
        models=models,
    )


def estimate(name: str, mean: float, samples: Sequence[Sample]) -> Estimate:
    """The evaluation's mean, with the standard error sd / √n of the samples where they are all of the evaluation."""
    values = covering(name, mean, samples)
    return Estimate(mean, None if values is None else standard_error(values))


def difference(name: str, higher: RunData, lower: RunData) -> tuple[Estimate, str]:
    """`higher` minus `lower` in their last evaluations, and how the error was worked out.

    Where both answered the same prompts the error is that of the differences prompt by prompt (paired); else the two
    errors are added in squares.
    """
    means = [run.evals[-1].get(f"eval/{name}", math.nan) for run in (higher, lower)]
    gap = means[0] - means[1]
    ours, theirs = (covering(name, mean, run.last) for mean, run in zip(means, (higher, lower), strict=True))
    if ours is None or theirs is None:
        return Estimate(gap), "no standard error: the samples files do not hold every response"
    order = same_prompts(higher.last, lower.last)
    if order is None:
        error = unpaired_error(ours, theirs)
        return Estimate(gap, error), f"± one standard error, {len(ours)} and {len(theirs)} held-out prompts, unpaired"
    paired = paired_difference(ours, [theirs[other] for other in order])
    return Estimate(gap, paired.error), f"± one standard error, {len(ours)} held-out prompts, paired"


def _model_row(name: str, row: dict[str, float], samples: Sequence[Sample], names: Sequence[str]) -> SummaryRow:
    means = {key: row.get(f"eval/{key}", math.nan) for key in names}
    covered = covering("scores", means["scores"], samples) is not None
    estimates = {key: estimate(key, mean, samples) for key, mean in means.items()}
    return SummaryRow(name, estimates, len(samples) if covered else None)


def _sft_rows(runs: Sequence[RunData], names: Sequence[str]) -> list[SummaryRow]:
    """One row for SFT, or one per run where their first evaluations differ."""
    rows = [_model_row("SFT", run.evals[0], run.first, names) for run in runs]
    if all(row.estimates == rows[0].estimates for row in rows):
        return rows[:1]
    return [_model_row(f"SFT, start of {run.name}", run.evals[0], run.first, names) for run in runs]


def _cells(model: SummaryRow, names: Sequence[str]) -> list[str]:
    formats = {"length": (1, 1.0), "eos_rate": (1, 100.0)}
    cells = [model.estimates[name].text(*formats.get(name, (3, 1.0))) for name in names]
    return [model.name, *cells, "–" if model.prompts is None else str(model.prompts)]


def _training_cells(run: RunData) -> list[str]:
    prompts = max(row["samples"] for row in [*run.train, *run.evals])
    numbers = [
        Estimate(run.train_mean("macro/length")).text(2),
        Estimate(run.train_mean("macro/lambda_eff")).text(3),
        Estimate(run.train_mean("val/explained_variance", last=0.1)).text(2),
    ]
    return [run.name, str(run.updates), str(int(prompts)), f"{run.seconds:.0f}", *numbers]


def _against_sft(runs: Sequence[RunData], name: str, label: str) -> list[str]:
    sentences = []
    for run in runs:
        start, end = (row.get(f"eval/{name}", math.nan) for row in (run.evals[0], run.evals[-1]))
        ratio = f", {end / start:.2f} times" if start > 0 and end > 0 else ""
        sentences.append(f"{run.name}: {label} from {start:.3f} (SFT) to {end:.3f}{ratio}.")
    return sentences


def _ranking(runs: Sequence[RunData], name: str, label: str) -> list[str]:
    """The run that ended highest against each other one, whatever the order they were given in."""

    def final(run: RunData) -> float:
        return run.evals[-1].get(f"eval/{name}", math.nan)

    ranked = sorted((run for run in runs if math.isfinite(final(run))), key=lambda run: (-final(run), run.name))
    sentences = []
    for other in ranked[1:]:
        best = ranked[0]
        if final(best) == final(other):
            sentences.append(f"{best.name} and {other.name} ended with the same {label}, {final(best):.3f}.")
            continue
        gap, how = difference(name, best, other)
        sentence = (
            f"{best.name} ended higher than {other.name} in {label}: {final(best):.3f} against {final(other):.3f},"
            f" a difference of {gap.text()} ({how})."
        )
        if gap.error is not None:
            within = "within" if gap.mean <= 2 * gap.error else "more than"
            sentence += f" That is {within} two standard errors."
        sentences.append(sentence)
    return sentences


def _remarks(models: Sequence[SummaryRow], num_runs: int) -> list[str]:
    remarks = ["SFT is the model before the first update; the runs are at their last evaluation."]
    if any(value.error is not None for model in models for value in model.estimates.values()):
        remarks.append(
            "± is one standard error over held-out prompts, not over seeds"
            + (": runs of other seeds may differ by more." if num_runs > 1 else ".")
        )
    if any(value.error is None for model in models for value in model.estimates.values()):
        remarks.append("No ± where the samples file does not give the number for every response.")
    if any(model.prompts is None for model in models):
        remarks.append("No number of prompts where the samples file does not hold every response evaluated.")
    remarks.append(
        "Macro length and λ_eff = λ^(1/macro length) are means over the run; the critic's explained variance is the"
        " mean of its last tenth."
    )
    return remarks
