# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts against plain AutoModelForSequenceClassification, on ids written out here, and of dialogues."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from closeness import near
from dialogue_cases import chat_tokenizer, dialogue
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.models.reward_notes import note_end_token
from dschat.refuel.scores import RewardModelDialogueScores
from dschat.scoring.reward_reader import ClassifierReader, load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.source import ResponseTexts
from factories import BOS, EOS, hf_score, make_classifier, make_tokenizer, save_folder

PROMPTS = ("POST\nThe cat sat. \nTL;DR: ", "a ", "the lazy dog jumps over a mat, and a table.\n\nAssistant:")
RESPONSES = (" a cat sat", "", " the quick brown fox; whisky and quartz follow. we make puzzles")
TEMPLATE = (
    "<bos>{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def rows_of(prompts):
    return [Row(prompt, None, None, None, {}, f"set.jsonl:{i}") for i, prompt in enumerate(prompts, start=1)]


def read(path, rows, responses, rm_template=False, finished=None):
    tokenizer = load_reward_tokenizer(path, rm_template)
    reader = load_reward_model(path, tokenizer, rm_template, torch.device("cpu"), torch.float32)
    prompts = [row.prompt for row in rows]
    return reader(ResponseTexts(prompts, list(responses), rows, finished or [True] * len(rows))).tolist()


@torch.no_grad()
def plain_scores(path, sequences):
    """One unpadded row at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def with_template(folder, tokenizer, template=TEMPLATE):
    """The folder of a classifier whose tokenizer has a chat template."""
    path = save_folder(folder, make_classifier(vocab_size=300), tokenizer)
    saved = AutoTokenizer.from_pretrained(path)
    saved.chat_template = template
    saved.save_pretrained(path)
    return path, saved


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
def test_prompt_response_and_eos(kind, bytes_tokenizer, tmp_path):
    path = save_folder(tmp_path, make_classifier(kind, vocab_size=len(bytes_tokenizer)), bytes_tokenizer)
    scores = read(path, rows_of(PROMPTS), RESPONSES)
    sequences = [
        [BOS, *encode(bytes_tokenizer, prompt), *encode(bytes_tokenizer, response), EOS]
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert scores == near(plain_scores(path, sequences))


@pytest.mark.parametrize("end", [None, "~"])
@pytest.mark.parametrize("rm_template", [False, True])
def test_a_response_that_was_cut_is_read_without_its_end(rm_template, end, bytes_tokenizer, tmp_path):
    """Neither EOS, nor the end token of step 2, nor what the template writes after the content."""
    path, tokenizer = with_template(tmp_path, bytes_tokenizer)
    if end is not None:
        model = make_classifier(vocab_size=300)
        note_end_token(model, tokenizer, encode(tokenizer, end)[0])
        model.save_pretrained(path)
        assert json.loads((tmp_path / "config.json").read_text())["end_of_response"] == end
    finished = [True, False, False]
    found = read(path, rows_of(PROMPTS), RESPONSES, rm_template, finished)
    sequences = []
    for prompt, response, has_end in zip(PROMPTS, RESPONSES, finished, strict=True):
        if rm_template:
            # Step 2 encodes the prompt, which ends with the generation prompt, and the response each alone.
            parts = [f"\n[assistant] {response.strip()}"] if end is None else ["\n[assistant] ", response.strip()]
            ids = [BOS, *encode(tokenizer, f"[user] {prompt.strip()}"), EOS]
            for part in parts:
                ids += encode(tokenizer, part)
        else:
            ids = [BOS, *encode(tokenizer, prompt), *encode(tokenizer, response)]
        if has_end and end is not None:
            ids += encode(tokenizer, end)
        elif has_end:
            ids += [EOS, *encode(tokenizer, "\n")] if rm_template else [EOS]
        sequences.append(ids)
    assert found == near(plain_scores(path, sequences))


def bert_folder(folder, positions=96):
    """A BERT-like classifier and tokenizer: [CLS] prompt [SEP] response [SEP]."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator([*PROMPTS, *RESPONSES], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=positions, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return save_folder(folder, BertForSequenceClassification(config).eval(), tokenizer), tokenizer


@torch.no_grad()
def test_an_encoder_reads_a_pair_of_texts(tmp_path):
    path, tokenizer = bert_folder(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        first = [2, *encode(tokenizer, prompt), 3]
        second = [*encode(tokenizer, response), 3]
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        expected.append(float(model(input_ids=torch.tensor([first + second]), token_type_ids=types).logits[0, 0]))
    assert read(path, rows_of(PROMPTS), RESPONSES) == near(expected)


def test_a_text_longer_than_the_model_names_its_row(tmp_path):
    path, tokenizer = bert_folder(tmp_path, positions=40)
    long = " the cat" * 60
    with pytest.raises(UserError, match=r"at most 40 tokens.*set.jsonl:2 have \d+\. Lower --max_new_tokens"):
        read(path, rows_of(PROMPTS), ["", long, ""])


def test_a_missing_template_or_eos_is_refused(bytes_tokenizer, tmp_path):
    path = save_folder(tmp_path / "a", make_classifier(vocab_size=300), bytes_tokenizer)
    with pytest.raises(UserError, match=r"--rm_template: the tokenizer of --reward_model .* has no chat template"):
        load_reward_tokenizer(path, True)
    endless = save_folder(tmp_path / "b", make_classifier(), make_tokenizer(eos_token=None))
    with pytest.raises(UserError, match=r"--reward_model .*b: its tokenizer has no eos token.*--rm_template"):
        read(endless, rows_of(PROMPTS), RESPONSES)


def test_a_score_that_is_no_number_names_its_row(bytes_tokenizer, tmp_path):
    model = make_classifier(vocab_size=300)
    model.score.weight.data.fill_(float("inf"))
    path = save_folder(tmp_path, model, bytes_tokenizer)
    with pytest.raises(UserError, match=r"--reward_model .*the score of set.jsonl:1 is .*--dtype fp32"):
        read(path, rows_of(PROMPTS), RESPONSES)


# -- whole dialogues


TALKS = [dialogue("a", "b"), dialogue("first", "an answer", "more", "and more"), dialogue("x", "")]
ROWS = [Row(None, None, None, None, {"n": n}, f"talk.jsonl:{n}") for n in range(3)]


@pytest.mark.parametrize(("batch_size", "offload"), [(1, True), (2, False)])
def test_scores_are_plain_transformers_of_the_templates_text(batch_size, offload):
    tokenizer = chat_tokenizer("llama-3")
    classifier = make_classifier(vocab_size=len(tokenizer))
    reading = ClassifierReader(classifier, tokenizer.pad_token_id, torch.device("cpu"), batch_size, offload)
    scores = RewardModelDialogueScores(reading, tokenizer, "--reward_model rm")
    found = scores(TALKS, ROWS, [True] * 3).tolist()
    cut = scores(TALKS, ROWS, [True, False, False]).tolist()
    assert cut[0] == near(found[0])
    for number, talk in enumerate(TALKS):
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        assert found[number] == near(hf_score(classifier, encode(tokenizer, text)))
        if number:
            text = text.removesuffix("<|eot|>")
            assert cut[number] == near(hf_score(classifier, encode(tokenizer, text)))
