# SPDX-License-Identifier: Apache-2.0
"""Curves of the best of N: reward against N at each temperature, and against temperature for a single response."""

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS, MARKERS, interval_line, legend_label, plain_axes, plain_legend, png, short
from dschat.evaluation.best_of.report import BestOf

REWARD = "mean reward, 95 % interval over prompts"
APART = 0.05  # of two lines, along the axis, so that their whiskers can be seen: in doublings of N
APART_IN_TEMPERATURE = 0.012


def draw_best_of(found: Sequence[BestOf]) -> bytes:
    """A chart of the best of N for each model that has several responses, and one of single responses, as PNG."""
    several = list(dict.fromkeys(each.model for each in found if each.draws > 1))
    models = list(dict.fromkeys(each.model for each in found))
    figure = Figure(figsize=(5.6 * (len(several) + 1), 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(several) + 1, squeeze=False)[0]
    temperatures = sorted({each.temperature for each in found if each.draws > 1})
    for ax in panels[1:-1]:
        ax.sharey(panels[0])
    for model, ax in zip(several, panels, strict=False):
        _against_n(ax, model, [each for each in found if each.model == model and each.draws > 1], temperatures)
    _against_temperature(panels[-1], models, [each for each in found if each.n == 1])
    return png(figure)


def _against_n(ax: Axes, model: str, found: Sequence[BestOf], temperatures: Sequence[float]) -> None:
    """A line for each temperature, from dark for the lowest to bright for the highest."""
    shades = matplotlib.colormaps["plasma"]
    for i, temperature in enumerate(temperatures):
        cells = [each for each in found if each.temperature == temperature]
        if cells:
            shade = shades(0.85 * i / max(1, len(temperatures) - 1))
            means = [each.expected for each in cells]
            label = f"temperature {temperature:g}"
            places = [each.n * 2 ** (APART * (i - (len(temperatures) - 1) / 2)) for each in cells]
            interval_line(ax, places, means, label, shade, MARKERS[i % len(MARKERS)])
    numbers = sorted({each.n for each in found})
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, list(map(str, numbers)))
    ax.minorticks_off()
    plain_axes(ax, f"{short(model)}: best of N", "N, responses to choose from", REWARD)
    plain_legend(ax)


def _against_temperature(ax: Axes, models: Sequence[str], found: Sequence[BestOf]) -> None:
    for i, model in enumerate(models):
        cells = [each for each in found if each.model == model]
        means = [each.expected for each in cells]
        places = [each.temperature + APART_IN_TEMPERATURE * (i - (len(models) - 1) / 2) for each in cells]
        look = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        interval_line(ax, places, means, legend_label(model), *look)
    plain_axes(ax, "A single response", "temperature (0 = greedy)", REWARD)
    plain_legend(ax)
