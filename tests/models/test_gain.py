# SPDX-License-Identifier: Apache-2.0
"""The learnable gain of a reward model's head, and what becomes of it in a saved model."""

import logging

import pytest
from transformers import AutoModelForSequenceClassification

from closeness import near
from dschat.models.heads import add_gain
from dschat.models.lora import add_lora
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel, last_scores, note_reward_loss, warn_of_reward_loss
from factories import engine_of, hf_score, make_classifier, pad_rows, ragged_rows, save_folder, saved_weights

ROWS = ragged_rows([2, 4, 3], [5, 1, 3])


def gained(kind="gemma", gain=3.0):
    """A classifier with a gain."""
    model = make_classifier(kind)
    add_gain(model.score)
    model.score.gain.data.fill_(gain)
    return model


def test_the_gain_multiplies_and_learns():
    plain, model = make_classifier(), gained()
    assert [hf_score(model, p + r) for p, r in ROWS] == near([3 * hf_score(plain, p + r) for p, r in ROWS])
    ids, mask, _ = pad_rows(ROWS)
    scores = last_scores(ScalarModel(model)(ids, mask), mask)
    scores.sum().backward()
    assert float(model.score.gain.grad) == near(float(scores.detach().sum()) / 3)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
def test_a_saved_model_gives_the_same_scores_in_transformers(kind, lora, tokenizer, tmp_path, caplog):
    model = gained(kind)
    if lora:
        add_lora(model, 2, None, "base")
        assert model.score.gain.requires_grad
    expected = [hf_score(model, p + r) for p, r in ROWS]
    save_model(model, saved_weights(model), tokenizer, tmp_path)
    with caplog.at_level(logging.WARNING):
        opened, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert [hf_score(opened, p + r) for p, r in ROWS] == near(expected)
    assert model.score.gain.item() == 3  # the live model is as it was


def test_an_engine_trains_the_gain_without_weight_decay(group):
    engine = engine_of(gained(), weight_decay=0.5, learning_rate=1e-2)
    ids, mask, _ = pad_rows(ROWS)
    engine.backward(last_scores(engine(ids, mask), mask).sum() * 0)
    engine.step()
    assert float(engine.module.inner.score.gain) == 3


def test_a_saved_model_says_which_loss_trained_it(tokenizer, tmp_path, caplog):
    model = make_classifier()
    note_reward_loss(model, "end")
    assert not hasattr(model.config, "reward_loss")
    for loss, warnings in (("average", 1), ("per_sample", 0), ("last_token", 1), ("end", 0)):
        note_reward_loss(model, loss)
        path = save_folder(tmp_path / loss, model, tokenizer)
        caplog.clear()
        warn_of_reward_loss(AutoModelForSequenceClassification.from_pretrained(path).config, f"--reward {path}")
        messages = [record.getMessage() for record in caplog.records if "--reward_loss" in record.getMessage()]
        assert len(messages) == warnings
        assert all(f"was trained with --reward_loss {loss}" in message for message in messages)
