# SPDX-License-Identifier: Apache-2.0
"""Log-probs and scores of policies and scalar models against Hugging Face's own, one unpadded row at a time."""

import logging

import pytest
import torch
import transformers

from closeness import assert_near, near
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.models.reward_head import add_gain
from dschat.models.reward_notes import note_end_token, warn_of_other_end
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel, last_scores
from factories import (
    KINDS,
    hf_logprobs,
    hf_score,
    make_causal_lm,
    make_classifier,
    make_rollout,
    pad_rows,
    ragged_rows,
    saved_weights,
    score,
)

ROWS = ragged_rows([2, 5, 9], [7, 1, 4])
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT = SIZES | {"ffn_dim": 64, "init_std": 0.3, "word_embed_proj_dim": 16, "pad_token_id": 0, "num_labels": 1}
# Families whose logits are more than a product of last states and a head: scaled, or projected before.
OTHER_HEADS = {
    "granite": transformers.GraniteConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logits_scaling=0.5),
    "cohere": transformers.CohereConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logit_scale=0.25),
    "opt": transformers.OPTConfig(**OPT),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_HEADS])
def test_log_probs_and_entropy_are_those_of_the_models_own_logits(kind, temperature):
    """With as much padding as the rows need, and with more on either side."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config
        causal_lm = made(OTHER_HEADS[kind]).eval() if kind in OTHER_HEADS else make_causal_lm(kind)
    for left, right in ((0, 0), (3, 0), (0, 4), (5, 2)):
        ids, attention_mask, mask = pad_rows(ROWS, left, right)
        with torch.no_grad():
            logprobs, entropy = PolicyModel(causal_lm)(ids, attention_mask, mask.shape[1], temperature)
        assert logprobs.shape == entropy.shape == mask.shape
        assert logprobs.dtype == entropy.dtype == torch.float32
        for tokens, *found in zip(ROWS, logprobs, entropy, strict=True):
            for own, expected in zip(found, hf_logprobs(causal_lm, tokens, temperature), strict=True):
                assert_near(own[: len(expected)], expected)


# Families that count positions themselves: from the mask, or by how far tokens lie apart.
OTHER_POSITIONS = {
    "opt": transformers.OPTConfig(**OPT),
    "falcon": transformers.FalconConfig(**SIZES, initializer_range=0.3, alibi=True, pad_token_id=0, num_labels=1),
}


def scores_of(model, rows, left=0, right=0):
    ids, attention_mask, _ = pad_rows(rows, left, right)
    with torch.no_grad():
        return last_scores(model(ids, attention_mask), attention_mask)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (4, 3)])
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_POSITIONS])
def test_scores_are_the_classifiers_own(kind, left, right):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForSequenceClassification.from_config
        classifier = made(OTHER_POSITIONS[kind]).eval() if kind in OTHER_POSITIONS else make_classifier(kind)
    scores = scores_of(ScalarModel(classifier), ROWS, left, right)
    expected = torch.tensor([hf_score(classifier, prompt + response) for prompt, response in ROWS])
    assert_near(scores, expected)
    assert float(expected.std()) > 0.1


def test_last_scores_by_hand():
    numbers = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    assert last_scores(numbers, mask).tolist() == [2.0, 8.0, 11.0]


GAIN_ROWS = ragged_rows([2, 4, 3], [5, 1, 3])


def gained(kind="gemma", gain=3.0):
    """A classifier with a gain."""
    model = make_classifier(kind)
    add_gain(model.score)
    model.score.gain.data.fill_(gain)
    return model


def test_the_gain_multiplies_and_learns():
    plain, model = make_classifier(), gained()
    assert [hf_score(model, p + r) for p, r in GAIN_ROWS] == near([3 * hf_score(plain, p + r) for p, r in GAIN_ROWS])
    ids, mask, _ = pad_rows(GAIN_ROWS)
    scores = last_scores(ScalarModel(model)(ids, mask), mask)
    scores.sum().backward()
    assert float(model.score.gain.grad) == near(float(scores.detach().sum()) / 3)


@pytest.mark.parametrize(("kind", "lora"), [("gemma", True), ("gpt2", False)])
def test_a_saved_model_gives_the_same_scores_in_transformers(kind, lora, tokenizer, tmp_path, caplog):
    model = gained(kind)
    if lora:
        add_lora(model, 2, None, "base")
        assert model.score.gain.requires_grad
    expected = [hf_score(model, p + r) for p, r in GAIN_ROWS]
    save_model(model, saved_weights(model), tokenizer, tmp_path)
    with caplog.at_level(logging.WARNING):
        opened, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path, output_loading_info=True
        )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert [hf_score(opened, p + r) for p, r in GAIN_ROWS] == near(expected)
    assert model.score.gain.item() == 3  # the live model is as it was


def test_a_run_whose_responses_end_otherwise_than_a_reward_model_s_is_warned(tokenizer, caplog):
    model = make_classifier()
    warn_of_other_end(model.config, "<eos>", "--reward rm")  # a model that says nothing
    note_end_token(model, tokenizer, tokenizer.eos_token_id)
    warn_of_other_end(model.config, "<eos>", "--reward rm")
    assert not caplog.messages
    warn_of_other_end(model.config, "<|im_end|>", "--reward rm")
    assert "rm was trained on responses that end with <eos>, but here they end with <|im_end|>" in caplog.text
    assert "Give --end_of_conversation_token in both steps, or in neither" in caplog.text


@pytest.mark.parametrize("batch_size", [2, 5])
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
            assert_near(stored[row, :n], numbers, message=name)
            assert not bool(stored[row, n:].any())
