# SPDX-License-Identifier: Apache-2.0
"""Chunked token log-probs against those of the full logits."""

import math
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from closeness import FORMULA, assert_near
from macro_actions.logprobs import Head, chunk_positions, token_logprobs
from rl_cases import PROPERTY, SEEDS, normal

VOCABULARY = 11


def soft_capped(weight: torch.Tensor, bias: torch.Tensor, cap: float | None) -> Callable:
    """hidden (N,H) -> logits (N,V), soft-capped as Gemma-2 does."""

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, weight, bias)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return to_logits


def leaves(positions: int, seed: int) -> list[torch.Tensor]:
    """hidden (N,5), weight (V,5), bias (V,), all with gradients."""
    shapes = ((positions, 5), (VOCABULARY, 5), (VOCABULARY,))
    return [normal(shape, seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def targets_like(positions: int, seed: int) -> torch.Tensor:
    """Random token ids (N,)."""
    return torch.randint(VOCABULARY, (positions,), generator=torch.Generator().manual_seed(seed))


def full(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs by torch's cross-entropy, and the entropy, from all logits at once, in float64."""
    logits = logits.double()
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    return -cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing), entropy


@PROPERTY
@given(
    positions=st.integers(1, 28),
    chunk=st.sampled_from([1, 2, 5, 2**20]),
    temperature=st.sampled_from([0.5, 0.8, 1.0, 2.0]),
    cap=st.sampled_from([None, 3.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    seed=SEEDS,
)
def test_values_and_gradients_are_those_of_the_full_logits(
    positions, chunk, temperature, cap, smoothing, seed
) -> None:
    """Of smoothed targets, too; values are the same without gradients."""
    targets = targets_like(positions, seed)
    ours, theirs = leaves(positions, seed), leaves(positions, seed)
    head = Head(soft_capped(*ours[1:], cap), ours[1:], VOCABULARY, temperature, smoothing)
    logprobs, entropy = token_logprobs(ours[0], targets, head, chunk=chunk)
    expected, expected_entropy = full(soft_capped(*theirs[1:], cap)(theirs[0]) / temperature, targets, smoothing)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_near(logprobs, expected.detach())
    assert_near(entropy, expected_entropy.detach())
    with torch.no_grad():
        assert_near(token_logprobs(ours[0], targets, head, chunk=chunk)[0], expected.detach())
    assert logprobs.requires_grad and not entropy.requires_grad
    weights = normal((positions,), seed + 9)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine.grad, other.grad.double())


def test_by_hand() -> None:
    """Logits 0, log 2, log 5 have probabilities 1/8, 2/8, 5/8; at temperature 0.5, 1/30, 4/30, 25/30."""
    hidden, targets = torch.ones(2, 1), torch.tensor([0, 2])
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = token_logprobs(hidden, targets, Head(lambda h: linear(h, weight), (), 3))
    assert_near(logprobs, [math.log(1 / 8), math.log(5 / 8)], FORMULA)
    nats = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert_near(entropy, [nats, nats], FORMULA)
    logprobs, _ = token_logprobs(hidden, targets, Head(lambda h: linear(h, weight), (), 3, temperature=0.5))
    assert_near(logprobs, [math.log(1 / 30), math.log(25 / 30)], FORMULA)


def test_logits_are_made_in_chunks_and_again_in_backward() -> None:
    """Never more logits at once than those of a chunk's positions, forward or backward."""
    hidden, weight, bias = leaves(24, 0)
    for chunk in (4, 1):
        sizes: list[int] = []

        def to_logits(h: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(len(h))
            return linear(h, weight, bias)

        head = Head(to_logits, (weight, bias), VOCABULARY)
        logprobs, _ = token_logprobs(hidden, targets_like(24, 0), head, chunk=chunk)
        forward = sum(sizes)
        assert max(sizes) <= chunk and forward >= 24
        logprobs.sum().backward()
        assert max(sizes) <= chunk and sum(sizes) >= forward + 24


def test_a_chunk_holds_512_positions_at_least_on_a_gpu() -> None:
    assert chunk_positions(256_000, torch.device("cuda")) == 1048
    assert chunk_positions(2_000_000, torch.device("cuda")) == 512
    assert chunk_positions(256_000, torch.device("cpu")) == 78


def test_the_heads_gradient_is_added_up_in_float32() -> None:
    """256 chunks of one position, each with a gradient of 2^-8 beside one of 1: in bf16 the sum would stay at 1."""
    hidden = torch.full((257, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 1
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    head = Head(lambda h: linear(h, weight), (weight,), 2)
    logprobs, _ = token_logprobs(hidden, torch.zeros(257, dtype=torch.long), head, chunk=1)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert_near(weight.grad.float(), [[1.0], [-1.0]])  # 0.5 · (1 + 256 / 256)


def test_forbidden_tokens_leave_the_others_alone() -> None:
    """Logits of -inf (a masked vocabulary entry) have probability 0, no entropy and no gradient."""
    logits = torch.tensor([[0.0, -math.inf, math.log(3)]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2]), Head(lambda h: h, (), 3))
    assert_near(logprobs, [math.log(0.75)], FORMULA)
    logprobs.sum().backward()
    assert_near(logits.grad, [[-0.25, 0.0, 0.25]], FORMULA)
    assert_near(entropy, [-0.25 * math.log(0.25) - 0.75 * math.log(0.75)], FORMULA)
