# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM: its log-probs and draws beside those of the model itself. `make test-vllm` runs these."""

import json
import random
import signal
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from closeness import EPS, FORWARD
from dschat.base.errors import UserError
from dschat.models.layout import PassSize
from dschat.models.lora import add_lora
from dschat.models.vocabulary import mask_missing_ids
from dschat.rollouts.sampling import Sampling
from dschat.run.state import random_states
from dschat.training.ppo.models import response_logprobs
from dschat.training.selfcheck import TOLERANCE
from dschat.turns.environments import EnvironmentPool
from dschat.turns.episodes import EpisodeLimits, EpisodePlayer
from dschat.turns.sampler import agreed_source, assemble_episodes
from dschat.vllm.engine import VllmEngine
from factories import BOS, EOS, PAD, engine_of, make_tokenizer, sampling_of, save_folder
from launches import WORKERS, launch
from turn_cases import chat_tokenizer, make_row, write_environments
from vllm_cases import (
    LONG_PROMPTS,
    LONG_TOKENS,
    MAX_TOKENS,
    MODELS,
    PROMPTS,
    SEEDS,
    causal_lm_of,
    largest_gap,
    one_update,
)

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")]


@pytest.fixture
def pair(group, tmp_path_factory):
    """pair(name): the actor of a model and its engine, which all tests share; starting one takes seconds."""

    def made(name):
        if name not in ENGINES:
            causal_lm = causal_lm_of(name)
            engine = engine_for(tmp_path_factory.mktemp("model"), causal_lm)
            ENGINES[name] = engine_of(causal_lm, learning_rate=0.01), engine
            ENGINES[name][0].eval()
        return ENGINES[name]

    return made


ENGINES = {}


@cache
def tokenizer_of(vocab_size):
    return make_tokenizer(vocab_size)


def engine_for(folder, causal_lm, tokens=MAX_TOKENS):
    """A new engine with a model's weights."""
    return VllmEngine(save_folder(folder, causal_lm, tokenizer_of(100)), tokens, 0.3)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_the_models_own(name, pair):
    """Those of the whole softmax(logits / temperature), whatever the sampler leaves out."""
    actor, engine = pair(name)
    with engine.session(actor) as draw:
        for options in ({}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8}, {"temperature": 0}):
            drawn = draw(PROMPTS, sampling_of(12, **options), SEEDS)
            assert largest_gap(actor, PROMPTS, drawn, options.get("temperature", 1.0) or 1.0) < FORWARD * EPS
            assert not drawn.bad_rows.any()


def test_ids_without_a_token_are_neither_drawn_nor_in_the_log_probs(pair):
    """The actor's tokenizer has 80 of 100 ids."""
    actor, engine = pair("gemma2")
    inner = actor.module.inner
    mask_missing_ids(inner, tokenizer_of(80))
    try:
        with engine.session(actor) as draw:
            for options in ({}, {"temperature": 1.5}, {"temperature": 0}):
                drawn = draw(PROMPTS, sampling_of(12, **options), SEEDS)
                assert all(number < 80 for row in drawn.rollout.response_rows() for number in row)
                assert largest_gap(actor, PROMPTS, drawn, options.get("temperature", 1.0) or 1.0) < FORWARD * EPS
    finally:
        inner._buffers.pop("missing_ids")
        inner._forward_hooks.clear()


def test_prompts_that_begin_alike_share_keys_and_values_of_the_same_weights_alone(group, tmp_path):
    """After an update the same prompts are computed anew."""
    causal_lm = causal_lm_of("llama", max_position_embeddings=LONG_TOKENS)
    actor = engine_of(causal_lm, learning_rate=0.01)
    actor.eval()
    engine = engine_for(tmp_path, causal_lm, LONG_TOKENS)
    drawn = []
    for _ in range(2):
        with engine.session(actor) as draw:
            cached = [cached_tokens(engine)]
            for _ in range(2):
                drawn.append(draw(LONG_PROMPTS, sampling_of(12), SEEDS))
                assert largest_gap(actor, LONG_PROMPTS, drawn[-1]) < FORWARD * EPS
            assert [*cached, cached_tokens(engine)] == [0, 128]
        one_update(actor)
    rows = [found.rollout.response_rows() for found in drawn]
    assert rows[0] == rows[1] and rows[2] == rows[3] != rows[0]


def cached_tokens(engine):
    """Tokens of a prompt whose keys and values are there already; it is not sampled from again."""
    from vllm import SamplingParams

    (output,) = engine._llm.generate(
        {"prompt_token_ids": LONG_PROMPTS[0]}, SamplingParams(max_tokens=1), use_tqdm=False
    )
    return output.num_cached_tokens


def test_end_tokens_are_kept_and_pad_and_bos_are_never_drawn(group, tmp_path):
    """A vocabulary of 8, of which 2 are forbidden and 2 end a response."""
    causal_lm = causal_lm_of("llama", vocab_size=8, initializer_range=0.1)
    engine = engine_for(tmp_path, causal_lm)
    actor = engine_of(causal_lm)
    sampling = Sampling(max_new_tokens=6, end_ids=(EOS, 7), pad_id=PAD, bos_id=BOS, temperature=1.2)
    count = 800
    with engine.session(actor) as draw:
        drawn = draw([[3, 4, 5]] * count, sampling, list(range(count)))
    rows, finished = drawn.rollout.response_rows(), drawn.rollout.finished.tolist()
    assert {len(row) for row in rows} == set(range(1, 7))
    for row, ended in zip(rows, finished, strict=True):
        assert ended == (row[-1] in (EOS, 7)) and not {EOS, 7} & set(row[:-1])
        assert ended or len(row) == 6
        assert not {PAD, BOS} & set(row)
    logits = causal_lm(torch.tensor([[3, 4, 5]])).logits[0, -1].detach().double() / 1.2
    probabilities = logits[2:].softmax(0).numpy()
    seen = np.bincount([row[0] for row in rows], minlength=8)[2:]
    assert chisquare(seen, count * probabilities).pvalue > 1e-3
    assert chisquare(seen, count * np.roll(probabilities, 1)).pvalue < 1e-3


@pytest.mark.parametrize(("name", "lora_dim"), [("qwen3_moe", None), ("llama", None), ("llama", 2), ("gpt2", None)])
def test_weights_one_small_update_old_are_an_error(name, lora_dim, pair, monkeypatch):
    """Log-probs do not show an update at a learning rate of 1e-6; a push that goes nowhere is noticed all the same."""
    causal_lm, (_, engine) = causal_lm_of(name), pair(name)
    if lora_dim:
        add_lora(causal_lm, lora_dim, None, "base")
    actor = engine_of(causal_lm, learning_rate=1e-6)
    with engine.session(actor):
        pass

    def lost(method, kwargs):
        assert method == "reload_weights" and len(list(kwargs["weights_iterator"])) > 10

    one_update(actor)
    with monkeypatch.context() as context:
        context.setattr(engine._llm, "collective_rpc", lost)
        context.setattr("dschat.vllm.engine.repack_weights", lambda model: None)
        with pytest.raises(UserError, match="computes with other weights than the actor's"), engine.session(actor):
            pass
    drawn = engine._sample(PROMPTS, sampling_of(12), SEEDS)
    assert largest_gap(actor, PROMPTS, drawn) < TOLERANCE[torch.float32]
    with engine.session(actor):
        pass


def test_a_head_one_small_update_old_is_an_error(pair, monkeypatch):
    """That of a tied head, of which a CPU keeps a copy of its own."""
    _, engine = pair("gemma")
    actor = engine_of(causal_lm_of("gemma"), learning_rate=1e-6)
    with engine.session(actor):
        pass
    one_update(actor)
    monkeypatch.setattr("dschat.vllm.engine.repack_weights", lambda model: None)
    with pytest.raises(UserError, match="lm_head computes with other weights"), engine.session(actor):
        pass


def test_rows_whose_logits_are_not_finite_are_noted(group, tmp_path):
    """The embedding of token 5, which the first prompt alone holds, is NaN."""
    causal_lm = causal_lm_of("llama")
    engine = engine_for(tmp_path, causal_lm)
    with torch.no_grad():
        causal_lm.model.embed_tokens.weight[5] = float("nan")
    with engine.session(engine_of(causal_lm)) as draw:
        assert draw([[3, 5, 4], [3, 6, 4]], sampling_of(2), [1, 2]).bad_rows.tolist() == [True, False]


def test_the_process_is_left_as_it_was(pair):
    """Random states, signal handlers, and the process group, which vLLM would end with its engine."""
    random.seed(1)
    before, handlers = random_states(), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    actor, engine = pair("llama")
    with engine.session(actor) as draw:
        draw(PROMPTS, sampling_of(12), SEEDS)
    after = random_states()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_processes_have_an_engine_each(tmp_path):
    """ZeRO 3: weights are gathered one after another on both; prompts and responses differ in number and length."""
    save_folder(tmp_path / "model", causal_lm_of("llama"), tokenizer_of(100))
    launch(WORKERS, [tmp_path, "vllm"], timeout=600).expect(0)
    notes = [json.loads((tmp_path / f"vllm-1-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(max(note["gaps"]) < FORWARD * EPS for note in notes)
    assert [len(note["rows"]) for note in notes] == [2, 3]
    assert notes[0]["rows"][0] == notes[1]["rows"][0]  # the same prompt and seed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_two_processes_share_an_engine(name, tmp_path):
    """--vllm_tensor_parallel 2 at ZeRO 3: the same tokens as with an engine each. Neither process ever has the actor
    whole: vLLM holds half of its layers, and what is gathered or on its way is less than two layers of six."""
    deep = {"n_layer": 6} | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    causal_lm = causal_lm_of(name, **deep if name == "gpt2" else {"num_hidden_layers": 6})
    save_folder(tmp_path / "model", causal_lm, tokenizer_of(100))
    for file in Path("/dev/shm").glob("*-tp:0-*-cpushm_*"):  # vLLM leaves it on CPUs, and its name is always the same
        file.unlink()
    for check in ("vllm", "vllm_shared"):  # a process's first engine decides how vLLM divides its ranks
        launch(WORKERS, [tmp_path, check], timeout=600).expect(0)
    weights = sum(parameter.numel() for parameter in causal_lm.parameters())
    for rank in (0, 1):
        alone, shared = (json.loads((tmp_path / f"vllm-{k}-{rank}.json").read_text()) for k in (1, 2))
        assert max(shared["gaps"]) < FORWARD * EPS
        assert shared["rows"] == alone["rows"]
        assert (alone["held"], shared["held"]) == (1, 0.5)
        assert 0 < shared["passed"] < weights / 3 and shared["drawing"] < weights / 10


def test_replies_of_episodes_are_sampled_token_by_token(pair, tmp_path):
    """Every turn reads the ids so far as they are: log-probs are those of a pass over the whole episode."""
    actor, engine = pair("llama")
    pool = EnvironmentPool(f"{write_environments(tmp_path)}:Counts", 30.0, 4)
    limits = EpisodeLimits(turns=3, prompt_tokens=8, tokens=MAX_TOKENS - 8, turn_tokens=4)
    player = EpisodePlayer(chat_tokenizer(), sampling_of(), pool, limits, False)
    with engine.session(actor) as draw:
        episodes, turns = player.play(draw, [make_row("we make"), make_row("cat", 1)], [3, 4], [7, 7])
    pool.close()
    assert len(turns) > 1 and turns[1].read[0] > turns[0].read[0] + turns[0].sampled[0]
    rollout = assemble_episodes(episodes, PAD, agreed_source(episodes)).rollout
    logprobs = response_logprobs(actor, rollout, 1.0, PassSize(2))
    gaps = (logprobs - rollout.drawn_logprobs)[rollout.response_mask].abs()
    assert float(gaps.max()) < FORWARD * EPS
