# SPDX-License-Identifier: Apache-2.0
"""How near does step 3 come to what a GPU can do? In pieces, each of which stands alone.

A random Gemma of 2B's shape in bf16; all responses have their full length. Times are medians of --repeats runs (of
decoding alone: the fastest), after one that does not count. Two limits come first: how fast the device copies a large
tensor (bytes read and written), and how fast it multiplies large matrices.

- decoding: steps alone, from the time of whole responses minus that of their first tokens. The limit is the memory's:
  each step reads all weights and every row's keys and values once, the whole batch at the same time.
- training: scoring and training alone, of random responses in place of sampled ones, by the models and the updates of
  step 3. Operations are those of `dschat.models.operations` over real tokens: forwards of reference and reward model,
  forwards and backwards of actor and critic. Recomputation and padding do not count as work; the optimisers' time
  counts. The peak of memory stands beside what `dschat.plan` says of the same flags.
- iterations: whole ones, through the main program (contenders/ours.py), with the largest of --micro_batches that fits.
  The rate of rollouts has the time of prompts in it. Layers are compiled where --compile auto compiles them.

What cannot be measured says why, and the rest continues.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from contenders.gpu_jobs import choice_of, fits, job_choices, job_of, planned_memory, work_of
from contenders.limits import (
    DeviceLimits,
    Figures,
    Task,
    attempted,
    decode,
    measure_limits,
    phase_rates,
    rollout_limit,
)
from contenders.meter import PHASES, IterationFigures, median_figures
from contenders.process import Contender, ContenderJob
from contenders.work import SIZES, make_files
from harness import GB, MB, in_process, report, settings_parser

Tasks = list[tuple[Figures, Task]]  # how rows begin, and what measures them
TRAINED = 64  # prompts of the piece training
DECODERS = {
    "dynamic": "dynamic loop",
    "static": "static graphs",
    "compiled": "static graphs, compiled layers",
    "transformers": "transformers' static cache, compiled",
}


def main() -> None:
    """Measures the pieces and prints one JSON object; status 1 if there was a problem."""
    parser = settings_parser(__doc__, repeats=1)
    parser.add_argument("--pieces", nargs="*", choices=list(PIECES), default=list(PIECES), help="none: limits alone")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="G")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256], help="of decoding and of iterations")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[2, 4, 8, 32], help="sequences of a pass")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    settings = parser.parse_args()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too

    limits = in_process(measure_limits, settings.device)
    rows_of_pieces: dict[str, list[Figures]] = {}
    for name in settings.pieces:
        rows: list[Figures] = []
        with tempfile.TemporaryDirectory() as folder:
            for label, task in PIECES[name](settings, limits, Path(folder)):
                rows += attempted(label, task)
        rows_of_pieces[name] = rows
    report(settings, {"limits": asdict(limits), "pieces": rows_of_pieces})
    sys.exit(any("problem" in row for rows in rows_of_pieces.values() for row in rows))


def decoding(settings: argparse.Namespace, limits: DeviceLimits, folder: Path) -> Tasks:
    """A process for each decoder."""
    works = [work_of(settings, prompts) for prompts in settings.prompts]
    tasks: Tasks = []
    for decoder, name in DECODERS.items():
        task = partial(in_process, decode, decoder, works, settings.device, settings.repeats, limits)
        tasks.append(({"decoder": name}, task))
    return tasks


def training(settings: argparse.Namespace, limits: DeviceLimits, folder: Path) -> Tasks:
    """Each size of micro-batches, without gradient checkpointing and with it, layers as they are and compiled."""
    tasks: Tasks = []
    for size, recomputes, compiled in product(settings.micro_batches, (False, True), ("off", "on")):
        label: Figures = {"micro_batch": size, "checkpointing": "yes" if recomputes else "no", "compile": compiled}
        work = work_of(settings, TRAINED, size)
        make_job = partial(job_of, settings, work, folder, recomputes, "--compile", compiled)
        tasks.append((label, partial(train, make_job, settings.repeats, limits)))
    return tasks


def train(make_job: Callable[[], ContenderJob], repeats: int, limits: DeviceLimits) -> list[Figures]:
    """Scoring and training, unless they would not fit: the phases but the drawing of responses."""
    job = replace(make_job(), random_responses=True)
    planned, is_enough = planned_memory(job, without=("generate",))
    if not is_enough:
        return [{"planned_gb": planned / GB, "not_measured": "it would not fit"}]
    run = run_alone(job, repeats)
    peaks: Figures = {"peak_gb": peak_gb(run), "planned_gb": planned / GB}
    return [phase_rates(job.work, run.wall_seconds, limits) | peaks]


def iterations(settings: argparse.Namespace, limits: DeviceLimits, folder: Path) -> Tasks:
    """Each number of prompts, with the largest micro-batches that fit: without gradient checkpointing, or with it."""
    tasks: Tasks = []
    for prompts in settings.prompts:
        tasks.append(({"prompts": prompts}, partial(fitting_iteration, settings, prompts, limits, folder)))
    return tasks


def fitting_iteration(settings: argparse.Namespace, prompts: int, limits: DeviceLimits, folder: Path) -> list[Figures]:
    """The usual iteration with the first choice that the plan says will fit."""
    job = next(filter(fits, job_choices(settings, prompts, folder)), None)
    if job is None:
        return [{"not_measured": "no micro-batch would fit"}]
    run = run_alone(job, settings.repeats)
    return [choice_of(job) | iteration_figures(job, run, limits)]


def iteration_figures(job: ContenderJob, run: IterationFigures, limits: DeviceLimits) -> Figures:
    """Rates and shares of a whole iteration."""
    seconds = run.wall_seconds
    tokens = job.work.batch * job.work.longest_response
    figures: Figures = {
        "drawing_tokens_per_second": tokens / seconds["generation"],
        "drawing_of_limit": rollout_limit(job.work, limits) / seconds["generation"],
    }
    figures |= phase_rates(job.work, seconds, limits)
    for phase in PHASES:
        figures[f"{phase}_share"] = seconds[phase] / seconds["total"]
    figures["seconds"] = seconds["total"]
    figures["tokens_per_second"] = tokens / seconds["total"]
    figures["peak_gb"] = peak_gb(run)
    return figures


def run_alone(job: ContenderJob, repeats: int) -> IterationFigures:
    """Runs step 3 without other contenders; the phases of each iteration are printed to standard error.

    Args:
        job: its settings; missing models are made. The contender gets a folder of its own below the job's.
        repeats: iterations that count, after one that does not.

    Returns:
        The median iteration.

    Raises:
        RuntimeError: its process ended early.
    """
    runs = []
    work = job.work
    make_files(work, Path(job.files))
    torch.cuda.empty_cache()  # so that the contender has the memory that this process has cached
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        with Contender(sys.executable, "ours", replace(job, folder=folder)) as contender:
            for number in range(repeats + 1):
                runs.append(contender.iterate())
                phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in runs[-1].wall_seconds.items())
                print(f"batch {work.batch}, iteration {number}: {phases}", file=sys.stderr, flush=True)
    return median_figures(runs[1:])


def peak_gb(run: IterationFigures) -> float:
    """The peak of memory, models included."""
    return (run.held_mb + run.peak_mb) * MB / GB


PIECES: dict[str, Callable[[argparse.Namespace, DeviceLimits, Path], Tasks]] = {
    "decoding": decoding,
    "training": training,
    "iterations": iterations,
}


if __name__ == "__main__":
    main()
