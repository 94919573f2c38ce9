# SPDX-License-Identifier: Apache-2.0
"""Sampling against hand-written loops over the models' own logits, and scoring against one row at a time."""

from dataclasses import fields

import pytest
import torch
from transformers import GenerationConfig

from dschat.data.collate import collate_prompts
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.rl.types import Rollout
from dschat.rollouts.generate import concatenate, generate
from dschat.rollouts.sampling import Sampling
from factories import (
    BOS,
    EOS,
    KINDS,
    PAD,
    hf_logprobs,
    hf_score,
    make_causal_lm,
    make_classifier,
    make_prompt,
    make_rollout,
    ppo_config,
    ragged_rows,
    random_ids,
    score,
)


def prompts_of(lengths, seed=0):
    examples = [make_prompt(random_ids(n, 100 * seed + i), f"prompt {i}", i) for i, n in enumerate(lengths)]
    return collate_prompts(examples, PAD)


def sampling_of(length=8, **options):
    return Sampling(max_new_tokens=length, end_ids=(EOS,), pad_id=PAD, bos_id=BOS, **options)


def favouring(token_ids, kind="gpt2", bias=6.0):
    """A causal LM whose logits for some ids are raised by `bias`, wherever its head is used."""
    causal_lm = make_causal_lm(kind, tie_word_embeddings=False, initializer_range=0.02)
    head = torch.nn.Linear(32, 100, bias=True)
    with torch.no_grad():
        head.weight.copy_(causal_lm.lm_head.weight)
        head.bias.zero_()
        head.bias[token_ids] = bias
    causal_lm.lm_head = head
    return causal_lm.eval()


def same(first: Rollout, second: Rollout) -> bool:
    return all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(Rollout))


def test_shapes_and_types():
    prompts = prompts_of([2, 6, 4])
    rollout = generate(make_causal_lm(), prompts, sampling_of(8), seed=1)
    rows, width = rollout.response_mask.shape
    assert rows == 3 and 1 <= width <= 8
    assert rollout.input_ids.shape == rollout.attention_mask.shape == (3, 6 + width)
    assert torch.equal(rollout.input_ids[:, :6], prompts["input_ids"])
    assert torch.equal(rollout.attention_mask[:, :6], prompts["attention_mask"])
    assert torch.equal(rollout.attention_mask[:, 6:], rollout.response_mask)
    assert rollout.prompt_index.tolist() == [0, 1, 2]
    assert rollout.response_mask.dtype == rollout.finished.dtype == rollout.attention_mask.dtype == torch.bool


def test_the_mask_is_a_prefix_that_holds_eos():
    """With EOS sampled often, rows end at different places."""
    rollout = generate(favouring([EOS], bias=3.0), prompts_of([3] * 32), sampling_of(12), seed=3)
    ids, mask = rollout.response_ids.tolist(), rollout.response_mask.tolist()
    lengths = set()
    for row_ids, row_mask, finished in zip(ids, mask, rollout.finished.tolist(), strict=True):
        length = row_ids.index(EOS) + 1 if EOS in row_ids else len(row_ids)
        assert row_mask == [True] * length + [False] * (len(row_ids) - length)
        assert finished == (EOS in row_ids)
        assert all(token == PAD for token in row_ids[length:])
        lengths.add(length)
    assert len(lengths) > 3


def test_any_of_several_end_tokens_ends_a_response():
    sampling = Sampling(max_new_tokens=10, end_ids=(EOS, 7), pad_id=PAD, bos_id=BOS)
    rollout = generate(favouring([EOS, 7], bias=4.0), prompts_of([3] * 32), sampling, seed=3)
    last = rollout.response_ids.gather(1, rollout.response_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert set(last[rollout.finished].tolist()) == {EOS, 7}
    before = rollout.response_mask.clone()
    before[torch.arange(32), rollout.response_mask.sum(1) - 1] = False
    assert not bool(torch.isin(rollout.response_ids[before], torch.tensor([EOS, 7])).any())


def test_a_cut_response_is_all_true_and_not_finished():
    rollout = generate(favouring([EOS], bias=-50.0), prompts_of([3, 5]), sampling_of(6), seed=0)
    assert rollout.response_mask.shape == (2, 6)
    assert bool(rollout.response_mask.all()) and not bool(rollout.finished.any())
    assert EOS not in rollout.response_ids


def test_pad_and_bos_are_never_sampled():
    causal_lm = favouring([PAD, BOS], bias=8.0)
    for temperature in (1.0, 0.0):
        rollout = generate(causal_lm, prompts_of([3] * 16), sampling_of(8, temperature=temperature), seed=0)
        sampled = rollout.response_ids[rollout.response_mask]
        assert not bool(torch.isin(sampled, torch.tensor([PAD, BOS])).any())


def test_a_bos_that_is_also_eos_may_be_sampled():
    """GPT-2 has one token for both."""
    sampling = Sampling(max_new_tokens=8, end_ids=(EOS,), pad_id=PAD, bos_id=EOS)
    rollout = generate(favouring([EOS]), prompts_of([3] * 8), sampling, seed=0)
    assert bool(rollout.finished.all())


LEAKS = {
    "do_sample": True,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.02,
    "temperature": 0.1,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "min_length": 100,
    "min_new_tokens": 7,
    "max_length": 5,
    "suppress_tokens": list(range(3, 90)),
    "begin_suppress_tokens": list(range(3, 95)),
    "bad_words_ids": [[i] for i in range(3, 80)],
    "forced_eos_token_id": 9,
    "forced_bos_token_id": 8,
    "exponential_decay_length_penalty": (1, 3.0),
    "renormalize_logits": True,
    "num_return_sequences": 2,
    "eos_token_id": list(range(3, 60)),
}


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("leak", LEAKS)
def test_the_checkpoints_generation_config_does_not_leak(leak, temperature):
    causal_lm, prompts = favouring([EOS], bias=2.0), prompts_of([3, 4, 5, 6])
    clean = generate(causal_lm, prompts, sampling_of(8, temperature=temperature), seed=5)
    causal_lm.generation_config = GenerationConfig(**{"do_sample": True, leak: LEAKS[leak]})
    saved = causal_lm.generation_config
    assert same(generate(causal_lm, prompts, sampling_of(8, temperature=temperature), seed=5), clean)
    assert causal_lm.generation_config is saved


def test_the_generation_config_comes_back_after_an_error():
    causal_lm = make_causal_lm()
    saved = causal_lm.generation_config
    prompts = prompts_of([3]) | {"input_ids": torch.full((1, 3), 1000)}
    with pytest.raises(IndexError):
        generate(causal_lm, prompts, sampling_of(), seed=0)
    assert causal_lm.generation_config is saved


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_from_the_full_softmax_over_temperature(temperature):
    causal_lm = make_causal_lm(initializer_range=0.1)
    count = 4000
    prompt = random_ids(4, 7)
    examples = [make_prompt(prompt, "", i) for i in range(count)]
    sampling = sampling_of(1, temperature=temperature)
    drawn = generate(causal_lm, collate_prompts(examples, PAD), sampling, seed=2).response_ids[:, 0]
    with torch.no_grad():
        logits = causal_lm(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature
    logits[[PAD, BOS]] = -torch.inf
    expected = logits.softmax(-1)
    frequency = torch.bincount(drawn, minlength=100) / count
    deviation = (frequency - expected).abs() / (expected * (1 - expected) / count).sqrt().clamp(min=1e-3)
    assert float(deviation.max()) < 5
    assert int((frequency > 0).sum()) > 50  # no top-k of 50


@pytest.mark.parametrize(("options", "allowed"), [({"top_k": 3}, 3), ({"top_p": 0.2}, 20)])
def test_top_k_and_top_p_truncate(options, allowed):
    examples = [make_prompt([5, 6, 7], "", i) for i in range(500)]
    sampling = sampling_of(1, **options)
    drawn = generate(make_causal_lm(initializer_range=0.1), collate_prompts(examples, PAD), sampling, seed=0)
    assert 1 <= len(drawn.response_ids.unique()) <= allowed


def test_a_seed_gives_the_same_draws_and_leaves_the_global_state_alone():
    causal_lm, prompts = make_causal_lm(initializer_range=0.1), prompts_of([3, 5, 4])
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = generate(causal_lm, prompts, sampling_of(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert same(generate(causal_lm, prompts, sampling_of(), seed=1), first)
    assert not same(generate(causal_lm, prompts, sampling_of(), seed=2), first)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_0_is_an_argmax_loop(kind):
    causal_lm, prompts = make_causal_lm(kind), prompts_of([2, 9, 5])
    rollout = generate(causal_lm, prompts, sampling_of(12, temperature=0.0), seed=0)
    for row in range(3):
        tokens = prompts["input_ids"][row][prompts["attention_mask"][row]].tolist()
        expected = []
        while len(expected) < 12 and EOS not in expected:
            with torch.no_grad():
                logits = causal_lm(input_ids=torch.tensor([tokens + expected])).logits[0, -1]
            logits[[PAD, BOS]] = -torch.inf
            expected.append(int(logits.argmax()))
        assert rollout.response_ids[row][rollout.response_mask[row]].tolist() == expected


def test_concatenate_pads_to_the_widest():
    first = make_rollout([([5, 6], [7, 8, EOS]), ([9], [10])])
    second = make_rollout([([11, 12, 13, 14], [15])])
    both = concatenate([first, second], PAD)
    assert both.input_ids.tolist() == [
        [0, 0, 5, 6, 7, 8, 2],
        [0, 0, 0, 9, 10, 0, 0],
        [11, 12, 13, 14, 15, 0, 0],
    ]
    assert both.attention_mask.int().tolist() == [
        [0, 0, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
    ]
    assert both.response_mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert both.response_ids.tolist() == [[7, 8, 2], [10, 0, 0], [15, 0, 0]]
    assert both.prompt_index.tolist() == [0, 1, 0]
    assert both.finished.tolist() == [True, False, False]
    assert same(concatenate([first], PAD), first)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_score_is_each_row_alone_under_each_model(kind, batch_size):
    """values[j] is the critic's number for the prefix BEFORE token j."""
    rows = ragged_rows([2, 5, 9, 1], [7, 1, 4, 3])
    actor, reference = make_causal_lm(kind, seed=0), make_causal_lm(kind, seed=1)
    critic = make_classifier(kind, seed=2)
    rollout, scores = make_rollout(rows, left=1, right=2), torch.tensor([1.0, -2.0, 0.5, 3.0])
    trajectory = score(
        rollout, scores, PolicyModel(actor), PolicyModel(reference), ScalarModel(critic), 0.7, batch_size
    )
    assert trajectory.rollout is rollout and torch.equal(trajectory.scores, scores)
    for row, (prompt, response) in enumerate(rows):
        n = len(response)
        expected = {
            "logprobs": hf_logprobs(actor, (prompt, response), 0.7)[0],
            "ref_logprobs": hf_logprobs(reference, (prompt, response), 0.7)[0],
            "values": torch.tensor([hf_score(critic, prompt + response[:j]) for j in range(n)]),
        }
        for name, numbers in expected.items():
            stored = getattr(trajectory, name)
            assert stored.dtype == torch.float32 and not stored.requires_grad
            torch.testing.assert_close(stored[row, :n], numbers, rtol=0, atol=1e-5, msg=name)
            assert not bool(stored[row, n:].any())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_likeliest_under_the_scored_log_probs(kind):
    """Cached generation and the scoring forward see the same distribution, prompts padded or not."""
    causal_lm = make_causal_lm(kind)
    rollout = generate(causal_lm, prompts_of([2, 9, 5]), sampling_of(10, temperature=0.0), seed=0)
    policy, width = PolicyModel(causal_lm), rollout.response_mask.shape[1]
    with torch.no_grad():
        logprobs, _ = policy(rollout.input_ids, rollout.attention_mask, width)
        for column in range(width):
            others = rollout.input_ids.clone()
            others[:, column - width] = torch.randint(3, 100, (3,))
            changed, _ = policy(others, rollout.attention_mask, width)
            ok = logprobs[:, column] >= changed[:, column] - 1e-5
            assert bool((ok | ~rollout.response_mask[:, column]).all())


def test_sampling_from_flags(tokenizer, tmp_path):
    config = ppo_config(tmp_path, temperature=0.8, top_k=50, top_p=0.9, max_answer_seq_len=17)
    sampling = Sampling.from_config(config, tokenizer)
    assert sampling == Sampling(17, (EOS,), PAD, BOS, 0.8, 50, 0.9)
    dot = tokenizer.convert_tokens_to_ids(".")
    config = ppo_config(tmp_path, end_of_conversation_token=".")
    assert Sampling.from_config(config, tokenizer).end_ids == (EOS, dot)
