# SPDX-License-Identifier: Apache-2.0
"""How do time and memory of an iteration of step 3 grow with length, batch, vocabulary and processes?

One of them is changed at a time; the rest stays as in BASE, a small Gemma whose responses all have the full length.
The iteration is that of the main program (contenders/ours.py), one update per rollout, one thread in each process;
medians after one iteration that does not count. Two processes share the same batch; the slower one's time and the
larger one's memory count. `exponent` is the slope between the last two points with both axes logarithmic: 1 is linear,
less is cheaper than that. A picture per quantity is drawn on request.

    python growth.py --pictures ../../../docs
"""

import argparse
import io
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from contenders.process import PHASES, Contender, Job, middle
from contenders.work import SIZES, Size, Work, make_files
from harness import origin, report, settings_parser, table, write_section
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS

BASE = Work(Size(2048, 64, 2, 4, 4, 16, 256), 8, 4, 32, 32, 128)
SHOWN = PHASES[:3]  # of the phases


@dataclass(frozen=True)
class Quantity:
    """What is changed."""

    name: str
    unit: str
    values: tuple[int, ...]
    tiny: tuple[int, int]  # for tests

    def work(self, base: Work, value: int) -> Work:
        """The work at one value."""
        match self.name:
            case "response":
                return replace(base, response=value)
            case "batch":
                return replace(base, batch=value)
            case "vocabulary":
                return replace(base, size=replace(base.size, vocabulary=value))
        return base


QUANTITIES = (
    Quantity("response", "tokens of a response", (128, 256, 512, 1024), (4, 8)),
    Quantity("batch", "prompts of a rollout", (8, 16, 32, 64, 128), (8, 16)),
    Quantity("vocabulary", "tokens of the vocabulary", (2048, 8192, 32_768, 131_072, 262_144), (64, 128)),
    Quantity("processes", "processes", (1, 2), (1, 2)),
)


@dataclass(frozen=True)
class Point:
    """Figures at one value: of the slowest process, and of the largest."""

    value: int
    cpu_seconds: float  # of an iteration
    phases: dict[str, float]  # CPU seconds
    wall_seconds: float
    peak_mb: float


@dataclass(frozen=True)
class Growth:
    """Every point of one quantity, and how fast time and memory grow at its end."""

    points: list[Point]
    exponent: dict[str, float]


def main() -> None:
    """Measures, prints one JSON object, and draws and writes what is asked for."""
    settings = parse()
    base = replace(BASE, size=SIZES["tiny"], response=4) if settings.tiny else BASE
    figures = {}
    for each in QUANTITIES:
        if each.name in settings.quantities:
            chosen = replace(each, values=each.tiny) if settings.tiny else each
            found = measure(chosen, base, settings.repeats)
            figures[each.name] = asdict(found)
            publish(found, each, settings)
    report(settings, figures)


def parse() -> argparse.Namespace:
    """The settings."""
    parser = settings_parser(__doc__, "sections growth … are")
    names = [each.name for each in QUANTITIES]
    parser.add_argument("--quantities", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=2, help="iterations that count")
    parser.add_argument("--pictures", type=Path, help="folder for growth-….svg")
    parser.add_argument("--tiny", action="store_true", help="two small points of each, for tests")
    return parser.parse_args()


def measure(quantity: Quantity, base: Work, repeats: int) -> Growth:
    """All of one quantity."""
    points = [run(quantity.work(base, value), value, quantity.name == "processes", repeats) for value in quantity.values]
    before, last = points[-2:]
    steps = {
        "cpu_seconds": last.cpu_seconds / before.cpu_seconds,
        "peak_mb": last.peak_mb / before.peak_mb,
    }
    wider = math.log(last.value / before.value)
    return Growth(points, {name: round(math.log(step) / wider, 2) for name, step in steps.items()})


def run(work: Work, value: int, processes: bool, repeats: int) -> Point:
    """One point; the value is the number of processes or already in the work."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(work, folder / "files")
        job = Job(work, str(folder / "files"), place, processes=value if processes else 1)
        with Contender(sys.executable, "ours", job) as contender:
            ranks = list(zip(*[contender.iterate() for _ in range(repeats + 1)][1:], strict=True))

    def slowest(kind: Literal["cpu", "wall"], phase: str) -> float:
        return round(max(middle(runs, kind, phase) for runs in ranks), 3)

    return Point(
        value=value,
        cpu_seconds=slowest("cpu", "total"),
        phases={phase: slowest("cpu", phase) for phase in SHOWN},
        wall_seconds=slowest("wall", "total"),
        peak_mb=round(max(run.peak_mb for runs in ranks for run in runs), 1),
    )


def publish(found: Growth, quantity: Quantity, settings: argparse.Namespace) -> None:
    """A quantity's picture and section of the document, where they are asked for."""
    if settings.pictures is not None:
        (settings.pictures / f"growth-{quantity.name}.svg").write_bytes(draw(found.points, quantity.unit))
    if settings.markdown is not None:
        text = f"{origin()}\n\n{growth_table(found, quantity.unit)}"
        write_section(settings.markdown, f"growth {quantity.name}", text)


def growth_table(found: Growth, unit: str) -> str:
    """Time and memory by the quantity that grows; how fast they grow at the end."""
    head = [unit, "CPU s", *(f"{phase}, s" for phase in SHOWN), "wall s", "peak, MB"]
    rows = []
    for point in found.points:
        seconds = (point.cpu_seconds, *(point.phases[phase] for phase in SHOWN), point.wall_seconds)
        rows.append([f"{point.value:,}", *(f"{number:.2f}" for number in seconds), f"{point.peak_mb:.0f}"])
    power = found.exponent
    end = f"At the end: CPU time grows with the power {power['cpu_seconds']}, memory with {power['peak_mb']}."
    return f"{table(head, rows)}\n\n{end}"


def draw(points: Sequence[Point], unit: str) -> bytes:
    """CPU time by phase and peak memory, as SVG; a dashed line shows linear growth from the first point."""
    values = [point.value for point in points]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": unit, "font.size": 9}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for phase, colour in zip(SHOWN, COLOURS, strict=False):
            time.plot(values, [point.phases[phase] for point in points], "o-", color=colour, label=phase)
        _draw(time, values, [point.cpu_seconds for point in points], "CPU seconds of an iteration")
        _draw(memory, values, [point.peak_mb for point in points], "peak memory, MB")
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
    ax.plot(ends, [numbers[0], numbers[0] * ends[1] / ends[0]], "--", color="#888888", label="linear")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_xticks(values, [f"{value:,}" if value < 10_000 else f"{value / 1000:.0f}k" for value in values])
    ax.minorticks_off()
    ax.set_ylabel(label)
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
