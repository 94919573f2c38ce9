# SPDX-License-Identifier: Apache-2.0
"""The learning curves of a report, as PNG bytes. Drawn without a display and without matplotlib's global state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dschat.common.pictures import COLOURS, png
from dschat.run_report.data import RunData
from dschat.run_report.outcome import judges_of
from dschat.run_report.speed import levels_of

MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}  # matplotlib's name → the page's symbol
SFT_COLOUR = "#444444"
SMOOTHED_PART = 0.1  # a smoothed line is the mean over this part of the run, centred


@dataclass(frozen=True)
class Chart:
    """One chart: its title, the label of the y axis with the unit, and the keys of metrics.jsonl."""

    title: str
    axis: str
    train_key: str
    eval_key: str | None


@dataclass(frozen=True)
class RunStyle:
    """How a run is drawn: its name, colour, marker of matplotlib and the marker as a character."""

    name: str
    colour: str
    marker: str
    symbol: str


def run_charts(runs: Sequence[RunData], labels: Mapping[str, str]) -> list[Chart]:
    """The charts of a report, in reading order; the metric function's and the critic's only where there is one.

    Args:
        runs: of the report.
        labels: what the runs are compared by, the metric function or the scores first.
    """
    charts = [
        Chart(labels["scores"].capitalize(), "score", "objective/scores", "eval/scores"),
        Chart("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
        Chart("Response length", "length (tokens)", "response/length", "eval/length"),
    ]
    critic = Chart("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", None)
    charts += [critic] if any(critic.train_key in row for run in runs for row in run.train) else []
    name, label = next(iter(labels.items()))
    own = [] if name == "scores" else [Chart(label.capitalize(), label, f"objective/{name}", f"eval/{name}")]
    return [*own, *charts]


def run_styles(runs: Sequence[RunData]) -> list[RunStyle]:
    """A colour and a marker per run; they repeat after six."""
    markers = list(MARKERS.items())
    return [RunStyle(run.name, COLOURS[i % len(COLOURS)], *markers[i % len(markers)]) for i, run in enumerate(runs)]


def smooth(values: Sequence[float]) -> np.ndarray:
    """Centred moving mean over SMOOTHED_PART of the values, cut off at both ends; NaN values are left out.

    Args:
        values: (N,) numbers.

    Returns:
        (N,) float64; NaN where the window holds no number.
    """
    numbers = np.asarray(values, dtype=np.float64)
    half = max(1, round(len(numbers) * SMOOTHED_PART / 2))
    windows = [numbers[max(0, i - half) : i + half + 1] for i in range(len(numbers))]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if window.size else math.nan for window in finite])


def draw_all(runs: Sequence[RunData], labels: Mapping[str, str], title: str) -> bytes:
    """All charts and one legend in one PNG of 1800 × 1080 pixels."""
    figure = Figure(figsize=(15, 9), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=15, parse_math=False)
    axes = figure.subplots(2, 3).flatten()
    charts = run_charts(runs, labels)
    goals = goal_levels(runs, labels)
    for chart, ax in zip(charts, axes, strict=False):
        _draw(ax, runs, chart, goals)
    for ax in axes[len(charts) :]:
        ax.set_axis_off()
    legend = axes[-1].legend(handles=_handles(runs), loc="center", frameon=False, fontsize=12)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return png(figure)


def goal_levels(runs: Sequence[RunData], labels: Mapping[str, str]) -> dict[str, float]:
    """Key of metrics.jsonl → where the first run ends, which the others are to reach; none for a single run."""
    if len(runs) < 2:
        return {}
    return {f"objective/{name}": level for name, level in levels_of(runs[0], list(judges_of(labels))).items()}


def draw_chart(runs: Sequence[RunData], labels: Mapping[str, str], chart: Chart) -> bytes:
    """One chart without a legend, as a PNG of 1000 × 700 pixels."""
    figure = Figure(figsize=(5, 3.5), dpi=200, layout="constrained")
    _draw(figure.subplots(), runs, chart, goal_levels(runs, labels))
    return png(figure)


def _draw(ax: Axes, runs: Sequence[RunData], chart: Chart, goals: Mapping[str, float]) -> None:
    for run, style in zip(runs, run_styles(runs), strict=True):
        updates = [row["update"] for row in run.train]
        numbers = [row.get(chart.train_key, math.nan) for row in run.train]
        ax.plot(updates, numbers, color=style.colour, alpha=0.22, linewidth=0.8)
        ax.plot(updates, smooth(numbers), color=style.colour, linewidth=2)
        if chart.eval_key is not None:
            updates = [row["update"] for row in run.evals]
            numbers = [row.get(chart.eval_key, math.nan) for row in run.evals]
            marks = ax.plot(updates, numbers, color=style.colour, linestyle="none", marker=style.marker, markersize=7)
            marks[0].set(markeredgecolor="white", zorder=3)
    if chart.eval_key is not None:
        for level in sorted({run.first.row.get(chart.eval_key, math.nan) for run in runs}):
            if math.isfinite(level):
                ax.axhline(level, color=SFT_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
    if chart.train_key in goals:
        ax.axhline(goals[chart.train_key], color=COLOURS[0], linestyle=":", linewidth=1.6, zorder=1)
    ax.set_title(chart.title, fontsize=12, fontweight="bold", parse_math=False)
    ax.set_xlabel("optimiser updates")
    ax.set_ylabel(chart.axis, parse_math=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _handles(runs: Sequence[RunData]) -> list[Line2D]:
    handles = []
    for style in run_styles(runs):
        # matplotlib leaves out a label that begins with an underscore.
        label = style.name.lstrip("_") or style.name.replace("_", "-")
        line = Line2D(
            [], [], color=style.colour, linewidth=2, marker=style.marker, markeredgecolor="white", label=label
        )
        handles.append(line)
    if len(runs) > 1:
        label = f"where {runs[0].name} ends"
        handles.append(Line2D([], [], color=COLOURS[0], linestyle=":", linewidth=1.6, label=label))
    return [
        *handles,
        Line2D([], [], color=SFT_COLOUR, linestyle="--", linewidth=1.2, label="SFT, before the first update"),
        Line2D([], [], color="#888888", linewidth=0.8, alpha=0.5, label="each update, training prompts"),
        Line2D([], [], color="#888888", linewidth=2, label="the same, smoothed"),
        Line2D([], [], color="#888888", linestyle="none", marker="o", label="evaluation, held-out prompts"),
    ]
