# SPDX-License-Identifier: Apache-2.0
"""The corpora made by code: determinism, gold scores by hand, columns, the token limit, and files."""

import json

import pytest
import torch

from dialogue_cases import dialogue
from dschat.data.formats import apps_row
from dschat.models.tiny import make_gemma, make_model, train_tokenizer
from dschat.programs.levels import weakness
from dschat.programs.run import ProgramPool
from dschat.quickstart import synthetic
from dschat.quickstart.problems import FRAMES, PROBLEMS, make_row, write_problems
from dschat.quickstart.synthetic import COMPLAINTS, NEUTRALS, NOUNS, PEOPLE, PRAISES, SUBREDDITS
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

COLUMNS = {"info", "summaries", "choice", "worker", "batch", "split", "extra"}
SOURCES = ("demonstrations", "comparisons")
INFO_COLUMNS = {"id", "post", "title", "subreddit", "site", "article"}
needs_walls = pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))


@pytest.fixture(scope="module")
def demonstrations():
    return synthetic.make_rows(1500, 7, "demonstrations")


@pytest.fixture(scope="module")
def comparisons():
    return synthetic.make_rows(1500, 7, "comparisons")


@pytest.fixture(scope="module")
def tokenizer(demonstrations, comparisons):
    return train_tokenizer(synthetic.row_texts(demonstrations[:700] + comparisons[:700]), 768)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("", 0),
        (" It was red. It was tall. It was new.", 0),
        (" It was slow. It was dim. It was weak. It was neat.", 4),
        (" It was slow. It was slow. It was dim. It was neat.", 2),  # slow, dim, neat less one repeat
        (" It was neat. It was warm. It was rich. It was slow.", 0),  # all in the wrong half
        (" It was slow, dim and dull, no stop", 3),
        (" It was red. It was red. It was slow. It was slow and fast.", 1),  # slow, fast less the second slow
        (" It was red. It was red. It was red. It was fast, fast, fast and fast.", 0),  # 1 - 3 is kept at 0
        (" IT WAS SLOW. It was slower.", 1),  # case does not matter, whole words do
    ],
)
def test_gold_score_by_hand(text, points):
    assert synthetic.gold_score(text) == pytest.approx(points / 12)


def test_gold_score_reaches_one_and_stays_there():
    complaints, praises = ", ".join(COMPLAINTS[:9]), ", ".join(PRAISES[:9])
    assert synthetic.gold_score(f" It was {complaints}. It was red. It was red. It was {praises}.") == 1.0


def test_gold_scores_is_a_reward_function():
    responses = [" It was slow.", " It was red.", " It was slow, dim and dull."]
    scores = synthetic.gold_scores(["p"] * 3, responses, [{}] * 3)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([1 / 12, 0.0, 3 / 12]))


def test_word_lists_do_not_overlap():
    words = [*COMPLAINTS, *PRAISES, *NEUTRALS, *NOUNS, *PEOPLE]
    assert len(set(words)) == len(words)
    assert len(COMPLAINTS) == len(PRAISES) == 24
    assert len(SUBREDDITS) == 12


@pytest.mark.parametrize("kind", SOURCES)
def test_columns(kind):
    for row in synthetic.make_rows(50, 3, kind, "valid1"):
        assert set(row) == COLUMNS
        assert set(row["info"]) == INFO_COLUMNS
        assert row["info"]["site"] is None and row["info"]["article"] is None
        assert row["info"]["subreddit"] in SUBREDDITS
        assert "." not in row["info"]["post"]
        assert [set(summary) for summary in row["summaries"]] == [{"text", "policy", "note"}] * 2
        assert row["choice"] in (0, 1)
        assert row["split"] == "valid1"
        assert set(row["extra"]) == {"confidence"} and 1 <= row["extra"]["confidence"] <= 9


@pytest.mark.parametrize("kind", SOURCES)
def test_seed_decides(kind):
    rows = synthetic.make_rows(20, 5, kind)
    assert rows == synthetic.make_rows(30, 5, kind)[:20]
    assert rows != synthetic.make_rows(20, 6, kind)
    assert rows[0] != synthetic.make_row(0, 5, kind, "valid1")


def test_demonstrations_are_mediocre(demonstrations):
    scores = torch.tensor([synthetic.gold_score(row["summaries"][row["choice"]]["text"]) for row in demonstrations])
    assert 0.15 <= scores.mean() <= 0.25
    assert scores.std() > 0.08
    assert 0.45 < sum(row["choice"] for row in demonstrations) / len(demonstrations) < 0.55


def test_comparisons_span_poor_to_good_with_label_noise(comparisons):
    scores = torch.tensor([[synthetic.gold_score(side["text"]) for side in row["summaries"]] for row in comparisons])
    choices = torch.tensor([row["choice"] for row in comparisons])
    assert scores.min() == 0 and scores.max() >= 0.9
    counts = torch.histc(scores, bins=4, min=0, max=1 - 1e-6)
    assert counts.min() > 0.15 * scores.numel()
    assert (scores[:, 0] - scores[:, 1]).abs().min() >= 2 / 12 - 1e-6
    noise = ((scores[:, 1] > scores[:, 0]).long() != choices).float().mean()
    assert 0.03 < noise < 0.07
    assert 0.45 < choices.float().mean() < 0.55
    assert abs(torch.corrcoef(scores.T)[0, 1]) < 0.3


def test_responses_are_five_to_eight_sentences_within_the_token_limit(demonstrations, comparisons, tokenizer):
    for row in demonstrations + comparisons:
        for text in (summary["text"] for summary in row["summaries"]):
            assert text.startswith(" ") and text[1] != " " and "{" not in text
            assert 5 <= text.count(".") <= 8 and text.endswith(".")
            assert len(tokenizer.encode(text, add_special_tokens=False)) + 1 <= 64


def test_tokenizer_round_trip_and_special_tokens(demonstrations, tokenizer):
    texts = [*synthetic.row_texts(demonstrations[:50]), "naïve — “ünïcode” 你好 \n\t."]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    words = [*COMPLAINTS, *PRAISES, *NEUTRALS, *NOUNS, *PEOPLE]
    single = [len(tokenizer.encode(" " + word, add_special_tokens=False)) == 1 for word in words]
    assert sum(single) > 0.95 * len(single)


def test_tokenizer_needs_room_for_bytes():
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(["a"], 100)


def test_corpus_files_round_trip(tmp_path):
    synthetic.write_corpus(tmp_path, num_demonstrations=12, num_comparisons=9, num_eval=4, seed=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(SOURCES)
    for kind, num_train in (("demonstrations", 12), ("comparisons", 9)):
        assert sorted(path.name for path in (tmp_path / kind).iterdir()) == ["train.jsonl", "validation.jsonl"]
        for name, num_rows, split in (("train", num_train, "train"), ("validation", 4, "valid1")):
            lines = (tmp_path / kind / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            assert [json.loads(line) for line in lines] == synthetic.make_rows(num_rows, 3, kind, split)


def test_model_folder_is_ordinary_and_seeded(tmp_path, demonstrations, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = torch.random.get_rng_state()
    texts = synthetic.row_texts(demonstrations[:50])
    folder = make_model(tmp_path / "model", texts, seed=5, hidden_size=32, vocab_size=400)
    assert torch.equal(torch.random.get_rng_state(), state)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    model, loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "gemma" and model.config.vocab_size == len(loaded) == 400
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == ("<pad>", "<bos>", "<eos>")
    same, other = (make_gemma(loaded, seed, hidden_size=32).state_dict() for seed in (5, 6))
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())
    assert not torch.equal(same["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_gemma_width_must_suit_the_heads(tokenizer):
    with pytest.raises(ValueError, match="multiple of 8"):
        make_gemma(tokenizer, hidden_size=60)


def test_gold_scores_by_hand():
    """Right words of 4, or of all where there are more, in the mean over replies; the second asks for colours."""
    metals = dialogue("Name some metals.", " tin lead cat", "More please.", " zinc tin iron lead red")
    assert dialogue_score(metals) == pytest.approx((2 / 4 + 4 / 5) / 2)
    assert dialogue_score(metals[:2]) == 2 / 4
    others = dialogue("Name some metals.", " tin lead cat", "And some colours?", " zinc red")
    assert dialogue_score(others) == (2 / 4 + 1 / 4) / 2 and asked_kinds(others) == ["metals", "colours"]
    assert dialogue_scores([metals, others], [{}, {}]) == [dialogue_score(metals), dialogue_score(others)]


def test_what_is_good_in_turn_2_depends_on_turn_1():
    for first, good, bad in (("metals", " zinc", " plum"), ("fruits", " plum", " zinc")):
        talk = dialogue(f"Name some {first}.", " red", "More please.")
        scores = [dialogue_score([*talk, {"role": "assistant", "content": text}]) for text in (good, bad)]
        assert scores == [1 / 8, 0]


def test_rows_follow_from_their_arguments_and_ask_for_both_kinds_of_more():
    rows = [make_dialogue(index, 1) for index in range(200)]
    assert rows == [make_dialogue(index, 1) for index in range(200)] != [make_dialogue(i, 2) for i in range(200)]
    assert [make_dialogue(0, 1, "valid")] != rows[:1]
    kinds = [asked_kinds(row["messages"]) for row in rows]
    assert {kind for pair in kinds for kind in pair} == set(KINDS)
    assert 70 < sum(first == second for first, second in kinds) < 130
    scores = [dialogue_score(row["messages"]) for row in rows]
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
def test_files_of_dialogues(name, tmp_path):
    write_dialogues(tmp_path, 3, 3, 2, seed=1)
    lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
    make = make_dialogue if name == "dialogues" else make_demonstration
    assert [json.loads(line) for line in lines] == [make(index, 1) for index in range(3)]
    assert len((tmp_path / name / "validation.jsonl").read_text().splitlines()) == 2


def test_there_are_128_problems_of_both_kinds():
    # 4 quantities, 3 joints: 48 printed, 48 returned, 16 lists, 16 of words.
    assert len(PROBLEMS) == len(set(PROBLEMS)) == 128
    assert {bool(frame.starter) for frame in FRAMES} == {True, False}


@needs_walls
@pytest.mark.xdist_group("sandbox")
@pytest.mark.parametrize("count", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_right_solutions_pass_and_most_demonstrations_do_not(count):
    pool = ProgramPool("namespaces", workers=2)
    passed = {}
    for kind in ("problems", "demonstrations"):
        rows = [apps_row(make_row(index, 3, kind), f"row {index}") for index in range(count)]
        found = pool.run([row.chosen for row in rows], [row.extra["input_output"] for row in rows], ["row"] * count)
        passed[kind] = sum(outcome.status == "passed" for outcome in found)
    assert passed["problems"] == count and count / 20 <= passed["demonstrations"] <= count / 2


def test_files_of_problems(tmp_path):
    write_problems(tmp_path, 8, 6, 4, seed=1)
    lines = {
        file.relative_to(tmp_path).as_posix(): file.read_text().splitlines() for file in tmp_path.rglob("*.jsonl")
    }
    sizes = {"demonstrations/train": 8, "demonstrations/test": 4, "problems/train": 6, "problems/test": 4}
    assert {name.removesuffix(".jsonl"): len(rows) for name, rows in lines.items()} == sizes
    first = (tmp_path / "problems" / "train.jsonl").read_text()
    write_problems(tmp_path, 8, 6, 4, seed=1)
    assert (tmp_path / "problems" / "train.jsonl").read_text() == first
    for rows in lines.values():
        assert [json.loads(row)["id"] for row in rows] == list(range(len(rows)))
    # Test rows are draws of their own: other rows than the first ones of training.
    for kind in ("demonstrations", "problems"):
        assert not set(lines[f"{kind}/test.jsonl"]) & set(lines[f"{kind}/train.jsonl"])
    row = json.loads(first.splitlines()[0])
    assert set(row) == {"id", "question", "solutions", "input_output", "difficulty", "url", "starter_code"}
