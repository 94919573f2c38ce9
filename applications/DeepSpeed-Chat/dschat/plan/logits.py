# SPDX-License-Identifier: Apache-2.0
"""Bytes of logits and log-probs, which are made in chunks of positions."""

from __future__ import annotations

from dataclasses import dataclass

from dschat.plan.passes import Pass
from dschat.plan.states import FLOAT32
from dschat.rl.logprobs import CHUNK_ELEMENTS

# On CUDA a chunk holds at least these positions, and at least these logits (1 GiB).
CUDA_POSITIONS = 512
CUDA_ELEMENTS = 2**28
# float32 tensors of a chunk's size at one time.
SCORING_BUFFERS = 2  # logits and their exponentials
TRAINING_BUFFERS = 3  # logits, softmax and their gradient
SAMPLING_BYTES = FLOAT32 + 2 * 8  # per logit of a row: itself, probability and cumulative sum in float64


@dataclass(frozen=True)
class Head:
    """The output head of a policy.

    Attributes:
        vocab: V.
        weight: elements, V × H.
        tied: whether it is the embedding, too.
        trained: whether it has a gradient.
        width: bytes of an element.
    """

    vocab: int
    weight: int
    tied: bool
    trained: bool
    width: int


def chunk_elements(vocab: int, cuda: bool) -> int:
    """The most logits held at one time."""
    return max(CUDA_POSITIONS * vocab, CUDA_ELEMENTS) if cuda else CHUNK_ELEMENTS


def training_logits(head: Head, positions: int, cuda: bool) -> Pass:
    """Log-probs of `positions` tokens with gradients, in bytes.

    Where all logits fit into a chunk they are kept for the backward pass. Else a chunk at a time is computed again,
    and the head's gradient is added up in float32. An embedding that is the head, too, has its gradient of both only
    at the end of the backward pass: until then that of the head is kept.
    """
    elements, chunk = positions * head.vocab, chunk_elements(head.vocab, cuda)
    own = head.width * head.weight if head.trained else 0
    if elements <= chunk:
        logits = FLOAT32 * elements
        return Pass(SCORING_BUFFERS * logits, logits, TRAINING_BUFFERS * logits + own)
    logits = FLOAT32 * (chunk // head.vocab) * head.vocab
    sums = FLOAT32 * head.weight if head.trained else 0
    return Pass(SCORING_BUFFERS * logits, 0, TRAINING_BUFFERS * logits + sums + own)


def kept_gradient(head: Head) -> int:
    """Bytes of the head's gradient during the rest of the backward pass."""
    return head.width * head.weight if head.tied and head.trained else 0


def scoring_logits(vocab: int, positions: int, cuda: bool) -> int:
    """Bytes of log-probs of `positions` tokens without gradients."""
    chunk = max(1, chunk_elements(vocab, cuda) // vocab)
    return SCORING_BUFFERS * FLOAT32 * min(positions, chunk) * vocab


def sampling_logits(vocab: int, rows: int) -> int:
    """Bytes of the next token's distributions."""
    return SAMPLING_BYTES * rows * vocab
