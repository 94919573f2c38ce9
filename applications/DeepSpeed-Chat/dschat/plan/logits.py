# SPDX-License-Identifier: Apache-2.0
"""Bytes of logits and log-probs, which `dschat.rl.logprobs` makes in chunks of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dschat.plan.passes import Pass
from dschat.plan.states import FLOAT32
from dschat.rl.logprobs import chunk_positions

SAMPLING_BUFFERS = 4  # logits of the model, at a temperature, truncated, and their softmax; float32


@dataclass(frozen=True)
class Head:
    """The output head of a policy.

    Attributes:
        vocab: V.
        weight: elements, V × H.
        tied: whether it is the embedding, too.
        trained: whether it has a gradient.
        width: bytes of an element.
        capped: whether the model soft-caps its logits (Gemma-2).
    """

    vocab: int
    weight: int
    tied: bool
    trained: bool
    width: int
    capped: bool = False


def training_logits(head: Head, positions: int, device: torch.device) -> Pass:
    """Log-probs of `positions` tokens with gradients, in bytes.

    The softmax is made in the logits' place. Where all positions make one chunk it is kept for the backward pass; else
    each chunk is made again. Soft-capping keeps its result and works on two more tensors in the backward pass; the
    entropy takes one more on a GPU.

    A trained head's gradient is added up in float32 beside that of a chunk; a frozen head has none.
    """
    chunk = chunk_positions(head.vocab, device)
    kept = positions <= chunk
    logits = FLOAT32 * head.vocab * min(positions, chunk)
    entropy = 0 if device.type == "cpu" else logits
    graph = logits * (1 + head.capped)
    half = logits // 2 if head.width < FLOAT32 else 0  # the logits' gradient in the head's format
    of_chunk = max(half, 2 * logits * head.capped) + head.trained * head.width * head.weight
    again = 0 if kept else _converted(head, device)
    return Pass(
        forward=graph + entropy + _converted(head, device),
        held=graph if kept else 0,
        backward=graph + head.trained * FLOAT32 * head.weight + max(of_chunk, again),
    )


def kept_gradient(head: Head) -> int:
    """Bytes of the head's gradient during the rest of the backward pass.

    An embedding that is the head, too, has the sum of both gradients only at the end.
    """
    return head.width * head.weight if head.tied and head.trained else 0


def scoring_logits(head: Head, positions: int, device: torch.device) -> int:
    """Bytes of log-probs of `positions` tokens without gradients and entropy."""
    chunk = min(positions, chunk_positions(head.vocab, device))
    return FLOAT32 * head.vocab * chunk * (1 + head.capped) + _converted(head, device)


def sampling_logits(head: Head, rows: int, device: torch.device) -> int:
    """Bytes of the next token's distributions."""
    return SAMPLING_BUFFERS * FLOAT32 * rows * head.vocab + _converted(head, device)


def _converted(head: Head, device: torch.device) -> int:
    """On a CPU, a head in half precision is multiplied in float32."""
    return FLOAT32 * head.weight if device.type == "cpu" and head.width < FLOAT32 else 0
