# SPDX-License-Identifier: Apache-2.0
"""Continuous batching, in both kinds of steps, against a loop that knows no cache, no batch and no slots."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from dschat.rollouts import scheduler, static
from dschat.rollouts.continuous import sample, supports
from dschat.rollouts.decoder import Decoder
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.slots import SlotCache
from dschat.rollouts.static import StaticDecoder
from factories import make_causal_lm, sampling_of
from rollout_cases import ENDS, FAMILIES, LENGTHS, by_hand, check_logprobs, model_of, prompts_of, seeds_of

DECODERS = (Decoder, StaticDecoder)


def all_by_hand(causal_lm: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Any:
    return [by_hand(causal_lm, p, sampling, seed) for p, seed in zip(prompts, seeds, strict=True)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows here have at most 50 tokens, and a static step reads 16, 32, … columns."""
    monkeypatch.setattr(static, "COLUMN_STEP", 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn_as_by_hand(family: str) -> None:
    """Prompts and responses longer and shorter than a sliding window of 16; three slots are filled again."""
    causal_lm, prompts, seeds = model_of(family), prompts_of(LENGTHS[:5]), seeds_of(5)
    sampling = sampling_of(20, ENDS, temperature=0.9)
    assert supports(causal_lm)
    expected = all_by_hand(causal_lm, prompts, sampling, seeds)
    for decoder in DECODERS:
        drawn = sample(causal_lm, prompts, sampling, seeds, 3, decoder)
        assert drawn.rollout.response_rows() == expected
        assert drawn.rollout.finished.tolist() == [row[-1] in ENDS for row in expected]
        check_logprobs(causal_lm, prompts, drawn, 0.9)


@functools.cache
def rows_alone() -> tuple[Any, list[list[int]], Sampling, list[int], list[list[int]]]:
    """A model, prompts, a sampling, seeds; and what is drawn for each prompt by itself."""
    causal_lm, sampling = make_causal_lm("gemma2"), sampling_of(30, ENDS)
    prompts = prompts_of([*LENGTHS, 17, 2, 11])
    seeds = seeds_of(len(prompts))
    rows = zip(prompts, seeds, strict=True)
    alone = [sample(causal_lm, [p], sampling, [seed], 1).rollout.response_rows()[0] for p, seed in rows]
    return causal_lm, prompts, sampling, seeds, alone


@pytest.mark.parametrize(("sync_interval", "slots"), [(1, 8), (7, 3), (7, 24)])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_row_depends_neither_on_slots_nor_on_looks_nor_on_order(
    slots: int, sync_interval: int, decoder: type[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is looked only now and then which rows have ended, as on a GPU."""
    causal_lm, prompts, sampling, seeds, alone = rows_alone()
    monkeypatch.setitem(scheduler.SYNC_INTERVAL, "cpu", sync_interval)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(slots)).tolist()
    drawn = sample(causal_lm, [prompts[i] for i in order], sampling, [seeds[i] for i in order], slots, decoder)
    assert drawn.rollout.response_rows() == [alone[i] for i in order]
    assert len({len(row) for row in alone}) > 4


def test_buffers_that_are_soon_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few spare columns live rows move to the first columns before all prompts have come in."""
    monkeypatch.setattr(scheduler, "SPARE_COLUMNS", 2)
    monkeypatch.setattr(static, "COLUMN_STEP", 2)
    moves, move = [], SlotCache.shift
    monkeypatch.setattr(SlotCache, "shift", lambda cache, *place: (moves.append(place), move(cache, *place)))
    causal_lm = make_causal_lm("gemma2")
    lengths = [2, 7, 1, 12, 3, 9, 2, 4, 6, 11]
    prompts, sampling, seeds = prompts_of(lengths), sampling_of(10, ENDS), seeds_of(len(lengths))
    expected = all_by_hand(causal_lm, prompts, sampling, seeds)
    for decoder in DECODERS:
        moves.clear()
        assert sample(causal_lm, prompts, sampling, seeds, 4, decoder).rollout.response_rows() == expected
        assert moves


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_a_row_left_in_its_slot_does_not_reach_the_next_one(decoder: type[Decoder]) -> None:
    """Every third prompt ends with a token whose embedding is not a number; the others are drawn as without them."""
    causal_lm, sampling, seeds = make_causal_lm("llama"), sampling_of(12, (*ENDS, 50)), seeds_of(30)
    prompts = [[51 if token == 50 else token for token in p] for p in prompts_of([2 + i % 7 for i in range(30)])]
    clean = sample(causal_lm, prompts, sampling, seeds, 30).rollout.response_rows()
    with torch.no_grad():
        causal_lm.get_input_embeddings().weight[50] = torch.nan
    spoilt = [[*prompt[:-1], 50] if row % 3 == 0 else prompt for row, prompt in enumerate(prompts)]
    drawn = sample(causal_lm, spoilt, sampling, seeds, 6, decoder)
    assert drawn.bad_rows.tolist() == [row % 3 == 0 for row in range(30)]
    rows = drawn.rollout.response_rows()
    assert [rows[i] for i in range(30) if i % 3] == [clean[i] for i in range(30) if i % 3]


def test_only_live_rows_are_computed() -> None:
    """The rows of all forward passes are little more than the tokens drawn, about a third of what all rows take."""
    causal_lm, prompts, sampling = make_causal_lm(), prompts_of([4] * 64), sampling_of(40, ENDS)
    rows: list[int] = []
    causal_lm.register_forward_pre_hook(lambda *call: rows.append(len(call[2]["input_ids"])), with_kwargs=True)
    drawn = sample(causal_lm, prompts, sampling, seeds_of(64), 16)
    assert sum(rows) < 1.1 * int(drawn.rollout.response_mask.sum()) and max(rows) == 16


def test_models_that_remember_otherwise_are_not_supported() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    for config in (
        transformers.FalconConfig(**sizes, num_attention_heads=2, alibi=True),
        transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=20),
    ):
        assert not supports(transformers.AutoModelForCausalLM.from_config(config))
    t5 = transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16, vocab_size=20)
    assert not supports(transformers.T5ForConditionalGeneration(t5))
