# SPDX-License-Identifier: Apache-2.0
"""Pictures of the reports: line charts, with intervals where the numbers have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dschat.base.pictures import COLOURS, MARKERS, plain_axes, plain_legend, png
from dschat.base.statistics import MeanInterval

INK = "#1a1a1a"
Look = Mapping[str, Any]  # how matplotlib draws a line


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
    charts: Sequence[Chart], size: tuple[float, float], dpi: int = 120, level_with_first: int = 0, below: bool = False
) -> bytes:
    """Draw charts next to each other, or below each other, as PNG.

    Args:
        charts: at least one.
        size: size of the whole picture, in inches.
        dpi: pixels per inch.
        level_with_first: number of charts that share the first one's y axis.
        below: below each other.
    """
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    rows, columns = (len(charts), 1) if below else (1, len(charts))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[1:level_with_first]:
        ax.sharey(axes[0])
    for chart, ax in zip(charts, axes, strict=True):
        chart.draw(ax)
    return png(figure)
