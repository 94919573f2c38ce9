# SPDX-License-Identifier: Apache-2.0
"""The pictures of all reports: charts of lines, with intervals where the numbers have them, and stacked bars."""

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
BAR = 0.62  # height of a bar, where rows are 1 apart
ROW_INCHES, HEAD_INCHES = 0.62, 1.0
Look = Mapping[str, Any]  # how matplotlib draws a line
# Okabe-Ito: told apart with any colour vision, and by their brightness in print. Behind each what is written on it.
WIN, TIE, LOSS = ("#0072b2", "white"), ("#d9d9d9", INK), ("#e69f00", INK)
NO_DIFFERENCE: Look = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}


def look_of(number: int, label: str) -> Look:
    """Colour and marker of a line by its number; after six they come again, dashed and hollow."""
    look = {"label": label, "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    return look if number < len(COLOURS) else look | {"linestyle": "--", "markerfacecolor": "white"}


def place_of(number: int, of: Sequence[object]) -> float:
    """Of one line among others: 0 in the middle. Lines stand a little apart, so that their whiskers can be seen."""
    return number - (len(of) - 1) / 2


@dataclass(frozen=True)
class Curve:
    """Numbers over x, or estimates: each of these with a whisker over its interval where it has one."""

    x: Sequence[float]
    y: Sequence[float] | Sequence[MeanInterval]
    look: Look

    def draw(self, ax: Axes) -> None:
        """Draws it into a chart."""
        estimates = [each for each in self.y if isinstance(each, MeanInterval)]
        if not estimates:
            ax.plot(self.x, np.asarray(self.y), **self.look)
            return
        below = [0.0 if each.low is None else each.value - each.low for each in estimates]
        above = [0.0 if each.high is None else each.high - each.value for each in estimates]
        look = {"markersize": 5, "linewidth": 1.8, "capsize": 2, "elinewidth": 1, **self.look}
        ax.errorbar(self.x, [each.value for each in estimates], yerr=[below, above], **look)


@dataclass(frozen=True)
class Chart:
    """Lines over x."""

    title: str
    x: str  # what the axes show, with the unit
    y: str
    lines: Sequence[Curve]
    levels: Sequence[tuple[float, Look]] = ()  # horizontal lines behind the others
    ticks: Mapping[float, str] = field(default_factory=dict)  # of x; by matplotlib where there are none
    scale: Literal["linear", "whole", "doubling", "names"] = "linear"  # of x
    legend: Literal["", "inside", "below"] = ""

    def draw(self, ax: Axes) -> None:
        """Draws it into axes."""
        for line in self.lines:
            line.draw(ax)
        for level, look in self.levels:
            ax.axhline(level, zorder=1, **look)
        if self.scale == "doubling":
            ax.set_xscale("log", base=2)
        elif self.scale == "whole":
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if self.scale == "names" else {}
        if self.ticks:
            ax.set_xticks(list(self.ticks), list(self.ticks.values()), parse_math=False, **turned)
            ax.minorticks_off()
        if self.scale == "names":
            ax.margins(x=0.2)
        plain_axes(ax, self.title, self.x, self.y)
        if self.legend:
            plain_legend(ax, below=self.legend == "below")


def draw_charts(
    charts: Sequence[Chart],
    size: tuple[float, float],
    dpi: int = 120,
    columns: int = 0,
    title: str = "",
    legend: Sequence[Look] = (),
    level_with_first: int = 0,
) -> bytes:
    """Charts beside each other as PNG.

    Args:
        charts: at least one.
        size: of the whole, in inches.
        dpi: pixels per inch.
        columns: charts in a row, 0 = all.
        title: above them.
        legend: of all charts, in the last place.
        level_with_first: so many of the charts share the first one's y axis.
    """
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=15, parse_math=False)
    places = len(charts) + bool(legend)
    columns = columns or places
    axes = figure.subplots(-(-places // columns), columns, squeeze=False).flatten()
    for ax in axes[1:level_with_first]:
        ax.sharey(axes[0])
    for chart, ax in zip(charts, axes, strict=False):
        chart.draw(ax)
    for ax in axes[len(charts) :]:
        ax.set_axis_off()
    if legend:
        handles = [Line2D([], [], **look) for look in legend]
        show_as_it_is(axes[-1].legend(handles=handles, loc="center", frameon=False, fontsize=12).get_texts())
    return png(figure)


@dataclass(frozen=True)
class Bar:
    """Shares of wins, ties and losses beside each other, and estimates of a share drawn over them."""

    label: str
    shares: Sequence[MeanInterval]  # in per cent; none where there is nothing to show
    over: Sequence[tuple[MeanInterval, float, Look]] = ()  # in per cent, how far below the middle, and the marker


@dataclass(frozen=True)
class Bars:
    """Bars below each other."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> float:
        """In inches."""
        return HEAD_INCHES + ROW_INCHES * len(self.bars)

    def draw(self, ax: Axes) -> None:
        """Draws them into axes."""
        for row, bar in enumerate(self.bars):
            self._draw_bar(ax, row, bar)
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

    def _draw_bar(self, ax: Axes, row: int, bar: Bar) -> None:
        if not bar.shares:
            ax.text(1, row, "no verdict that counts", ha="left", va="center", color="#666666", fontsize=10)
        left = 0.0
        for share, (colour, ink) in zip(bar.shares, (WIN, TIE, LOSS), strict=False):
            width = share.value
            ax.barh(row, width, BAR, left=left, color=colour, edgecolor="white", linewidth=1)
            if width >= 4:
                text = ax.text(left + width / 2, row + 0.17, f"{width:.0f} %", color=ink, zorder=3, fontsize=9)
                text.set(ha="center", va="center", path_effects=[withStroke(linewidth=3, foreground=colour)])
            left += width
        for estimate, below, marker in bar.over:
            line: Look = {"color": INK, "path_effects": [withStroke(linewidth=4, foreground="white")]}
            y = row + below
            if estimate.low is not None and estimate.high is not None:
                look: Look = {"linewidth": 1.8, "solid_capstyle": "butt", "zorder": 3}
                ax.plot([estimate.low, estimate.high], [y, y], **look, **line)
            ax.plot([estimate.value], [y], zorder=4, clip_on=False, **line, **marker)


def draw_bars(panels: Sequence[Bars], legend: Sequence[tuple[str, str] | Look]) -> bytes:
    """Panels, at least one, below each other, and what their colours (with a name each) and lines mean, as PNG."""
    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.9), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        panel.draw(ax)
    handles = [
        Patch(color=each[0], label=each[1]) if isinstance(each, tuple) else Line2D([], [], **each) for each in legend
    ]
    told = figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    show_as_it_is(told.get_texts())
    return png(figure)
