# SPDX-License-Identifier: Apache-2.0
"""How much memory do log-probs of the response take at a vocabulary of 256,000?

For training (forward and backward, the head's own gradient included) and for scoring (no gradients), at each batch
size, by ``macro_actions.logprobs.token_logprobs``; and at the first batch size by ``log_softmax`` over the full logits
of prompt and response, for comparison. Hidden states (B, P+R, H), head weight (V, H) and targets are the inputs; the
figure is the peak above them.

Every case runs in a fresh process. A tiny case first loads the kernels and starts the thread pool; then the inputs are
made (random numbers touch every page), free heap goes back to the system, and `harness.Peak` counts from there.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from harness import GB, Peak, in_process
from macro_actions.logprobs import Head, token_logprobs

Method = Literal["chunks", "full_logits"]
Phase = Literal["training", "scoring"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sizes of the inputs."""
    parser.add_argument("--vocabulary", type=int, default=256_000, help="tokens of the vocabulary")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of the response")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8], help="sequences")


def measure(settings: argparse.Namespace) -> list[dict[str, object]]:
    """Measures every case."""
    rows = []
    for case in cases(settings.batch_sizes):
        rows.append(in_process(measure_case, *case, settings))
    return rows


def cases(batch_sizes: Sequence[int]) -> list[tuple[Method, Phase, int]]:
    """Method, phase and batch size of every case: full logits at the first batch size alone."""
    sizes: dict[Method, Sequence[int]] = {"chunks": batch_sizes, "full_logits": batch_sizes[:1]}
    chosen: list[tuple[Method, Phase, int]] = []
    for method, method_sizes in sizes.items():
        for phase in get_args(Phase):
            chosen += [(method, phase, batch_size) for batch_size in method_sizes]
    return chosen


def measure_case(method: Method, phase: Phase, batch_size: int, settings: argparse.Namespace) -> dict[str, object]:
    """The peak of one case above its inputs, in GB, and its seconds."""
    training = phase == "training"
    warm_up = make_inputs(training, batch_size=1, prompt=2, response=4, vocabulary=64, width=settings.hidden)
    run(method, training, *warm_up)
    inputs = make_inputs(
        training, batch_size, settings.prompt, settings.response, settings.vocabulary, settings.hidden
    )
    peak = Peak(DEVICE == "cuda")
    start = time.perf_counter()
    run(method, training, *inputs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "method": method,
        "phase": phase,
        "batch_size": batch_size,
        "peak_gb": round(peak.bytes() / GB, 3),
        "inputs_gb": round(sum(x.nbytes for x in inputs) / GB, 3),
        "seconds": round(seconds, 2),
    }


def make_inputs(
    training: bool, batch_size: int, prompt: int, response: int, vocabulary: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (B, P+R, H), head weight (V, H), targets (B, R); with gradients in training."""
    torch.manual_seed(0)
    hidden = torch.randn(batch_size, prompt + response, width, device=DEVICE)
    weight = torch.randn(vocabulary, width, device=DEVICE).mul_(width**-0.5)
    targets = torch.randint(vocabulary, (batch_size, response), device=DEVICE)
    return hidden.requires_grad_(training), weight.requires_grad_(training), targets


def run(method: Method, training: bool, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Log-probs of the response, in chunks or by full logits, and in training the gradients of the inputs."""
    positions = slice(-targets.shape[1] - 1, -1)
    with torch.set_grad_enabled(training):
        if method == "chunks":
            head = Head(partial(F.linear, weight=weight), (weight,), weight.shape[0])
            states = hidden[:, positions].flatten(0, 1)
            logprobs, _ = token_logprobs(states, targets.flatten(), head, with_entropy=False)
        else:
            all_logprobs = torch.log_softmax(F.linear(hidden, weight), dim=-1)[:, positions]
            logprobs = all_logprobs.gather(-1, targets[..., None]).squeeze(-1)
        if training:
            logprobs.sum().backward()
