# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy of tokens from hidden states, in chunks, so that (N, V) logits never exist at once.

Shapes: N positions (all tokens of a micro-batch), H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# Logits per chunk. CPU: 80 MB in float32. With chunks below 32 MiB a process would grow from chunk to chunk, because
# glibc returns only larger freed blocks to the system. GPU: 1 GiB in float32, and at least 512 positions, because each
# chunk reads all weights of the head.
CPU_LOGITS = 20_000_000
GPU_LOGITS = 2**28
GPU_POSITIONS = 512
BLOCK = 2**19  # logits that fit into a CPU's cache while they are turned into probabilities


def softmax_in_place(
    logits: Tensor, targets: Tensor, smoothing: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Turn float32 logits into their softmax, in their own memory.

    Args:
        logits: shape ``(N, V)``, finite or −inf; overwritten by the softmax.
        targets: shape ``(N,)``, int64.
        smoothing: see :class:`Head`.
        with_entropy: compute the entropy, too.

    Returns:
        Log-probabilities of the targets, shape ``(N,)``; the entropy in nats, shape ``(N,)``, or ``None``.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    target_logits = logits.gather(-1, targets[:, None]).squeeze(-1)
    if smoothing:
        target_logits = (1 - smoothing) * target_logits + smoothing * logits.mean(-1)
    powers = logits.exp() if with_entropy else logits.exp_()
    total = powers.sum(-1)

    entropy = None
    if with_entropy:
        products = logits.mul_(powers).nan_to_num_(nan=0.0)  # p = 0 at a logit of −inf adds nothing
        expected_logit = products.sum(-1)
        entropy = total.log() - expected_logit / total
    torch.div(powers, total[:, None], out=logits)
    return target_logits - total.log(), entropy


def gradient_in_place(softmax: Tensor, targets: Tensor, grad: Tensor, smoothing: float, dtype: torch.dtype) -> Tensor:
    """Gradient of the targets' log-probabilities with respect to the logits: grad · (target distribution − softmax).

    Args:
        softmax: shape ``(N, V)``, float32; overwritten by the gradient.
        targets: shape ``(N,)``, int64.
        grad: shape ``(N, 1)``, gradient of the log-probabilities, divided by the temperature.
        smoothing: see :class:`Head`.
        dtype: dtype of the result.

    Returns:
        Shape ``(N, V)``.
    """
    softmax.mul_(-grad)
    if smoothing:
        softmax.add_(grad, alpha=smoothing / softmax.shape[1])
    softmax.scatter_add_(1, targets[:, None], (1 - smoothing) * grad)
    return softmax.to(dtype)


@dataclass(frozen=True)
class LogitKernels:
    """The two passes over logits. A caller may compile them, so that each logit is read and written fewer times."""

    softmax: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]] = softmax_in_place
    gradient: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], Tensor] = gradient_in_place


@dataclass(frozen=True)
class Head:
    """The map from hidden states to the logits of a softmax.

    Attributes:
        to_logits: maps (N, H) to (N, V), including the model's post-processing (Gemma-2 soft-caps its logits).
        parameters: the parameters that ``to_logits`` uses. Their gradients are added up over chunks in float32.
        vocab_size: V.
        temperature: divides the logits.
        smoothing: ε of label smoothing: a target has weight 1 − ε, and each of the V tokens ε / V in addition.
        missing: shape ``(K,)``, int64, ids that are no tokens; their logits count as −inf. Not with smoothing.
        kernels: the passes over logits.

    Raises:
        ValueError: smoothing together with missing ids.
    """

    to_logits: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    vocab_size: int
    temperature: float = 1.0
    smoothing: float = 0.0
    missing: Tensor | None = None
    kernels: LogitKernels = field(default_factory=LogitKernels)

    def __post_init__(self) -> None:
        if self.smoothing and self.missing is not None:
            raise ValueError("targets cannot be smoothed over ids that have no probability")


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: Head, with_entropy: bool = True, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution.

    With smoothed targets: (1 − ε) log p(target) + ε Σ log p / V, the negative of PyTorch's smoothed cross-entropy.

    Memory is that of one chunk of logits. If all positions fit into one chunk, its softmax is kept for the backward
    pass; otherwise the backward pass computes the logits of each chunk again.

    Args:
        hidden: shape ``(N, H)``, the states that predict the targets.
        targets: shape ``(N,)``, int64.
        head: from states to logits.
        with_entropy: compute the entropy, too.
        chunk: positions per chunk; :func:`chunk_positions` with ``None``.

    Returns:
        Log-probabilities, shape ``(N,)``, float32, differentiable once; entropy in nats, shape ``(N,)``, float32,
        without gradient, or shape ``(0,)`` if it is not wanted.
    """
    chunk = chunk or chunk_positions(head.vocab_size, hidden.device)
    trained = [p for p in head.parameters if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        logprobs, entropy = _TokenLogprobs.apply(hidden, targets, head, with_entropy, chunk, *trained)
        return logprobs, entropy

    logprobs_by_chunk = []
    entropy_by_chunk = []
    for states, chunk_targets in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        softmax, logprobs, entropy = _softmax(head.to_logits(states), states, chunk_targets, head, with_entropy)
        logprobs_by_chunk.append(logprobs)
        entropy_by_chunk.append(entropy)
        del softmax  # frees its memory before the next chunk is computed
    return torch.cat(logprobs_by_chunk), torch.cat(entropy_by_chunk)


def chunk_positions(vocab_size: int, device: torch.device) -> int:
    """Positions per chunk, such that their logits fit into CPU_LOGITS or GPU_LOGITS."""
    if device.type == "cpu":
        return max(1, CPU_LOGITS // vocab_size)
    return max(GPU_POSITIONS, GPU_LOGITS // vocab_size)


@dataclass(frozen=True)
class _Chunk:
    """Tensors from which the gradient of a chunk of n positions is computed.

    Attributes:
        states: shape ``(n, H)``, the input of the head's autograd graph.
        edge: the output of that graph, the logits, at which the gradient enters.
        dtype: dtype of the logits.
        softmax: shape ``(n, V)``, float32; the gradient overwrites it.
    """

    states: Tensor
    edge: GradientEdge
    dtype: torch.dtype
    softmax: Tensor


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax with its derivative written out: (target − softmax) / temperature, in the softmax's own memory."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, with_entropy: bool, chunk: int, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, targets, *parameters)
        ctx.head = head
        ctx.chunk = chunk
        ctx.only_chunk = None
        if len(hidden) > chunk:
            logprobs, entropy = token_logprobs(hidden, targets, head, with_entropy, chunk)
        else:
            ctx.only_chunk, logprobs, entropy = _with_graph(hidden, hidden.requires_grad, targets, head, with_entropy)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, *parameters = ctx.saved_tensors
        head: Head = ctx.head
        grad = grads[0] / head.temperature
        if ctx.only_chunk is not None:
            hidden_grad, parameter_grads = _chunk_gradients(ctx.only_chunk, targets, grad, head, parameters)
            ctx.only_chunk = None  # its softmax has been overwritten
            return hidden_grad, None, None, None, None, *parameter_grads

        hidden_grads = []
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        pieces = zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), grad.split(ctx.chunk), strict=True)
        for states, chunk_targets, chunk_grad in pieces:
            chunk, _, _ = _with_graph(states, ctx.needs_input_grad[0], chunk_targets, head, False)
            hidden_grad, parameter_grads = _chunk_gradients(chunk, chunk_targets, chunk_grad, head, parameters)
            if hidden_grad is not None:
                hidden_grads.append(hidden_grad)
            for number, total in enumerate(sums):
                total.add_(parameter_grads[number])
            # Frees their memory before the next chunk is computed; a loop variable would hold a gradient as well.
            del chunk, parameter_grads
        return torch.cat(hidden_grads) if hidden_grads else None, None, None, None, None, *sums


def _with_graph(
    states: Tensor, needs_grad: bool, targets: Tensor, head: Head, with_entropy: bool
) -> tuple[_Chunk, Tensor, Tensor]:
    """Softmax of a chunk with the graph of the head, for its gradient.

    The softmax overwrites the logits. Autograd would notice that they are a view and differentiate a copy instead, so
    the graph's edge is taken before.

    Returns:
        The chunk, and log-probabilities and entropy as from `_softmax`.
    """
    states = states.detach().requires_grad_(needs_grad)
    with torch.enable_grad():
        logits = head.to_logits(states)
    edge = get_gradient_edge(logits)
    softmax, logprobs, entropy = _softmax(logits.detach(), states, targets, head, with_entropy)
    return _Chunk(states, edge, logits.dtype, softmax), logprobs, entropy


def _chunk_gradients(
    chunk: _Chunk, targets: Tensor, grad: Tensor, head: Head, parameters: Sequence[Tensor]
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Gradients with respect to a chunk's hidden states and to the head's parameters.

    Args:
        chunk: n positions.
        targets: shape ``(n,)``.
        grad: shape ``(n,)``, gradient of the log-probabilities, divided by the temperature.
        head: from states to logits.
        parameters: parameters of the head that are trained.

    Returns:
        Shape ``(n, H)``, or ``None`` if the states need no gradient; one gradient per parameter.
    """
    logits_grad = head.kernels.gradient(chunk.softmax, targets, grad[:, None], head.smoothing, chunk.dtype)
    if not chunk.states.requires_grad:
        return None, torch.autograd.grad(chunk.edge, parameters, logits_grad)
    states_grad, *parameter_grads = torch.autograd.grad(chunk.edge, [chunk.states, *parameters], logits_grad)
    return states_grad, parameter_grads


@torch.no_grad()
def _softmax(
    logits: Tensor, states: Tensor, targets: Tensor, head: Head, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(logits / temperature) in float32, which overwrites float32 logits unless they share memory with states.

    Returns:
        The softmax, shape ``(N, V)``; log-probabilities of the targets, shape ``(N,)``; the entropy, shape ``(N,)``,
        or ``(0,)`` if it is not wanted.
    """
    shared = logits.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()
    softmax = logits.clone() if shared else logits
    softmax = softmax.float()
    if head.temperature != 1.0:
        softmax.div_(head.temperature)
    if head.missing is not None:
        softmax.index_fill_(1, head.missing, -torch.inf)

    block_rows = max(1, len(softmax))
    if softmax.device.type == "cpu":
        block_rows = max(1, BLOCK // softmax.shape[1])
    logprobs = []
    entropies = []
    for block, block_targets in zip(softmax.split(block_rows), targets.split(block_rows), strict=True):
        block_logprobs, block_entropy = head.kernels.softmax(block, block_targets, head.smoothing, with_entropy)
        logprobs.append(block_logprobs)
        if block_entropy is not None:
            entropies.append(block_entropy)
    entropy = torch.cat(entropies) if with_entropy else softmax.new_empty(0)
    return softmax, torch.cat(logprobs), entropy
