# SPDX-License-Identifier: Apache-2.0
"""Curves of runs, and their responses side by side: the parts of a report's page above the tables."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from dschat.base.pictures import legend_labels
from dschat.evaluation.chart import Chart, Curve, Look, draw_charts, look_of
from dschat.evaluation.page import Example, Figure, MacroPanel, Section, drawn
from dschat.evaluation.run_comparison import Labels, Runs
from dschat.evaluation.run_data import WINDOW_PART, RunData, column_of

SHOWN_PROMPTS = 3  # held-out prompts whose responses the page shows
START_LOOK: Look = {"label": "before training", "color": "#444444", "linestyle": "--", "linewidth": 1.2}
# Title, y axis with the unit, and keys of metrics.jsonl for training and held-out rows. Drawn where a run has them.
CHARTS = (
    ("Loss", "loss", "loss/<step>", "eval/loss"),
    ("Accuracy", "share of pairs", "train/accuracy", "eval/accuracy"),
    ("Score", "score", "objective/scores", "eval/scores"),
    ("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
    ("Response length", "length (tokens)", "response/length", "eval/length"),
    ("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", ""),
)
CHART_INCHES = (5.2, 3.6)
READING = "Markers: evaluations on held-out rows. Lines: training rows, bold where averaged over a tenth of the run."
NO_EXAMPLE = "There is no held-out prompt whose responses were written token by token for every model."


def curves(runs: Runs, labels: Labels) -> Section:
    """Charts of what the runs have logged; one that cannot be drawn is left out."""
    title = "Learning curves"
    charts = run_charts(runs, labels)
    if not charts:
        return Section(title, "No run has logged a metric that is drawn.")
    figures = []
    for chart in charts:
        picture = drawn(partial(draw_charts, [chart], CHART_INCHES), chart.title)
        if picture:
            figures.append(Figure(f"{chart.title} over optimiser updates", picture))
    return Section(title, remark=READING, figures=figures)


def run_charts(runs: Runs, labels: Labels) -> list[Chart]:
    """Charts in reading order of what any run has logged; the metric function's first, if `labels` name it."""
    rows = []
    for name, label in labels.items():
        if name != "scores":
            rows.append((label.capitalize(), label, f"objective/{name}", f"eval/{name}"))
    for title, axis, train_key, eval_key in CHARTS:
        if train_key == "objective/scores":
            title = labels.get("scores", title).capitalize()
        rows.append((title, axis, train_key.replace("<step>", runs[0].step), eval_key))
    charts: list[Chart] = []
    for title, axis, train_key, eval_key in rows:
        if any(train_key in run.train or eval_key in run.evals for run in runs):
            charts.append(_chart(runs, title, axis, train_key, eval_key, legend=not charts))
    return charts


def _chart(runs: Runs, title: str, axis: str, train_key: str, eval_key: str, legend: bool) -> Chart:
    """A metric over updates: training rows as lines, evaluations as markers, and the level before training."""
    lines = []
    starts = set()
    labels = legend_labels([run.name for run in runs])
    for number, run in enumerate(runs):
        look = look_of(number, labels[number])
        lines.append(Curve([], [], look))  # for the legend
        lines += _curves_of_training(run, train_key, look)
        evaluated = column_of(run.evals, eval_key)
        updates = run.evals["update"]
        lines.append(Curve(updates.tolist(), evaluated.tolist(), _markers(look)))
        starts.update(evaluated[updates == 0].tolist())
    levels = [(level, START_LOOK) for level in sorted(filter(math.isfinite, starts))]
    return Chart(title, "updates", axis, lines, levels, scale="whole", legend="inside" if legend else "")


def _curves_of_training(run: RunData, key: str, look: Look) -> list[Curve]:
    """A metric of a run's training rows: a faint line of all values, and a bold one of their moving mean."""
    updates = run.train["update"].tolist()
    numbers = pd.Series(column_of(run.train, key))
    line = {**look, "label": "", "marker": ""}
    faint = Curve(updates, numbers.tolist(), line | {"alpha": 0.22, "linewidth": 0.8})
    bold = Curve(updates, smooth(numbers).tolist(), line | {"linewidth": 2})
    return [faint, bold]


def _markers(look: Look) -> Look:
    """How evaluations are drawn: markers without a line, with a white rim unless they are hollow."""
    rim = look["color"] if "markerfacecolor" in look else "white"
    return {**look, "label": "", "linestyle": "none", "markersize": 7, "markeredgecolor": rim, "zorder": 3}


def smooth(numbers: "pd.Series[float]") -> "pd.Series[float]":
    """Centred moving mean over a tenth of the values, which is shorter at both ends; NaN values are left out."""
    half = max(1, round(len(numbers) * WINDOW_PART / 2))
    return numbers.rolling(2 * half + 1, center=True, min_periods=1).mean()


def examples(runs: Runs, labels: Labels) -> Section:
    """Responses side by side to the first held-out prompts that every model answered token by token."""
    answers = [_samples_with_tokens(run.last.samples) for run in runs]

    # The SFT model's responses have the macro actions of the run whose macro actions are longest.
    longest = max(runs, key=lambda run: np.nan_to_num(run.train_mean("macro/length")))
    shown: list[Example] = []
    for prompt, start in _samples_with_tokens(longest.first.samples).items():
        if len(shown) < SHOWN_PROMPTS and all(prompt in samples for samples in answers):
            panels = [_panel("SFT", start, labels, f"macro actions as in {longest.name}")]
            for run, samples in zip(runs, answers, strict=True):
                panels.append(_panel(run.name, samples[prompt], labels))
            shown.append(Example(f"Prompt {len(shown) + 1}", prompt, panels))
    intro = f"The first {len(shown)} held-out prompts, with the responses of each model as they were sampled."
    return Section("Responses before and after", intro if shown else NO_EXAMPLE, examples=shown)


def _samples_with_tokens(samples: pd.DataFrame) -> dict[str, Mapping[str, Any]]:
    """Prompt → its last response that was written token by token, in the order of the file."""
    written = samples[samples["tokens"].map(len) > 0]
    return {sample["prompt"]: sample for sample in written.to_dict("records")}


def _panel(title: str, sample: Mapping[str, Any], labels: Labels, remark: str = "") -> MacroPanel:
    """A response with its scores, length and end."""
    parts = []
    for name, label in labels.items():
        if not math.isnan(sample.get(name, math.nan)):
            parts.append(f"{label} {sample[name]:.3f}")
    parts.append(f"{len(sample['tokens'])} tokens")
    parts.append("ended by EOS" if sample["eos_rate"] else "cut at the longest length")
    if remark:
        parts.append(remark)
    return MacroPanel(title, sample["tokens"], " · ".join(parts))
