# SPDX-License-Identifier: Apache-2.0
"""How fast is an iteration of step 3, beside what must be computed at least, and beside TRL?

Every contender does the same work (contenders/work.py): the same random Gemmas, the same prompts, responses of the
same lengths or of the same distribution of lengths, the same batch and micro-batch. Each runs in a process of its own
with one thread. They take turns, iteration by iteration, so that other load on the machine meets all; the first
iteration of each does not count, medians of the others do. How time and memory are measured stands at the top of
contenders/process.py. Speed is response tokens per CPU second: with equal lengths that is the same as samples per CPU
second, and with ragged ones it does not depend on the luck of the draw. `speed` relates it to that of the lower bound.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from contenders.process import PHASES, Contender, ContenderJob, IterationFigures, usual
from contenders.work import SIZES, IterationWork, make_files
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
ENTRIES = {
    "lower_bound": Entry("lower bound", "lower_bound"),
    "lower_bound_scoring": Entry("lower bound + scoring passes", "lower_bound", scoring=True),
    "lower_bound_scoring_4": Entry("lower bound + scoring passes, 4 updates", "lower_bound", updates=4, scoring=True),
    "ours": Entry("ours", "ours", flags=MACRO),
    "ours_4": Entry("ours, 4 updates", "ours", updates=4, flags=MACRO),
    "vanilla": Entry("ours, vanilla PPO (n = 1)", "ours", flags=("--ngram", "1")),
    "randomized": Entry("ours, randomized", "ours", flags=("--termination_condition", "randomized")),
    "ppl": Entry("ours, ppl", "ours", flags=("--termination_condition", "ppl")),
    "trl": Entry("TRL PPOTrainer", "trl_ppo"),
}
WORKS = {
    "equal": IterationWork(SIZES["S"], 32, 8, 8, 64, 64),
    "ragged": IterationWork(SIZES["S"], 128, 8, 8, 64, 256, mean_response=48),
}
EVERY = {"equal": list(ENTRIES), "ragged": ["lower_bound", "ours", "trl"]}
NOT_MEASURED = {"not_measured": "no --trl_python"}


@dataclass(frozen=True, kw_only=True)
class ContenderRow(IterationFigures):
    """A contender's usual iteration."""

    batch: int
    positions_per_token: dict[str, float]  # computed outside of sampling, by token of prompts and responses
    tokens_per_cpu_second: float
    spread: tuple[float, float]  # the slowest and the fastest iteration, as parts of the same
    speed: float | None = None  # in that of the lower bound


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    parser = settings_parser(__doc__, "sections step3 … are")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--lengths", nargs="+", choices=list(WORKS), default=list(WORKS))
    names = "default: all; with ragged lengths lower_bound, ours, trl"
    parser.add_argument("--contenders", nargs="+", choices=list(ENTRIES), help=names)
    parser.add_argument("--repeats", type=int, default=3, help="iterations of each that count")
    parser.add_argument("--trl_python", help="an interpreter with TRL 1.12.0; TRL is left out without it")
    settings = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for size, lengths in product(settings.sizes, settings.lengths):
        title, rows = f"{size}, {lengths}", measure(size, lengths, settings)
        figures[title] = {name: NOT_MEASURED if row is None else asdict(row) for name, row in rows.items()}
        if settings.markdown is not None:
            write_section(settings.markdown, f"step3 {title}", f"{origin()}\n\n{step3_table(rows)}")
    report(settings, figures)


Rows = dict[str, ContenderRow | None]  # by name; None where there is no --trl_python


def measure(size: str, lengths: str, settings: argparse.Namespace) -> Rows:
    """Figures of every contender on one kind of work."""
    work = replace(WORKS[lengths], size=SIZES[size], dtype="bf16" if torch.cuda.is_available() else "fp32")
    if size == "tiny":  # for tests
        work = replace(work, batch=8, micro_batch=2, response=6, mean_response=work.mean_response and 2.0)
    names = settings.contenders or EVERY[lengths]
    rows: Rows = {ENTRIES[name].name: None for name in names}
    measured = [name for name in names if name != "trl" or settings.trl_python is not None]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(work, folder / "files")
        # On a GPU the models of all contenders together may not fit.
        for group in [[name] for name in measured] if torch.cuda.is_available() else [measured]:
            rows |= take_turns(group, work, folder, settings)
    if lower := rows.get("lower bound"):
        tokens = lower.tokens_per_cpu_second
        rows = {name: row and replace(row, speed=row.tokens_per_cpu_second / tokens) for name, row in rows.items()}
    return rows


def take_turns(
    names: Sequence[str], work: IterationWork, folder: Path, settings: argparse.Namespace
) -> dict[str, ContenderRow]:
    """Figures of contenders that stand beside each other."""
    with ExitStack() as stack:
        started = [stack.enter_context(start(name, work, folder, settings)) for name in names]
        turns = [[contender.iterate()[0] for contender in started] for _ in range(settings.repeats + 1)]
    runs = zip(*turns[1:], strict=True)
    return {ENTRIES[name].name: summary(own, work) for name, own in zip(names, runs, strict=True)}


def start(name: str, work: IterationWork, folder: Path, settings: argparse.Namespace) -> Contender:
    """A contender's process."""
    entry, own = ENTRIES[name], tempfile.mkdtemp(dir=folder)
    work = replace(work, updates=entry.updates)
    job = ContenderJob(work, str(folder / "files"), own, entry.scoring, list(entry.flags))
    return Contender(settings.trl_python if name == "trl" else sys.executable, entry.module, job)


def summary(runs: Sequence[IterationFigures], work: IterationWork) -> ContenderRow:
    """A contender's figures."""
    prompts = sum(work.prompt_lengths())
    parts = [{name: count / (prompts + run.tokens) for name, count in run.counts.items()} for run in runs]
    speeds = [run.tokens / run.cpu_seconds["total"] for run in runs]
    middle = statistics.median(speeds)
    spread = (round(min(speeds) / middle, 3), round(max(speeds) / middle, 3))
    positions = {name: round(statistics.median(part[name] for part in parts), 4) for name in parts[0]}
    own = {"batch": work.batch, "positions_per_token": positions, "tokens_per_cpu_second": middle, "spread": spread}
    return ContenderRow(**vars(usual(runs)) | own)


def step3_table(rows: Mapping[str, ContenderRow | None]) -> str:
    """The table of one kind of work."""
    head = ["", "speed", *(f"{name}, s" for name in PHASES), "macro actions", "positions", "peak, MB", "length"]
    lines = []
    for name, row in rows.items():
        if row is None:
            lines.append([name, f"not measured: {NOT_MEASURED['not_measured']}", *[""] * (len(head) - 2)])
            continue
        inside = row.inside_cpu_seconds.get("macro actions")
        lines.append(
            [
                name,
                f"{row.tokens_per_cpu_second:.0f} tokens/s" if row.speed is None else f"{row.speed:.2f}",
                *(f"{row.cpu_seconds.get(phase, 0.0):.2f}" for phase in PHASES),
                "" if inside is None else f"{100 * inside / row.cpu_seconds['total']:.2f} %",
                " / ".join(f"{positions:.2f}" for positions in row.positions_per_token.values()),
                f"{row.peak_mb:.0f}",
                f"{row.tokens / row.batch:.0f}",
            ]
        )
    return table(head, lines)


if __name__ == "__main__":
    main()
