# SPDX-License-Identifier: Apache-2.0
"""How fast is an iteration of step 3, beside what must be computed at least, and beside TRL?

Every contender does the same work (contenders/work.py): the same random Gemmas, the same prompts, responses of the
same lengths or of the same distribution of lengths, the same batch and micro-batch. Each runs in a process of its own
with one thread. They take turns, iteration by iteration, so that other load on the machine meets all; the first
iteration of each does not count, medians of the others do. How time and memory are measured stands at the top of
contenders/meter.py. Speed is response tokens per CPU second: with equal lengths that is the same as samples per CPU
second, and with ragged ones it does not depend on the luck of the draw. `speed` relates it to that of the floor.

    python step3.py
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contenders.job import Job
from contenders.process import Contender
from contenders.tables import origin, step3_table, write_section
from contenders.work import SIZES, Work, make_files
from machine import machine


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    name: str
    module: str
    updates: int = 1
    scoring: bool = False
    flags: tuple[str, ...] = ()


MACRO = ("--ngram", "5")
FLOOR, PROFILE = "floor", "where the time of ours went"
ENTRIES = {
    "floor": Entry(FLOOR, "floor"),
    "floor_scoring": Entry("floor + scoring passes", "floor", scoring=True),
    "floor_scoring_4": Entry("floor + scoring passes, 4 updates", "floor", updates=4, scoring=True),
    "ours": Entry("ours", "ours", flags=MACRO),
    "ours_4": Entry("ours, 4 updates", "ours", updates=4, flags=MACRO),
    "vanilla": Entry("ours, vanilla PPO (n = 1)", "ours", flags=("--ngram", "1")),
    "randomized": Entry("ours, randomized", "ours", flags=("--termination_condition", "randomized")),
    "ppl": Entry("ours, ppl", "ours", flags=("--termination_condition", "ppl")),
    "trl": Entry("TRL PPOTrainer", "trl_ppo"),
}
WORKS = {
    "equal": Work(SIZES["S"], 32, 8, 8, 64, 64),
    "ragged": Work(SIZES["S"], 128, 8, 8, 64, 256, mean_response=48),
}
EVERY = {"equal": list(ENTRIES), "ragged": ["floor", "ours", "trl"]}


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    settings = parse()
    figures: dict[str, dict[str, Any]] = {}
    for size in settings.sizes:
        for lengths in settings.lengths:
            title = f"{size}, {lengths}"
            figures[title] = measure(size, lengths, settings)
            if settings.markdown is not None:
                text = f"{origin(machine())}\n\n{step3_table(figures[title])}"
                write_section(Path(settings.markdown), f"step3 {title}", text)
    used = {name: value for name, value in vars(settings).items() if name not in ("output", "markdown")}
    report = {"machine": machine(), "settings": used, "figures": figures}
    text = json.dumps(report, indent=2)
    print(text)
    if settings.output is not None:
        Path(settings.output).write_text(text + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--lengths", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(ENTRIES), help="default: all; with ragged lengths floor, ours, trl"
    )
    parser.add_argument("--repeats", type=int, default=3, help="iterations of each that count")
    parser.add_argument("--trl_python", help="an interpreter with TRL 1.12.0; TRL is left out without it")
    parser.add_argument("--flags", default="", help="more flags of step 3 for ours, in one word")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", help="folder for a trace of ours and a table of where its time went")
    parser.add_argument("--output", help="file for the JSON object")
    parser.add_argument("--markdown", help="document whose sections are written anew, as docs/performance.md")
    parser.add_argument("--batch", type=int, help="prompts of a rollout, instead of those of the table")
    parser.add_argument("--response", type=int, help="longest response, instead of that of the table")
    return parser.parse_args()


def measure(size: str, lengths: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Figures of every contender on one kind of work, by name."""
    work = adapt(WORKS[lengths], size, settings)
    names = settings.contenders or EVERY[lengths]
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(work, folder / "files")
        # On a GPU the models of all contenders together may not fit.
        for group in [[name] for name in names] if torch.cuda.is_available() else [names]:
            figures |= take_turns(group, work, folder, settings)
        if settings.profile is not None:
            traces = (Path(settings.profile) / f"{size}-{lengths}").absolute()
            figures[PROFILE] = trace(work, folder, traces, settings)
    floor = figures.get(FLOOR)
    for name, row in figures.items():
        if floor is not None and name != PROFILE and "not_measured" not in row:
            row["speed"] = row["tokens_per_cpu_second"] / floor["tokens_per_cpu_second"]
    return figures


def take_turns(names: list[str], work: Work, folder: Path, settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures by name of contenders that stand beside each other."""
    started: dict[str, Contender] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    figures: dict[str, dict[str, Any]] = {}
    try:
        for name in names:
            if ENTRIES[name].module == "trl_ppo" and settings.trl_python is None:
                figures[ENTRIES[name].name] = {"not_measured": "no --trl_python"}
            else:
                started[name] = start(name, work, folder, settings)
        for _ in range(settings.repeats + 1):
            for name, contender in started.items():
                runs.setdefault(name, []).append(contender.iterate())
    finally:
        for contender in started.values():
            contender.end()
    return figures | {ENTRIES[name].name: summary(own[1:], work) for name, own in runs.items()}


def trace(work: Work, folder: Path, place: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Where the time of ours goes, from a process of its own; the trace is written to a folder."""
    contender = start("ours", work, folder, settings, profile=str(place))
    for _ in range(2):
        contender.iterate()
    contender.end()
    return json.loads((place / "profile.json").read_text(encoding="utf-8"))


def adapt(work: Work, size: str, settings: argparse.Namespace) -> Work:
    """The work at a size; small ones are for tests."""
    work = replace(work, size=SIZES[size], dtype="bf16" if torch.cuda.is_available() else "fp32")
    if settings.batch is not None:
        work = replace(work, batch=settings.batch, micro_batch=min(work.micro_batch, settings.batch // 4))
    if settings.response is not None:
        mean = None if work.mean_response is None else settings.response / 3
        work = replace(work, response=settings.response, mean_response=mean)
    return work


def start(name: str, work: Work, folder: Path, settings: argparse.Namespace, profile: str | None = None) -> Contender:
    """A contender's process."""
    entry = ENTRIES[name]
    own = Path(tempfile.mkdtemp(dir=folder))
    job = Job(
        replace(work, updates=entry.updates),
        str(folder / "files"),
        str(own),
        scoring=entry.scoring,
        flags=[*entry.flags, *(settings.flags.split() if entry.module == "ours" else [])],
        profile=profile,
        threads=settings.threads,
    )
    python = settings.trl_python if entry.module == "trl_ppo" else sys.executable
    return Contender(python, entry.module, job)


def summary(runs: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    """Medians over iterations; the peak of all."""

    def medians(kind: str) -> dict[str, float]:
        names = dict.fromkeys(name for run in runs for name in run[kind])
        return {name: round(statistics.median(run[kind].get(name, 0.0) for run in runs), 4) for name in names}

    for run in runs:
        real = sum(work.prompt_lengths()) + run["tokens"]
        run["positions"] = {name: count / real for name, count in run["counts"].items()}
    speeds = [run["tokens"] / run["cpu"]["total"] for run in runs]
    middle = statistics.median(speeds)
    return {
        "tokens_per_cpu_second": middle,
        "spread": [round(min(speeds) / middle, 3), round(max(speeds) / middle, 3)],
        "tokens": statistics.median(run["tokens"] for run in runs),
        "batch": work.batch,
        "cpu_seconds": medians("cpu"),
        "wall_seconds": medians("wall"),
        "inside_cpu_seconds": medians("inside"),
        "positions_per_token": medians("positions"),
        "peak_mb": round(max(run["peak_mb"] for run in runs)),
    }


if __name__ == "__main__":
    main()
