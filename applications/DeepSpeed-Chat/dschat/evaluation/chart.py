# SPDX-License-Identifier: Apache-2.0
"""Pictures of the reports: line charts, with intervals where the numbers have them, and stacked bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from dschat.base.pictures import COLOURS, MARKERS, plain_axes, plain_legend, png, show_as_it_is
from dschat.base.statistics import MeanInterval

INK = "#1a1a1a"
BAR_HEIGHT = 0.62  # rows are 1 apart
ROW_INCHES = 0.62
HEAD_INCHES = 1.0
MIN_LABELLED_WIDTH = 4  # per cent; a narrower part of a bar has no number
Look = Mapping[str, Any]  # how matplotlib draws a line
# Fill and text colour of wins, ties and losses, from the Okabe-Ito palette: distinct in any colour vision.
WIN = ("#0072b2", "white")
TIE = ("#d9d9d9", INK)
LOSS = ("#e69f00", INK)
NO_DIFFERENCE: Look = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}


def look_of(number: int, label: str) -> Look:
    """Colour and marker of a line by its number; the six colours repeat dashed, with hollow markers."""
    look = {"label": label, "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    if number < len(COLOURS):
        return look
    return look | {"linestyle": "--", "markerfacecolor": "white"}


def offset_of(number: int, count: int) -> float:
    """Offset along the axis of a line among `count`, 0 for the middle one, so that whiskers do not overlap."""
    return number - (count - 1) / 2


@dataclass(frozen=True)
class Curve:
    """A line of numbers over x, or of estimates with a whisker over each interval."""

    x: Sequence[float]
    y: Sequence[float] | Sequence[MeanInterval]
    look: Look

    def draw(self, ax: Axes) -> None:
        """Draw the line into a chart."""
        estimates = [estimate for estimate in self.y if isinstance(estimate, MeanInterval)]
        if not estimates:
            ax.plot(self.x, np.asarray(self.y), **self.look)
            return
        values = [estimate.value for estimate in estimates]
        below = []
        above = []
        for estimate in estimates:
            below.append(0.0 if estimate.low is None else estimate.value - estimate.low)
            above.append(0.0 if estimate.high is None else estimate.high - estimate.value)
        look = {"markersize": 5, "linewidth": 1.8, "capsize": 2, "elinewidth": 1, **self.look}
        ax.errorbar(self.x, values, yerr=[below, above], **look)


@dataclass(frozen=True)
class Chart:
    """Lines over x."""

    title: str
    x: str  # label of the axis, with the unit
    y: str
    lines: Sequence[Curve]
    levels: Sequence[tuple[float, Look]] = ()  # horizontal lines behind the others
    ticks: Mapping[float, str] = field(default_factory=dict)  # ticks of the x axis; if empty, matplotlib chooses them
    scale: Literal["linear", "whole", "doubling"] = "linear"  # scale of the x axis
    legend: Literal["", "inside", "below"] = ""

    def draw(self, ax: Axes) -> None:
        """Draw the chart into axes."""
        for line in self.lines:
            line.draw(ax)
        for level, look in self.levels:
            ax.axhline(level, zorder=1, **look)
        if self.scale == "doubling":
            ax.set_xscale("log", base=2)
        elif self.scale == "whole":
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if self.ticks:
            ax.set_xticks(list(self.ticks), list(self.ticks.values()), parse_math=False)
            ax.minorticks_off()
        plain_axes(ax, self.title, self.x, self.y)
        if self.legend:
            plain_legend(ax, below=self.legend == "below")


def draw_charts(
    charts: Sequence[Chart], size: tuple[float, float], dpi: int = 120, level_with_first: int = 0
) -> bytes:
    """Draw charts next to each other, as PNG.

    Args:
        charts: at least one.
        size: size of the whole picture, in inches.
        dpi: pixels per inch.
        level_with_first: number of charts that share the first one's y axis.
    """
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    axes = figure.subplots(1, len(charts), squeeze=False)[0]
    for ax in axes[1:level_with_first]:
        ax.sharey(axes[0])
    for chart, ax in zip(charts, axes, strict=True):
        chart.draw(ax)
    return png(figure)


@dataclass(frozen=True)
class BarMarker:
    """An estimate of a share, drawn over a bar."""

    estimate: MeanInterval  # in per cent
    below: float  # distance below the middle of the bar, where bars are 1 apart
    look: Look


@dataclass(frozen=True)
class Bar:
    """Stacked shares of wins, ties and losses, in per cent."""

    label: str
    shares: Sequence[MeanInterval]  # empty if no verdict counts
    markers: Sequence[BarMarker] = ()

    def draw(self, ax: Axes, row: int) -> None:
        """Draw the bar into axes, at the height of a row."""
        if not self.shares:
            ax.text(1, row, "no verdict that counts", ha="left", va="center", color="#666666", fontsize=10)
        left = 0.0
        for share, (fill, ink) in zip(self.shares, (WIN, TIE, LOSS), strict=False):
            width = share.value
            ax.barh(row, width, BAR_HEIGHT, left=left, color=fill, edgecolor="white", linewidth=1)
            if width >= MIN_LABELLED_WIDTH:
                text = ax.text(left + width / 2, row + 0.17, f"{width:.0f} %", color=ink, zorder=3, fontsize=9)
                outline = withStroke(linewidth=3, foreground=fill)
                text.set(ha="center", va="center", path_effects=[outline])
            left += width
        for marker in self.markers:
            self._draw_marker(ax, row + marker.below, marker)

    def _draw_marker(self, ax: Axes, y: float, marker: BarMarker) -> None:
        estimate = marker.estimate
        line: Look = {"color": INK, "path_effects": [withStroke(linewidth=4, foreground="white")]}
        if estimate.low is not None and estimate.high is not None:
            whisker: Look = {"linewidth": 1.8, "solid_capstyle": "butt", "zorder": 3}
            ax.plot([estimate.low, estimate.high], [y, y], **whisker, **line)
        ax.plot([estimate.value], [y], zorder=4, clip_on=False, **line, **marker.look)


@dataclass(frozen=True)
class Bars:
    """A panel of bars below each other."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> float:
        """Height of the panel in inches."""
        return HEAD_INCHES + ROW_INCHES * len(self.bars)

    def draw(self, ax: Axes) -> None:
        """Draw the bars into axes."""
        for row, bar in enumerate(self.bars):
            bar.draw(ax, row)
        ax.axvline(50, zorder=2.5, **NO_DIFFERENCE)
        ax.set_xlim(0, 100)
        ax.set_ylim(len(self.bars) - 0.35, -0.5)
        ax.set_yticks(range(len(self.bars)), [bar.label for bar in self.bars], fontsize=10)
        show_as_it_is(ax.get_yticklabels())
        ax.tick_params(axis="y", length=0, pad=10)
        ax.set_xticks(range(0, 101, 10))
        ax.set_xlabel("% of the verdicts counted")
        ax.set_title(self.title, fontsize=12, fontweight="bold", loc="left", pad=10, parse_math=False)
        ax.spines[["top", "right", "left"]].set_visible(False)


def draw_bars(panels: Sequence[Bars], legend: Sequence[tuple[str, str] | Look]) -> bytes:
    """Draw panels of bars below each other, as PNG.

    Args:
        panels: at least one.
        legend: (colour, name) of a part of the bars, or the look of a line.
    """
    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.9), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        panel.draw(ax)
    handles: list[Patch | Line2D] = []
    for entry in legend:
        if isinstance(entry, tuple):
            handles.append(Patch(color=entry[0], label=entry[1]))
        else:
            handles.append(Line2D([], [], **entry))
    drawn_legend = figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    show_as_it_is(drawn_legend.get_texts())
    return png(figure)
