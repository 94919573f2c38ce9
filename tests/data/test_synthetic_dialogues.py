# SPDX-License-Identifier: Apache-2.0
"""The toy dialogues: the gold score by hand, and rows that are what the tasks need."""

import json

import pytest

from dialogue_cases import dialogue
from dschat.data.synthetic_dialogues import (
    CHAT_TEMPLATE,
    KINDS,
    asked_kinds,
    gold_score,
    gold_scores,
    make_demonstration,
    make_dialogue,
    texts_of,
    write_dialogues,
)
from dschat.models.tiny import make_model


def test_gold_scores_by_hand():
    """Right words of 4, or of all where there are more, in the mean over replies; the second asks for colours."""
    metals = dialogue("Name some metals.", " tin lead cat", "More please.", " zinc tin iron lead red")
    assert gold_score(metals) == pytest.approx((2 / 4 + 4 / 5) / 2)
    assert gold_score(metals[:2]) == 2 / 4
    others = dialogue("Name some metals.", " tin lead cat", "And some colours?", " zinc red")
    assert gold_score(others) == (2 / 4 + 1 / 4) / 2 and asked_kinds(others) == ["metals", "colours"]
    assert gold_scores([metals, others], [{}, {}]) == [gold_score(metals), gold_score(others)]


def test_what_is_good_in_turn_2_depends_on_turn_1():
    for first, good, bad in (("metals", " zinc", " plum"), ("fruits", " plum", " zinc")):
        talk = dialogue(f"Name some {first}.", " red", "More please.")
        scores = [gold_score([*talk, {"role": "assistant", "content": text}]) for text in (good, bad)]
        assert scores == [1 / 8, 0]


def test_rows_follow_from_their_arguments_and_ask_for_both_kinds_of_more():
    rows = [make_dialogue(index, 1) for index in range(200)]
    assert rows == [make_dialogue(index, 1) for index in range(200)] != [make_dialogue(i, 2) for i in range(200)]
    assert [make_dialogue(0, 1, "valid")] != rows[:1]
    kinds = [asked_kinds(row["messages"]) for row in rows]
    assert {kind for pair in kinds for kind in pair} == set(KINDS)
    assert 70 < sum(first == second for first, second in kinds) < 130
    scores = [gold_score(row["messages"]) for row in rows]
    assert 0.5 < sum(scores) / 200 < 0.7  # 0.5 + 0.5 / 4, a little less since words differ
    turns = [len(make_demonstration(index, 1)["messages"]) for index in range(4)]
    assert turns == [2, 4, 2, 4]


def test_every_word_is_one_token_of_the_tiny_models_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    rows = [make_dialogue(index, 1) for index in range(500)]
    make_model(tmp_path, texts_of(rows), hidden_size=8, layers=1, vocab_size=512, chat_template=CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for word in (word for words in KINDS.values() for word in words):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
    text = tokenizer.apply_chat_template(dialogue("Hi", " red"), tokenize=False)
    assert text == "<bos>Hi\n red<eos>"


@pytest.mark.parametrize("name", ["demonstrations", "dialogues"])
def test_files(name, tmp_path):
    write_dialogues(tmp_path, 3, 3, 2, seed=1)
    lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
    make = make_dialogue if name == "dialogues" else make_demonstration
    assert [json.loads(line) for line in lines] == [make(index, 1) for index in range(3)]
    assert len((tmp_path / name / "validation.jsonl").read_text().splitlines()) == 2
