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
from collections.abc import Callable, Sequence

import torch
from torch.utils.benchmark import Timer

from contenders.process import PHASES, ours_alone
from contenders.work import SIZES, Size, Work
from harness import origin, report, settings_parser, table_of, write_section

Figures = dict[str, float]


def main() -> None:
    """Measures, prints one JSON object, and writes what is asked for."""
    lengths = {"shortest_prompt": 64, "longest_prompt": 512, "response": 512}  # every response has its length
    parser = settings_parser(__doc__, "section gpu is", **lengths, repeats=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="G")
    parser.add_argument("--batch", type=int, default=16, help="prompts of the smallest rollout")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16], help="what it is multiplied by")
    parser.add_argument("--micro_batch", type=int, default=2, help="sequences of a forward and backward pass")
    parser.add_argument("--flags", default="", help="more flags of step 3, in one word")
    settings = parser.parse_args()
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are started, too
    limits = measure_limits(settings.device)
    batches = [measure(settings, factor, limits) for factor in settings.factors]
    report(settings, {"limits": limits, "batches": batches})
    if settings.markdown is not None:
        write_section(settings.markdown, "gpu", f"{origin()}\n\n{gpu_table(limits, batches)}")


def measure_limits(device: str) -> Figures:
    """Bytes per second of memory, and operations per second of matrices in the dtype of training."""
    large, side = (2**31, 8192) if device == "cuda" else (2**26, 512)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.zeros(large // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return {
        "bytes_per_second": 2 * large / fastest("target.copy_(source)", target=target, source=source),
        "operations_per_second": 2 * side**3 / fastest("left @ right", left=left, right=right),
    }


def fastest(statement: str, **tensors: torch.Tensor) -> float:
    """Seconds of the fastest of ten runs."""
    timer = Timer(statement, globals=tensors)
    return min(timer.timeit(1).mean for _ in range(10))


def measure(settings: argparse.Namespace, factor: int, limits: Figures) -> Figures:
    """One line of the table."""
    batch = settings.batch * factor
    lengths = (settings.shortest_prompt, settings.longest_prompt, settings.response)
    dtype = "bf16" if settings.device == "cuda" else "fp32"
    work = Work(SIZES[settings.size], batch, min(settings.micro_batch, batch), *lengths, dtype=dtype)
    (run,) = ours_alone(work, settings.repeats, flags=settings.flags.split())
    whole = sum(run.wall_seconds[phase] for phase in PHASES)
    shares = {f"{phase}_share": run.wall_seconds[phase] / whole for phase in PHASES}
    return shares | {
        "batch": batch,
        "wall_seconds": run.wall_seconds["total"],
        "rollout_tokens_per_second": batch * work.response / run.wall_seconds["generation"],
        "rollout_limit": rollout_limit(work, limits["bytes_per_second"]),
        "training_operations_per_second": training_operations(work) / run.wall_seconds["training"],
        "training_limit": limits["operations_per_second"],
        "peak_mb": run.peak_mb,
    }


def layer_weights(size: Size) -> int:
    """Weights of the matrices of all layers."""
    attention = 2 * (size.num_attention_heads + size.num_key_value_heads) * size.head_dim
    return size.num_hidden_layers * size.hidden_size * (attention + 3 * size.intermediate_size)


def rollout_limit(work: Work, bytes_per_second: float) -> float:
    """Tokens per second if decoding did nothing but read weights, keys and values."""
    size, number = work.size, 2 if work.dtype == "bf16" else 4
    weights = layer_weights(size) + size.vocab_size * size.hidden_size
    # While token t of R is computed, a row has its prompt and t tokens; (R - 1) / 2 of them on average.
    held = sum(work.prompt_lengths()) + work.batch * (work.response - 1) / 2
    cache = 2 * size.num_hidden_layers * size.num_key_value_heads * size.head_dim * held
    return work.batch * bytes_per_second / (number * (weights + cache))


def training_operations(work: Work) -> float:
    """Multiplications and additions of forwards and backwards of actor and critic.

    A forward takes two per weight and token, a backward twice as many. The head counts for response tokens only;
    attention for the keys that a token sees.
    """
    size = work.size
    lengths = [prompt + work.response for prompt in work.prompt_lengths()]
    layers = 2 * layer_weights(size) * sum(lengths)
    attention = 2 * size.num_hidden_layers * size.num_attention_heads * size.head_dim * sum(n * n for n in lengths)
    head = 2 * size.vocab_size * size.hidden_size * work.batch * work.response
    return 3.0 * (2 * (layers + attention) + head)


def gpu_table(limits: Figures, batches: Sequence[Figures]) -> str:
    """How near rollouts and training come to their limits, and the phases' shares, by batch."""
    copied, computed = limits["bytes_per_second"] / 1e9, limits["operations_per_second"] / 1e12

    def share(of: str, whole: str = "") -> Callable[[Figures], str]:
        return lambda row: f"{100 * row[of] / row.get(whole, 1.0):.0f} %"

    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("prompts", lambda row: f"{row['batch']:.0f}"),
        ("rollout, tokens/s", lambda row: f"{row['rollout_tokens_per_second']:,.0f}"),
        ("of its limit", share("rollout_tokens_per_second", "rollout_limit")),
        ("training, TFLOP/s", lambda row: f"{row['training_operations_per_second'] / 1e12:,.1f}"),
        ("of its limit", share("training_operations_per_second", "training_limit")),
        *((f"{phase}, share", share(f"{phase}_share")) for phase in PHASES),
        ("iteration, s", lambda row: f"{row['wall_seconds']:.1f}"),
        ("peak, GB", lambda row: f"{row['peak_mb'] / 1e3:.1f}"),
    ]
    return f"Measured limits: {copied:,.0f} GB/s, {computed:,.1f} TFLOP/s.\n\n{table_of(columns, batches)}"


if __name__ == "__main__":
    main()
