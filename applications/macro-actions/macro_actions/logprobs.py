# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy of tokens from hidden states, in chunks, so that B×R×V logits never exist at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# The most logits held at one time. On a CPU 80 MB in float32; not fewer, since glibc gives freed blocks above 32 MiB
# back to the system and keeps smaller ones, so that a process with smaller chunks would grow with every chunk. On a
# GPU 1 GiB, and never fewer than 512 positions: each chunk reads the whole head.
CPU_LOGITS = 20_000_000
GPU_LOGITS = 2**28
GPU_POSITIONS = 512
BLOCK = 2**19  # logits that a CPU's cache holds while they are turned into probabilities


def softmax_in_place(
    logits: Tensor, targets: Tensor, smoothing: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Turns logits (N, V) float32 into their softmax, in their own memory.

    Args:
        logits: finite or −inf.
        targets: (N,) long.
        smoothing: see `Head`.
        with_entropy: compute the entropy, too.

    Returns:
        Log-probs (N,) of the targets, and the entropy (N,) in nats or None.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * logits.mean(-1)
    powers = logits.exp() if with_entropy else logits.exp_()
    total = powers.sum(-1)
    entropy = None
    if with_entropy:
        expected = logits.mul_(powers).nan_to_num_(nan=0.0).sum(-1)  # p = 0 at a logit of −inf adds nothing
        entropy = total.log() - expected / total
    torch.div(powers, total[:, None], out=logits)
    return chosen - total.log(), entropy


def gradient_in_place(softmax: Tensor, targets: Tensor, grad: Tensor, smoothing: float, dtype: torch.dtype) -> Tensor:
    """Gradient of the log-probs of some targets with respect to logits (N, V), in the softmax's memory and a dtype.

    Args:
        softmax: (N, V) float32 of the logits; it is overwritten.
        targets: (N,) long.
        grad: (N, 1) gradient of the log-probs, divided by the temperature.
        smoothing: see `Head`.
        dtype: of the result.
    """
    softmax.mul_(-grad)
    if smoothing:
        softmax.add_(grad, alpha=smoothing / softmax.shape[1])
    softmax.scatter_add_(1, targets[:, None], (1 - smoothing) * grad)
    return softmax.to(dtype)


@dataclass(frozen=True)
class LogitKernels:
    """The passes over logits, which a caller may have compiled; each reads and writes 4 bytes per logit several times
    where it is not.
    """

    softmax: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]] = softmax_in_place
    gradient: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], Tensor] = gradient_in_place


@dataclass(frozen=True)
class Head:
    """What turns hidden states into the logits of a softmax.

    Attributes:
        to_logits: maps (N, H) to (N, V), the model's own post-processing included (Gemma-2 soft-caps its logits).
        parameters: that it uses; they get their gradients, which are added up over chunks in float32.
        vocab_size: V.
        temperature: divides the logits.
        smoothing: ε of the targets: each stands for its own token with weight 1 − ε and for all V tokens with ε / V.
        missing: (K,) long, ids that are no tokens; their logits count as −inf. Not together with smoothing.
        kernels: what goes over the logits.
    """

    to_logits: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    vocab_size: int
    temperature: float = 1.0
    smoothing: float = 0.0
    missing: Tensor | None = None
    kernels: LogitKernels = field(default_factory=LogitKernels)

    def __post_init__(self) -> None:
        """Raises ValueError where targets would be smoothed over ids that are no tokens."""
        if self.smoothing and self.missing is not None:
            raise ValueError("targets cannot be smoothed over ids that have no probability")


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: Head, with_entropy: bool = True, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution.

    With smoothed targets: (1 − ε) log p(target) + ε Σ log p / V, the negative of PyTorch's smoothed cross-entropy.

    Where all positions make one chunk, its softmax is kept for the backward pass; otherwise the logits of each chunk
    are computed again there. Memory is one chunk of logits either way.

    Args:
        hidden: (N, H), the states that predict the targets.
        targets: (N,) long.
        head: from states to logits.
        with_entropy: compute the entropy, too.
        chunk: positions of a chunk; chosen by the device when None.

    Returns:
        logprobs (N,) float32, differentiable once; entropy (N,) float32 in nats, without gradient, (0,) if it is not
        wanted.
    """
    chunk = chunk or chunk_positions(head.vocab_size, hidden.device)
    trained = [p for p in head.parameters if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        logprobs, entropy = _TokenLogprobs.apply(hidden, targets, head, with_entropy, chunk, *trained)
        return logprobs, entropy
    parts = [
        _softmax(head.to_logits(states), states, chosen, head, with_entropy)[1:]
        for states, chosen in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropy


def chunk_positions(vocab_size: int, device: torch.device) -> int:
    """Positions whose logits are held at one time."""
    if device.type == "cpu":
        return max(1, CPU_LOGITS // vocab_size)
    return max(GPU_POSITIONS, GPU_LOGITS // vocab_size)


class _TokenLogprobs(torch.autograd.Function):
    """The derivative of log softmax is written out: (target − softmax) / temperature, in the softmax's own memory."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, with_entropy: bool, chunk: int, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, targets, *parameters)
        ctx.head, ctx.chunk, ctx.kept = head, chunk, None
        parts = []
        for states, chosen in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            if len(hidden) > chunk:
                logits = head.to_logits(states)
            else:
                states, logits, edge = _with_graph(states, hidden.requires_grad, head)
            softmax, *part = _softmax(logits.detach(), states, chosen, head, with_entropy)
            if len(hidden) <= chunk:
                ctx.kept = states, edge, logits.dtype, softmax
            parts.append(part)
            del logits, softmax  # else they would still be there while the next chunk's are made
        logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, *parameters = ctx.saved_tensors
        needs_hidden, head, kept = ctx.needs_input_grad[0], ctx.head, ctx.kept
        ctx.kept = ()  # its softmax is written over
        hidden_grads, sums = [], [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        pieces = zip(*(x.split(ctx.chunk) for x in (hidden, targets, grads[0])), strict=True)
        for states, chosen, grad in pieces:
            if kept is None:
                states, logits, edge = _with_graph(states, needs_hidden, head)
                dtype = logits.dtype
                softmax = _softmax(logits.detach(), states, chosen, head, False)[0]
                del logits
            else:
                states, edge, dtype, softmax = kept
            grad = (grad / head.temperature)[:, None]
            logits_grad = head.kernels.gradient(softmax, chosen, grad, head.smoothing, dtype)
            wanted = [*([states] if needs_hidden else []), *parameters]
            found = list(torch.autograd.grad(edge, wanted, logits_grad))
            if needs_hidden:
                hidden_grads.append(found.pop(0))
            sums = found if kept is not None else [total.add_(x) for total, x in zip(sums, found, strict=True)]
            del found, softmax, logits_grad  # else they would still be there while the next chunk's are made
        return torch.cat(hidden_grads) if needs_hidden else None, None, None, None, None, *sums


def _with_graph(states: Tensor, needs_grad: bool, head: Head) -> tuple[Tensor, Tensor, GradientEdge]:
    """States that a graph begins at, their logits, and where that graph ends.

    The logits are written over later. As they are a view, autograd would then take another way through the graph, on
    which it copies them; the edge is that of before.
    """
    states = states.detach().requires_grad_(needs_grad)
    with torch.enable_grad():
        logits = head.to_logits(states)
    return states, logits, get_gradient_edge(logits)


@torch.no_grad()
def _softmax(
    logits: Tensor, states: Tensor, targets: Tensor, head: Head, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(logits / temperature) (N, V) float32, in the logits' own memory where that is nobody else's.

    Returns:
        The softmax; log-probs (N,) of the targets; entropy (N,), or (0,).
    """
    shared = logits.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()
    softmax = logits.clone() if shared else logits
    softmax = softmax.float()
    if head.temperature != 1.0:
        softmax.div_(head.temperature)
    if head.missing is not None:
        softmax.index_fill_(1, head.missing, -torch.inf)
    rows = max(1, BLOCK // softmax.shape[1]) if softmax.device.type == "cpu" else max(1, len(softmax))
    logprobs, entropies = [], []
    for block, chosen in zip(softmax.split(rows), targets.split(rows), strict=True):
        block_logprobs, entropy = head.kernels.softmax(block, chosen, head.smoothing, with_entropy)
        logprobs.append(block_logprobs)
        if entropy is not None:
            entropies.append(entropy)
    return softmax, torch.cat(logprobs), torch.cat(entropies) if with_entropy else softmax.new_empty(0)
