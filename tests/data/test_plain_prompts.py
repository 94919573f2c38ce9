# SPDX-License-Identifier: Apache-2.0
"""Plain-text prompts beside a chat template: what is said, and `--apply_chat_template`."""

from pathlib import Path
from typing import Any

import pytest

import data_cases
from cli_runs import write_jsonl
from data_cases import KINDS, flags_of, numbered_pairs, talk_row, text_row
from data_cases import look_at_data as main
from dialogue_cases import TEMPLATES, dialogue
from dschat.base.errors import UserError
from dschat.data.examples import PairExample, PreferenceExample, PromptExample
from dschat.data.formats import parse_row
from dschat.data.notes import plain_prompt_note
from dschat.settings.common import ColumnFlags
from factories import make_tokenizer

CHATML = TEMPLATES["chatml"][0]
# The same without line ends, of which the tokenizer of these tests has none.
SPACED = CHATML.replace("\n", " ")
LLAMA2 = TEMPLATES["llama-2"][0]


def chat_tokenizer(template: str | None = CHATML) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """60 rows of plain texts, enough for every step."""
    return write_jsonl(tmp_path / "source" / "train.jsonl", numbered_pairs(range(60))).parent


@pytest.mark.parametrize(
    ("template", "prompt", "is_said"),
    [
        (CHATML, "hi", True),
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        (LLAMA2, "hi", True),
        (LLAMA2, "[u] hi [/u]", False),
        (LLAMA2, "<bos>hi", True),  # BOS alone is no template
        ("{{ raise_exception('no') }}", "hi", True),
        (None, "hi", False),
    ],
)
def test_a_prompt_without_the_templates_marks_is_said(template, prompt, is_said) -> None:
    rows = [talk_row(dialogue("a")), text_row(prompt, line=2)]
    note = plain_prompt_note(rows, chat_tokenizer(template), False)
    assert (note is not None) == is_said
    if note is not None:
        assert note.startswith("1 prompts of 2 are plain text") and "first: rows.jsonl:2" in note
        assert "--apply_chat_template" in note


def test_marks_that_would_be_doubled_are_said() -> None:
    rows = [talk_row(dialogue(text)) for text in ("hi", "<|im_start|>user\nhi<|im_end|>\n")]
    note = plain_prompt_note(rows, chat_tokenizer(), True)
    assert note is not None and note.startswith("1 prompts of 2 hold the chat template's marks")
    assert plain_prompt_note(rows[:1], chat_tokenizer(), True) is None


def test_the_flag_needs_a_template() -> None:
    with pytest.raises(UserError, match="--apply_chat_template: the tokenizer of .* has no chat template. Drop"):
        plain_prompt_note([], chat_tokenizer(None), True)


def test_the_flag_makes_messages_of_every_format_of_texts() -> None:
    keys = ColumnFlags(apply_chat_template=True)
    tldr = {"info": {"post": "P", "subreddit": "s"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1}
    for raw, text in (
        ({"prompt": "q", "chosen": "b", "rejected": "a"}, "q"),
        (tldr, "POST\nSubreddit: r/s\nP\nTL;DR: "),
    ):
        row = parse_row(raw, keys, "rows:1")
        assert row is not None and row.prompt is None
        assert row.messages == dialogue(text) and (row.chosen, row.rejected) == ("b", "a")
    talk = {"messages": dialogue("q", "a")}
    assert parse_row(talk, keys, "rows:1") == parse_row(talk, ColumnFlags(), "rows:1")


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_the_templates_text_with_the_flag(kind, source, caplog) -> None:
    """Without it the plain text, said once by what is read; from the cache, too."""
    step = {"data_split": "0,1,0", "step": 2} if kind in (PairExample, PreferenceExample) else {"data_split": "1,0,0"}
    tokenizer = chat_tokenizer(SPACED)

    def first(**flags: Any) -> str:
        loader = data_cases.loader_of(kind, flags_of(source, **step, **flags), 100, tokenizer=tokenizer)
        example = loader.read(show=True).train[0]
        ids = example.chosen_ids if kind is PairExample else example.prompt_ids
        return str(tokenizer.decode(ids))

    plain = first()
    (said,) = [message for message in caplog.messages if "--apply_chat_template" in message]
    assert said.startswith("57 prompts of 57 are plain text")
    caplog.clear()
    written = first(apply_chat_template=True)
    assert not [message for message in caplog.messages if "--apply_chat_template" in message]
    text = plain.removeprefix("<bos>")
    if kind is PairExample:  # prompt and response in one
        assert "<|im_end|> <|im_start|>assistant " in written and "<|im_start|>" not in plain
    else:
        assert written.removeprefix("<bos>") == f"<|im_start|>user {text}<|im_end|> <|im_start|>assistant "


def test_prepare_says_it_and_training_does_not_apply_it_again(source, tmp_path, caplog) -> None:
    chat_tokenizer().save_pretrained(tmp_path / "model")
    loose = ["--tokenizer", str(tmp_path / "model"), "--minimum_response_length", "0"]
    for name, flags in (("plain", []), ("chat", ["--apply_chat_template"])):
        assert main(["prepare", str(source), "--output", str(tmp_path / name), *loose, *flags]) == 0
        assert caplog.text.count("are plain text") == (not flags)
        caplog.clear()

    def load(name: str) -> Any:
        flags = flags_of(tmp_path / name, apply_chat_template=True)
        return data_cases.loader_of(PromptExample, flags, 100, tokenizer=chat_tokenizer()).read()

    with pytest.raises(UserError, match="--apply_chat_template: the rows of .*plain were prepared without it"):
        load("plain")
    assert load("chat").train[0].prompt_text.endswith("<|im_end|>\n<|im_start|>assistant\n")
