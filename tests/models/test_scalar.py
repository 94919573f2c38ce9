# SPDX-License-Identifier: Apache-2.0
"""ScalarModel against AutoModelForSequenceClassification's own logits."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BloomConfig, FalconConfig, OPTConfig

from closeness import assert_near
from dschat.models.load import load_scalar
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel, last_scores
from factories import (
    KINDS,
    hf_score,
    make_causal_lm,
    make_classifier,
    pad_rows,
    ragged_rows,
    save_folder,
    saved_weights,
)

ROWS = ragged_rows([2, 5, 9], [7, 1, 4])
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "pad_token_id": 0, "num_labels": 1}
# Families that count positions themselves: from the mask, or by how far tokens lie apart.
OTHER_POSITIONS = {
    "opt": OPTConfig(**SIZES, num_hidden_layers=2, ffn_dim=64, init_std=0.3, word_embed_proj_dim=16),
    "bloom": BloomConfig(**SIZES, n_layer=2, initializer_range=0.3),
    "falcon": FalconConfig(**SIZES, num_hidden_layers=2, initializer_range=0.3, alibi=True),
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
        made = AutoModelForSequenceClassification.from_config
        classifier = made(OTHER_POSITIONS[kind]).eval() if kind in OTHER_POSITIONS else make_classifier(kind)
    scores = scores_of(ScalarModel(classifier), ROWS, left, right)
    expected = torch.tensor([hf_score(classifier, prompt + response) for prompt, response in ROWS])
    assert_near(scores, expected)
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_at_a_position_is_the_classifiers_for_the_prefix_up_to_it(kind):
    classifier = make_classifier(kind)
    ids, attention_mask, _ = pad_rows(ROWS[:1], left=2)
    with torch.no_grad():
        numbers = ScalarModel(classifier)(ids, attention_mask)
    assert numbers.dtype == torch.float32
    tokens = ROWS[0][0] + ROWS[0][1]
    expected = torch.tensor([hf_score(classifier, tokens[: end + 1]) for end in range(len(tokens))])
    assert_near(numbers[0, 2:], expected)


def test_last_scores_by_hand():
    numbers = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    assert last_scores(numbers, mask).tolist() == [2.0, 8.0, 11.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_begins_from_a_causal_lm_and_reopens_in_plain_transformers(kind, tokenizer, tmp_path):
    base = save_folder(tmp_path / "sft", make_causal_lm(kind), tokenizer)
    model = ScalarModel(load_scalar(base, "--m", torch.float32, tokenizer)).eval()
    numbers = model(*pad_rows(ROWS)[:2])
    assert not bool(numbers.any())  # a new head starts at zero
    numbers.sum().backward()
    assert float(model.inner.score.weight.grad.abs().max()) > 0
    torch.nn.init.normal_(model.inner.score.weight, std=0.1)  # as if trained
    scores = scores_of(model, ROWS)
    save_model(model.inner, saved_weights(model.inner), tokenizer, tmp_path / "reward")
    reopened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    assert reopened.config.num_labels == 1
    expected = torch.tensor([hf_score(reopened, prompt + response) for prompt, response in ROWS])
    assert_near(scores, expected)
    again = ScalarModel(load_scalar(str(tmp_path / "reward"), "--m", torch.float32, tokenizer)).eval()
    assert_near(scores_of(again, ROWS), scores)


def test_a_padded_batch_scores_alike_in_plain_transformers(tokenizer, tmp_path):
    model = ScalarModel(make_classifier("llama"))
    save_model(model.inner, saved_weights(model.inner), tokenizer, tmp_path)
    reopened = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.zeros(2, 9, dtype=torch.long)
    for row, (prompt, response) in enumerate(ROWS[:2]):
        tokens = prompt + response
        ids[row, : len(tokens)] = torch.tensor(tokens)
    with torch.no_grad():
        plain = reopened(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
    assert_near(plain, scores_of(model, ROWS[:2]))
