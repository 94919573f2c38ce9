# SPDX-License-Identifier: Apache-2.0
"""The learning curves of a report, as PNG bytes. Drawn without a display and without matplotlib's global state."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dschat.run_report.data import RunData
from dschat.run_report.summary import metric_label, score_label

# Okabe-Ito colours dark enough for thin lines; the markers tell the runs apart without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7a6f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
SFT_COLOUR = "#444444"
SMOOTHED_PART = 0.1  # a smoothed line is the mean over this part of the run, centred


@dataclass(frozen=True)
class Panel:
    """One chart: its title, the label of the y axis with the unit, and the keys of metrics.jsonl."""

    title: str
    axis: str
    train_key: str
    eval_key: str | None


def panels(runs: Sequence[RunData], metric: str | None) -> list[Panel]:
    """The charts of a report, in reading order; the metric function's only where the runs have one."""
    score = score_label(runs)
    charts = [
        Panel(score.capitalize(), "score", "objective/scores", "eval/scores"),
        Panel("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
        Panel("Response length", "length (tokens)", "response/length", "eval/length"),
        Panel("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", None),
    ]
    if metric is None:
        return charts
    label = metric_label(metric)
    return [Panel(label.capitalize(), label, f"objective/{metric}", f"eval/{metric}"), *charts]


def smooth(values: Sequence[float]) -> np.ndarray:
    """Centred moving mean over SMOOTHED_PART of the values, cut off at both ends; NaN values are left out.

    Args:
        values: (N,) numbers.

    Returns:
        (N,) float64; NaN where the window holds no number.
    """
    numbers = np.asarray(values, dtype=np.float64)
    half = max(1, round(len(numbers) * SMOOTHED_PART / 2))
    smoothed = np.full(len(numbers), math.nan)
    for index in range(len(numbers)):
        window = numbers[max(0, index - half) : index + half + 1]
        window = window[np.isfinite(window)]
        if window.size:
            smoothed[index] = window.mean()
    return smoothed


def draw_all(runs: Sequence[RunData], metric: str | None, title: str) -> bytes:
    """All charts and one legend in one PNG of 1800 × 1080 pixels."""
    figure = Figure(figsize=(15, 9), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=15, parse_math=False)
    axes = figure.subplots(2, 3).flatten()
    charts = panels(runs, metric)
    for chart, ax in zip(charts, axes, strict=False):
        _draw(ax, runs, chart)
    for ax in axes[len(charts) :]:
        ax.set_axis_off()
    handles = _handles(runs)
    legend = axes[-1].legend(
        handles, [str(handle.get_label()) for handle in handles], loc="center", frameon=False, fontsize=12
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _png(figure)


def draw_panel(runs: Sequence[RunData], panel: Panel) -> bytes:
    """One chart without a legend, as a PNG of 1000 × 700 pixels."""
    figure = Figure(figsize=(5, 3.5), dpi=200, layout="constrained")
    _draw(figure.subplots(), runs, panel)
    return _png(figure)


def _draw(ax: Axes, runs: Sequence[RunData], panel: Panel) -> None:
    for index, run in enumerate(runs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        updates = [row["update"] for row in run.train]
        numbers = [row.get(panel.train_key, math.nan) for row in run.train]
        ax.plot(updates, numbers, color=colour, alpha=0.22, linewidth=0.8)
        ax.plot(updates, smooth(numbers), color=colour, linewidth=2)
        if panel.eval_key is not None:
            ax.plot(
                [row["update"] for row in run.evals],
                [row.get(panel.eval_key, math.nan) for row in run.evals],
                linestyle="none",
                marker=marker,
                markersize=7,
                color=colour,
                markeredgecolor="white",
                zorder=3,
            )
    if panel.eval_key is not None:
        for level in sorted({run.evals[0].get(panel.eval_key, math.nan) for run in runs}):
            if math.isfinite(level):
                ax.axhline(level, color=SFT_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
    ax.set_title(panel.title, fontsize=12, fontweight="bold", parse_math=False)
    ax.set_xlabel("optimiser updates")
    ax.set_ylabel(panel.axis, parse_math=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _handles(runs: Sequence[RunData]) -> list[Line2D]:
    handles = []
    for index, run in enumerate(runs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        # matplotlib leaves out a label that begins with an underscore.
        label = run.name.lstrip("_") or run.name.replace("_", "-")
        handles.append(Line2D([], [], color=colour, linewidth=2, marker=marker, markeredgecolor="white", label=label))
    return [
        *handles,
        Line2D([], [], color=SFT_COLOUR, linestyle="--", linewidth=1.2, label="SFT, before the first update"),
        Line2D([], [], color="#888888", linewidth=0.8, alpha=0.5, label="each update, training prompts"),
        Line2D([], [], color="#888888", linewidth=2, label="the same, smoothed"),
        Line2D([], [], color="#888888", linestyle="none", marker="o", label="evaluation, held-out prompts"),
    ]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
