# SPDX-License-Identifier: Apache-2.0
"""Completions: responses that may be shorter than others, many of one text, which is read once."""

import functools
from typing import Any

import pytest
import torch

from dschat.rollouts import scheduler, static
from dschat.rollouts.continuous import sample
from dschat.rollouts.decoder import Decoder
from dschat.rollouts.engine import assemble
from dschat.rollouts.generate import generate
from dschat.rollouts.static import StaticDecoder
from factories import EOS, PAD, make_causal_lm, random_ids, sampling_of
from rollout_cases import ENDS, by_hand, check_logprobs, model_of, seeds_of

# Three texts, one of them the beginning of another; of the second four completions, of the last a single token each.
TEXTS = [random_ids(12, 1), random_ids(7, 2), random_ids(12, 1)[:5]]
PROMPTS = [TEXTS[n] for n in (1, 0, 2, 1, 1, 2, 1)]
LIMITS = [9, 4, 1, 9, 9, 1, 9]
SAMPLING = sampling_of(9, ENDS, temperature=0.9)


@functools.cache
def model_and_rows(family: str) -> tuple[Any, list[list[int]]]:
    """A model and what is drawn for each prompt by hand."""
    causal_lm = model_of(family)
    rows = zip(PROMPTS, seeds_of(7), LIMITS, strict=True)
    return causal_lm, [by_hand(causal_lm, prompt, SAMPLING, seed)[:limit] for prompt, seed, limit in rows]


@pytest.mark.parametrize("slots, prefill", [(3, 8192), (16, 8192), (16, 14)])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
@pytest.mark.parametrize("decoder", [Decoder, StaticDecoder])
def test_completions_are_drawn_as_by_hand(
    decoder: type[Decoder], family: str, slots: int, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where texts with copies are read in several forward passes."""
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", prefill)
    monkeypatch.setattr(static, "COLUMN_STEP", 16)
    causal_lm, expected = model_and_rows(family)
    assert {len(row) for row in expected} > {1} and any(row[-1] not in ENDS for row in expected)
    drawn = sample(causal_lm, PROMPTS, SAMPLING, seeds_of(7), slots, decoder, limits=LIMITS)
    assert drawn.rollout.response_rows() == expected
    assert drawn.rollout.finished.tolist() == [row[-1] in ENDS for row in expected]
    check_logprobs(causal_lm, PROMPTS, drawn, 0.9)


def test_a_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without limits, as in a rollout, every prompt is read as it always was."""
    causal_lm: Any = make_causal_lm("llama")
    read: list[int] = []
    causal_lm.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].shape[0] * (given["input_ids"].shape[1] > 1)),
        with_kwargs=True,
    )
    sample(causal_lm, PROMPTS, sampling_of(9, ENDS), seeds_of(7), 16, limits=LIMITS)
    assert sum(read) == 3
    read.clear()
    sample(causal_lm, PROMPTS, sampling_of(9, ENDS), seeds_of(7), 16)
    assert sum(read) == 7


def test_generate_keeps_to_the_limit_of_each_row() -> None:
    """7 rows, 3 at a time."""
    limits = [1, 2, 3, 4, 5, 6, 7]
    rollout = generate(make_causal_lm("llama"), PROMPTS, sampling_of(9), seeds_of(7), 3, limits=limits).rollout
    rows = rollout.response_rows()
    assert all(len(row) <= limit for row, limit in zip(rows, limits, strict=True))
    assert rollout.finished.tolist() == [row[-1] == EOS for row in rows] and not bool(rollout.finished.all())


def test_what_follows_a_limit_ends_nothing() -> None:
    """Where end tokens pad, they are none of the response: 7 8 cut at 2 has not ended, EOS at its limit has."""
    prompts = torch.tensor([[5]] * 2), torch.ones(2, 1, dtype=torch.bool)
    tokens = torch.tensor([[7, 8, EOS, EOS], [7, EOS, EOS, EOS]])
    rollout = assemble(prompts, tokens, sampling_of(4), [2, 2])
    assert rollout.response_rows() == [[7, 8], [7, EOS]] and rollout.finished.tolist() == [False, True]
    assert rollout.input_ids.tolist() == [[5, 7, 8], [5, 7, EOS]] and PAD not in rollout.input_ids
