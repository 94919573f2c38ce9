# SPDX-License-Identifier: Apache-2.0
"""Pictures of growing cost, as SVG: drawn without a display and without matplotlib's global state."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS

LINEAR = "#888888"


def draw_growth(points: Sequence[Mapping[str, Any]], unit: str, phases: Sequence[str]) -> bytes:
    """CPU time by phase and peak memory over a quantity; a dashed line shows linear growth from the first point."""
    values = [point["value"] for point in points]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": unit, "font.size": 9}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for phase, colour in zip(phases, COLOURS, strict=False):
            time.plot(values, [point["phases"][phase] for point in points], "o-", color=colour, label=phase)
        _draw(time, values, [point["cpu_seconds"] for point in points], "CPU seconds of an iteration")
        _draw(memory, values, [point["peak_mb"] for point in points], "peak memory, MB")
        for ax in (time, memory):
            ax.set_xlabel(unit)
            ax.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _draw(ax: Axes, values: Sequence[int], numbers: Sequence[float], label: str) -> None:
    """The sum and what linear growth would be, on logarithmic axes."""
    ax.plot(values, numbers, "s-", color="#1a1a1a", label="whole")
    ends = [values[0], values[-1]]
    ax.plot(ends, [numbers[0], numbers[0] * ends[1] / ends[0]], "--", color=LINEAR, label="linear")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_xticks(values, [f"{value:,}" if value < 10_000 else f"{value / 1000:.0f}k" for value in values])
    ax.minorticks_off()
    ax.set_ylabel(label)
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
