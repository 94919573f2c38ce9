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
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("generation", "scoring", "training", "rest")
FACTORS = (1, 4, 16)


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    settings = parse()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too
    from contenders.tables import gpu_table, origin, write_section
    from machine import machine

    limits = measure_limits(settings.device)
    figures = {"limits": limits, "batches": [measure(settings, factor, limits) for factor in settings.factors]}
    report = {"machine": machine(), "settings": vars(settings), "figures": figures}
    text = json.dumps(report, indent=2)
    print(text)
    if settings.output is not None:
        Path(settings.output).write_text(text + "\n", encoding="utf-8")
    if settings.markdown is not None:
        write_section(Path(settings.markdown), "gpu", f"{origin(report['machine'])}\n\n{gpu_table(figures)}")


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["tiny", "S", "M", "G"], default="G")
    parser.add_argument("--batch", type=int, default=16, help="prompts of the smallest rollout")
    parser.add_argument("--factors", type=int, nargs="+", default=list(FACTORS), help="what it is multiplied by")
    parser.add_argument("--micro_batch", type=int, default=2, help="sequences of a forward and backward pass")
    parser.add_argument("--shortest_prompt", type=int, default=64, help="tokens")
    parser.add_argument("--longest_prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens; every response has them")
    parser.add_argument("--repeats", type=int, default=2, help="iterations that count")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    parser.add_argument("--output", help="file for the JSON object")
    parser.add_argument("--markdown", help="document whose section gpu is written anew, as docs/performance.md")
    return parser.parse_args()


def measure_limits(device: str) -> dict[str, float]:
    """Bytes per second of memory, and operations per second of matrices in the dtype of training."""
    import torch

    large, side = (2**31, 8192) if device == "cuda" else (2**26, 512)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.zeros(large // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return {
        "bytes_per_second": 2 * large / fastest(lambda: target.copy_(source), device),
        "operations_per_second": 2 * side**3 / fastest(lambda: left @ right, device),
    }


def fastest(work: Callable[[], object], device: str, runs: int = 10) -> float:
    """Seconds of the fastest run."""
    import torch

    seconds = []
    for _ in range(runs + 2):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def measure(settings: argparse.Namespace, factor: int, limits: dict[str, float]) -> dict[str, Any]:
    """One line of the table."""
    import torch
    from contenders.job import Job
    from contenders.process import Contender
    from contenders.work import SIZES, Work, make_files

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
        folder = Path(place)
        make_files(work, folder / "files")
        if settings.device == "cuda":
            torch.cuda.empty_cache()  # what this process keeps for itself is missing to the contender
        contender = Contender(
            sys.executable, "ours", Job(work, str(folder / "files"), place, flags=settings.flags.split())
        )
        runs = [iterate(contender, work.batch, number) for number in range(settings.repeats + 1)][1:]
        contender.end()
    seconds = {phase: statistics.median(run["wall"].get(phase, 0.0) for run in runs) for phase in PHASES}
    total = statistics.median(run["wall"]["total"] for run in runs)
    return {
        "batch": work.batch,
        "wall_seconds": total,
        "share": {phase: seconds[phase] / total for phase in PHASES},
        "rollout_tokens_per_second": work.batch * work.response / seconds["generation"],
        "rollout_limit": rollout_limit(work, limits["bytes_per_second"]),
        "training_operations_per_second": training_operations(work) / seconds["training"],
        "training_limit": limits["operations_per_second"],
        "peak_mb": max(run["peak_mb"] for run in runs),
    }


def iterate(contender: Any, batch: int, number: int) -> dict[str, Any]:
    """One iteration of a `Contender`, which says on stderr that it is done."""
    run: dict[str, Any] = contender.iterate()
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run["wall"].items())
    print(f"batch {batch}, iteration {number}: {phases}", file=sys.stderr, flush=True)
    return run


def layer_weights(size: Any) -> int:
    """Weights of the matrices of all layers of a `Size`."""
    query, other = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    return size.layers * size.hidden * (2 * query + other + 3 * size.intermediate)


def rollout_limit(work: Any, bytes_per_second: float) -> float:
    """Tokens per second of a `Work` if decoding did nothing but read weights, keys and values."""
    size, number = work.size, 2 if work.dtype == "bf16" else 4
    weights = layer_weights(size) + size.vocabulary * size.hidden
    # While token t of R is computed, a row has its prompt and t tokens; (R - 1) / 2 of them on average.
    held = sum(work.prompt_lengths()) + work.batch * (work.response - 1) / 2
    cache = 2 * size.layers * size.kv_heads * size.head_dim * held
    return work.batch * bytes_per_second / (number * (weights + cache))


def training_operations(work: Any) -> float:
    """Multiplications and additions of a `Work`'s forwards and backwards of actor and critic.

    A forward takes two per weight and token, a backward twice as many. The head counts for response tokens only;
    attention for the keys that a token sees.
    """
    size = work.size
    lengths = [prompt + work.response for prompt in work.prompt_lengths()]
    layers = 2 * layer_weights(size) * sum(lengths)
    attention = 2 * size.layers * size.heads * size.head_dim * sum(length * length for length in lengths)
    head = 2 * size.vocabulary * size.hidden * work.batch * work.response
    return 3.0 * (2 * (layers + attention) + head)


if __name__ == "__main__":
    main()
