# SPDX-License-Identifier: Apache-2.0
"""The picture of an evaluation report: win, tie and loss of every rater as stacked bars, with intervals."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from dschat.common.pictures import png, short
from dschat.common.statistics import Rate, Tally
from dschat.evaluation.report.results import RaterResult, SectionResult

# Okabe-Ito: told apart with any colour vision, and by their brightness in print.
WIN, TIE, LOSS = "#0072b2", "#d9d9d9", "#e69f00"
INK = "#1a1a1a"
BAR = 0.62  # height of a bar, where rows are 1 apart
ROW_INCHES, HEAD_INCHES = 0.62, 1.0
HALF: dict[str, Any] = {"marker": "D", "markerfacecolor": "white", "markersize": 7}
EQUAL_LENGTH: dict[str, Any] = {"marker": "o", "markerfacecolor": INK, "markersize": 7}
NO_DIFFERENCE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}


def draw_report(sections: Sequence[SectionResult]) -> bytes:
    """One panel per section (at least one) below each other, as PNG."""
    heights = [HEAD_INCHES + ROW_INCHES * len(section.raters) for section in sections]
    figure = Figure(figsize=(11, sum(heights) + 0.9), dpi=120, layout="constrained")
    panels = figure.subplots(len(sections), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, section in zip(panels, sections, strict=True):
        _draw(ax, section)
    first, second = sections[0].names if len(sections) == 1 else ("the first model", "the second model")
    handles = [
        Patch(color=WIN, label=f"win of {short(first)}"),
        Patch(color=TIE, label="tie"),
        Patch(color=LOSS, label=f"win of {short(second)}"),
        Line2D([], [], color=INK, linewidth=1.8, label="win + ½ tie, 95 % interval", **HALF),
        Line2D([], [], color=INK, linewidth=1.8, label="the same at equal length, 95 % interval", **EQUAL_LENGTH),
        Line2D([], [], label="no difference", **NO_DIFFERENCE),
    ]
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return png(figure)


def _draw(ax: Axes, section: SectionResult) -> None:
    for row, rater in enumerate(section.raters):
        _bar(ax, row, rater)
    ax.axvline(50, zorder=2.5, **NO_DIFFERENCE)
    ax.set_xlim(0, 100)
    ax.set_ylim(len(section.raters) - 0.35, -0.5)
    tallies = [(short(rater.rater), rater.rates.tally) for rater in section.raters]
    labels = [f"{name}\nn = {tally.counted}{_aside(tally)}" for name, tally in tallies]
    ax.set_yticks(range(len(labels)), labels, fontsize=10)
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.tick_params(axis="y", length=0, pad=10)
    ax.set_xticks(range(0, 101, 10))
    ax.set_xlabel("% of the verdicts counted")
    first, second = (short(name) for name in section.names)
    dataset = f" · {section.dataset}" if section.dataset else ""
    title = f"{first} against {second}{dataset} · {section.items} items"
    ax.set_title(title, fontsize=12, fontweight="bold", loc="left", pad=10, parse_math=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _bar(ax: Axes, row: int, rater: RaterResult) -> None:
    rates = rater.rates
    if rates.win is None or rates.tie is None or rates.loss is None or rates.half is None:
        ax.text(1, row, "no verdict that counts", ha="left", va="center", color="#666666", fontsize=10)
        return
    left = 0.0
    for rate, colour, ink in ((rates.win, WIN, "white"), (rates.tie, TIE, INK), (rates.loss, LOSS, INK)):
        width = 100 * rate.value
        ax.barh(row, width, BAR, left=left, color=colour, edgecolor="white", linewidth=1)
        if width >= 4:
            text = ax.text(left + width / 2, row + 0.17, f"{width:.0f} %", color=ink, zorder=3, fontsize=9)
            text.set(ha="center", va="center", path_effects=[withStroke(linewidth=3, foreground=colour)])
        left += width
    _whisker(ax, rates.half, row - 0.12, HALF)
    if rater.length_controlled.rate is not None:
        _whisker(ax, rater.length_controlled.rate, row + 0.42, EQUAL_LENGTH)


def _whisker(ax: Axes, rate: Rate, y: float, marker: dict[str, Any]) -> None:
    line: dict[str, Any] = {"color": INK, "path_effects": [withStroke(linewidth=4, foreground="white")]}
    if rate.low is not None and rate.high is not None:
        ends = [100 * rate.low, 100 * rate.high]
        ax.plot(ends, [y, y], linewidth=1.8, solid_capstyle="butt", zorder=3, **line)
    ax.plot([100 * rate.value], [y], zorder=4, clip_on=False, **line, **marker)


def _aside(tally: Tally) -> str:
    parts = ((tally.invalid, "invalid"), (tally.skipped, "skipped"))
    return "".join(f", {number} {word}" for number, word in parts if number)
