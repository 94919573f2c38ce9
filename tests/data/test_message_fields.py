# SPDX-License-Identifier: Apache-2.0
"""Fields of messages and columns for the chat template that cannot be read are refused with the row and the field."""

import pytest

from cli_runs import write_jsonl
from data_cases import error_of
from dialogue_cases import bot, user

HALF = "\ud83d"  # the first half of an emoji


def calling(function):
    """A conversation whose response calls a function."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return {"messages": [user("a"), message]}


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (calling({"name": "sun", "arguments": {"city": [f"Rome {HALF}"]}}), "tool_calls of message 2 in 'messages'"),
        ({"messages": [user("a"), bot("b")], "tools": [{"name": "sun", "description": HALF}]}, "in column 'tools'"),
        ({"messages": [user("a")], "chat_template_kwargs": {"mood": HALF}}, "in column 'chat_template_kwargs'"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "thinking": HALF}]},
            "thinking of message 2 in 'conversations'",
        ),
    ],
)
def test_half_of_a_character_anywhere_in_a_conversation_is_named(row, place, tmp_path):
    """Tokenizers raise a TypeError for it, which names neither file nor row."""
    error = error_of(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert "rows.jsonl:1: " in error and place in error and "half of a character (a lone surrogate)" in error


@pytest.mark.parametrize(
    "function", [{"arguments": {}}, {"name": "sun"}, {"name": "sun", "parameters": {"city": "Rome"}}, "sun"]
)
def test_calls_without_a_name_or_arguments_are_refused(function, tmp_path):
    """Some templates write a call without its name; others raise errors of Python."""
    error = error_of(write_jsonl(tmp_path / "rows.jsonl", [calling(function)]))
    assert "rows.jsonl:1: a tool call of message 2 in 'messages' must hold a function with name and arguments" in error
    assert "correct the row" in error
    value = '{"name": "sun", "parameters": {}}'
    speakers = [{"from": "human", "value": "a"}, {"from": "function_call", "value": value}]
    error = error_of(write_jsonl(tmp_path / "more.jsonl", [{"conversations": speakers}]))
    assert "more.jsonl:1: a tool call of message 2 in 'conversations' must hold" in error
