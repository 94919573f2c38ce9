# SPDX-License-Identifier: Apache-2.0
"""The picture of win rates by turn, beside the published ones."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS, GREY, MARKERS, interval_line, legend_label, plain_axes, plain_legend, png
from dschat.common.statistics import Rate
from dschat.evaluation.turns.report import PUBLISHED, TurnRates

DASHES = ("--", ":", "-.")
APART = 0.06  # of two lines along the axis, in turns, so that their whiskers can be seen


def draw_turns(found: Sequence[TurnRates]) -> bytes:
    """A line for each comparison with its intervals, thin grey ones for what is published, as PNG."""
    figure = Figure(figsize=(9, 5.4), dpi=120, layout="constrained")
    ax = figure.subplots()
    for i, each in enumerate(found):
        shown = [(turn, _per_cent(rates.half)) for turn, rates in each.turns.items() if rates.half is not None]
        places = [turn + APART * (i - (len(found) - 1) / 2) for turn, _ in shown]
        look = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        interval_line(ax, places, [rate for _, rate in shown], legend_label(each.title), *look)
    for dash, (title, rates) in zip(DASHES, PUBLISHED.items(), strict=True):
        label = f"published, against Llama-3-8B-it: {title}"
        ax.plot(range(1, len(rates) + 1), rates, color=GREY, linestyle=dash, linewidth=1.1, label=label, zorder=1)
    ax.axhline(50, color="#1a1a1a", linewidth=0.8, zorder=1)
    turns = max(len(next(iter(PUBLISHED.values()))), *(max(each.turns) for each in found))
    ax.set_xticks(range(1, turns + 1))
    plain_axes(ax, "Win rate by turn", "turn", "win rate of the first, %, 95 % interval over dialogues")
    plain_legend(ax, below=True)
    return png(figure)


def _per_cent(rate: Rate) -> Rate:
    low, high = (None if end is None else 100 * end for end in (rate.low, rate.high))
    return Rate(100 * rate.value, low, high)
