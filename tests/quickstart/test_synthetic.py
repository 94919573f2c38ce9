# SPDX-License-Identifier: Apache-2.0
"""The corpora made by code: determinism, gold scores by hand, columns, the token limit, and files."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dialogue_cases import dialogue
from dschat.data.formats import apps_row
from dschat.models.tiny import make_gemma, make_model, train_tokenizer
from dschat.programs.levels import weakness
from dschat.programs.run import ProgramPool
from dschat.quickstart import synthetic
from dschat.quickstart.problems import make_row, write_problems
from dschat.quickstart.synthetic import COMPLAINTS, PRAISES
from dschat.quickstart.synthetic_dialogues import (
    CHAT_TEMPLATE,
    KINDS,
    asked_kinds,
    make_demonstration,
    make_dialogue,
    texts_of,
    write_dialogues,
)
from dschat.quickstart.synthetic_dialogues import gold_score as dialogue_score
from dschat.quickstart.synthetic_dialogues import gold_scores as dialogue_scores

needs_walls = pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))


@pytest.fixture(scope="module")
def demonstrations():
    return synthetic.make_rows(800, 7, "demonstrations")


@pytest.fixture(scope="module")
def comparisons():
    return synthetic.make_rows(800, 7, "comparisons")


@pytest.fixture(scope="module")
def tokenizer(demonstrations, comparisons):
    return train_tokenizer(synthetic.row_texts(demonstrations[:400] + comparisons[:400]), 768)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("", 0),
        (" It was slow. It was slow. It was dim. It was neat.", 2),  # slow, dim, neat less one repeat
        (" It was neat. It was warm. It was rich. It was slow.", 0),  # all in the wrong half
        (" It was slow, dim and dull, no stop", 3),
        (" It was red. It was red. It was red. It was fast, fast, fast and fast.", 0),  # 1 - 3 is kept at 0
        (" IT WAS SLOW. It was slower.", 1),  # case does not matter, whole words do
        (f" It was {', '.join(COMPLAINTS[:9])}. It was red. It was red. It was {', '.join(PRAISES[:9])}.", 12),
    ],
)
def test_gold_score_by_hand(text, points):
    """A point for each word in its half, up to twelve."""
    assert synthetic.gold_score(text) == pytest.approx(points / 12)


def test_gold_scores_is_a_reward_function():
    responses = [" It was slow.", " It was red.", " It was slow, dim and dull."]
    scores = synthetic.gold_scores(["p"] * 3, responses, [{}] * 3)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([1 / 12, 0.0, 3 / 12]))


def test_demonstrations_are_mediocre(demonstrations):
    scores = torch.tensor([synthetic.gold_score(row["summaries"][row["choice"]]["text"]) for row in demonstrations])
    assert 0.15 <= scores.mean() <= 0.25 and scores.std() > 0.08


def test_comparisons_span_poor_to_good_with_label_noise(comparisons):
    scores = torch.tensor([[synthetic.gold_score(side["text"]) for side in row["summaries"]] for row in comparisons])
    choices = torch.tensor([row["choice"] for row in comparisons])
    assert scores.min() == 0 and scores.max() >= 0.9
    assert (scores[:, 0] - scores[:, 1]).abs().min() >= 2 / 12 - 1e-6
    noise = ((scores[:, 1] > scores[:, 0]).long() != choices).float().mean()
    assert 0.03 < noise < 0.07


def test_responses_are_five_to_eight_sentences_within_the_token_limit(demonstrations, comparisons, tokenizer):
    for row in demonstrations + comparisons:
        for text in (summary["text"] for summary in row["summaries"]):
            assert text.startswith(" ") and text[1] != " " and "{" not in text
            assert 5 <= text.count(".") <= 8 and text.endswith(".")
            assert len(tokenizer.encode(text, add_special_tokens=False)) + 1 <= 64


def test_sizes_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(["a"], 100)
    with pytest.raises(ValueError, match="multiple of 8"):
        make_gemma(tokenizer, hidden_size=60)


def test_corpus_files_round_trip(tmp_path):
    synthetic.write_corpus(tmp_path, num_demonstrations=12, num_comparisons=9, num_eval=4, seed=3)
    for kind, num_train in (("demonstrations", 12), ("comparisons", 9)):
        for name, num_rows, split in (("train", num_train, "train"), ("validation", 4, "valid1")):
            lines = (tmp_path / kind / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            assert [json.loads(line) for line in lines] == synthetic.make_rows(num_rows, 3, kind, split)


def test_a_model_follows_from_its_seed_alone(tmp_path, tokenizer):
    state = torch.random.get_rng_state()
    folder = make_model(tmp_path / "model", ["It was red."], seed=5, hidden_size=32, vocab_size=400)
    assert torch.equal(torch.random.get_rng_state(), state)
    model, loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "gemma" and model.config.vocab_size == len(loaded)
    same, other = (make_gemma(loaded, seed, hidden_size=32).state_dict() for seed in (5, 6))
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())
    assert not torch.equal(same["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_gold_scores_by_hand():
    """Right words of 4, or of all where there are more, in the mean over replies; the second asks for colours."""
    metals = dialogue("Name some metals.", " tin lead cat", "More please.", " zinc tin iron lead red")
    assert dialogue_score(metals) == pytest.approx((2 / 4 + 4 / 5) / 2)
    assert dialogue_score(metals[:2]) == 2 / 4
    others = dialogue("Name some metals.", " tin lead cat", "And some colours?", " zinc red")
    assert dialogue_score(others) == (2 / 4 + 1 / 4) / 2 and asked_kinds(others) == ["metals", "colours"]
    assert dialogue_scores([metals, others], [{}, {}]) == [dialogue_score(metals), dialogue_score(others)]


def test_rows_follow_from_their_arguments_and_ask_for_both_kinds_of_more():
    rows = [make_dialogue(index, 1) for index in range(200)]
    assert rows[5] == make_dialogue(5, 1) and rows[0] not in (make_dialogue(0, 2), make_dialogue(0, 1, "valid"))
    kinds = [asked_kinds(row["messages"]) for row in rows]
    assert {kind for pair in kinds for kind in pair} == set(KINDS)
    assert 70 < sum(first == second for first, second in kinds) < 130
    scores = [dialogue_score(row["messages"]) for row in rows]
    assert 0.5 < sum(scores) / 200 < 0.7  # 0.5 + 0.5 / 4, a little less since words differ
    turns = [len(make_demonstration(index, 1)["messages"]) for index in range(4)]
    assert turns == [2, 4, 2, 4]


def test_every_word_is_one_token_of_the_tiny_models_tokenizer(tmp_path):
    rows = [make_dialogue(index, 1) for index in range(200)]
    make_model(tmp_path, texts_of(rows), hidden_size=8, layers=1, vocab_size=512, chat_template=CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for word in (word for words in KINDS.values() for word in words):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
    text = tokenizer.apply_chat_template(dialogue("Hi", " red"), tokenize=False)
    assert text == "<bos>Hi\n red<eos>"


def test_files_of_dialogues(tmp_path):
    write_dialogues(tmp_path, 3, 3, 2, seed=1)
    for name, make in (("demonstrations", make_demonstration), ("dialogues", make_dialogue)):
        lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [make(index, 1) for index in range(3)]
        assert len((tmp_path / name / "validation.jsonl").read_text().splitlines()) == 2


@needs_walls
@pytest.mark.xdist_group("sandbox")
def test_right_solutions_pass_and_most_demonstrations_do_not():
    count = 10
    pool = ProgramPool("namespaces", workers=2)
    passed = {}
    for kind in ("problems", "demonstrations"):
        rows = [apps_row(make_row(index, 3, kind), f"row {index}") for index in range(count)]
        found = pool.run([row.chosen for row in rows], [row.extra["input_output"] for row in rows], ["row"] * count)
        passed[kind] = sum(outcome.status == "passed" for outcome in found)
    assert passed["problems"] == count and count / 20 <= passed["demonstrations"] <= count / 2


def test_files_of_problems(tmp_path):
    """Test rows are draws of their own: other rows than the first ones of training."""
    write_problems(tmp_path, 8, 6, 4, seed=1)
    for kind, size in (("demonstrations", 8), ("problems", 6)):
        train, test = ((tmp_path / kind / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
        assert (len(train), len(test)) == (size, 4) and not set(test) & set(train)
        assert [json.loads(row) for row in train] == [make_row(index, 1, kind) for index in range(size)]
