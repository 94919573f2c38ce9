# SPDX-License-Identifier: Apache-2.0
"""How near does step 3 come to what a GPU can do? In pieces, each of which ends within minutes and stands alone.

A random Gemma of 2B's shape in bf16; all responses have their full length. Times are medians of --repeats runs (of
decoding alone: the fastest), after one that does not count. Two limits come first: how fast the device copies a large
tensor (bytes read and written), and how fast it multiplies large matrices.

- decoding: steps alone, from the time of whole responses minus that of their first tokens. The limit is the memory's:
  each step reads all weights and every row's keys and values once, the whole batch at the same time.
- training: scoring and training alone, of random responses in place of sampled ones, by the models and the updates of
  step 3. Operations are multiplications and additions over real tokens: forwards of reference and reward model,
  forwards and backwards of actor and critic. Recomputation and padding do not count as work; the optimisers' time
  counts. The peak of memory stands beside what `dschat.plan` says of the same flags.
- iterations: whole ones, through the main program (contenders/ours.py), with the largest of --micro_batches that fits.
  The rate of rollouts has the time of prompts in it. Layers are compiled where --compile auto compiles them. With
  --peer trl, TRL's PPO does the same work in its own process, with the same micro-batches or smaller ones that fit.
- zero3: an iteration at ZeRO 3 beside one at ZeRO 0, layers not compiled. Limits that DeepSpeed states in numbers of
  parameters are scaled down to the model, in the proportion that its defaults have to a model of 7B.
- profile: the kernels of a short rollout's scoring and training, and of decoding steps, in groups: matrix products of
  the layers, attention, the head with its passes over logits, gradients that are checked and added up, the optimiser,
  everything else, and time in which the GPU waits. Milliseconds of one pass; the profiler's traces stay beside the
  figures. Responses are random, so that only what is asked for is profiled.
- tests_1, tests_2: the tests that need a GPU. quickstart: does PPO learn there?

A piece's figures go into a file of its own, row by row; what cannot be measured says why, and the rest continues.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import psutil
import torch

from contenders import ours
from contenders.gpu_jobs import choice_of, fits, job_choices, job_of, planned_memory, work_of
from contenders.kernels import read_kernels, times_of_parts
from contenders.limits import TERA, Figures, Task, attempted, decode, measure_limits, phase_rates, rollout_limit
from contenders.process import PHASES, ContenderJob, IterationFigures, run_alone
from contenders.profiled import WARMUP_ITERATIONS, profile_decoding
from contenders.work import SIZES, IterationWork, make_actor
from dschat.base.atomic import write_file
from dschat.models.operations import Peaks
from dschat.quickstart.subcommands import TRAINING
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from harness import GB, MB, in_process, origin, report, report_of, settings_parser, table

Tasks = list[tuple[Figures, Task]]  # how rows begin, and what measures them
MOST_SECONDS = 480  # of a piece
TRAINED = 64  # prompts of the piece training
NOTHING_FITS = "no micro-batch would fit"
ROOT = Path(__file__).resolve().parents[3]
DECODERS = {
    "dynamic": "dynamic loop",
    "static": "static graphs",
    "compiled": "static graphs, compiled layers",
    "transformers": "transformers' static cache, compiled",
}
NOT_COMPILED = ["--compile", "off"]
PEER = "TRL PPOTrainer"
PEER_PACKAGES = ("trl", "accelerate", "datasets", "jinja2", "pandas")
USUAL_PARAMETERS = 7e9  # of the models that DeepSpeed's defaults are made for
ZERO3_LIMITS = {  # in parameters: DeepSpeed's defaults, and dschat's threshold
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e4,
}
GOLD = "objective/gold_scores"
TESTS = [f"tests/{name}.py" for name in ("gpu/test_cuda", "distributed/test_cuda_steps", "evaluation/test_cuda")]
TESTS.append("tests/treelib/test_benepar_models.py")


def main() -> None:
    """Measures the pieces, prints one JSON object, and writes what is asked for; status 1 if there was a problem."""
    parser = settings_parser(__doc__, repeats=1)
    parser.add_argument(
        "--pieces",
        nargs="*",
        choices=list(PIECES),
        default=list(PIECES),
        help="with --tables, none writes the tables alone",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="G")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256], help="of decoding and of iterations")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[2, 4, 8, 32], help="sequences of a pass")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    parser.add_argument("--peer", choices=["trl"], help="does the iterations, too; TRL 1.12.0 must be installed")
    parser.add_argument("--json_folder", type=Path, default=Path("runs/gpu"), help="for PIECE.json")
    parser.add_argument("--tables", type=Path, help="Markdown file for tables of all pieces in --json_folder")
    settings = parser.parse_args()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too
    settings.json_folder.mkdir(parents=True, exist_ok=True)

    limits = in_process(measure_limits, settings.device) if settings.pieces else None
    rows_of_pieces: dict[str, list[Figures]] = {}
    for name in settings.pieces:
        assert limits is not None
        rows_of_pieces[name] = measure(name, settings, limits)
    report(settings, {"limits": limits and asdict(limits), "pieces": rows_of_pieces})
    if settings.tables is not None:
        write_tables(settings.tables, settings.json_folder)
    sys.exit(any("problem" in row for rows in rows_of_pieces.values() for row in rows))


def measure(name: str, settings: argparse.Namespace, limits: Peaks) -> list[Figures]:
    """The rows of a piece, which are in its file as they come; what would take too long is left out or ended."""
    begun = time.monotonic()
    longest = 0.0
    rows: list[Figures] = []
    watch = threading.Timer(MOST_SECONDS, end_children, [children()])
    watch.start()
    with tempfile.TemporaryDirectory() as folder:
        write_rows(name, settings, limits, rows)
        for label, task in PIECES[name](settings, limits, Path(folder)):
            task_begun = time.monotonic()
            if task_begun + longest - begun > MOST_SECONDS:
                rows.append(label | {"not_measured": "no time was left"})
            else:
                rows += attempted(label, task)
            longest = max(longest, time.monotonic() - task_begun)
            write_rows(name, settings, limits, rows)
    watch.cancel()
    return rows


def write_rows(name: str, settings: argparse.Namespace, limits: Peaks, rows: Sequence[Figures]) -> None:
    """Writes the file of a piece."""
    content = report_of(settings, {"limits": asdict(limits), "rows": rows}) | {"origin": origin()}
    write_file(settings.json_folder / f"{name}.json", json.dumps(content, indent=2, default=str) + "\n")


def write_tables(file: Path, json_folder: Path) -> None:
    """Writes a Markdown file with a table for each piece whose figures are in the folder."""
    sections = []
    for name in PIECES:
        piece_file = json_folder / f"{name}.json"
        if piece_file.exists():
            piece = json.loads(piece_file.read_text(encoding="utf-8"))
            limits = Peaks(**piece["figures"]["limits"])
            rows = piece_table(limits, piece["figures"]["rows"])
            sections.append(f"## {name}\n\n{piece['origin']}\n\n{rows}\n")
    write_file(file, "\n".join(sections))


def children() -> set[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def end_children(others: set[psutil.Process]) -> None:
    """Ends all children but the others; who waits for one gets an error."""
    for child in children() - others:
        child.kill()


# ---- The pieces ----


def peak_gb(run: IterationFigures) -> float:
    """The peak of memory, models included."""
    return (run.held_mb + run.peak_mb) * MB / GB


def decoding(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """A process for each decoder."""
    works = [work_of(settings, prompts) for prompts in settings.prompts]
    tasks: Tasks = []
    for decoder, name in DECODERS.items():
        task = partial(in_process, decode, decoder, works, settings.device, settings.repeats, limits)
        tasks.append(({"decoder": name}, task))
    return tasks


def training(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """Each size of micro-batches, without gradient checkpointing and with it, layers as they are and compiled."""
    tasks: Tasks = []
    for size, recomputes, compiled in product(settings.micro_batches, (False, True), ("no", "yes")):
        label: Figures = {"micro_batch": size, "checkpointing": "yes" if recomputes else "no", "compiled": compiled}
        flags = ["--compile", "on"] if compiled == "yes" else NOT_COMPILED
        work = work_of(settings, TRAINED, size)
        make_job = partial(job_of, settings, work, folder, recomputes, *flags)
        tasks.append((label, partial(train, make_job, settings.repeats, limits)))
    return tasks


def train(make_job: Callable[[], ContenderJob], repeats: int, limits: Peaks) -> list[Figures]:
    """Scoring and training, unless they would not fit: the phases but the drawing of responses."""
    job = replace(make_job(), random_responses=True)
    planned, is_enough = planned_memory(job, without=("generate",))
    if not is_enough:
        return [{"planned_gb": planned / GB, "not_measured": "it would not fit"}]
    (run,) = run_alone(job, repeats)
    peaks: Figures = {"peak_gb": peak_gb(run), "planned_gb": planned / GB}
    return [phase_rates(job.work, run.wall_seconds, limits) | peaks]


def iterations(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """Each number of prompts, with the largest micro-batches that fit: without gradient checkpointing, or with it."""
    tasks: Tasks = []
    for prompts in settings.prompts:
        label: Figures = {"prompts": prompts}
        tasks.append((label, partial(fitting_iteration, settings, prompts, limits, folder)))
        if settings.peer is not None:
            peer_task = partial(peer_iteration, settings, prompts, limits, folder)
            tasks.append((label | {"contender": PEER}, peer_task))
    return tasks


def fitting_iteration(settings: argparse.Namespace, prompts: int, limits: Peaks, folder: Path) -> list[Figures]:
    """The usual iteration with the first choice that the plan says will fit."""
    job = next(filter(fits, job_choices(settings, prompts, folder)), None)
    if job is None:
        return [{"not_measured": NOTHING_FITS}]
    (run,) = run_alone(job, settings.repeats)
    return [choice_of(job) | iteration_figures(job, run, limits)]


def peer_iteration(settings: argparse.Namespace, prompts: int, limits: Peaks, folder: Path) -> list[Figures]:
    """TRL's usual iteration with our micro-batches, or with the largest smaller ones that its process survives."""
    missing = []
    for package in PEER_PACKAGES:
        if importlib.util.find_spec(package) is None:
            missing.append(package)
    if missing:
        return [{"not_measured": f"not installed: {', '.join(missing)}"}]
    ours_job = next(filter(fits, job_choices(settings, prompts, folder)), None)
    largest = prompts if ours_job is None else ours_job.work.micro_batch
    sizes = [size for size in sorted(settings.micro_batches, reverse=True) if size <= largest]
    for size in sizes or [largest]:
        job = job_of(settings, work_of(settings, prompts, size), folder, recomputes=False)
        try:
            (run,) = run_alone(job, settings.repeats, "trl_ppo")
        except RuntimeError:  # the process ended, most likely for want of memory; what it said is on standard error
            continue
        return [choice_of(job) | iteration_figures(job, run, limits)]
    return [{"not_measured": "its process ended early with every micro-batch"}]


def iteration_figures(job: ContenderJob, run: IterationFigures, limits: Peaks) -> Figures:
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


def zero3(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """An iteration of the first number of prompts at ZeRO 0 and at ZeRO 3."""
    tasks: Tasks = []
    for stage in (0, 3):
        tasks.append(({"zero_stage": stage}, partial(zero_iteration, settings, stage, limits, folder)))
    return tasks


def zero_iteration(settings: argparse.Namespace, stage: int, limits: Peaks, folder: Path) -> list[Figures]:
    """The usual iteration at a stage of ZeRO; micro-batches are the first choice that fits at both stages."""
    prompts = settings.prompts[0]
    config_file = folder / "zero3.json"
    scaled = {"zero_optimization": zero3_limits(work_of(settings, prompts))}
    config_file.write_text(json.dumps(scaled), encoding="utf-8")
    zero0_flags = [*NOT_COMPILED, "--zero_stage", "0"]
    zero3_flags = [*NOT_COMPILED, "--zero_stage", "3", "--deepspeed_config", str(config_file)]
    jobs_of_zero0 = job_choices(settings, prompts, folder, *zero0_flags)
    jobs_of_zero3 = job_choices(settings, prompts, folder, *zero3_flags)
    for zero0_job, zero3_job in zip(jobs_of_zero0, jobs_of_zero3, strict=True):
        if fits(zero0_job) and fits(zero3_job):
            job = zero3_job if stage == 3 else zero0_job
            (run,) = run_alone(job, settings.repeats)
            return [choice_of(job) | iteration_figures(job, run, limits)]
    return [{"not_measured": NOTHING_FITS}]


def zero3_limits(work: IterationWork) -> dict[str, int]:
    """DeepSpeed's limits on gathered parameters, in the proportion to this model that they have to one of 7B."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in make_actor(work).parameters())
    limits: dict[str, int] = {}
    for name, limit in ZERO3_LIMITS.items():
        limits[name] = max(1, round(limit * parameters / USUAL_PARAMETERS))
    return limits


def profiled(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """The kernels of scoring and training, and those of decoding steps for the first number of prompts."""
    work = work_of(settings, settings.prompts[0])
    job = ContenderJob(work, str(folder), str(folder), flags=settings.flags.split())
    is_compiled = parse(PPOConfig, ours.flags(job)).engine.compile != "off"
    trace = settings.json_folder / "trace-decoding.json.gz"
    decoding_task = partial(in_process, profile_decoding, work, settings.device, is_compiled, trace)
    return [({}, partial(profile_training, settings, folder)), ({"prompts": work.batch}, decoding_task)]


def profile_training(settings: argparse.Namespace, folder: Path) -> list[Figures]:
    """Where the time of scoring and training goes, with the first choice that the plan says will fit."""
    trace = settings.json_folder.resolve() / "trace-training.json.gz"
    fits_without_drawing = partial(fits, without=("generate",))
    job = next(filter(fits_without_drawing, job_choices(settings, None, folder)), None)
    if job is None:
        return [{"not_measured": NOTHING_FITS}]
    run_alone(replace(job, random_responses=True, trace=str(trace)), WARMUP_ITERATIONS)
    times = times_of_parts(read_kernels(trace))
    rows: list[Figures] = []
    for part, part_times in times.items():
        rows.append(choice_of(job) | {"part": part} | part_times.row())
    return rows


def run_tests(files: Sequence[str], folder: Path) -> list[Figures]:
    """How many tests there were, and which failed; they are skipped where there is no GPU."""
    results = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--junitxml", str(results), *files]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    suite = ElementTree.parse(results).find("testsuite")
    assert suite is not None
    row: Figures = {}
    for name in ("tests", "failures", "errors", "skipped", "time"):
        row[name] = float(suite.attrib[name])
    failed = []
    for case in suite:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.attrib["name"])
    if failed:
        row["problem"] = f"failed: {', '.join(failed)}"
    return [row]


def run_quickstart(folder: Path, flags: Sequence[str]) -> list[Figures]:
    """The gold score at the beginning and at the end of each run of step 3, over a tenth of it."""
    command = [sys.executable, str(TRAINING / "quickstart" / "main.py"), "--output_dir", str(folder), *flags]
    status = subprocess.run(command, stdout=sys.stderr).returncode
    runs: list[Figures] = []
    for file in sorted(folder.glob("step3-*/metrics.jsonl")):
        rows = pd.read_json(file, lines=True).dropna(subset=[GOLD])
        tenth = max(1, round(len(rows) / 10))
        runs.append(
            {
                "run": file.parent.name,
                "updates": len(rows),
                "seconds": float(rows["seconds"].iloc[-1]),
                "first_gold": float(rows[GOLD].head(tenth).mean()),
                "gold": float(rows[GOLD].tail(tenth).mean()),
            }
        )
    if status:
        runs.append({"problem": f"it ended with status {status}"})
    return runs


def quickstart(settings: argparse.Namespace, limits: Peaks, folder: Path) -> Tasks:
    """The quickstart, or its small one for the size tiny."""
    flags = ["--small"] if settings.size == "tiny" else []
    return [({}, partial(run_quickstart, folder, flags))]


PIECES: dict[str, Callable[[argparse.Namespace, Peaks, Path], Tasks]] = {
    "limits": lambda settings, limits, folder: [],
    "decoding": decoding,
    "training": training,
    "iterations": iterations,
    "zero3": zero3,
    "profile": profiled,
    "tests_1": lambda settings, limits, folder: [({}, partial(run_tests, TESTS[::2], folder))],
    "tests_2": lambda settings, limits, folder: [({}, partial(run_tests, TESTS[1::2], folder))],
    "quickstart": quickstart,
}


def piece_table(limits: Peaks, rows: Sequence[Figures]) -> str:
    """The limits, and below them the rows, if there are any."""
    copied = limits.bytes_per_second / GB
    computed = limits.operations_per_second / TERA
    text = f"Measured limits: {copied:,.0f} GB/s, {computed:,.1f} TFLOP/s."
    if not rows:
        return text
    columns = dict.fromkeys(name for row in rows for name in row)
    head = [name.replace("_", " ") for name in columns]
    lines = []
    for row in rows:
        lines.append([cell(name, row.get(name, "")) for name in columns])
    return f"{text}\n\n{table(head, lines)}"


def cell(name: str, value: float | str) -> str:
    """A figure, shares in percent."""
    if not isinstance(value, float):
        return str(value)
    if name.endswith(("share", "of_limit")):
        return f"{100 * value:.0f} %"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
