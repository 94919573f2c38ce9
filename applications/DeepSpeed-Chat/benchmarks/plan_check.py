# SPDX-License-Identifier: Apache-2.0
"""How well does `dschat.plan` foresee the memory of step 3?

One process on the CPU runs step 3 itself for two iterations, on random Gemmas whose prompts and responses all have
their full length. The measured figure is the most bytes of tensors alive in a phase of the second one: torch's
allocator reports every allocation to its profiler, and their running sum, from before the models are made on, is
followed here. It sees neither weights that are mapped from their file nor what another thread allocates: so the
models' folders have another dtype than the run, and one thread loads them. The planned figure comes from the same
flags and the models' configs alone.

    python plan_check.py
"""

import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from contenders import ours
from contenders.process import Job
from contenders.work import SIZES, Work, make_files
from dschat.common.launch import as_arguments
from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.models.load import open_config
from dschat.plan.phases import Machine
from dschat.plan.plan import make_plan
from dschat.trainers.iteration import Clock
from harness import MB, in_process, report, run_step, settings_parser

# dtype, whether activations are computed again, updates per rollout
KINDS = (("fp32", False, 1), ("fp32", True, 1), ("fp32", False, 2), ("bf16", False, 1))
PHASES = {"generation": "generate", "scoring": "score", "training": "train"}  # of the trainer's clock → of the plan


def main() -> None:
    """Measures every case and prints one JSON object."""
    parser = settings_parser(__doc__, prompt=64, response=64)
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--short", action="store_true", help="float32 and one update per rollout only")
    settings = parser.parse_args()
    lengths = (settings.prompt, settings.prompt, settings.response)
    figures = []
    for shape, (dtype, checkpointing, updates) in product(settings.shapes, KINDS[:1] if settings.short else KINDS):
        batch = 2 * settings.rows * updates  # two micro-batches an update
        work = Work(SIZES[shape], batch, settings.rows, *lengths, updates=updates, dtype=dtype)
        figures.append(in_process(compare, work, checkpointing))
    report(settings, figures)


def compare(work: Work, checkpointing: bool) -> dict[str, object]:
    """Planned and measured megabytes of each phase, of two iterations."""
    own = {"num_train_epochs": 2, "generation_batches": 2 * work.updates}
    own |= {"per_device_generation_batch_size": work.micro_batch, "per_device_eval_batch_size": work.micro_batch}
    recomputed = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]
    flags = [
        *as_arguments({f"--{name}": value for name, value in own.items()}),
        *(recomputed if checkpointing else []),
    ]
    with tempfile.TemporaryDirectory() as place:
        make_files(replace(work, dtype="bf16" if work.dtype == "fp32" else "fp32"), Path(place) / "files")
        argv = ours.flags(Job(work, f"{place}/files", place, flags=flags))
        plan = make_plan(parse(PPOConfig, argv), Machine(1, None), open_config)
        measured = measure(argv)
    planned = {phase.name: phase.total for phase in plan.phases}
    planned["train"] = max(planned["train"], planned["update"])
    rows = {}
    for name, most in measured.items():
        figures = {"planned_mb": round(planned[name] / MB, 1), "measured_mb": round(most / MB, 1)}
        rows[name] = figures | {"ratio": round(planned[name] / most, 3)}
    return asdict(work) | {"checkpointing": checkpointing, "phases": rows}


def measure(argv: list[str]) -> dict[str, int]:
    """Peak bytes of each phase, the last time that it runs."""
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    peaks: dict[str, int] = {}
    alive, profiler = 0, started_profiler()

    def followed(lap: Callable[[Clock, str], None]) -> Callable[[Clock, str], None]:
        def run(clock: Clock, name: str) -> None:
            nonlocal alive, profiler
            gc.collect()  # what is given back later would not be seen
            profiler.stop()
            events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]  # type: ignore[union-attr]
            peak = alive
            for _, size in sorted(sizes):
                alive += size
                peak = max(peak, alive)
            peaks[PHASES[name]] = peak
            profiler = started_profiler()
            lap(clock, name)

        return run

    setattr(Clock, "lap", followed(Clock.lap))  # noqa: B010  # a method for mypy
    run_step(ours.STEP, argv)
    profiler.stop()
    return peaks


def started_profiler() -> profile:
    """Notes every allocation from now on."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    return profiler


if __name__ == "__main__":
    main()
