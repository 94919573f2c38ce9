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

import argparse
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dschat.rl.logprobs import Head, token_logprobs
from harness import GB, Peak, in_process, report, settings_parser


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
    parser = settings_parser(__doc__, vocabulary=256_000, hidden=256, prompt=512, response=512)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--softcap", type=float, default=0.0, help="of the logits, as Gemma-2's 30; 0 = none")
    parser.add_argument("--full_logits", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    settings = parser.parse_args()
    shape = {name: value for name, value in vars(settings).items() if name not in ("batch_sizes", "full_logits")}
    sizes = {"chunks": settings.batch_sizes, "full_logits": settings.batch_sizes[: settings.full_logits]}
    cases = [
        Case(method, phase, size, **shape)
        for method in sizes
        for phase in ("training", "scoring")
        for size in sizes[method]
    ]
    report(settings, [in_process(measure, case) for case in cases], dtype="float32")


def measure(case: Case) -> dict[str, object]:
    """The peak of one case above its inputs, in GB, and its seconds."""
    torch.set_num_threads(case.threads)
    tiny = replace(case, batch_size=1, prompt=2, response=4, vocabulary=64)
    run(*inputs(tiny), tiny)
    tensors = inputs(case)
    peak = Peak(case.device.startswith("cuda"))
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


if __name__ == "__main__":
    main()
