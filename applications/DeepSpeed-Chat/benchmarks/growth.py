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
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contenders.job import Job
from contenders.process import environment_of, failure
from contenders.tables import growth_table, origin, write_section
from contenders.work import SIZES, Size, Work, make_files
from machine import machine

PHASES = ("generation", "scoring", "training")
BASE = Work(Size(2048, 64, 2, 4, 4, 16, 256), 8, 4, 32, 32, 128)


@dataclass(frozen=True)
class Quantity:
    """What is changed."""

    name: str
    unit: str
    values: tuple[int, ...]

    def work(self, base: Work, value: int) -> Work:
        """The work at one value."""
        if self.name == "vocabulary":
            return replace(base, size=replace(base.size, vocabulary=value))
        return base if self.name == "processes" else replace(base, **{self.name: value})


QUANTITIES = (
    Quantity("response", "tokens of a response", (128, 256, 512, 1024)),
    Quantity("batch", "prompts of a rollout", (8, 16, 32, 64, 128)),
    Quantity("vocabulary", "tokens of the vocabulary", (2048, 8192, 32_768, 131_072, 262_144)),
    Quantity("processes", "processes", (1, 2)),
)
TINY = {"response": (4, 8), "batch": (8, 16), "vocabulary": (64, 128), "processes": (1, 2)}


def main() -> None:
    """Measures, prints one JSON object, and draws and writes what is asked for."""
    settings = parse()
    base, quantities = BASE, QUANTITIES
    if settings.tiny:
        base = replace(BASE, size=SIZES["tiny"], batch=8, micro_batch=4, response=4)
        quantities = tuple(replace(each, values=TINY[each.name]) for each in QUANTITIES)
    chosen = [each for each in quantities if each.name in settings.quantities]
    figures: dict[str, dict[str, Any]] = {}
    for each in chosen:
        figures[each.name] = measure(each, base, settings.repeats)
        publish(figures[each.name], each, settings)
    text = json.dumps({"machine": machine(), "settings": vars(settings), "figures": figures}, indent=2)
    print(text)
    if settings.output is not None:
        Path(settings.output).write_text(text + "\n", encoding="utf-8")


def publish(found: dict[str, Any], quantity: Quantity, settings: argparse.Namespace) -> None:
    """A quantity's picture and section of the document, where they are asked for."""
    if settings.pictures is not None:
        from contenders.pictures import draw_growth

        picture = draw_growth(found["points"], quantity.unit, PHASES)
        (Path(settings.pictures) / f"growth-{quantity.name}.svg").write_bytes(picture)
    if settings.markdown is not None:
        text = f"{origin(machine())}\n\n{growth_table(found, quantity.unit, PHASES)}"
        write_section(Path(settings.markdown), f"growth {quantity.name}", text)


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [each.name for each in QUANTITIES]
    parser.add_argument("--quantities", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=2, help="iterations that count")
    parser.add_argument("--pictures", help="folder for growth-….svg")
    parser.add_argument("--markdown", help="document whose sections are written anew, as docs/performance.md")
    parser.add_argument("--output", help="file for the JSON object")
    parser.add_argument("--tiny", action="store_true", help="two small points of each, for tests")
    return parser.parse_args()


def measure(quantity: Quantity, base: Work, repeats: int) -> dict[str, Any]:
    """Every point of one quantity, and how fast time and memory grow at its end."""
    points = []
    for value in quantity.values:
        processes = value if quantity.name == "processes" else 1
        points.append({"value": value} | run(quantity.work(base, value), processes, repeats))
    before, last = points[-2:]
    return {
        "points": points,
        "exponent": {
            name: round(math.log(last[name] / before[name]) / math.log(last["value"] / before["value"]), 2)
            for name in ("cpu_seconds", "peak_mb")
        },
    }


def run(work: Work, processes: int, repeats: int) -> dict[str, Any]:
    """Figures of one point: CPU seconds of an iteration and of its phases, wall seconds, peak memory."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(work, folder / "files")
        job = Job(work, str(folder / "files"), str(folder), iterations=repeats + 1)
        _run_processes(job, processes)
        ranks = []
        for rank in range(processes):
            lines = (folder / f"meter-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            ranks.append([json.loads(line) for line in lines[2:]])  # after "ready" and the first iteration

    def slowest(kind: str, phase: str) -> float:
        middles = [statistics.median(run[kind].get(phase, 0.0) for run in runs) for runs in ranks]
        return round(max(middles), 3)

    return {
        "cpu_seconds": slowest("cpu", "total"),
        "phases": {phase: slowest("cpu", phase) for phase in PHASES},
        "wall_seconds": slowest("wall", "total"),
        "peak_mb": round(max(run["peak_mb"] for runs in ranks for run in runs), 1),
    }


def _run_processes(job: Job, processes: int) -> None:
    """The contender's processes, from beginning to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-m", "contenders.ours", str(job.write())]
    started, logs = [], [Path(job.folder) / f"log-{rank}.txt" for rank in range(processes)]
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment = os.environ | environment_of(job) | (group | own if processes > 1 else {})
        with open(log, "w", encoding="utf-8") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=job.folder))
    try:
        for process, log in zip(started, logs, strict=True):
            if process.wait():
                raise failure(log)
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    main()
