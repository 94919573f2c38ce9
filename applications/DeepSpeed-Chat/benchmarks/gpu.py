# SPDX-License-Identifier: Apache-2.0
"""How near does step 3 come to what a GPU can do? In pieces, each of which ends within minutes and stands alone.

A random Gemma of 2B's shape in bf16; all responses have their full length. Times are medians of --repeats runs (of
decoding alone: the fastest), after one that does not count. Two limits come first: how fast the device copies a large
tensor (bytes read and written), and how fast it multiplies large matrices.

- decoding: steps alone, from the time of whole responses minus that of their first tokens. The limit is the memory's:
  each step reads all weights and every row's keys and values once, the whole batch at the same time.
- training: scoring and training alone, of random responses in place of drawn ones, by the models and the updates of
  step 3. Operations are multiplications and additions over real tokens: forwards of reference and reward model,
  forwards and backwards of actor and critic. Recomputation and padding do not count as work; the optimisers' time
  counts. The peak of memory stands beside what `dschat.plan` says of the same flags.
- iterations: whole ones, through the main program (contenders/ours.py), with the largest of --micro_batches that fits.
  The rate of rollouts has the time of prompts in it. Layers are compiled where --compile auto compiles them.
- profile: the kernels of a short rollout's scoring and training, and of decoding steps, in groups: matrix products of
  the layers, attention, the head with its passes over logits, gradients that are checked and added up, the optimiser,
  everything else, and time in which the GPU waits. Milliseconds of one pass; the profiler's traces stay beside the
  figures. Responses are random, so that only what is asked for is profiled.
- tests_1, tests_2: the tests that need a GPU. quickstart: does PPO learn there?

A piece's figures go into a file of its own, row by row; what cannot be measured says why, and the rest goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import psutil
import torch

from contenders import ours
from contenders.kernels import read_kernels, times_of_parts
from contenders.limits import (
    TERA,
    Figures,
    Limits,
    Task,
    attempted,
    decode,
    measure_limits,
    phase_rates,
    rollout_limit,
)
from contenders.process import PHASES, Job, ours_alone
from contenders.profiled import WARMUP_ITERATIONS, profile_decoding
from contenders.work import SIZES, Work, make_files
from dschat.common.atomic import write_file
from dschat.common.jsonl import json_lines
from dschat.common.launch import TRAINING
from dschat.models.load import open_config
from dschat.plan.phases import CUDA_BYTES, Machine
from dschat.plan.plan import make_plan
from dschat.reports.run_summary import trailing_mean, window_of
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from harness import GB, MB, in_process, origin, report, report_of, settings_parser, table, write_section

Tasks = list[tuple[Figures, Task]]  # how rows begin, and what measures them
MOST_SECONDS = 480  # of a piece
LENGTHS = {"tiny": (4, 16, 16)}  # tokens: the shortest and the longest prompt, every response
TRAINED = 64  # prompts of the piece training
PROFILED_MICRO_BATCHES = 2  # of the piece profile
NOTHING_FITS = "no micro-batch would fit"
ROOT = Path(__file__).resolve().parents[3]
WAYS = {
    "dynamic": "dynamic loop",
    "static": "static graphs",
    "compiled": "static graphs, compiled layers",
    "transformers": "transformers' static cache, compiled",
}
RECOMPUTED = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]
GOLD = "objective/gold_scores"
TESTS = [f"tests/{name}.py" for name in ("gpu/test_cuda", "distributed/test_cuda_steps", "inference/test_cuda")]
TESTS.append("tests/treelib/test_benepar_models.py")


def main() -> None:
    """Measures the pieces, prints one JSON object, and writes what is asked for; status 1 if there was a problem."""
    parser = settings_parser(__doc__, "sections gpu … are", repeats=1)
    parser.add_argument("--pieces", nargs="*", choices=list(PIECES), default=list(PIECES), help="none: tables only")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="G")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256], help="of decoding and of iterations")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[2, 4, 8, 32], help="sequences of a pass")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    parser.add_argument("--json_folder", type=Path, default=Path("runs/gpu"), help="for PIECE.json")
    settings = parser.parse_args()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too
    settings.json_folder.mkdir(parents=True, exist_ok=True)
    limits = in_process(measure_limits, settings.device) if settings.pieces else {}
    rows = {name: measure(name, settings, limits) for name in settings.pieces}
    report(settings, {"limits": limits, "pieces": rows})
    for name in PIECES if settings.markdown is not None else ():
        if (file := settings.json_folder / f"{name}.json").exists():
            piece = json.loads(file.read_text(encoding="utf-8"))
            text = f"{piece['origin']}\n\n{piece_table(**piece['figures'])}"
            write_section(settings.markdown, f"gpu {name}", text)
    sys.exit(any("problem" in row for found in rows.values() for row in found))


def measure(name: str, settings: argparse.Namespace, limits: Limits) -> list[Figures]:
    """The rows of a piece, which are in its file as they come; what would take too long is left out or ended."""
    begun, longest, rows = time.monotonic(), 0.0, list[Figures]()
    watch = threading.Timer(MOST_SECONDS, end_children, [children()])
    watch.start()
    with tempfile.TemporaryDirectory() as place:
        for label, task in [({}, list), *PIECES[name](settings, limits, Path(place))]:
            last = time.monotonic()
            late = last + longest - begun > MOST_SECONDS
            rows += [label | {"not_measured": "no time was left"}] if late else attempted(label, task)
            longest = max(longest, time.monotonic() - last)
            found = report_of(settings, {"limits": limits, "rows": rows}) | {"origin": origin()}
            write_file(settings.json_folder / f"{name}.json", json.dumps(found, indent=2, default=str) + "\n")
    watch.cancel()
    return rows


def children() -> set[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def end_children(others: set[psutil.Process]) -> None:
    """Ends all children but the others; who waits for one gets an error."""
    for child in children() - others:
        child.kill()


def work_of(settings: argparse.Namespace, prompts: int, micro_batch: int = 1) -> Work:
    """A rollout of so many prompts."""
    lengths, dtype = LENGTHS.get(settings.size, (64, 512, 512)), "bf16" if settings.device == "cuda" else "fp32"
    return Work(SIZES[settings.size], prompts, min(prompts, micro_batch), *lengths, dtype=dtype)


def decoding(settings: argparse.Namespace, limits: Limits, place: Path) -> Tasks:
    """A process for each way."""
    rest = ([work_of(settings, prompts) for prompts in settings.prompts], settings.device, settings.repeats, limits)
    return [({"way": name}, partial(in_process, decode, way, *rest)) for way, name in WAYS.items()]


def training(settings: argparse.Namespace, limits: Limits, place: Path) -> Tasks:
    """Each size of micro-batches, without gradient checkpointing and with it, layers as they are and compiled."""
    tasks = Tasks()
    for size, again, compiled in product(settings.micro_batches, ("no", "yes"), ("no", "yes")):
        flags = settings.flags.split() + (RECOMPUTED if again == "yes" else [])
        flags += ["--compile", "on" if compiled == "yes" else "off"]
        work = work_of(settings, TRAINED, size)
        job = Job(work, str(place / "files"), str(place), flags=flags, random_responses=True)
        label: Figures = {"micro_batch": size, "checkpointing": again, "compiled": compiled}
        tasks.append((label, partial(train, job, settings.repeats, limits)))
    return tasks


def train(job: Job, repeats: int, limits: Limits) -> list[Figures]:
    """Scoring and training, unless they would not fit: the phases but the drawing of responses."""
    make_files(job.work, Path(job.files))
    planned, fits = planned_memory(job, without=("generate",))
    if not fits:
        return [{"planned_gb": planned / GB, "not_measured": "it would not fit"}]
    (run,) = ours_alone(job, repeats)
    peaks: Figures = {"peak_gb": (run.held_mb + run.peak_mb) * MB / GB, "planned_gb": planned / GB}
    return [phase_rates(job.work, run.wall_seconds, limits) | peaks]


def planned_memory(job: Job, without: Sequence[str] = ()) -> tuple[int, bool]:
    """Bytes that the plan expects of all phases but some, and whether the GPU has them; a CPU always does."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    phases = make_plan(parse(PPOConfig, ours.flags(job)), Machine(1, memory), open_config).phases
    planned = max(phase.total for phase in phases if phase.name not in without)
    return planned, memory is None or planned + CUDA_BYTES <= memory


def iterations(settings: argparse.Namespace, limits: Limits, place: Path) -> Tasks:
    """Each number of prompts, with the largest micro-batches that fit: without gradient checkpointing, or with it."""
    return [
        ({"prompts": prompts}, partial(fitting_iteration, settings, prompts, limits, place))
        for prompts in settings.prompts
    ]


def fitting_iteration(settings: argparse.Namespace, prompts: int, limits: Limits, place: Path) -> list[Figures]:
    """The usual iteration with the first choice that the plan says will fit."""
    descending = sorted(settings.micro_batches, reverse=True)
    for recomputes, size in product((False, True), descending):
        job = job_of(settings, work_of(settings, prompts, size), recomputes, place)
        if planned_memory(job)[1]:
            return [choice_of(job) | row for row in iterate(job, settings.repeats, limits)]
    return [{"not_measured": NOTHING_FITS}]


def job_of(settings: argparse.Namespace, work: Work, recomputes: bool, place: Path) -> Job:
    """A job of step 3 with or without gradient checkpointing, whose files are written."""
    flags = settings.flags.split()
    if recomputes:
        flags += RECOMPUTED
    job = Job(work, str(place / "files"), str(place), flags=flags)
    make_files(work, Path(job.files))
    return job


def choice_of(job: Job) -> Figures:
    """The micro-batch of a job, and whether it recomputes activations."""
    checkpointing = "yes" if RECOMPUTED[0] in job.flags else "no"
    return {"micro_batch": job.work.micro_batch, "checkpointing": checkpointing}


def profiled(settings: argparse.Namespace, limits: Limits, place: Path) -> Tasks:
    """The kernels of scoring and training, and those of decoding steps for the first number of prompts."""
    work = work_of(settings, settings.prompts[0])
    first_job = Job(work, str(place), str(place), flags=settings.flags.split())
    is_compiled = parse(PPOConfig, ours.flags(first_job)).compile != "off"
    trace = settings.json_folder / "trace-decoding.json.gz"
    decoding_task = partial(in_process, profile_decoding, work, settings.device, is_compiled, trace)
    return [({}, partial(profile_training, settings, place)), ({"prompts": work.batch}, decoding_task)]


def profile_training(settings: argparse.Namespace, place: Path) -> list[Figures]:
    """Where the time of scoring and training goes, with the first choice that the plan says will fit."""
    trace = settings.json_folder.resolve() / "trace-training.json.gz"
    descending = sorted(settings.micro_batches, reverse=True)
    for recomputes, size in product((False, True), descending):
        work = work_of(settings, PROFILED_MICRO_BATCHES * size, size)
        job = job_of(settings, work, recomputes, place)
        if planned_memory(job, without=("generate",))[1]:
            ours_alone(replace(job, random_responses=True, trace=str(trace)), WARMUP_ITERATIONS)
            times = times_of_parts(read_kernels(trace))
            return [choice_of(job) | {"part": part} | part_times.row() for part, part_times in times.items()]
    return [{"not_measured": NOTHING_FITS}]


def iterate(job: Job, repeats: int, limits: Limits) -> list[Figures]:
    """The usual iteration."""
    (run,) = ours_alone(job, repeats)
    seconds, tokens = run.wall_seconds, job.work.batch * job.work.response
    rate = tokens / seconds["generation"]
    drawing: Figures = {"drawing_tokens_per_second": rate, "drawing_of_limit": rate / rollout_limit(job.work, limits)}
    shares = {f"{phase}_share": seconds[phase] / seconds["total"] for phase in PHASES}
    whole = {"seconds": seconds["total"], "tokens_per_second": tokens / seconds["total"]}
    whole["peak_gb"] = (run.held_mb + run.peak_mb) * MB / GB
    return [drawing | phase_rates(job.work, seconds, limits) | shares | whole]


def run_tests(files: Sequence[str], place: Path) -> list[Figures]:
    """How many there were, and which failed; the tests are skipped where there is no GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--junitxml", str(place / "tests.xml"), *files]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    suite = ElementTree.parse(place / "tests.xml").find("testsuite")
    assert suite is not None
    row: Figures = {name: float(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped", "time")}
    bad = [case.attrib["name"] for case in suite if case.find("failure") is not None or case.find("error") is not None]
    return [row | ({"problem": f"failed: {', '.join(bad)}"} if bad else {})]


def run_quickstart(place: Path, flags: Sequence[str]) -> list[Figures]:
    """The gold score at the beginning and at the end of each run of step 3, over a tenth of it."""
    command = [sys.executable, str(TRAINING / "quickstart" / "main.py"), "--output_dir", str(place), *flags]
    status, found = subprocess.run(command, stdout=sys.stderr).returncode, list[Figures]()
    for file in sorted(place.glob("step3-*/metrics.jsonl")):
        rows = [row for _, row in json_lines(file) if GOLD in row]
        ends = [trailing_mean([row[GOLD] for row in rows])[i] for i in (window_of(len(rows)) - 1, -1)]
        row: Figures = {"run": file.parent.name, "updates": len(rows), "seconds": rows[-1]["seconds"]}
        found.append(row | {"first_gold": ends[0], "gold": ends[1]})
    if status:
        found.append({"problem": f"it ended with status {status}"})
    return found


PIECES: dict[str, Callable[[argparse.Namespace, Limits, Path], Tasks]] = {
    "limits": lambda settings, limits, place: [],
    "decoding": decoding,
    "training": training,
    "iterations": iterations,
    "profile": profiled,
    "tests_1": lambda settings, limits, place: [({}, partial(run_tests, TESTS[::2], place))],
    "tests_2": lambda settings, limits, place: [({}, partial(run_tests, TESTS[1::2], place))],
    "quickstart": lambda settings, limits, place: [
        ({}, partial(run_quickstart, place, ["--small"] if settings.size == "tiny" else []))
    ],
}


def piece_table(limits: Limits, rows: list[Figures]) -> str:
    """The limits, and below them the rows, if there are any."""
    copied, computed = limits["bytes_per_second"] / 1e9, limits["operations_per_second"] / TERA
    text = f"Measured limits: {copied:,.0f} GB/s, {computed:,.1f} TFLOP/s."
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(name, row.get(name, "")) for name in names] for row in rows]
    return f"{text}\n\n{table([name.replace('_', ' ') for name in names], cells)}" if rows else text


def cell(name: str, value: float | str) -> str:
    """A figure, shares in percent."""
    if not isinstance(value, float):
        return str(value)
    if name.endswith(("share", "of_limit")):
        return f"{100 * value:.0f} %"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
