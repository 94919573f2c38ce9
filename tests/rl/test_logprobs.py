# SPDX-License-Identifier: Apache-2.0
"""Chunked token log-probs against log_softmax of the full logits."""

import math
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from closeness import FORMULA, assert_near
from macro_actions.logprobs import Head, chunk_positions
from macro_actions.logprobs import token_logprobs as chunked_logprobs
from rl_cases import PROPERTY, SEEDS, normal

VOCABULARY = 11


def soft_capped(weight: torch.Tensor, bias: torch.Tensor, cap: float | None = 3.0) -> Callable:
    """hidden (...,H) -> logits (...,V), soft-capped as Gemma-2 does."""

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, weight, bias)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    to_logits.parameters = (weight, bias)
    return to_logits


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    to_logits: Callable,
    temperature: float = 1.0,
    chunk_elements: int = 2**23,
    vocab_size: int = VOCABULARY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function under test, on (B, R) positions; the one place that knows its parameters."""
    parameters = getattr(to_logits, "parameters", ())
    head = Head(to_logits, parameters, vocab_size, temperature)
    flat = hidden.flatten(0, 1), targets.flatten()
    logprobs, entropy = chunked_logprobs(*flat, head, chunk=max(1, chunk_elements // vocab_size))
    return logprobs.view_as(targets), entropy.view_as(targets)


def leaves(rows: int, width: int, size: int, seed: int) -> list[torch.Tensor]:
    """hidden (B,R,H), weight (V,H), bias (V,), all with gradients."""
    shapes = ((rows, width, size), (VOCABULARY, size), (VOCABULARY,))
    return [normal(shape, seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def targets_like(rows: int, width: int, seed: int) -> torch.Tensor:
    """Random token ids (B,R)."""
    return torch.randint(VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(seed))


def full(hidden: torch.Tensor, targets: torch.Tensor, to_logits: Callable, temperature: float) -> tuple:
    """Log-probs and entropy from all logits at once, in float64."""
    logprobs = torch.log_softmax(to_logits(hidden).double() / temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[..., None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(dim=-1)


@PROPERTY
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 7),
    chunk=st.sampled_from([1, VOCABULARY, 2 * VOCABULARY + 3, 5 * VOCABULARY, 2**23]),
    temperature=st.sampled_from([0.5, 0.8, 1.0, 2.0]),
    cap=st.sampled_from([None, 3.0]),
    seed=SEEDS,
)
def test_values_and_gradients_are_those_of_the_full_logits(rows, width, chunk, temperature, cap, seed) -> None:
    targets = targets_like(rows, width, seed)
    ours, theirs = leaves(rows, width, 5, seed), leaves(rows, width, 5, seed)
    logprobs, entropy = token_logprobs(ours[0], targets, soft_capped(ours[1], ours[2], cap), temperature, chunk)
    expected, expected_entropy = full(theirs[0], targets, soft_capped(theirs[1], theirs[2], cap), temperature)
    assert logprobs.shape == entropy.shape == (rows, width)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_near(logprobs, expected.detach())
    assert_near(entropy, expected_entropy.detach())
    assert logprobs.requires_grad and not entropy.requires_grad
    weights = normal((rows, width), seed + 9)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine.grad, other.grad.double())


def test_by_hand() -> None:
    """Logits 0, log 2, log 5 have probabilities 1/8, 2/8, 5/8; at temperature 0.5, 1/30, 4/30, 25/30."""
    hidden = torch.tensor([[[1.0], [1.0]]])
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = token_logprobs(hidden, torch.tensor([[0, 2]]), lambda h: linear(h, weight), vocab_size=3)
    assert_near(logprobs, [[math.log(1 / 8), math.log(5 / 8)]], FORMULA)
    nats = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert_near(entropy, [[nats, nats]], FORMULA)
    logprobs, _ = token_logprobs(hidden, torch.tensor([[0, 2]]), lambda h: linear(h, weight), 0.5, vocab_size=3)
    assert_near(logprobs, [[math.log(1 / 30), math.log(25 / 30)]], FORMULA)


@PROPERTY
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 7),
    chunk=st.sampled_from([1, 2 * VOCABULARY + 3, 2**23]),
    temperature=st.sampled_from([0.5, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    seed=SEEDS,
)
def test_smoothed_targets_are_those_of_torchs_cross_entropy(rows, width, chunk, temperature, smoothing, seed) -> None:
    """In value, with and without gradients, and in every gradient."""
    targets = targets_like(rows, width, seed).flatten()
    (hidden, weight, bias), theirs = leaves(rows, width, 5, seed), leaves(rows, width, 5, seed)
    head = Head(soft_capped(weight, bias), (weight, bias), VOCABULARY, temperature, smoothing)
    positions = max(1, chunk // VOCABULARY)
    logprobs, _ = chunked_logprobs(hidden.flatten(0, 1), targets, head, chunk=positions)
    logits = soft_capped(*theirs[1:])(theirs[0].flatten(0, 1)).double() / temperature
    expected = cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    assert_near(-logprobs.detach(), expected.detach())
    with torch.no_grad():
        assert_near(-chunked_logprobs(hidden.flatten(0, 1), targets, head, chunk=positions)[0], expected.detach())
    weights = normal((rows * width,), seed + 9)
    (-logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip((hidden, weight, bias), theirs, strict=True):
        assert_near(mine.grad, other.grad.double())


def test_logits_are_made_in_chunks_and_again_in_backward() -> None:
    """Never more than chunk_elements logits at once (or one position, if even that is more), forward or backward."""
    hidden, weight, bias = leaves(3, 8, 5, 0)
    targets = targets_like(3, 8, 0)
    for chunk, most in ((4 * VOCABULARY, 4 * VOCABULARY), (1, VOCABULARY)):
        sizes: list[int] = []

        def to_logits(h: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            logits = linear(h, weight, bias)
            sizes.append(logits.numel())
            return logits

        to_logits.parameters = (weight, bias)

        logprobs, _ = token_logprobs(hidden, targets, to_logits, 1.0, chunk)
        forward = sum(sizes)
        assert max(sizes) <= most and forward >= 24 * VOCABULARY
        logprobs.sum().backward()
        assert max(sizes) <= most and sum(sizes) >= forward + 24 * VOCABULARY


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
    logprobs, _ = chunked_logprobs(hidden, torch.zeros(257, dtype=torch.long), head, chunk=1)
    logprobs.sum().backward()
    assert_near(weight.grad.float(), [[1.0], [-1.0]])  # 0.5 · (1 + 256 / 256)


def test_bfloat16_hidden_states_give_float32_logprobs() -> None:
    hidden, weight, bias = (x.detach().bfloat16().requires_grad_() for x in leaves(2, 4, 5, 0))
    targets = targets_like(2, 4, 0)
    logprobs, entropy = token_logprobs(hidden, targets, soft_capped(weight, bias, None), 1.0, 30)
    expected, expected_entropy = full(hidden, targets, soft_capped(weight, bias, None), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_near(logprobs, expected.detach())
    assert_near(entropy, expected_entropy.detach())
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_forbidden_tokens_leave_the_others_alone() -> None:
    """Logits of -inf (a masked vocabulary entry) have probability 0 and no entropy."""
    logits = torch.tensor([[[0.0, -math.inf, math.log(3)]]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([[2]]), lambda h: h, vocab_size=3)
    assert_near(logprobs, [[math.log(0.75)]], FORMULA)
    assert_near(entropy, [[-0.25 * math.log(0.25) - 0.75 * math.log(0.75)]], FORMULA)
