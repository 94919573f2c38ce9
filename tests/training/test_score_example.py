# SPDX-License-Identifier: Apache-2.0
"""A saved reward model gives its trained score in plain transformers: with its card's lines, and the obvious ones."""

import contextlib
import io
import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from chat_templates import SPECIAL_TEMPLATES, TEMPLATES, byte_tokenizer
from closeness import near
from dschat.base.fingerprints import template_fingerprint
from dschat.models.classifiers import load_scalar
from dschat.models.finetuning import EVERYTHING, Finetuning, choose_trained
from dschat.models.tokenizer import open_tokenizer
from dschat.run.model_folders import ModelFolders
from dschat.scoring.reward_reader import encode_dialogues
from dschat.settings.supervised import RewardConfig
from dschat.training.steps.score_example import plain_reading, saved_reward_model
from factories import engine_of, hf_score, make_causal_lm, make_classifier, make_tokenizer, run_of, save_folder

PROMPT = {"role": "user", "content": "Hi"}
DIALOGUE = [PROMPT, {"role": "assistant", "content": "Yes?"}]
LONGER = [*DIALOGUE, {"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": "An oak."}]
# The end token of training, and the text that was trained on: templates end with a line break, or with another token.
WRITTEN = {
    "chatml": ("<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>"),
    "mistral": ("<eos>", "<bos>[INST] Hi [/INST] Yes?<eos>"),
    "gemma": ("<eos>", "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes?<eos>"),
    "zephyr": ("<eos>", "<|user|>\nHi<eos>\n<|assistant|>\nYes?<eos>"),
}


def ids_of(tokenizer, dialogue, **options):
    return tokenizer.apply_chat_template(dialogue, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_dialogue_ends_with_the_token_at_which_the_score_was_trained(name):
    tokenizer = byte_tokenizer(name)
    end, text = WRITTEN[name]
    reading = plain_reading(tokenizer, tokenizer.convert_tokens_to_ids(end))
    assert reading.tokenizer.apply_chat_template(DIALOGUE, tokenize=False) == text
    for messages, begins in ((DIALOGUE, True), ([PROMPT], True), ([PROMPT], False)):  # other texts stay
        rendered = [
            each.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False)
            for each in (tokenizer, reading.tokenizer)
        ]
        assert rendered[0] == rendered[1]


@pytest.mark.parametrize("name", sorted((TEMPLATES | SPECIAL_TEMPLATES).keys() - {"r1"}))
def test_every_template_is_read_as_our_own_commands_read_it(name):
    tokenizer = byte_tokenizer(name)
    reading = plain_reading(tokenizer, tokenizer.eos_token_id)
    expected, _ = encode_dialogues(tokenizer, [DIALOGUE, LONGER], [True, True], end_id=tokenizer.eos_token_id)
    assert [ids_of(reading.tokenizer, dialogue) for dialogue in (DIALOGUE, LONGER)] == [expected[0], expected[1]]


def test_a_template_without_the_bos_that_texts_get_writes_it():
    tokenizer = make_tokenizer(300, texts=["Name a fruit. An apple. user assistant"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}\n{% endfor %}"
    reading = plain_reading(tokenizer, 2)
    assert reading is not None
    assert reading.tokenizer.apply_chat_template(DIALOGUE, tokenize=False) == "<bos>Hi<eos>\nYes?<eos>"


def saved(folder, base, tokenizer, end, what=EVERYTHING, **options):
    """A reward model as step 2 saves it, and its engine."""
    model = load_scalar(base, "--m", torch.float32, tokenizer, head_seed=5)
    choose_trained(model, what, base)
    engine = engine_of(model)
    flags = {"model_name_or_path": base, "data_path": "rows.jsonl", "output_dir": folder, "dtype": "fp32", **options}
    config = RewardConfig(**flags)
    models = [saved_reward_model(engine, base, tokenizer, tokenizer.convert_tokens_to_ids(end))]
    ModelFolders(models, tokenizer, config, run_of("reward", config)).save_final()
    return engine


def run_card(folder):
    """Runs the card's example; its printed number, and the number that the card gives."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    given = float(re.search(r"# (\S+), the score when", code)[1])
    return float(re.search(r"\[\[(\S+?)[],]", printed.getvalue())[1]), given


@pytest.mark.parametrize(("adapter", "name"), [(False, "chatml"), (True, "gemma")])
def test_card_and_obvious_lines_give_the_trained_score(name, adapter, group, tmp_path):
    """In plain transformers; also of an adapter, and of two dialogues with padding on either side."""
    tokenizer = byte_tokenizer(name)
    base = save_folder(tmp_path / "base", make_causal_lm("llama", vocab_size=276), tokenizer)
    options = {"lora_dim": 2, "merge_lora": False} if adapter else {}
    what = Finetuning(rank=2) if adapter else EVERYTHING
    engine = saved(tmp_path / "out", base, tokenizer, WRITTEN[name][0], what, **options)
    computed, given = run_card(tmp_path / "out")
    assert computed == pytest.approx(given, rel=1e-3, abs=1e-3)

    ids = tokenizer(WRITTEN[name][1], add_special_tokens=False)["input_ids"]
    expected = hf_score(engine.module.inner.cpu().eval(), ids)
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ids_of(opened, DIALOGUE) == ids
    ours = open_tokenizer(str(tmp_path / "out"), "--m")
    assert ours.chat_template == tokenizer.chat_template
    assert template_fingerprint(ours) == template_fingerprint(tokenizer)
    if adapter:
        return
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    for side in ("left", "right"):
        options = {"padding": True, "return_tensors": "pt", "tokenizer_kwargs": {"padding_side": side}}
        batch = opened.apply_chat_template([DIALOGUE, LONGER], return_dict=True, **options)
        assert float(model(**batch).logits[0, 0]) == near(expected)


def test_a_reward_model_of_texts_shows_the_token_that_ends_them(group, tmp_path):
    tokenizer = make_tokenizer(300, texts=["Name a fruit. An apple."])
    base = save_folder(tmp_path / "base", make_classifier("llama", vocab_size=len(tokenizer)), tokenizer)
    engine = saved(tmp_path / "out", base, tokenizer, "<eos>")
    computed, given = run_card(tmp_path / "out")
    ids = [1, *tokenizer.encode("Name a fruit. An apple.", add_special_tokens=False), 2]
    assert computed == pytest.approx(given, abs=1e-3)
    assert given == pytest.approx(hf_score(engine.module.inner.eval(), ids), rel=1e-3)
