# SPDX-License-Identifier: Apache-2.0
"""The picture of win rates by turn, beside published ones where there are any."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS, GREY, MARKERS, interval_line, legend_label, plain_axes, plain_legend, png
from dschat.evaluation.turns.report import Published, TurnRates

DASHES = ("--", ":", "-.")
APART = 0.06  # of two lines along the axis, in turns, so that their whiskers can be seen


def draw_turns(found: Sequence[TurnRates], published: Published) -> bytes:
    """A line for each comparison with its intervals, thin grey ones for published rates, as PNG."""
    figure = Figure(figsize=(9, 5.4), dpi=120, layout="constrained")
    ax = figure.subplots()
    for i, each in enumerate(found):
        shown = [(turn, rates.half.per_cent) for turn, rates in each.turns.items() if rates.half is not None]
        places = [turn + APART * (i - (len(found) - 1) / 2) for turn, _ in shown]
        look = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        interval_line(ax, places, [rate for _, rate in shown], legend_label(each.title), *look)
    for dash, (title, rates) in zip(DASHES, published.items(), strict=False):
        label = f"published, against Llama-3-8B-it: {title}"
        ax.plot(range(1, len(rates) + 1), rates, color=GREY, linestyle=dash, linewidth=1.1, label=label, zorder=1)
    ax.axhline(50, color="#1a1a1a", linewidth=0.8, zorder=1)
    turns = max([*map(len, published.values()), *(max(each.turns) for each in found)])
    ax.set_xticks(range(1, turns + 1))
    plain_axes(ax, "Win rate by turn", "turn", "win rate of the first, %, 95 % interval over dialogues")
    plain_legend(ax, below=True)
    return png(figure)
