# SPDX-License-Identifier: Apache-2.0
"""The pictures of all reports on evaluations."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from dschat.common.pictures import (
    COLOURS,
    GREY,
    MARKERS,
    interval_line,
    legend_label,
    plain_axes,
    plain_legend,
    png,
    short,
    show_as_it_is,
)
from dschat.common.statistics import MeanInterval, Rate, Tally
from dschat.evaluation.best_of import BestOf
from dschat.evaluation.report.results import RaterResult, SectionResult
from dschat.evaluation.text import PolicyResult, RewardResult
from dschat.evaluation.turns import Published, TurnRates

# Okabe-Ito: told apart with any colour vision, and by their brightness in print.
WIN, TIE, LOSS = "#0072b2", "#d9d9d9", "#e69f00"
INK = "#1a1a1a"
BAR = 0.62  # height of a bar, where rows are 1 apart
ROW_INCHES, HEAD_INCHES = 0.62, 1.0
HALF: dict[str, Any] = {"marker": "D", "markerfacecolor": "white", "markersize": 7}
EQUAL_LENGTH: dict[str, Any] = {"marker": "o", "markerfacecolor": INK, "markersize": 7}
REWARD = "mean reward, 95 % interval over prompts"
TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
DASHES = ("--", ":", "-.")
# How far lines stand apart, along the axis.
APART_IN_DOUBLINGS, APART_IN_TEMPERATURE, APART_IN_TURNS = 0.05, 0.012, 0.06
NO_DIFFERENCE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1}


def draw_comparisons(sections: Sequence[SectionResult]) -> bytes:
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
    show_as_it_is(legend.get_texts())
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
    show_as_it_is(ax.get_yticklabels())
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


def draw_best_of(found: Sequence[BestOf]) -> bytes:
    """A chart of the best of N for each model that has several responses, and one of single responses, as PNG."""
    drawn = [each for each in found if each.draws > 1]
    several, models = (list(dict.fromkeys(each.model for each in some)) for some in (drawn, found))
    temperatures = sorted({each.temperature for each in drawn})
    figure = Figure(figsize=(5.6 * (len(several) + 1), 4.6), dpi=120, layout="constrained")
    *panels, last = figure.subplots(1, len(several) + 1, squeeze=False)[0]
    for ax in panels[1:]:
        ax.sharey(panels[0])
    for model, ax in zip(several, panels, strict=True):
        _against_n(ax, model, [each for each in drawn if each.model == model], temperatures)
    for i, model in enumerate(models):
        cells = [each for each in found if each.n == 1 and each.model == model]
        places = [each.temperature + APART_IN_TEMPERATURE * _place(i, models) for each in cells]
        _line(last, i, places, [each.expected for each in cells], legend_label(model))
    plain_axes(last, "A single response", "temperature (0 = greedy)", REWARD)
    plain_legend(last)
    return png(figure)


def _against_n(ax: Axes, model: str, found: Sequence[BestOf], temperatures: Sequence[float]) -> None:
    """A line for each temperature, from dark for the lowest to bright for the highest."""
    for i, temperature in enumerate(temperatures):
        cells = [each for each in found if each.temperature == temperature]
        if cells:
            shade = matplotlib.colormaps["plasma"](0.85 * i / max(1, len(temperatures) - 1))
            places = [each.n * 2 ** (APART_IN_DOUBLINGS * _place(i, temperatures)) for each in cells]
            _line(ax, i, places, [each.expected for each in cells], f"temperature {temperature:g}", shade)
    numbers = sorted({each.n for each in found})
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, list(map(str, numbers)))
    ax.minorticks_off()
    plain_axes(ax, f"{short(model)}: best of N", "N, responses to choose from", REWARD)
    plain_legend(ax)


def draw_turns(found: Sequence[TurnRates], published: Published) -> bytes:
    """A line for each comparison with its intervals, thin grey ones for published rates, as PNG."""
    figure = Figure(figsize=(9, 5.4), dpi=120, layout="constrained")
    ax = figure.subplots()
    for i, each in enumerate(found):
        shown = {turn: rates.half.per_cent for turn, rates in each.turns.items() if rates.half is not None}
        places = [turn + APART_IN_TURNS * _place(i, found) for turn in shown]
        _line(ax, i, places, list(shown.values()), legend_label(each.title))
    for dash, (title, rates) in zip(DASHES, published.items(), strict=False):
        label = f"published, against Llama-3-8B-it: {title}"
        ax.plot(range(1, len(rates) + 1), rates, color=GREY, linestyle=dash, linewidth=1.1, label=label, zorder=1)
    ax.axhline(50, color=INK, linewidth=0.8, zorder=1)
    turns = max([*map(len, published.values()), *(max(each.turns) for each in found)])
    ax.set_xticks(range(1, turns + 1))
    plain_axes(ax, "Win rate by turn", "turn", "win rate of the first, %, 95 % interval over dialogues")
    plain_legend(ax, below=True)
    return png(figure)


def draw_texts(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult]) -> bytes:
    """Perplexity and ROUGE of policies, loss and accuracy of reward models, a chart each, as PNG."""
    charts: list[tuple[str, str, Sequence[PolicyResult | RewardResult], dict[str, Sequence[MeanInterval]]]] = []
    if policies:
        charts.append(("Perplexity", "exp(nats per token)", policies, {"": [each.perplexity for each in policies]}))
    if policies and policies[0].rouge:
        scores = {TITLES[name]: [each.rouge[name] for each in policies] for name in policies[0].rouge}
        charts.append(("ROUGE against the data's responses", "F1", policies, {**scores}))
    if rewards:
        charts.append(("Loss of the reward model", "nats per pair", rewards, {"": [each.loss for each in rewards]}))
        accuracy = [each.accuracy.per_cent for each in rewards]
        charts.append(("Accuracy of the reward model", "%", rewards, {"": accuracy}))
    figure = Figure(figsize=(5.2 * len(charts), 4.2), dpi=120, layout="constrained")
    for ax, (title, unit, results, lines) in zip(
        figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True
    ):
        updates = [float(each.update) for each in results if each.update is not None]
        along = len(updates) == len(results)
        places = updates if along else list(map(float, range(len(results))))
        for number, (label, estimates) in enumerate(lines.items()):
            _line(ax, number, places, estimates, label)
            if not along:  # models in no order: points, no line
                ax.containers[-1][0].set_linestyle("none")
        plain_axes(ax, title, "optimiser updates" if along else "", f"{unit}, 95 % interval over texts")
        if not along:
            names = [short(each.model) for each in results]
            ax.set_xticks(places, names, rotation=20, ha="right", parse_math=False)
            ax.margins(x=0.2)
        if len(lines) > 1:
            plain_legend(ax)
    return png(figure)


def _line(
    ax: Axes, number: int, places: Sequence[float], estimates: Sequence[MeanInterval], label: str, colour: Any = None
) -> None:
    """A line with the colour, unless one is given, and the marker of its number; they repeat after six."""
    colour = COLOURS[number % len(COLOURS)] if colour is None else colour
    interval_line(ax, places, estimates, label, colour, MARKERS[number % len(MARKERS)])


def _place(number: int, of: Sequence[object]) -> float:
    """Of one line among others: 0 in the middle. Lines stand a little apart, so that their whiskers can be seen."""
    return number - (len(of) - 1) / 2
