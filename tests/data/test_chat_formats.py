# SPDX-License-Identifier: Apache-2.0
"""Rows of ShareGPT and Alpaca are those of the messages that they say."""

import json
from typing import Any

import pytest

from dschat.base.errors import UserError
from dschat.data.formats import format_of, parse_row, unread_columns
from dschat.data.rows import Row
from dschat.settings.common import ColumnFlags

KEYS = ColumnFlags()


def spoken(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    """Messages as ShareGPT has them, of speakers and what they say."""
    return [{"from": speaker, "value": text} for speaker, text in pairs]


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    """Messages of roles and contents."""
    return [{"role": role, "content": text} for role, text in pairs]


def parsed(raw: dict[str, Any], keys: ColumnFlags = KEYS) -> Row:
    row = parse_row(raw, keys, "rows:1")
    assert row is not None and row.extra == raw, "reward functions get the row as it was read"
    return row


def as_read(row: Row) -> tuple[Any, ...]:
    """All of a row but the columns that it came from."""
    return row.messages, row.chosen, row.rejected, row.chosen_message, row.rejected_message, row.template_arguments


ASKED = [("human", "hi"), ("gpt", "yes?"), ("human", "2 + 2?")]
ASKED_BY_ROLE = [("user", "hi"), ("assistant", "yes?"), ("user", "2 + 2?")]


@pytest.mark.parametrize(
    ("raw", "same"),
    [
        ({"conversations": spoken(*ASKED, ("gpt", "4"))}, {"messages": messages(*ASKED_BY_ROLE, ("assistant", "4"))}),
        (
            {"messages": spoken(("User", "hi"), ("Assistant", "4"))},
            {"messages": messages(("user", "hi"), ("assistant", "4"))},
        ),
        ({"system": "s", "conversations": spoken(*ASKED)}, {"messages": messages(("system", "s"), *ASKED_BY_ROLE)}),
        (
            {"system": "s", "conversations": spoken(("system", "s"), *ASKED)},
            {"messages": messages(("system", "s"), *ASKED_BY_ROLE)},
        ),
        ({"conversations": messages(*ASKED_BY_ROLE)}, {"messages": messages(*ASKED_BY_ROLE)}),
        (
            {
                "conversations": spoken(*ASKED),
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            {
                "prompt": messages(*ASKED_BY_ROLE),
                "chosen": messages(("assistant", "4")),
                "rejected": messages(("assistant", "5")),
            },
        ),
        (
            {"system": "s", "prompt": "row 17", "conversations": spoken(*ASKED, ("gpt", "4"))},
            {"prompt": "row 17", "messages": messages(("system", "s"), *ASKED_BY_ROLE, ("assistant", "4"))},
        ),
        (
            {"system": "s", "prompt": "2 + 2?", "chosen": spoken(("gpt", "4")), "rejected": spoken(("gpt", "5"))},
            {
                "prompt": messages(("system", "s"), ("user", "2 + 2?")),
                "chosen": messages(("assistant", "4")),
                "rejected": messages(("assistant", "5")),
            },
        ),
        (
            {
                "system": "s",
                "prompt": "2 + 2?",
                "conversations": spoken(("human", "2 + 2?"), ("gpt", "4")),
                "chosen": spoken(("human", "2 + 2?"), ("gpt", "4")),
                "rejected": spoken(("human", "2 + 2?"), ("gpt", "5")),
            },
            {
                "prompt": messages(("system", "s"), ("user", "2 + 2?")),
                "chosen": messages(("assistant", "4")),
                "rejected": messages(("assistant", "5")),
            },
        ),
        (
            {"system": "s", "chosen": spoken(*ASKED, ("gpt", "4")), "rejected": spoken(*ASKED, ("gpt", "5"))},
            {
                "chosen": messages(("system", "s"), *ASKED_BY_ROLE, ("assistant", "4")),
                "rejected": messages(("system", "s"), *ASKED_BY_ROLE, ("assistant", "5")),
            },
        ),
    ],
)
def test_sharegpt_is_read_as_the_messages_that_it_says(raw, same) -> None:
    assert as_read(parsed(raw)) == as_read(parsed(same))


def test_tools_of_sharegpt() -> None:
    """LLaMA-Factory's form: calls are JSON in a message of function_call, tools JSON in a column."""
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    raw = {
        "conversations": spoken(
            ("human", "2 + 2?"),
            ("function_call", "<think>Easy.</think>" + json.dumps(call)),
            ("observation", "4"),
            ("function_call", json.dumps([call, call])),
        ),
        "tools": json.dumps([tool]),
    }
    row = parsed(raw)
    tool_call = {"type": "function", "function": call}
    assert row.messages == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>Easy.</think>", "tool_calls": [tool_call]},
        {"role": "tool", "content": "4"},
    ]
    assert row.reply("chosen") == {"role": "assistant", "content": "", "tool_calls": [tool_call, tool_call]}
    assert row.template_arguments == {"tools": [{"type": "function", "function": tool}]}


def test_further_fields_of_sharegpt_messages_are_kept() -> None:
    said = [{"from": "human", "value": "hi", "name": "Ann", "role": None}, *spoken(("gpt", "b"))]
    assert parsed({"conversations": said}).messages == [{"role": "user", "content": "hi", "name": "Ann"}]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"conversations": spoken(("human", "hi"), ("narrator", "so"))},
            "rows:1: message 2 of 'conversations' is from 'narrator', an unknown speaker; known are system, dev",
        ),
        ({"conversations": [{"from": 3, "value": "hi"}]}, "'from' of message 1 of 'conversations' must be text"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "'value' of message 1 of 'conversations' must be text"),
        (
            {"conversations": spoken(("human", "hi"), ("function_call", "add(2, 2)"))},
            "message 2 of 'conversations' is a tool call but not valid JSON .*correct the row",
        ),
        (
            {"conversations": spoken(("human", "hi"), ("function_call", '{"arguments": {}}'))},
            "message 2 of 'conversations' must hold an object with name and arguments",
        ),
        (
            {"system": "a", "conversations": spoken(("system", "b"), ("human", "hi"))},
            "two system prompts, the conversation's first message and column 'system'; remove one",
        ),
        ({"instruction": "", "output": "a"}, "column 'instruction' is empty; fill it"),
        ({"instruction": "a", "output": ["b", "c"]}, "column 'output' must be text, not a list"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "column 'history' must hold a list of pairs"),
    ],
)
def test_what_is_refused_names_the_row_and_the_remedy(raw, message) -> None:
    with pytest.raises(UserError, match=message):
        parse_row(raw, KEYS, "rows:1")


@pytest.mark.parametrize(
    ("raw", "said", "responses"),
    [
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, [("user", "Add.\n2, 2")], ("4", None)),
        ({"instruction": "Add.", "input": "", "output": "4"}, [("user", "Add.")], ("4", None)),
        ({"instruction": "Add.", "input": "2", "chosen": "4", "rejected": "5"}, [("user", "Add.\n2")], ("4", "5")),
        (
            {"instruction": "And 3?", "output": "5", "system": "Be brief.", "history": [["Add 2.", "4"]]},
            [("system", "Be brief."), ("user", "Add 2."), ("assistant", "4"), ("user", "And 3?")],
            ("5", None),
        ),
    ],
)
def test_alpaca_is_read_as_a_conversation(raw, said, responses) -> None:
    """As LLaMA-Factory joins the columns: a line break between instruction and input."""
    row = parsed(raw)
    assert row.messages == messages(*said) and (row.chosen, row.rejected) == responses
    assert format_of(raw, KEYS) == "Alpaca instruction" and unread_columns(parsed(raw), KEYS) == []


@pytest.mark.parametrize(
    ("raw", "keys", "expected"),
    [
        ({"prompt": "p", "instruction": "i", "output": "o"}, KEYS, ("p", None)),
        (
            {"instruction": "i", "input": "x", "output": "o"},
            ColumnFlags(prompt_key="instruction", response_key="output"),
            ("i", "o"),
        ),
    ],
)
def test_named_columns_come_first(raw, keys, expected) -> None:
    row = parse_row(raw, keys, "rows:1")
    assert row is not None and row.messages is None and (row.prompt, row.chosen) == expected


def test_columns_that_no_format_reads_are_named() -> None:
    assert unread_columns(parsed({"instruction": "i", "output": "o", "category": "c"}), KEYS) == ["category"]
    raw = {"conversations": spoken(*ASKED), "system": "s", "source": "x", "id": None}
    assert unread_columns(parsed(raw), KEYS) == ["source"] and format_of(raw, KEYS) == "ShareGPT conversation"
