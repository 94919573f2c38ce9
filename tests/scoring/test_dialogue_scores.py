# SPDX-License-Identifier: Apache-2.0
"""Scores of whole dialogues by a reward model, against plain transformers."""

import pytest
import torch

from closeness import near
from dialogue_cases import chat_tokenizer, dialogue
from dschat.data.formats.rows import Row
from dschat.errors import UserError
from dschat.scoring.reward_model import RewardModelDialogueScores
from dschat.scoring.reward_reader import ClassifierReader
from factories import hf_score, make_classifier

TALKS = [dialogue("a", "b"), dialogue("first", "an answer", "more", "and more"), dialogue("x", "")]
ROWS = [Row(None, None, None, None, {"n": n}, f"talk.jsonl:{n}") for n in range(3)]


def reader(kind="gemma", batch_size=2, offload=False, **tokenizer):
    own = chat_tokenizer("llama-3")
    for name, value in tokenizer.items():
        setattr(own, name, value)
    classifier = make_classifier(kind, vocab_size=len(own))
    reading = ClassifierReader(classifier, own.pad_token_id, torch.device("cpu"), batch_size, offload)
    scores = RewardModelDialogueScores(reading, own, "--reward_model rm")
    return scores, own, classifier


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_are_plain_transformers_of_the_templates_text(batch_size, offload):
    scores, tokenizer, classifier = reader(batch_size=batch_size, offload=offload)
    found = scores(TALKS, ROWS).tolist()
    for talk, score in zip(TALKS, found, strict=True):
        ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
        assert score == near(hf_score(classifier, ids))


def test_a_classifier_of_another_architecture():
    """BERT's kind: what its own forward gives for the template's text."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = chat_tokenizer("llama-3")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=40, **sizes)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    reading = ClassifierReader(model, tokenizer.pad_token_id, torch.device("cpu"), 2)
    scores = RewardModelDialogueScores(reading, tokenizer, "--reward_model rm")
    text = tokenizer.apply_chat_template(TALKS[0], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert scores(TALKS[:1], ROWS[:1])[0] == near(hf_score(model, ids))
    with pytest.raises(UserError, match="rm reads at most 40 tokens, but a dialogue of talk.jsonl:1 has come to"):
        scores([dialogue("q" * 30, "r" * 30)], ROWS[1:2])


def test_a_reward_model_without_a_template_is_refused():
    with pytest.raises(UserError, match="--reward_model rm: its tokenizer has no chat template"):
        reader(chat_template=None)
    with pytest.raises(UserError, match="its chat template refuses a dialogue of one turn: no assistants"):
        reader(chat_template="{{ raise_exception('no assistants') }}")
