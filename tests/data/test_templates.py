# SPDX-License-Identifier: Apache-2.0
"""Prompt and response behind messages are the chat template's own text, whatever fields the messages have.

Expected texts are written out from what the templates of chat_templates.py say, or come from `apply_chat_template`.
"""

import itertools
import json
import logging

import pyarrow as pa
import pytest
from pyarrow import parquet

from chat_templates import TEMPLATES, byte_tokenizer
from cli_runs import write_jsonl
from data_cases import talk_row
from dialogue_cases import bot, dialogue, user
from dschat.base.errors import UserError
from dschat.data.check import check_report
from dschat.data.encoding import prompt_text
from dschat.data.examples import (
    NO_WEIGHT,
    NOTHING_WRITTEN,
    pair_examples,
    preference_examples,
    prompt_examples,
    sft_examples,
)
from dschat.data.notes import response_notes, warn_of_dialogues, warn_of_template
from dschat.data.preview import Settings, preview_report
from dschat.data.sources import load_source
from dschat.data.template_notes import template_notes
from dschat.data.tokenised import row_of, row_text
from dschat.data.turn_end import reply_contents, response_texts, turn_end
from dschat.settings.common import ColumnFlags

EOS = 2
TOOL = {"type": "function", "function": {"name": "sun", "description": "Sunrise.", "parameters": {"type": "object"}}}


def call(arguments, name="sun", **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | more


def caller(arguments, **more):
    """A message of the assistant that calls a tool and says nothing."""
    return {"role": "assistant", "tool_calls": [call(arguments, id="123456789")]} | more


def read(tmp_path, *rows, keys=None):
    """Rows as they are read from a file of JSON Lines."""
    source = load_source(write_jsonl(tmp_path / "rows.jsonl", rows), keys)
    return sorted([*source.train, *source.eval], key=lambda row: int(row.origin.rpartition(":")[2]))


def prompt_of_a(tokenizer, **variables):
    """What transformers itself writes for the message "a" of the user."""
    return tokenizer.apply_chat_template([user("a")], add_generation_prompt=True, tokenize=False, **variables)


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def trained_text(tokenizer, example):
    """The text of the tokens that are trained on."""
    return decoded(tokenizer, list(itertools.compress(example.response_ids, example.targets)))


# 5: the response is the template's

# Behind the generation prompt: what the template writes for the content "b".
RESPONSES = {
    "mistral": " b",
    "mistral-tools": " b",
    "llama-2": " b ",
    "llama-3.1": "b",
    "qwen-2.5": "b",
    "qwen-3": "<think>\n\n</think>\n\nb",
    "r1": "b",
    "smollm-2": "b",
    "gemma": "b",
    "zephyr": "\nb",
    "chatml": "b",
    "chatml without generation prompt": "<|im_start|>assistant\nb",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_and_response_are_the_templates_text(name):
    tokenizer = byte_tokenizer(name)
    row = talk_row([user("a")], "b")
    assert response_texts(tokenizer, [row], "chosen") == [RESPONSES[name]]
    (example,), _ = sft_examples([row], tokenizer, 999, turn_end(tokenizer).token_id)
    whole = tokenizer.apply_chat_template([user("a"), bot("b")], tokenize=False)
    trained = decoded(tokenizer, example.prompt_ids + example.response_ids)
    if name == "r1":  # whose generation prompt opens a thought that it does not write into a turn
        assert trained == "<bos><|User|>a<|Assistant|><think>\nb<eos>"
    else:
        assert whole.removesuffix("\n") == trained


@pytest.mark.parametrize("name", ["llama-2", "qwen-3", "zephyr", "chatml without generation prompt"])
def test_a_sampled_reply_goes_back_into_the_template_once(name):
    tokenizer = byte_tokenizer(name)
    reply = RESPONSES[name].replace("<|im_start|>", "")  # sampled replies are decoded without special tokens
    assert reply_contents(tokenizer, [reply]) == ["b"]


# the comparison of user "a" and assistant "b"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("r1", [repr("<bos><|User|>a<|Assistant|><think>\nb"), repr("<bos><|User|>a<|Assistant|>b<eos>")]),
        ("qwen-3", []),
    ],
)
def test_where_training_reads_other_text_than_the_template_both_are_said(name, texts, tmp_path, caplog):
    tokenizer = byte_tokenizer(name)
    end = turn_end(tokenizer).token_id
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": dialogue("hi", "yes")}] * 40))
    settings = Settings(tokenizer=tokenizer, end_of_response=end)
    warn_of_template(tokenizer, [talk_row([user("hi")], "yes")], end)
    for shown in (check_report(path, "1,0,0", settings), preview_report(path, 1, 1, False, settings), caplog.text):
        assert ("the chat template" in shown) == bool(texts) and all(text in shown for text in texts)


# 4: fields of messages


def test_tools_reach_the_template_in_every_step(tmp_path):
    tokenizer = byte_tokenizer("qwen-2.5")
    (row,) = read(tmp_path, {"messages": dialogue("a", "b"), "rejected": "c", "tools": [TOOL]})
    text = prompt_of_a(tokenizer, tools=[TOOL])
    assert json.dumps(TOOL) in text and prompt_text(tokenizer, row) == text
    (sft,), _ = sft_examples([row], tokenizer, 999, EOS)
    (pair,), _ = pair_examples([row], tokenizer, 999, EOS)
    (prompt,), _ = prompt_examples([row], tokenizer, 999)
    assert decoded(tokenizer, sft.prompt_ids) == decoded(tokenizer, prompt.prompt_ids) == text
    assert decoded(tokenizer, pair.chosen_ids) == f"{text}b<eos>"
    assert row_of(row_text(row)) == row  # the cache keeps them


@pytest.mark.parametrize(
    "tools", [json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]], [TOOL["function"] | {"strict": None}]]
)
def test_every_form_of_tools(tools, tmp_path):
    tokenizer = byte_tokenizer("llama-3.1")
    (row,) = read(tmp_path, {"chosen": dialogue("a", "b"), "rejected": dialogue("a", "c"), "tools": tools})
    expected = prompt_of_a(tokenizer, tools=[TOOL])
    assert prompt_text(tokenizer, row) == expected and '"name": "sun"' in expected


CALLS = {
    "qwen-2.5": '<tool_call>\n{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen-3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama-3.1": '{"name": "sun", "parameters": {"city": "Rome"}}',
    "mistral-tools": '[TOOL_CALLS] [{"name": "sun", "arguments": {"city": "Rome"}, "id": "123456789"}]',
    "r1": '<|call|>sun\n```json\n{"city": "Rome"}\n```',
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["object", "JSON"])
def test_tool_calls_are_the_response_whatever_form_their_arguments_have(name, arguments, tmp_path):
    tokenizer = byte_tokenizer(name)
    (row,) = read(tmp_path, {"messages": [user("a"), caller(arguments, content="")], "tools": [TOOL]})
    prompt = prompt_of_a(tokenizer, tools=[TOOL])
    assert prompt_text(tokenizer, row) == prompt
    assert response_texts(tokenizer, [row], "chosen") == [CALLS[name]]


@pytest.mark.parametrize("field", [{"tool_calls": [call({})]}, {"audio": {"id": "x"}}])
def test_calls_that_the_template_does_not_write_are_left_out_and_counted(field, tmp_path, caplog):
    """Else the response is empty, and a reward model learns that ending at once is best."""
    tokenizer = byte_tokenizer("chatml")
    silent = bot("") | field
    rows = read(
        tmp_path,
        {"chosen": [user("a"), silent], "rejected": [user("a"), bot("no")]},
        {"chosen": dialogue("a", "b"), "rejected": [user("a"), silent]},
        {"chosen": dialogue("a", "b"), "rejected": [user("a"), bot("") | {"weight": 1, "name": ""}]},
    )
    for make in (pair_examples, preference_examples):
        examples, dropped = make(rows, tokenizer, 999, EOS)
        assert len(examples) == 1 and dropped == {NOTHING_WRITTEN: 2}
    examples, dropped = sft_examples(rows, tokenizer, 999, EOS)
    assert len(examples) == 2 and dropped == {NOTHING_WRITTEN: 1}
    assert response_notes(rows)["empty"].startswith("1 responses without any text")  # the only one that is trained on
    warn_of_template(tokenizer, rows, EOS)
    assert f"does not write: '{next(iter(field))}' of responses: 2" in caplog.text


@pytest.mark.parametrize(("field", "no", "yes"), [("train", False, True), ("training", 0, 1), ("loss", False, 1)])
def test_switches_of_other_trainers_are_weights(field, no, yes, tmp_path):
    talk = dialogue("a", "b", "c", "d")
    talk[1] |= {field: no}
    talk[3] |= {field: yes}
    (row,) = read(tmp_path, {"messages": talk})
    assert (row.messages[1], row.chosen_message) == (bot("b") | {"weight": 0}, bot("d") | {"weight": 1})
    with pytest.raises(UserError, match=f"rows.jsonl:1: {field} of message 2 in 'messages' must be 0 .*correct"):
        read(tmp_path, {"messages": [user("a"), bot("b") | {field: 0.5}]})
    with pytest.raises(UserError, match=f"rows.jsonl:1: weight and {field} of message 2 .*contradict"):
        read(tmp_path, {"messages": [user("a"), bot("b") | {field: no, "weight": 1}]})


def test_turns_of_weight_0_are_not_trained_on(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    end = turn_end(tokenizer).token_id
    talk = dialogue("a", "b", "c", "d", "e", "f")

    def weighted(*weights):
        return [{**m, "weight": w} if w is not None else m for m, w in zip(talk, weights, strict=True)]

    rows = read(
        tmp_path,
        {"messages": weighted(None, 0, None, 1, None, None)},
        {"messages": weighted(None, 1, None, None, None, 0)},
        {"messages": weighted(None, 0, None, 0, None, 0)},
    )
    examples, dropped = sft_examples(rows, tokenizer, 999, end, all_turns=True)
    assert dropped == {NO_WEIGHT: 1}
    assert [trained_text(tokenizer, example) for example in examples] == [
        "d<|im_end|>f<|im_end|>",
        "b<|im_end|>d<|im_end|>",
    ]
    examples, dropped = sft_examples(rows, tokenizer, 999, end)
    assert len(examples) == 1 and dropped == {NO_WEIGHT: 2}


# what is not read is named


def test_what_the_template_does_not_write_is_named_with_counts(tmp_path, caplog):
    tokenizer = byte_tokenizer("zephyr")
    talk = [
        *(user("a") | {"name": "Ann"}, caller({}, content="wait")),
        *({"role": "tool", "content": "6:40"}, bot("b") | {"reasoning_content": "so"}),
    ]
    row = {"messages": talk, "tools": [TOOL], "id": 7, "system": "s"}
    path = str(write_jsonl(tmp_path / "rows.jsonl", [row] * 20))
    expected = {
        "column 'tools'": 20,
        "'name' of earlier user messages": 20,
        "'tool_calls' of earlier assistant messages": 20,
        "the content of earlier tool messages": 20,
        "'reasoning_content' of responses": 20,
    }
    settings = Settings(tokenizer=tokenizer)
    report, shown = check_report(path, "1,0,0", settings), preview_report(path, 1, 1, False, settings)
    rows = load_source(path)
    warn_of_template(tokenizer, rows.train + rows.eval, EOS)
    for name, count in expected.items():
        assert f"{name}: {count}" in report and f"{name}: {count}" in caplog.text and f"{name}: 1" in shown
    assert "id: 20" in report and "system: 20" in report and "system: 20" in caplog.text
    assert "columns that neither prompts nor responses are made of: id, system" in shown


def test_columns_that_rows_of_texts_do_not_read(tmp_path, caplog):
    """A column that users may expect in the prompt is a warning: an Alpaca row's input, for instance."""
    keys = ColumnFlags(prompt_key="instruction")
    row = {"instruction": "a", "chosen": "b", "input": "x", "tools": [TOOL], "source": "x", "margin": 1}
    rows = read(tmp_path, *[row] * 3, keys=keys)
    with caplog.at_level(logging.INFO, logger="dschat"):
        warn_of_template(byte_tokenizer("chatml"), rows, EOS, keys, reads=("margin",))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "columns that neither prompts nor responses are made of: input: 3, tools: 3"),
        ("INFO", "columns that neither prompts nor responses are made of: source: 3"),
    ]


def test_dialogues_that_are_played_again_say_what_they_leave_out(tmp_path, caplog):
    rows = read(tmp_path, {"messages": [user("a") | {"name": "Ann"}, bot("b")], "tools": [TOOL]})
    warn_of_dialogues(byte_tokenizer("qwen-2.5"), rows, ColumnFlags())
    assert "leave out: column 'tools': 1, 'name' of earlier user messages: 1" in caplog.text


# further forms of messages


def test_parts_of_text_are_joined_and_images_are_refused(tmp_path):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    (row,) = read(tmp_path, {"messages": [{"role": "user", "content": parts}, bot("c")]})
    assert prompt_text(byte_tokenizer("llama-3.1"), row).endswith("\n\na b<|eot_id|>" + HEADER)
    for kind in ("image", 3):
        part = {"type": kind, "text": "alt"}
        with pytest.raises(UserError, match=f"rows.jsonl:1: content of message 2 .* part of type {kind!r}; .*Remove"):
            read(tmp_path, {"messages": [user("a"), bot([part])]})


HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_variables_of_the_template_come_from_a_column(tmp_path):
    tokenizer = byte_tokenizer("qwen-3")
    row = {"messages": dialogue("a", "b"), "chat_template_kwargs": {"enable_thinking": False}}
    (quiet,) = read(tmp_path, row)
    expected = prompt_of_a(tokenizer, enable_thinking=False)
    assert prompt_text(tokenizer, quiet) == expected and expected.endswith("<think>\n\n</think>\n\n")
    assert response_texts(tokenizer, [quiet], "chosen") == ["b"]
    (note,) = template_notes(byte_tokenizer("chatml"), [quiet])
    assert note.endswith("column 'chat_template_kwargs.enable_thinking': 1")
    assert template_notes(tokenizer, [quiet]) == []
    with pytest.raises(UserError, match="'chat_template_kwargs' holds tokenize, which training sets itself"):
        read(tmp_path, row | {"chat_template_kwargs": {"tokenize": True}})
    with pytest.raises(UserError, match="'tools' must hold a list of objects"):
        read(tmp_path, row | {"tools": ["search"]})


def test_documents_reach_the_template(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}" + TEMPLATES["chatml"]
    (row,) = read(tmp_path, {"messages": dialogue("a", "b"), "documents": [{"title": "T", "text": "x"}]})
    assert prompt_text(tokenizer, row).startswith("[T]<|im_start|>user")


SCHEMA = {"type": "object", "properties": {"city": {"type": ["string", "null"], "default": None}}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nulls_of_arguments_and_schemas_are_values_where_no_column_fills_them_in(kind, tmp_path):
    """A call with "city": null is another one than a call without a city."""
    tool = {"type": "function", "function": {"name": "sun", "parameters": SCHEMA}}
    rows = [{"messages": [user("a"), caller({"city": None, "day": 1})], "tools": [tool], "more": {"x": None}}] * 20
    place = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(place, rows)
    else:
        parquet.write_table(pa.Table.from_pylist(rows), place)
    row = load_source(place).train[0]
    says_null = kind == "jsonl"
    arguments = {"city": None, "day": 1} if says_null else {"day": 1}
    assert row.chosen_message["tool_calls"][0]["function"]["arguments"] == arguments
    city = {"type": ["string", "null"]} | ({"default": None} if says_null else {})
    assert row.template_arguments["tools"][0]["function"]["parameters"]["properties"]["city"] == city
    assert row.extra["more"] == {"x": None}


def test_an_empty_list_of_calls_is_none(tmp_path):
    """Templates ask whether the field is there, and Llama's then wants exactly one call."""
    (row,) = read(tmp_path, {"messages": [user("a"), bot("b") | {"tool_calls": []}]})
    assert response_texts(byte_tokenizer("llama-3.1"), [row], "chosen") == ["b"]


def test_the_assistants_first_turn_and_headers_between_its_turns_are_not_trained_on(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    (row,) = read(tmp_path, {"messages": [bot("hi"), user("a"), bot("b"), bot("c"), user("d"), bot("e")]})
    (example,), _ = sft_examples([row], tokenizer, 999, turn_end(tokenizer).token_id, all_turns=True)
    assert trained_text(tokenizer, example) == "b<|im_end|>c<|im_end|>e<|im_end|>"
