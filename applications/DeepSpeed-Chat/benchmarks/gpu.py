# SPDX-License-Identifier: Apache-2.0
"""How near does step 3 come to what a GPU can do?

A random Gemma of 2B's shape in bf16, through the main program (contenders/ours.py), at 1, 4 and 16 times a batch, each
in a process of its own; medians of wall time after one iteration that does not count. Two limits are measured first:
how fast the GPU copies a large tensor (bytes read and written), and how fast it multiplies large matrices.

- Rollout: tokens per second of the phase generation, prompts included in the time. Its limit is the memory's: every
  step of decoding reads all weights and every row's keys and values once, the whole batch at the same time.
- Training: the multiplications and additions of forwards and backwards of actor and critic over real tokens, per
  second of the phase training, which holds the optimisers, too. Recomputation and padding do not count as work.

    bash gpu.sh
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from contenders.process import PHASES, Contender, Iteration, Job, middle
from contenders.work import SIZES, Size, Work, make_files
from harness import origin, report, settings_parser, table, write_section


@dataclass(frozen=True)
class Limits:
    """What the device can do, in a second."""

    bytes_per_second: float  # of memory
    operations_per_second: float  # on matrices in the dtype of training


@dataclass(frozen=True)
class Batch:
    """Figures of one size of the rollout."""

    batch: int
    wall_seconds: float
    share: dict[str, float]  # of the phases
    rollout_tokens_per_second: float
    rollout_limit: float
    training_operations_per_second: float
    training_limit: float
    peak_mb: float


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    settings = parse()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too
    limits = measure_limits(settings.device)
    batches = [measure(settings, factor, limits) for factor in settings.factors]
    report(settings, {"limits": asdict(limits), "batches": [asdict(batch) for batch in batches]})
    if settings.markdown is not None:
        write_section(settings.markdown, "gpu", f"{origin()}\n\n{gpu_table(limits, batches)}")


def parse() -> argparse.Namespace:
    """The settings."""
    parser = settings_parser(__doc__, "section gpu is")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="G")
    parser.add_argument("--batch", type=int, default=16, help="prompts of the smallest rollout")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16], help="what it is multiplied by")
    parser.add_argument("--micro_batch", type=int, default=2, help="sequences of a forward and backward pass")
    parser.add_argument("--shortest_prompt", type=int, default=64, help="tokens")
    parser.add_argument("--longest_prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens; every response has them")
    parser.add_argument("--repeats", type=int, default=2, help="iterations that count")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    return parser.parse_args()


def measure_limits(device: str) -> Limits:
    """Of copies and of products of matrices."""
    large, side = (2**31, 8192) if device == "cuda" else (2**26, 512)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.zeros(large // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copying = fastest(lambda: target.copy_(source), device)
    return Limits(2 * large / copying, 2 * side**3 / fastest(lambda: left @ right, device))


def fastest(work: Callable[[], object], device: str, runs: int = 10) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(runs + 2):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def measure(settings: argparse.Namespace, factor: int, limits: Limits) -> Batch:
    """One line of the table."""
    work = Work(
        SIZES[settings.size],
        settings.batch * factor,
        min(settings.micro_batch, settings.batch * factor),
        settings.shortest_prompt,
        settings.longest_prompt,
        settings.response,
        dtype="bf16" if settings.device == "cuda" else "fp32",
    )
    with tempfile.TemporaryDirectory() as place:
        files = Path(place) / "files"
        make_files(work, files)
        if settings.device == "cuda":
            torch.cuda.empty_cache()  # what this process keeps for itself is missing to the contender
        with Contender(sys.executable, "ours", Job(work, str(files), place, flags=settings.flags.split())) as contender:
            runs = [iterate(contender, work.batch, number) for number in range(settings.repeats + 1)][1:]
    seconds = {phase: middle(runs, "wall", phase) for phase in PHASES}
    total = middle(runs, "wall", "total")
    return Batch(
        batch=work.batch,
        wall_seconds=total,
        share={phase: seconds[phase] / total for phase in PHASES},
        rollout_tokens_per_second=work.batch * work.response / seconds["generation"],
        rollout_limit=rollout_limit(work, limits.bytes_per_second),
        training_operations_per_second=training_operations(work) / seconds["training"],
        training_limit=limits.operations_per_second,
        peak_mb=max(run.peak_mb for run in runs),
    )


def iterate(contender: Contender, batch: int, number: int) -> Iteration:
    """One iteration, which says on stderr that it is done."""
    (run,) = contender.iterate()
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.wall.items())
    print(f"batch {batch}, iteration {number}: {phases}", file=sys.stderr, flush=True)
    return run


def layer_weights(size: Size) -> int:
    """Weights of the matrices of all layers."""
    query, other = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    return size.layers * size.hidden * (2 * query + other + 3 * size.intermediate)


def rollout_limit(work: Work, bytes_per_second: float) -> float:
    """Tokens per second if decoding did nothing but read weights, keys and values."""
    size, number = work.size, 2 if work.dtype == "bf16" else 4
    weights = layer_weights(size) + size.vocabulary * size.hidden
    # While token t of R is computed, a row has its prompt and t tokens; (R - 1) / 2 of them on average.
    held = sum(work.prompt_lengths()) + work.batch * (work.response - 1) / 2
    cache = 2 * size.layers * size.kv_heads * size.head_dim * held
    return work.batch * bytes_per_second / (number * (weights + cache))


def training_operations(work: Work) -> float:
    """Multiplications and additions of forwards and backwards of actor and critic.

    A forward takes two per weight and token, a backward twice as many. The head counts for response tokens only;
    attention for the keys that a token sees.
    """
    size = work.size
    lengths = [prompt + work.response for prompt in work.prompt_lengths()]
    layers = 2 * layer_weights(size) * sum(lengths)
    attention = 2 * size.layers * size.heads * size.head_dim * sum(length * length for length in lengths)
    head = 2 * size.vocabulary * size.hidden * work.batch * work.response
    return 3.0 * (2 * (layers + attention) + head)


def gpu_table(limits: Limits, batches: Sequence[Batch]) -> str:
    """How near rollouts and training come to their limits, and the phases' shares, by batch."""
    measured = (
        f"Measured limits: {limits.bytes_per_second / 1e9:,.0f} GB/s, {limits.operations_per_second / 1e12:,.1f} TFLOP/s."
    )
    head = ["prompts", "rollout, tokens/s", "of its limit", "training, TFLOP/s", "of its limit"]
    head += [*(f"{phase}, share" for phase in PHASES), "iteration, s", "peak, GB"]
    rows = [
        [
            f"{row.batch}",
            f"{row.rollout_tokens_per_second:,.0f}",
            f"{100 * row.rollout_tokens_per_second / row.rollout_limit:.0f} %",
            f"{row.training_operations_per_second / 1e12:,.1f}",
            f"{100 * row.training_operations_per_second / row.training_limit:.0f} %",
            *(f"{100 * row.share[phase]:.0f} %" for phase in PHASES),
            f"{row.wall_seconds:.1f}",
            f"{row.peak_mb / 1e3:.1f}",
        ]
        for row in batches
    ]
    return f"{measured}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
