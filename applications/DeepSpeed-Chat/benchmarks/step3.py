# SPDX-License-Identifier: Apache-2.0
"""How fast is an iteration of step 3, compared with plain PyTorch and with TRL?

Every contender does the same work (contenders/work.py): the same random Gemmas, the same prompts, responses of the
same lengths or of the same distribution of lengths, the same batch and micro-batch. Each runs in a process of its own
with one thread. They take turns, iteration by iteration, so that other load on the machine affects all of them; the
first iteration of each does not count, and the figures are medians of the others. contenders/process.py says how time
and memory are measured. Speed is response tokens per CPU second: with equal lengths that is proportional to samples
per CPU second, and with ragged lengths it does not depend on the lengths that are sampled. `speed` is relative to
plain PyTorch.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from contenders.meter import PHASES, IterationFigures, median_figures
from contenders.process import Contender, ContenderJob
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
    "plain_pytorch": Entry("plain PyTorch", "plain_pytorch"),
    "plain_pytorch_scoring": Entry("plain PyTorch + scoring passes", "plain_pytorch", scoring=True),
    "plain_pytorch_scoring_4": Entry(
        "plain PyTorch + scoring passes, 4 updates", "plain_pytorch", updates=4, scoring=True
    ),
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
EVERY = {"equal": list(ENTRIES), "ragged": ["plain_pytorch", "ours", "trl"]}
NOT_MEASURED = {"not_measured": "no --trl_python"}


@dataclass(frozen=True, kw_only=True)
class ContenderRow(IterationFigures):
    """The median iteration of a contender."""

    batch: int
    positions_per_token: dict[str, float]  # positions computed outside of sampling, per token of prompts and responses
    tokens_per_cpu_second: float
    spread: tuple[float, float]  # the slowest and the fastest iteration, relative to the median
    speed: float | None = None  # relative to plain PyTorch


Rows = dict[str, ContenderRow | None]  # by name; None: not measured, because there is no --trl_python


def main() -> None:
    """Measures, prints one JSON object, and writes what the flags ask for."""
    parser = settings_parser(__doc__, "sections step3 … are")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--lengths", nargs="+", choices=list(WORKS), default=list(WORKS))
    names = "default: all; with ragged lengths plain_pytorch, ours, trl"
    parser.add_argument("--contenders", nargs="+", choices=list(ENTRIES), help=names)
    parser.add_argument("--repeats", type=int, default=3, help="iterations of each that count")
    parser.add_argument("--trl_python", help="an interpreter with TRL 1.12.0; TRL is left out without it")
    settings = parser.parse_args()
    figures = {}
    for size in settings.sizes:
        for lengths in settings.lengths:
            title = f"{size}, {lengths}"
            rows = measure(size, lengths, settings)
            measured = {}
            for name, row in rows.items():
                measured[name] = NOT_MEASURED if row is None else asdict(row)
            figures[title] = measured
            if settings.markdown is not None:
                write_section(settings.markdown, f"step3 {title}", f"{origin()}\n\n{step3_table(rows)}")
    report(settings, figures)


def measure(size: str, lengths: str, settings: argparse.Namespace) -> Rows:
    """Figures of every contender on one kind of work."""
    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    work = replace(WORKS[lengths], size=SIZES[size], dtype=dtype)
    if size == "tiny":  # for tests
        work = replace(work, batch=8, micro_batch=2, longest_response=6, mean_response=work.mean_response and 2.0)
    names = settings.contenders or EVERY[lengths]
    rows: Rows = {ENTRIES[name].name: None for name in names}
    measured = [name for name in names if name != "trl" or settings.trl_python is not None]
    # On a GPU the models of all contenders together may not fit.
    groups = [[name] for name in measured] if torch.cuda.is_available() else [measured]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(work, folder / "files")
        for group in groups:
            rows |= take_turns(group, work, folder, settings)
    return with_speeds(rows)


def with_speeds(rows: Rows) -> Rows:
    """The rows with their speed relative to plain PyTorch, if that was measured."""
    plain_pytorch = rows.get("plain PyTorch")
    if plain_pytorch is None:
        return rows
    relative: Rows = {}
    for name, row in rows.items():
        if row is not None:
            row = replace(row, speed=row.tokens_per_cpu_second / plain_pytorch.tokens_per_cpu_second)
        relative[name] = row
    return relative


def take_turns(
    names: Sequence[str], work: IterationWork, folder: Path, settings: argparse.Namespace
) -> dict[str, ContenderRow]:
    """Figures of contenders that run side by side, iteration by iteration."""
    runs: dict[str, list[IterationFigures]] = {name: [] for name in names}
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(start(name, work, folder, settings)) for name in names}
        for _ in range(settings.repeats + 1):
            for name, contender in contenders.items():
                runs[name].append(contender.iterate())
    rows = {}
    for name in names:
        rows[ENTRIES[name].name] = summary(runs[name][1:], work)
    return rows


def start(name: str, work: IterationWork, folder: Path, settings: argparse.Namespace) -> Contender:
    """A contender's process."""
    entry = ENTRIES[name]
    job = ContenderJob(
        work=replace(work, updates=entry.updates),
        files=str(folder / "files"),
        folder=tempfile.mkdtemp(dir=folder),
        scoring=entry.scoring,
        flags=list(entry.flags),
    )
    python = settings.trl_python if name == "trl" else sys.executable
    return Contender(python, entry.module, job)


def summary(runs: Sequence[IterationFigures], work: IterationWork) -> ContenderRow:
    """The figures of a contender over its iterations."""
    prompts = sum(work.prompt_lengths())
    speeds = [run.tokens / run.cpu_seconds["total"] for run in runs]
    median = statistics.median(speeds)
    positions = {}
    for name in runs[0].counts:
        per_token = [run.counts[name] / (prompts + run.tokens) for run in runs]
        positions[name] = round(statistics.median(per_token), 4)
    return ContenderRow(
        **vars(median_figures(runs)),
        batch=work.batch,
        positions_per_token=positions,
        tokens_per_cpu_second=median,
        spread=(round(min(speeds) / median, 3), round(max(speeds) / median, 3)),
    )


def step3_table(rows: Mapping[str, ContenderRow | None]) -> str:
    """The table of one kind of work."""
    phases = [f"{phase}, s" for phase in PHASES]
    headers = ["", "speed", *phases, "macro actions", "positions", "peak, MB", "length"]
    lines = []
    for name, row in rows.items():
        if row is None:
            empty = [""] * (len(headers) - 2)
            lines.append([name, f"not measured: {NOT_MEASURED['not_measured']}", *empty])
        else:
            lines.append([name, *row_cells(row)])
    return table(headers, lines)


def row_cells(row: ContenderRow) -> list[str]:
    """The figures of a contender as the table shows them."""
    speed = f"{row.tokens_per_cpu_second:.0f} tokens/s" if row.speed is None else f"{row.speed:.2f}"
    macro_seconds = row.function_seconds.get("macro actions")
    macro_share = ""
    if macro_seconds is not None:
        macro_share = f"{100 * macro_seconds / row.cpu_seconds['total']:.2f} %"
    return [
        speed,
        *(f"{row.cpu_seconds.get(phase, 0.0):.2f}" for phase in PHASES),
        macro_share,
        " / ".join(f"{positions:.2f}" for positions in row.positions_per_token.values()),
        f"{row.peak_mb:.0f}",
        f"{row.tokens / row.batch:.0f}",
    ]


if __name__ == "__main__":
    main()
