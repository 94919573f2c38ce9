# SPDX-License-Identifier: Apache-2.0
"""How much memory do log-probs of the response take at a vocabulary of 256,000?

For training (forward and backward, the head's own gradient included) and for scoring (no gradients), at each batch
size, through ``dschat.rl.logprobs.token_logprobs``; and at the first batch size through the full logits of prompt and
response and ``log_softmax``, for comparison. Hidden states (B, P+R, H), head weight (V, H) and targets are the inputs;
the figure is the peak above them.

Every case runs in a fresh process. A tiny case first loads the kernels and starts the thread pool; then the inputs are
made (random numbers touch every page), free heap goes back to the system, and the peak is counted from there:

- CPU: resident memory. Linux keeps its highest value itself (VmHWM), so no peak falls between two samples; writing 5
  to /proc/self/clear_refs sets it back to the present one. ru_maxrss would not do: a child inherits its parent's.
- CUDA: ``torch.cuda.max_memory_allocated`` after ``reset_peak_memory_stats``.

    python logprob_memory.py
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from torch.nn import functional as F

from dschat.rl.logprobs import Head, token_logprobs

GB = 1e9  # bytes


@dataclass(frozen=True)
class Case:
    """One measurement."""

    method: str  # chunks or full_logits
    phase: str  # training or scoring
    batch_size: int
    prompt: int
    response: int
    vocabulary: int
    hidden: int
    softcap: float  # 0 = none
    device: str
    threads: int


def main() -> None:
    """Measures every case and prints one JSON object."""
    settings = parse()
    sizes = {"chunks": settings["batch_sizes"]}
    if settings["full_logits"]:
        sizes["full_logits"] = settings["batch_sizes"][:1]
    cases = [
        Case(method, phase, size, **settings["shape"])
        for method in sizes
        for phase in ("training", "scoring")
        for size in sizes[method]
    ]
    figures = [measure_in_child(case) for case in cases]
    print(json.dumps({"machine": machine(), "settings": settings, "figures": figures}, indent=2))


def parse() -> dict[str, Any]:
    """The settings; ``shape`` is what all cases have in common."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=256_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--softcap", type=float, default=0.0, help="of the logits, as Gemma-2's 30; 0 = none")
    parser.add_argument("--full_logits", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags = vars(parser.parse_args())
    common = {name: flags.pop(name) for name in ("batch_sizes", "full_logits")}
    return {**common, "dtype": "float32", "shape": flags}


def measure_in_child(case: Case) -> dict[str, Any]:
    """Runs :func:`measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case).result()


def measure(case: Case) -> dict[str, Any]:
    """The peak of one case above its inputs, in GB (1e9 bytes), and its seconds."""
    torch.set_num_threads(case.threads)
    tiny = replace(case, batch_size=1, prompt=2, response=4, vocabulary=64)
    run(*inputs(tiny), tiny)
    tensors = inputs(case)
    peak = start_peak(case.device)
    start = time.perf_counter()
    run(*tensors, case)
    return {
        "method": case.method,
        "phase": case.phase,
        "batch_size": case.batch_size,
        "peak_gb": round(peak() / GB, 3),
        "inputs_gb": round(sum(x.numel() * x.element_size() for x in tensors) / GB, 3),
        "seconds": round(time.perf_counter() - start, 2),
    }


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (B, P+R, H), head weight (V, H), targets (B, R); with gradients where the case trains."""
    torch.manual_seed(0)
    training = case.phase == "training"
    hidden = torch.randn(case.batch_size, case.prompt + case.response, case.hidden, device=case.device)
    weight = torch.randn(case.vocabulary, case.hidden, device=case.device).mul_(case.hidden**-0.5)
    targets = torch.randint(case.vocabulary, (case.batch_size, case.response), device=case.device)
    return hidden.requires_grad_(training), weight.requires_grad_(training), targets


def run(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> None:
    """Log-probs of the response, and in training the gradients of hidden states and head."""

    def to_logits(states: Tensor) -> Tensor:
        logits = F.linear(states, weight)
        return torch.tanh(logits / case.softcap) * case.softcap if case.softcap else logits

    with torch.set_grad_enabled(case.phase == "training"):
        if case.method == "chunks":
            states = hidden[:, -case.response - 1 : -1]
            head = Head(to_logits, (weight,), weight.shape[0])
            logprobs, _ = token_logprobs(states.flatten(0, 1), targets.flatten(), head, with_entropy=False)
        else:
            everything = torch.log_softmax(to_logits(hidden), dim=-1)[:, -case.response - 1 : -1]
            logprobs = everything.gather(-1, targets[..., None]).squeeze(-1)
        if case.phase == "training":
            logprobs.sum().backward()


def start_peak(device: str) -> Callable[[], int]:
    """Begins to watch memory; the result gives the bytes of the peak since then above what was in use at its start."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - allocated
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc only
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    resident = _status_bytes("VmRSS")
    return lambda: _status_bytes("VmHWM") - resident


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
