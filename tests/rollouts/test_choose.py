# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers against integers of any size, and one step of sampling against plain sums in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeness import EPS, FORMULA, assert_near
from dschat.rollouts.sampling import Sampling, TokenSampler, inverse_cdf, row_seed, uniforms
from factories import BOS, EOS, PAD, sampling_of

CPU = torch.device("cpu")
WORD = 2**64
SEEDS = st.integers(0, 2**63 - 1)


def splitmix64(seed: int, count: int) -> list[int]:
    """Vigna's splitmix64.c, word by word."""
    outputs, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        outputs.append(z ^ (z >> 31))
    return outputs


def test_the_reference_gives_the_published_numbers() -> None:
    """The first outputs for the seed 1234567, as they are given at Rosetta Code."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(1, 6))
def test_uniform_numbers_are_the_upper_bits_of_splitmix64(seeds: list[int], count: int) -> None:
    expected = [[(word >> 11) / 2**53 for word in splitmix64(seed, count)] for seed in seeds]
    assert uniforms(torch.tensor(seeds), count).tolist() == expected


def test_row_seeds_are_of_63_bits_and_depend_on_every_part() -> None:
    seeds = {row_seed(1, kind, draw, index) for kind in range(3) for draw in range(5) for index in range(20)}
    assert len(seeds) == 300 and max(seeds) < 2**63 and max(seeds) > 2**62
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3)


@pytest.mark.parametrize("width", [3, 255, 256, 257, 1000])
def test_the_drawn_id_is_where_the_running_sum_passes(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(200, width, generator=generator) * (torch.rand(200, width, generator=generator) < 0.3)
    weights[:, -1] += 0.01
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    logits = weights.log()
    ids, log_z = inverse_cdf(logits, uniform)
    running = (logits - logits.amax(-1, keepdim=True)).exp().double().cumsum(-1)
    torch.testing.assert_close(log_z, logits.double().logsumexp(-1), rtol=0, atol=FORMULA * EPS)
    expected = (running <= uniform[:, None] * running[:, -1:]).sum(-1)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("width", [5, 600])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_an_id_without_weight_is_never_drawn(width: int, uniform: float) -> None:
    """Only the ids 2 and 3 have weights; their sum is rounded up in float32."""
    weights = torch.zeros(1, width)
    weights[0, 2:4] = torch.tensor([0.75 * 2.0**-23, 1.0])
    ids, _ = inverse_cdf(weights.log(), torch.tensor([uniform], dtype=torch.float64))
    assert ids.item() == (2 if uniform == 0 else 3)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_p": 0.5}])
def test_log_probs_are_those_of_the_whole_softmax(temperature: float, truncation: dict[str, float]) -> None:
    """Neither what is forbidden nor what truncation leaves out is taken from the denominator."""
    logits = 3 * torch.randn(50, 700, generator=torch.Generator().manual_seed(1))
    uniform = uniforms(torch.tensor([3]), 50)[0]
    sampling = sampling_of(temperature=temperature, **truncation)
    ids, logprobs = TokenSampler(sampling, 700, CPU)(logits.clone(), uniform)
    expected = (logits.double() / (temperature or 1)).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert_near(logprobs, expected, FORMULA, scale=float(logits.abs().max()) / (temperature or 1))
    assert logprobs.dtype == torch.float32 and not bool(torch.isin(ids, torch.tensor([PAD, BOS])).any())
    if temperature == 0:
        logits[:, [PAD, BOS]] = -torch.inf
        assert torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 4, 5, 6]),
        ({"temperature": 0.5}, [3, 3, 4, 5]),  # 16/30, 9/30, 4/30 and 1/30: running sums .53, .83, .97
        ({"top_k": 2}, [3, 3, 4, 4]),  # 4/7 and 3/7
        ({"top_p": 0.85}, [3, 4, 4, 5]),  # the first three: 4/9, 3/9 and 2/9
    ],
)
def test_tokens_by_hand(options: dict[str, float], expected: list[int]) -> None:
    """Ids 3 to 6 have probabilities .4, .3, .2 and .1 beside pad and BOS, which are far likelier and never drawn."""
    logits = torch.full((4, 7), -torch.inf)
    logits[:, [PAD, BOS]] = 200.0
    logits[:, 3:] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    uniform = torch.tensor([0.15, 0.45, 0.75, 0.95], dtype=torch.float64)
    ids, _ = TokenSampler(sampling_of(**options), 7, CPU)(logits, uniform)
    assert ids.tolist() == expected


@pytest.mark.parametrize("flags", [{}, {"top_k": 2}, {"temperature": 0}])
def test_rows_that_are_not_finite_have_no_log_prob_and_are_drawn_evenly(flags: dict[str, int]) -> None:
    logits = torch.zeros(5, 10)
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :9] = -torch.inf  # what is left is certain
    logits[4, 2:] = -torch.inf  # only ids that are never sampled are left
    uniform = torch.tensor([0.0, 0.99, 0.5, 0.5, 0.5], dtype=torch.float64)
    ids, logprobs = TokenSampler(Sampling(1, (EOS,), PAD, BOS, **flags), 10, CPU)(logits, uniform)
    assert ids.tolist() == [2, 9, 6, 9, 6]  # of the eight ids from 2 on, the first, the last, and number 4
    assert logprobs.isnan().tolist() == [True, True, True, False, True] and logprobs[3] == 0
