# SPDX-License-Identifier: Apache-2.0
"""How much memory do log-probs of the response take at a vocabulary of 256,000?

For training (forward and backward, the head's own gradient included) and for scoring (no gradients), at each batch
size, through ``dschat.rl.logprobs.token_logprobs``; and at the first batch size through the full logits of prompt and
response and ``log_softmax``, for comparison. Hidden states (B, P+R, H), head weight (V, H) and targets are the inputs;
the figure is the peak above them.

Every case runs in a fresh process. A tiny case first loads the kernels and starts the thread pool; then the inputs are
made (random numbers touch every page), free heap goes back to the system, and the peak is counted from there by
`harness.Peak`.

    python logprob_memory.py
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from dschat.rl.logprobs import Head, token_logprobs
from harness import GB, Peak, in_process, report, settings_parser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def main() -> None:
    """Measures every case and prints one JSON object."""
    parser = settings_parser(__doc__, vocabulary=256_000, hidden=256, prompt=512, response=512)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    settings = parser.parse_args()
    shape = (settings.prompt, settings.response, settings.vocabulary, settings.hidden)
    sizes = {"chunks": settings.batch_sizes, "full_logits": settings.batch_sizes[:1]}
    kinds = product(sizes, ("training", "scoring"))
    cases = [Case(method, phase, size, *shape) for method, phase in kinds for size in sizes[method]]
    report(settings, [in_process(measure, case) for case in cases], dtype="float32")


def measure(case: Case) -> dict[str, object]:
    """The peak of one case above its inputs, in GB, and its seconds."""
    tiny = replace(case, batch_size=1, prompt=2, response=4, vocabulary=64)
    run(*inputs(tiny), tiny)
    tensors = inputs(case)
    peak = Peak(DEVICE == "cuda")
    start = time.perf_counter()
    run(*tensors, case)
    return {
        "method": case.method,
        "phase": case.phase,
        "batch_size": case.batch_size,
        "peak_gb": round(peak.bytes() / GB, 3),
        "inputs_gb": round(sum(x.numel() * x.element_size() for x in tensors) / GB, 3),
        "seconds": round(time.perf_counter() - start, 2),
    }


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (B, P+R, H), head weight (V, H), targets (B, R); with gradients where the case trains."""
    torch.manual_seed(0)
    training = case.phase == "training"
    hidden = torch.randn(case.batch_size, case.prompt + case.response, case.hidden, device=DEVICE)
    weight = torch.randn(case.vocabulary, case.hidden, device=DEVICE).mul_(case.hidden**-0.5)
    targets = torch.randint(case.vocabulary, (case.batch_size, case.response), device=DEVICE)
    return hidden.requires_grad_(training), weight.requires_grad_(training), targets


def run(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> None:
    """Log-probs of the response, and in training the gradients of hidden states and head."""
    with torch.set_grad_enabled(case.phase == "training"):
        if case.method == "chunks":
            states = hidden[:, -case.response - 1 : -1]
            head = Head(partial(F.linear, weight=weight), (weight,), weight.shape[0])
            logprobs, _ = token_logprobs(states.flatten(0, 1), targets.flatten(), head, with_entropy=False)
        else:
            everything = torch.log_softmax(F.linear(hidden, weight), dim=-1)[:, -case.response - 1 : -1]
            logprobs = everything.gather(-1, targets[..., None]).squeeze(-1)
        if case.phase == "training":
            logprobs.sum().backward()


if __name__ == "__main__":
    main()
