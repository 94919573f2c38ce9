# SPDX-License-Identifier: Apache-2.0
"""How fast is an iteration of step 3, beside what must be computed at least, and beside TRL?

Every contender does the same work (contenders/work.py): the same random Gemmas, the same prompts, responses of the
same lengths or of the same distribution of lengths, the same batch and micro-batch. Each runs in a process of its own
with one thread. They take turns, iteration by iteration, so that other load on the machine meets all; the first
iteration of each does not count, medians of the others do. How time and memory are measured stands at the top of
contenders/process.py. Speed is response tokens per CPU second: with equal lengths that is the same as samples per CPU
second, and with ragged ones it does not depend on the luck of the draw. `speed` relates it to that of the floor.

    python step3.py
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from contenders.process import PHASES, Contender, Iteration, Job, middle
from contenders.work import SIZES, Work, make_files
from harness import origin, report, settings_parser, table, write_section


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


@dataclass(frozen=True)
class Row:
    """A contender's figures: medians over iterations; the peak of all."""

    tokens_per_cpu_second: float
    spread: tuple[float, float]  # the slowest and the fastest iteration, as parts of the same
    tokens: float
    batch: int
    cpu_seconds: dict[str, float]
    wall_seconds: dict[str, float]
    inside_cpu_seconds: dict[str, float]
    positions_per_token: dict[str, float]
    peak_mb: int
    speed: float | None = None  # in that of the floor


@dataclass(frozen=True)
class Profile:
    """Where the time of an iteration went; see contenders/profiling.py."""

    seconds: float
    percent: dict[str, float]
    items: dict[str, dict[str, float]]


Figures = dict[str, Row | Profile | None]  # None: TRL was not measured, there was no --trl_python


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    settings = parse()
    found = {}
    for size in settings.sizes:
        for lengths in settings.lengths:
            found[f"{size}, {lengths}"] = figures = measure(size, lengths, settings)
            if settings.markdown is not None:
                write_section(settings.markdown, f"step3 {size}, {lengths}", f"{origin()}\n\n{step3_table(figures)}")
    absent = {"not_measured": "no --trl_python"}
    report(
        settings,
        {
            title: {name: absent if row is None else asdict(row) for name, row in figures.items()}
            for title, figures in found.items()
        },
    )


def parse() -> argparse.Namespace:
    """The settings."""
    parser = settings_parser(__doc__, "sections step3 … are")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--lengths", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(ENTRIES), help="default: all; with ragged lengths floor, ours, trl"
    )
    parser.add_argument("--repeats", type=int, default=3, help="iterations of each that count")
    parser.add_argument("--trl_python", help="an interpreter with TRL 1.12.0; TRL is left out without it")
    parser.add_argument("--flags", default="", help="more flags of step 3 for ours, in one word")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="folder for a trace of ours and a table of where its time went")
    parser.add_argument("--batch", type=int, help="prompts of a rollout, instead of those of the table")
    parser.add_argument("--response", type=int, help="longest response, instead of that of the table")
    return parser.parse_args()


def measure(size: str, lengths: str, settings: argparse.Namespace) -> Figures:
    """Figures of every contender on one kind of work, by name."""
    work = adapt(WORKS[lengths], size, settings)
    names = settings.contenders or EVERY[lengths]
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(work, folder / "files")
        # On a GPU the models of all contenders together may not fit.
        for group in [[name] for name in names] if torch.cuda.is_available() else [names]:
            figures |= take_turns(group, work, folder, settings)
        if settings.profile is not None:
            traces = (settings.profile / f"{size}-{lengths}").absolute()
            with start("ours", work, folder, settings, profile=str(traces)) as contender:
                contender.iterate(), contender.iterate()
            figures[PROFILE] = Profile(**json.loads((traces / "profile.json").read_text(encoding="utf-8")))
    if isinstance(floor := figures.get(FLOOR), Row):
        for name, row in figures.items():
            if isinstance(row, Row):
                figures[name] = replace(row, speed=row.tokens_per_cpu_second / floor.tokens_per_cpu_second)
    return figures


def take_turns(names: Sequence[str], work: Work, folder: Path, settings: argparse.Namespace) -> Figures:
    """Figures by name of contenders that stand beside each other."""
    runs: dict[str, list[Iteration]] = {}
    left_out = [name for name in names if ENTRIES[name].module == "trl_ppo" and settings.trl_python is None]
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(start(name, work, folder, settings)) for name in names if name not in left_out
        }
        for _ in range(settings.repeats + 1):
            for name, contender in started.items():
                runs.setdefault(name, []).extend(contender.iterate())
    return {ENTRIES[name].name: None if name in left_out else summary(runs[name][1:], work) for name in names}


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
    job = Job(
        replace(work, updates=entry.updates),
        str(folder / "files"),
        tempfile.mkdtemp(dir=folder),
        scoring=entry.scoring,
        flags=[*entry.flags, *(settings.flags.split() if entry.module == "ours" else [])],
        profile=profile,
        threads=settings.threads,
    )
    return Contender(settings.trl_python if entry.module == "trl_ppo" else sys.executable, entry.module, job)


def summary(runs: Sequence[Iteration], work: Work) -> Row:
    """A contender's figures."""
    prompts = sum(work.prompt_lengths())
    speeds = [run.tokens / run.cpu["total"] for run in runs]
    usual = statistics.median(speeds)
    positions = dict.fromkeys(name for run in runs for name in run.counts)
    return Row(
        tokens_per_cpu_second=usual,
        spread=(round(min(speeds) / usual, 3), round(max(speeds) / usual, 3)),
        tokens=statistics.median(run.tokens for run in runs),
        batch=work.batch,
        cpu_seconds={name: round(middle(runs, "cpu", name), 4) for name in runs[0].cpu},
        wall_seconds={name: round(middle(runs, "wall", name), 4) for name in runs[0].wall},
        inside_cpu_seconds={name: round(middle(runs, "inside", name), 4) for name in runs[0].inside},
        positions_per_token={
            name: round(statistics.median(run.counts.get(name, 0) / (prompts + run.tokens) for run in runs), 4)
            for name in positions
        },
        peak_mb=round(max(run.peak_mb for run in runs)),
    )


def step3_table(rows: Mapping[str, Row | Profile | None]) -> str:
    """The table of one kind of work, and where the time of ours went, if that was traced."""
    head = ["", "speed", *(f"{name}, s" for name in PHASES), "macro actions", "positions", "peak, MB", "length"]
    lines, profiles = [], []
    for name, row in rows.items():
        if row is None:
            lines.append([name, "not measured: no --trl_python", *[""] * (len(head) - 2)])
        elif isinstance(row, Profile):
            profiles.append(profile_table(row))
        else:
            lines.append([name, *_numbers(row)])
    return "\n\n".join([table(head, lines), *profiles])


def _numbers(row: Row) -> list[str]:
    cpu, inside = row.cpu_seconds, row.inside_cpu_seconds.get("macro actions")
    return [
        f"{row.tokens_per_cpu_second:.0f} tokens/s" if row.speed is None else f"{row.speed:.2f}",
        *(f"{cpu.get(phase, 0.0):.2f}" for phase in PHASES),
        "" if inside is None else f"{100 * inside / cpu['total']:.2f} %",
        " / ".join(f"{positions:.2f}" for positions in row.positions_per_token.values()),
        f"{row.peak_mb}",
        f"{row.tokens / row.batch:.0f}",
    ]


def profile_table(profile: Profile) -> str:
    """Where the time of an iteration went, in percent; of everything else, what takes 0.5 % or more."""
    groups = [[name, f"{percent:.1f} %"] for name, percent in profile.percent.items()]
    items = [[f"· {name}", f"{x:.1f} %"] for name, x in profile.items["everything else"].items() if x >= 0.5]
    return f"Where the time of ours went:\n\n{table(['', 'of the iteration'], [*groups, *items])}"


if __name__ == "__main__":
    main()
