# SPDX-License-Identifier: Apache-2.0
"""How do time and memory of an iteration of step 3 grow with length, batch, vocabulary and processes?

One quantity is changed at a time; the others stay as in BASE, a small Gemma whose responses all have the full length.
The iteration is that of the main program (contenders/ours.py), one update per rollout, one thread in each process;
medians after one iteration that does not count. Two processes share the same batch; the slower one's time and the
larger one's memory count. `exponent` is the slope between the last two points on logarithmic axes: 1 is linear, less
is cheaper. A chart per quantity is written on request.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from contenders.process import PHASES, ContenderJob, run_alone
from contenders.work import SIZES, IterationWork, Size
from dschat.base.pictures import COLOURS, plain_axes
from harness import origin, report, settings_parser, svg, table, write_section

BASE = IterationWork(Size(2048, 64, 2, 4, 4, 16, 256), 8, 4, 32, 32, 128)
SHOWN = PHASES[:3]  # the phases in tables and pictures
# Quantity → its unit and values.
QUANTITIES = {
    "response": ("tokens of a response", (128, 256, 512, 1024)),
    "batch": ("prompts of a rollout", (8, 16, 32, 64, 128)),
    "vocabulary": ("tokens of the vocabulary", (2048, 8192, 32_768, 131_072, 262_144)),
    "processes": ("processes", (1, 2)),
}
# The value, seconds of an iteration ("cpu_seconds" and "wall_seconds"), CPU seconds of its phases, and "peak_mb".
Point = dict[str, float]


def main() -> None:
    """Measures, prints a JSON object, and writes the charts and tables that the flags ask for."""
    parser = settings_parser(__doc__, "sections growth … are")
    parser.add_argument("--repeats", type=int, default=2, help="iterations that count")
    parser.add_argument("--pictures", type=Path, help="folder for growth-….svg")
    parser.add_argument("--tiny", action="store_true", help="two points of a tiny model for each, for tests")
    settings = parser.parse_args()
    base = replace(BASE, size=SIZES["tiny"], longest_response=4) if settings.tiny else BASE
    figures = {}
    for name, (unit, values) in QUANTITIES.items():
        if settings.tiny:
            values = values[:2]
        points = [measure(name, value, base, settings.repeats) for value in values]
        figures[name] = {"points": points, "exponent": exponents(points)}
        write(name, points, unit, settings)
    report(settings, figures)


def measure(name: str, value: int, base: IterationWork, repeats: int) -> Point:
    """Measures one point: CPU seconds of the slowest process and memory of the largest one."""
    work = base
    if name == "response":
        work = replace(base, longest_response=value)
    elif name == "batch":
        work = replace(base, batch=value)
    elif name == "vocabulary":
        work = replace(base, size=replace(base.size, vocab_size=value))
    processes = value if name == "processes" else 1
    with tempfile.TemporaryDirectory() as folder:
        job = ContenderJob(work, f"{folder}/files", folder, processes=processes)
        ranks = run_alone(job, repeats)
    figures = {phase: max(rank.cpu_seconds[phase] for rank in ranks) for phase in SHOWN}
    figures["cpu_seconds"] = max(rank.cpu_seconds["total"] for rank in ranks)
    figures["wall_seconds"] = max(rank.wall_seconds["total"] for rank in ranks)
    figures["peak_mb"] = max(rank.peak_mb for rank in ranks)
    point = {"value": float(value)}
    for figure, number in figures.items():
        point[figure] = round(number, 3)
    return point


def write(name: str, points: Sequence[Point], unit: str, settings: argparse.Namespace) -> None:
    """Writes the picture and the table of a quantity, if the flags ask for them."""
    if settings.pictures is not None:
        (settings.pictures / f"growth-{name}.svg").write_bytes(draw(points, unit))
    if settings.markdown is not None:
        write_section(settings.markdown, f"growth {name}", f"{origin()}\n\n{growth_table(points, unit)}")


def exponents(points: Sequence[Point]) -> dict[str, float]:
    """How fast time and memory grow between the last two points."""
    before, last = points[-2:]
    wider = math.log(last["value"] / before["value"])
    growth = {}
    for name in ("cpu_seconds", "peak_mb"):
        growth[name] = round(math.log(last[name] / before[name]) / wider, 2)
    return growth


def growth_table(points: Sequence[Point], unit: str) -> str:
    """Time and memory by the quantity that grows."""
    names = ["cpu_seconds", *SHOWN]
    headers = ["CPU s", *(f"{phase}, s" for phase in SHOWN)]
    rows = []
    for point in points:
        seconds = [f"{point[name]:.2f}" for name in names]
        rows.append([f"{point['value']:,.0f}", *seconds, f"{point['peak_mb']:.0f}"])
    power = exponents(points)
    end = f"At the end: CPU time grows with the power {power['cpu_seconds']}, memory with {power['peak_mb']}."
    return f"{table([unit, *headers, 'peak, MB'], rows)}\n\n{end}"


def draw(points: Sequence[Point], unit: str) -> bytes:
    """CPU time by phase and peak memory, as SVG."""

    def plot(figure: Figure) -> None:
        time, memory = figure.subplots(1, 2)
        values = [point["value"] for point in points]
        for phase, colour in zip(SHOWN, COLOURS, strict=False):
            time.plot(values, [point[phase] for point in points], "o-", color=colour, label=phase)
        draw_growth(time, points, "cpu_seconds")
        plain_axes(time, "", unit, "CPU seconds of an iteration")
        time.legend(frameon=False)
        draw_growth(memory, points, "peak_mb")
        plain_axes(memory, "", unit, "peak memory, MB")
        memory.legend(frameon=False)

    return svg((8, 3), unit, plot)


def draw_growth(ax: Axes, points: Sequence[Point], name: str) -> None:
    """A figure on logarithmic axes; the dashed line is linear growth from the first point."""
    values = [point["value"] for point in points]
    numbers = [point[name] for point in points]
    linear = [numbers[0], numbers[0] * values[-1] / values[0]]
    ax.plot(values, numbers, "s-", color="#1a1a1a", label="whole")
    ax.plot([values[0], values[-1]], linear, "--", color="#888888", label="linear")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_xticks(values, [f"{value:,.0f}" if value < 10_000 else f"{value / 1000:.0f}k" for value in values])
    ax.minorticks_off()


if __name__ == "__main__":
    main()
