# SPDX-License-Identifier: Apache-2.0
"""Ids that a tokenizer lacks: no model draws them, and all log-probs are of one distribution over the others."""

import json
from functools import partial

import pytest
import torch

from closeness import assert_near
from dschat.base.errors import UserError
from dschat.models.classifiers import load_classifier, load_critic, load_trained_scalar
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import load_tokenizer
from dschat.models.vocabulary import id_count, missing_ids, missing_ids_of, untrained_ids
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.generate import GenerateEngine
from dschat.scoring.reward_reader import load_reward_model
from factories import make_causal_lm, make_classifier, make_tokenizer, random_ids, sampling_of, save_folder
from macro_actions.logprobs import Head, token_logprobs

ROWS = 130  # of a model whose tokenizer has 100 ids
MISSING = [40, 41, *range(100, ROWS)]  # with holes inside the vocabulary, too


def with_holes(folder, holes=(40, 41)):
    """A saved tokenizer without some of its tokens, whose other ids stay."""
    make_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    lost = {token for token, number in vocabulary.items() if number in holes}
    content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token not in lost}
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if not lost & {*pair, "".join(pair)}]
    file.write_text(json.dumps(content))
    return load_tokenizer(str(folder), "--m")


def opened(kind, folder, **options):
    """A model of 130 rows, with its tokenizer; the logits of ids without a token are the largest by far."""
    tokenizer = with_holes(folder)
    model = make_causal_lm(kind, vocab_size=ROWS, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[MISSING] += 2 * model.lm_head.weight.std() * torch.randn(len(MISSING), 32).sign()
    model.save_pretrained(folder)
    return load_causal_lm(str(folder), "--m", torch.float32, tokenizer, **options), tokenizer


def test_exactly_the_ids_that_the_tokenizer_lacks_are_missing(tmp_path):
    tokenizer = with_holes(tmp_path)
    assert missing_ids(tokenizer, ROWS) == MISSING and id_count(tokenizer) == 100 > len(tokenizer)
    assert missing_ids(make_tokenizer(), 100) == []


def test_rows_of_zeros_or_at_a_rounded_mean_are_untrained():
    """The second rows' mean is about (4.01, 0), which bfloat16 rounds to (4, 0)."""
    assert untrained_ids(torch.zeros(6, 4), [1, 5]) == [1, 5]
    rows = torch.tensor([[4.01, 1.0], [4.01, -1.0]] * 20 + [[4.0, 0.0], [4.01, 2.0], [4.01, -2.0]])
    assert untrained_ids(rows, [40, 41]) == [40]


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_log_probs_are_of_the_distribution_over_the_tokenizer_s_ids(kind, tmp_path):
    """The expected ones are torch's over the columns that have tokens, also where the model caps its logits."""
    model, _ = opened(kind, tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([random_ids(12, 1, 40)])
    present = [number for number in range(ROWS) if number not in MISSING]
    with torch.no_grad():
        logits = plain(ids).logits[0, 3:-1, present] / 0.7
        logprobs, entropy = PolicyModel(model)(ids, None, 8, 0.7)
        masked = model(ids).logits[0, 3:-1]
    expected = torch.distributions.Categorical(logits=logits)
    places = torch.tensor([present.index(number) for number in ids[0, 4:].tolist()])
    assert_near(logprobs[0], expected.log_prob(places))
    assert_near(entropy[0], expected.entropy())
    assert masked[:, MISSING].eq(-torch.inf).all() and masked[:, present].isfinite().all()


@pytest.mark.parametrize("chunk", [1, 9])
def test_log_probs_without_missing_ids_by_chunks(chunk):
    hidden, weight = torch.randn(9, 4), torch.randn(20, 4)
    targets = torch.randint(0, 10, (9,))
    missing = torch.arange(10, 20)
    head = Head(lambda states: states @ weight.T, [weight], 20, missing=missing)
    found, _ = token_logprobs(hidden, targets, head, chunk=chunk)
    assert_near(found, (hidden @ weight[:10].T).log_softmax(-1).gather(1, targets[:, None])[:, 0])
    with pytest.raises(ValueError, match="cannot be smoothed"):
        Head(lambda states: states, [], 20, smoothing=0.1, missing=missing)


def test_step_1_keeps_all_rows_in_its_softmax(tmp_path):
    """Its loss is that of transformers, and teaches that ids without a token do not occur."""
    model, _ = opened("llama", tmp_path, all_rows=True)
    ids = torch.tensor([random_ids(12, 3, 40)])
    labels = torch.where(torch.arange(12) < 4, -100, ids)
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.float32)(ids, labels=labels).loss
    logprobs = PolicyModel(model)(ids, None, 8)[0]
    assert_near(-logprobs.mean(), theirs)
    logprobs.sum().backward()
    assert model.lm_head.weight.grad[MISSING].any()


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
@pytest.mark.parametrize("make", [ContinuousEngine, GenerateEngine, lambda rows: ContinuousEngine(rows, True)])
def test_ids_without_a_token_are_never_drawn_and_drawn_log_probs_are_the_policy_s(kind, make, tmp_path):
    model, _ = opened(kind, tmp_path)
    prompts = [random_ids(3 + row % 4, row, 40) for row in range(12)]
    for options in ({"temperature": 0.0}, {"temperature": 1.3, "top_k": 50}, {"top_p": 0.9}):
        generation = make(8).sampler_for(model)(prompts, sampling_of(10, **options), range(12))
        rollout, mask = generation.rollout, generation.rollout.response_mask
        drawn = rollout.response_ids[mask]
        assert len(drawn) > 20 and not torch.isin(drawn, torch.tensor(MISSING)).any()
        if generation.logprobs is None:
            continue
        temperature = options.get("temperature", 1.0) or 1.0
        with torch.no_grad():
            own, _ = PolicyModel(model)(rollout.input_ids, rollout.attention_mask, mask.shape[1], temperature)
        assert_near(generation.logprobs[mask], own[mask])


# -- scorers with fewer rows than the tokenizer has ids
def test_a_scorer_with_too_few_rows_is_named_before_its_weights_are_read(tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_classifier(vocab_size=99), tokenizer)
    (tmp_path / "model.safetensors").unlink()
    words = f"--reward_model {folder}: its embeddings have 99 rows, .* ids up to 99"
    for load in (load_trained_scalar, load_classifier, partial(load_critic, may_grow=False)):
        with pytest.raises(UserError, match=words):
            load(folder, "--reward_model", torch.float32, tokenizer)
    with pytest.raises(UserError, match=words):
        load_reward_model(folder, tokenizer, False, torch.device("cpu"), torch.float32)


def test_embeddings_grow_to_the_highest_id_of_a_vocabulary_with_holes(tmp_path):
    """98 tokens with ids up to 99: 98 rows would be too few."""
    tokenizer = with_holes(tmp_path)
    make_causal_lm(vocab_size=98).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), "--m", torch.float32, tokenizer)
    assert model.get_input_embeddings().num_embeddings == 100
    assert missing_ids_of(model).tolist() == [40, 41]
