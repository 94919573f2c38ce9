# SPDX-License-Identifier: Apache-2.0
"""Special tokens that surprise, in `check` and `preview`, and turns that end otherwise than responses."""

import pytest

from cli_runs import write_jsonl
from data_cases import look_at_data as main
from data_cases import talk_row, text_row
from dialogue_cases import TEMPLATES, chat_tokenizer, dialogue
from dschat.data.check import check_report
from dschat.data.encoding import encode_prompts
from dschat.data.notes import warn_of_template
from dschat.data.preview import Settings, preview_report, row_reports, special_notes
from dschat.data.template_notes import template_notes
from factories import make_tokenizer

BOS, EOS = 1, 2  # of make_tokenizer: <bos>, <eos>


def notes(rows, tokenizer, end_id=EOS):
    settings = Settings(tokenizer=tokenizer, end_of_response=end_id)
    return special_notes(rows, row_reports(rows, settings), tokenizer)


def test_special_tokens_inside_responses():
    rows = [
        text_row("a", "b"),
        text_row("a", "b<eos>", "c", line=2),
        text_row("a", "b<eos>c<pad>", "<eos>", line=3),
        text_row("a <eos>", "c", line=4),  # of a prompt nobody takes it for an end
    ]
    (note,) = notes(rows, make_tokenizer())
    assert "<eos> in 3, <pad> in 1 (2 rows, the first is rows.jsonl:2)" in note
    assert notes(rows[:1], make_tokenizer()) == []


def test_bos_twice():
    tokenizer = make_tokenizer()
    rows = [text_row("a"), text_row("<bos>a", line=2), text_row("<bos><bos>a", line=3)]
    assert [ids[:2].count(BOS) for ids in encode_prompts(tokenizer, rows)[:3]] == [1, 1, 2]
    (twice,) = notes(rows, tokenizer)
    assert twice.startswith("prompts that begin with <bos> twice: 1 (the first is rows.jsonl:3)")
    # a template that writes BOS, and a message that begins with it
    tokenizer = chat_tokenizer("mistral")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "begin with <bos> twice: 1" in notes([talk_row(dialogue("<bos>a"), "bye")], tokenizer)[0]


@pytest.mark.parametrize("name", ["chatml", "mistral"])
def test_turns_that_end_otherwise_than_responses(name, caplog):
    tokenizer = chat_tokenizer(name)
    end = TEMPLATES[name][1]
    rows = [text_row("a", "b"), talk_row(dialogue("hi", "yes", "so"), "bye")]
    found = template_notes(tokenizer, rows, EOS)
    warn_of_template(tokenizer, rows, EOS)
    assert caplog.messages == found
    if end == "<eos>":
        assert not found
    else:
        assert f"ends the assistant's turns with {end}, but in training a response ends with <eos>" in found[0]
        assert f"--end_of_conversation_token '{end}'" in found[0]
        assert not template_notes(tokenizer, rows, tokenizer.convert_tokens_to_ids(end))
    assert not template_notes(tokenizer, rows[:1], EOS)  # no messages, no template
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert not template_notes(tokenizer, rows, EOS)


def test_check_and_preview_show_them(tmp_path):
    tokenizer = chat_tokenizer()
    rows = [{"messages": dialogue("hi", "yes", "so", "b<eos>c")}] * 40
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    report = check_report(path, "1,0,0", Settings(tokenizer=tokenizer))
    assert "special tokens\n  the texts of responses contain special tokens" in report and "<eos> in 40 (40" in report
    assert "chat template\n  the chat template ends the assistant's turns with <|im_end|>" in report
    shown = preview_report(path, 1, 1, False, Settings(tokenizer=tokenizer))
    assert "note: the texts of responses contain special tokens" in shown and "note: the chat template ends" in shown
    assert "trained, holds <eos> inside]]b<eos>c<eos>" in shown
    mended = Settings(tokenizer=tokenizer, end_of_response=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    shown = preview_report(path, 1, 1, False, mended)
    assert "note: the chat template" not in shown and "]]b<eos>c<|im_end|>" in shown
    plain = str(write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "a", "chosen": "b"}] * 40))
    assert "special tokens\n  nothing to note" in check_report(plain, "1,0,0", Settings(tokenizer=tokenizer))


def test_the_flag_of_the_command(tmp_path, capsys, caplog):
    chat_tokenizer().save_pretrained(tmp_path / "model")
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": dialogue("hi", "yes")}] * 40))
    model = ["--tokenizer", str(tmp_path / "model")]
    words = ["check", path, "--end_of_conversation_token"]
    assert main([*words, "<|im_end|>", *model]) == 0
    assert "--end_of_conversation_token" not in capsys.readouterr().out
    assert main([*words, "two words", *model]) == 2
    assert main([*words, "<|im_end|>"]) == 2
    assert "must be exactly one" in caplog.messages[-2] and "give the model's --tokenizer" in caplog.messages[-1]
