# SPDX-License-Identifier: Apache-2.0
"""The page and the pictures of runs of step 3 that start from the same models, and of learners side by side."""

import base64
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dschat.common.atomic import write_file
from dschat.common.display import markdown_table, text_table
from dschat.common.pictures import (
    COLOURS,
    GREY,
    MARKERS,
    interval_line,
    plain_axes,
    plain_legend,
    png,
    show_as_it_is,
)
from dschat.common.statistics import mean_interval
from dschat.errors import UserError
from dschat.macro_view.html import MacroPanel, panels_html, render_page
from dschat.run_report.data import RunData, Sample, read_run
from dschat.run_report.summary import RunReport, compare_runs, judges_of, labels_of, levels_of

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("report.html")
SHOWN_PROMPTS = 4  # held-out prompts whose responses the page shows
SYMBOLS = "●■▲◆▼✚"  # of the page, for the markers of matplotlib
SFT_COLOUR = "#444444"
SMOOTHED_PART = 0.1  # a smoothed line is the mean over this part of the run, centred
HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")


def build_report(
    runs: Mapping[str, Path], output_dir: Path, title: str = "PPO with macro actions", notes: Sequence[str] = ()
) -> RunReport:
    """Write `report.html` and `report.png` about runs of step 3; `.text()` of the numbers is for the terminal.

    Args:
        runs: the name to show → output folder of step 3. All start from the same SFT model.
        output_dir: folder of the two files; made where it is missing.
        title: heading of the page and the picture.
        notes: remarks of the caller, one paragraph each.

    Raises:
        UserError: when there is no run, or a file of a run is missing or malformed; the message names the file.
    """
    data, labels = read_runs(runs)
    report = compare_runs(data, labels, title, notes)
    picture = draw_all(data, labels, title)
    page = _page(data, labels, report)
    write_file(output_dir / "report.png", picture)
    write_file(output_dir / "report.html", page)
    return report


def read_runs(runs: Mapping[str, Path]) -> tuple[list[RunData], dict[str, str]]:
    """Read the output folders; also what the runs are compared by, see `labels_of`. Raises as `build_report`."""
    if not runs:
        raise UserError("A report needs the output_dir of at least one run of step 3.")
    data = [read_run(name, Path(folder)) for name, folder in runs.items()]
    metrics = {run.metric for run in data}
    if len(metrics) > 1:
        logger.warning("The runs differ in --metric_function: the report leaves it out and compares their scores.")
    return data, labels_of(data, metrics.pop() if len(metrics) == 1 else None)


def _page(runs: Sequence[RunData], labels: Mapping[str, str], report: RunReport) -> str:
    charts = run_charts(runs, labels)
    pngs = [base64.b64encode(draw_chart(runs, labels, chart)).decode("ascii") for chart in charts]
    return render_page(
        TEMPLATE,
        report=report,
        charts=[{"title": chart.title, "png": png} for chart, png in zip(charts, pngs, strict=True)],
        lines=run_styles(runs),
        examples=_examples(runs, labels),
        names=[run.name for run in runs],
        settings=_settings(runs),
    )


def _examples(runs: Sequence[RunData], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The first held-out prompts that every model answered token by token, with the responses side by side."""
    answers = [{sample.prompt: sample for sample in run.last.samples if sample.tokens} for run in runs]
    # The SFT model has no macro actions of its own: show those of the condition with the longest. The length of a run
    # without training rows is NaN, in place of which max() returns 0.
    longest = max(runs, key=lambda run: (max(0.0, run.train_mean("macro/length")), run.name))
    starts = [start for start in longest.first.samples if start.tokens and all(start.prompt in a for a in answers)]
    examples = []
    for start in starts[:SHOWN_PROMPTS]:
        panels = [_panel("SFT", start, labels, f"macro actions as in {longest.name}")]
        panels += [_panel(run.name, answer[start.prompt], labels) for run, answer in zip(runs, answers, strict=True)]
        examples.append({"prompt": start.prompt, "panels": Markup(panels_html(panels))})
    return examples


def _panel(title: str, sample: Sample, labels: Mapping[str, str], *remarks: str) -> MacroPanel:
    values = sample.values
    parts = [f"{label} {values[name]:.3f}" for name, label in judges_of(labels).items() if name in values]
    parts.append(f"{len(sample.tokens)} tokens")
    parts.append("ended by EOS" if values["eos_rate"] else "cut at the longest length")
    return MacroPanel(title, sample.tokens, " · ".join([*parts, *remarks]))


def _settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Flags with their value in each run: those that differ between the runs first."""
    rows = []
    for flag in sorted({flag for run in runs for flag in run.config}):
        values = [json.dumps(run.config[flag], ensure_ascii=False) if flag in run.config else "–" for run in runs]
        rows.append({"flag": f"--{flag}", "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    title: str
    axis: str  # label of the y axis, with the unit
    train_key: str  # of metrics.jsonl, like the next one
    eval_key: str | None


@dataclass(frozen=True)
class RunStyle:
    """How a run is drawn: its name, colour, marker of matplotlib and the marker as a character."""

    name: str
    colour: str
    marker: str
    symbol: str


def run_charts(runs: Sequence[RunData], labels: Mapping[str, str]) -> list[Chart]:
    """The charts in reading order; the metric function's and the critic's only where there is one. See `labels_of`."""
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
    looks = list(zip(COLOURS, MARKERS, SYMBOLS, strict=True))
    return [RunStyle(run.name, *looks[i % len(looks)]) for i, run in enumerate(runs)]


def smooth(values: Sequence[float]) -> np.ndarray:
    """(N,) float64: centred moving mean over SMOOTHED_PART of the values (N,), cut off at both ends.

    NaN values are left out; NaN where the window holds no number.
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
    charts, goals = run_charts(runs, labels), goal_levels(runs, labels)
    for chart, ax in zip(charts, axes, strict=False):
        _draw(ax, runs, chart, goals)
    for ax in axes[len(charts) :]:
        ax.set_axis_off()
    legend = axes[-1].legend(handles=_handles(runs), loc="center", frameon=False, fontsize=12)
    show_as_it_is(legend.get_texts())
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
    looks: list[dict[str, Any]] = []
    for style in run_styles(runs):
        # matplotlib leaves out a label that begins with an underscore.
        label, look = style.name.lstrip("_") or style.name.replace("_", "-"), {"markeredgecolor": "white"}
        looks.append({"label": label, "color": style.colour, "linewidth": 2, "marker": style.marker} | look)
    if len(runs) > 1:
        looks.append({"label": f"where {runs[0].name} ends", "color": COLOURS[0], "linestyle": ":", "linewidth": 1.6})
    looks += [
        {"label": "SFT, before the first update", "color": SFT_COLOUR, "linestyle": "--", "linewidth": 1.2},
        {"label": "each update, training prompts", "color": "#888888", "linewidth": 0.8, "alpha": 0.5},
        {"label": "the same, smoothed", "color": "#888888", "linewidth": 2},
        {"label": "evaluation, held-out prompts", "color": "#888888", "linestyle": "none", "marker": "o"},
    ]
    return [Line2D([], [], **look) for look in looks]


@dataclass(frozen=True)
class Point:
    """What a policy is measured to be on the held-out prompts; one number per prompt in each list."""

    gold: list[float]
    score: list[float]
    kl: list[float]
    tokens: list[float]


@dataclass(frozen=True)
class Learner:
    """A way to learn, and where it came to."""

    name: str
    points: list[Point]  # on the way, in order; the last one is its end
    seconds: float | None = None  # of training; None where there was none
    bound: bool = False  # the KL is an upper bound, not measured


def learner_table(learners: Sequence[Learner], as_page: bool = False) -> str:
    """Where each ends: a table for a terminal, or as Markdown for a page."""
    rows = []
    for learner in learners:
        end = learner.points[-1]
        kl = mean_interval(end.kl).text(1) if any(end.kl) else "0"
        cells = [learner.name, mean_interval(end.gold).text(), mean_interval(end.score).text(2)]
        cells += [f"≤ {end.kl[0]:.1f}" if learner.bound else kl, mean_interval(end.tokens).text(1)]
        rows.append([*cells, "–" if learner.seconds is None else f"{learner.seconds:.0f}"])
    return (markdown_table if as_page else text_table)(HEADERS, rows)


def draw_learners(learners: Sequence[Learner], file: Path) -> None:
    """Gold score against KL, each learner a line through its points with 95 % intervals of the gold score."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    ax = figure.subplots()
    start = mean_interval(learners[0].points[0].gold)
    ax.axhline(start.value, color=GREY, linestyle="--", linewidth=1, label=learners[0].name)
    for number, learner in enumerate(learners[1:]):
        kl = [fmean(point.kl) for point in learner.points]
        gold = [mean_interval(point.gold) for point in learner.points]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label = f"{learner.name} (its KL: an upper bound)" if learner.bound else learner.name
        interval_line(ax, [0.0, *kl], [start, *gold], label, colour, marker)
    plain_axes(ax, "What the gold score costs in KL", "KL to SFT (nats per response)", "gold score (mean, 95 %)")
    plain_legend(ax)
    write_file(file, png(figure))


def write_page(folder: Path, title: str, parts: Mapping[str, str]) -> Path:
    """Writes README.md of a folder: a title, and a heading with its text for each part."""
    body = "".join(f"\n## {heading}\n\n{text.rstrip()}\n" for heading, text in parts.items())
    page = folder / "README.md"
    write_file(page, f"# {title}\n{body}")
    return page
