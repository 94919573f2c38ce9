# SPDX-License-Identifier: Apache-2.0
"""What every engine keeps to, against hand-written loops over the models' own logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from dschat.rollouts.continuous import sample
from dschat.rollouts.engine import Generation
from dschat.rollouts.generate import generate
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.static import StaticDecoder
from factories import BOS, EOS, PAD, favouring, make_causal_lm, random_ids, same_rollout, sampling_of
from rollout_cases import prompts_of

ENGINES = {"continuous": sample, "static": partial(sample, make_decoder=StaticDecoder), "generate": generate}
pytestmark = pytest.mark.parametrize("engine", ENGINES)


def draw(
    engine: str, causal_lm: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int = 1
) -> Generation:
    """One response to each prompt, at most five rows at once."""
    return ENGINES[engine](causal_lm, prompts, sampling, [1000 * seed + row for row in range(len(prompts))], 5)


def test_shapes_and_types(engine: str) -> None:
    prompts = prompts_of([2, 6, 4])
    drawn = draw(engine, make_causal_lm(), prompts, sampling_of(8))
    rollout, (rows, width) = drawn.rollout, drawn.rollout.response_mask.shape
    assert rows == 3 and 1 <= width <= 8
    assert rollout.input_ids.shape == rollout.attention_mask.shape == (3, 6 + width)
    assert rollout.input_ids[:, :6].tolist() == [[PAD] * (6 - len(prompt)) + prompt for prompt in prompts]
    assert rollout.attention_mask[:, :6].sum(1).tolist() == [2, 6, 4]
    assert torch.equal(rollout.attention_mask[:, 6:], rollout.response_mask)
    assert rollout.prompt_index.tolist() == [0, 1, 2]
    assert rollout.response_mask.dtype == rollout.finished.dtype == rollout.attention_mask.dtype == torch.bool
    assert drawn.bad_rows.tolist() == [False] * 3


def test_the_mask_is_a_prefix_that_holds_eos(engine: str) -> None:
    """With EOS sampled often, rows end at different places, and some not at all."""
    rollout = draw(engine, favouring([EOS], bias=3.0), prompts_of([3] * 32), sampling_of(12)).rollout
    ids, mask = rollout.response_ids.tolist(), rollout.response_mask.tolist()
    lengths = set()
    for row_ids, row_mask, finished in zip(ids, mask, rollout.finished.tolist(), strict=True):
        length = row_ids.index(EOS) + 1 if EOS in row_ids else len(row_ids)
        assert row_mask == [True] * length + [False] * (len(row_ids) - length)
        assert finished == (EOS in row_ids)
        assert all(token == PAD for token in row_ids[length:])
        lengths.add(length)
    assert len(lengths) > 3 and not bool(rollout.finished.all())


@pytest.mark.parametrize("bias", [8.0, 200.0])  # with the latter all that is allowed has probability 0 in float32
def test_pad_and_bos_are_never_sampled(engine: str, bias: float) -> None:
    causal_lm = favouring([PAD, BOS], bias=bias)
    for options in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}):
        drawn = draw(engine, causal_lm, prompts_of([3] * 10), sampling_of(4, **options))
        sampled = drawn.rollout.response_ids[drawn.rollout.response_mask]
        assert not bool(torch.isin(sampled, torch.tensor([PAD, BOS])).any())
        assert len(sampled.unique()) > 1 and not bool(drawn.bad_rows.any())


@pytest.mark.parametrize(
    ("options", "allowed"), [({}, 98), ({"temperature": 0.5}, 98), ({"top_k": 5}, 5), ({"top_p": 0.5}, None)]
)
def test_tokens_are_drawn_from_the_softmax(engine: str, options: dict[str, float], allowed: int | None) -> None:
    """Frequencies of 4000 draws, beside the probabilities of the model's own logits."""
    causal_lm, count = make_causal_lm(initializer_range=0.1), 4000
    prompt = random_ids(4, 7)
    sampling = sampling_of(1, **options)
    drawn = ENGINES[engine](causal_lm, [prompt] * count, sampling, list(range(count)), 1000).rollout.response_ids[:, 0]
    with torch.no_grad():
        logits = causal_lm(input_ids=torch.tensor([prompt])).logits[0, -1].double() / options.get("temperature", 1.0)
    logits[[PAD, BOS]] = -torch.inf
    expected, order = logits.softmax(-1), logits.argsort(descending=True)
    if allowed is None:  # the fewest ids that make up half
        allowed = 1 + int((expected[order].cumsum(0) < 0.5).sum())
    expected[order[allowed:]] = 0
    expected /= expected.sum()
    counts = torch.bincount(drawn, minlength=100)
    assert not bool(counts[expected == 0].any())
    likely = expected * count >= 5
    chi_squared = float(((counts - expected * count) ** 2 / (expected * count))[likely].sum())
    freedom = int(likely.sum())
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5 and freedom >= min(allowed, 40)


def test_seeds_give_the_same_draws_and_leave_the_global_state_alone(engine: str) -> None:
    causal_lm, prompts = make_causal_lm(initializer_range=0.1), prompts_of([3, 5, 4])
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = draw(engine, causal_lm, prompts, sampling_of(), seed=1).rollout
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert same_rollout(draw(engine, causal_lm, prompts, sampling_of(), seed=1).rollout, first)
    assert not same_rollout(draw(engine, causal_lm, prompts, sampling_of(), seed=2).rollout, first)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_temperature_0_is_an_argmax_loop(engine: str, kind: str) -> None:
    causal_lm, prompts = make_causal_lm(kind), prompts_of([2, 9, 5, 1, 7, 3])
    rollout = draw(engine, causal_lm, prompts, sampling_of(12, temperature=0.0)).rollout
    for prompt, response in zip(prompts, rollout.response_rows(), strict=True):
        expected: list[int] = []
        while len(expected) < 12 and EOS not in expected:
            with torch.no_grad():
                logits = causal_lm(input_ids=torch.tensor([prompt + expected])).logits[0, -1]
            logits[[PAD, BOS]] = -torch.inf
            expected.append(int(logits.argmax()))
        assert response == expected
