# SPDX-License-Identifier: Apache-2.0
"""Prompts and responses written as lists of messages: the explicit and the implicit form, and what does not fit."""

import json

import pytest

from cli_runs import write_jsonl as write
from data_cases import error_of
from dialogue_cases import bot, dialogue, user
from dschat.base.errors import UserError
from dschat.data.sources import load_source

SYSTEM = {"role": "system", "content": "be brief"}
TALK = [SYSTEM, user("hi"), bot("hello"), user("2+2?")]


def read(tmp_path, raw):
    (row,) = load_source(write(tmp_path / "rows.jsonl", [raw])).train
    return row.prompt, row.messages, row.chosen, row.rejected


# The same comparison, however it is written.
PAIRS = {
    "implicit": {"chosen": [*TALK, bot("yes")], "rejected": [*TALK, bot("no")]},
    "explicit": {"prompt": TALK, "chosen": [bot("yes")], "rejected": [bot("no")]},
    "prompt repeated": {"prompt": TALK, "chosen": [*TALK, bot("yes")], "rejected": [*TALK, bot("no")]},
    "responses as text": {"prompt": TALK, "chosen": "yes", "rejected": "no"},
    "a question of it as text": {"prompt": "hi ", "chosen": [*TALK, bot("yes")], "rejected": [*TALK, bot("no")]},
}
PAIRS["messages beside"] = PAIRS["implicit"] | {"prompt": "2+2?", "messages": [*TALK, bot("yes")]}
LATER = {"chosen": [*TALK[2:], bot("yes")], "rejected": [*TALK[2:], bot("no")]}
PAIRS["conversation beside"] = {"messages": TALK, "chosen": [bot("yes")], "rejected": [bot("no")]}
PAIRS["several turns after the prompt"] = {"prompt": TALK[:2]} | LATER


@pytest.mark.parametrize("form", PAIRS)
def test_what_is_shared_is_the_prompt_and_the_last_message_the_response(form, tmp_path):
    assert read(tmp_path, PAIRS[form]) == (None, TALK, "yes", "no")


@pytest.mark.parametrize("column", ["completion", "chosen"])
def test_one_response(column, tmp_path):
    for row in ({"prompt": TALK, column: [bot("yes")]}, {column: [*TALK, bot("yes")]}):
        assert read(tmp_path, row) == (None, TALK, "yes", None)
    assert read(tmp_path, {"prompt": "2+2?", column: [bot("yes")]}) == (None, [user("2+2?")], "yes", None)
    # null as in files of columns, where other rows have a value
    row = {"prompt": None, column: [user("a") | {"name": None}, bot("b") | {"name": None}], "response": None}
    assert read(tmp_path, row) == (None, [user("a")], "b", None)


def test_a_prompt_alone(tmp_path):
    assert read(tmp_path, {"prompt": TALK}) == (None, TALK, None, None)
    assert read(tmp_path, {"prompt": TALK, "rejected": [bot("no")]}) == (None, TALK, None, "no")


# completion


def test_completion_is_the_response_where_there_is_none(tmp_path):
    assert read(tmp_path, {"prompt": "Q", "completion": "A"}) == ("Q", None, "A", None)
    assert read(tmp_path, {"prompt": "Q", "response": "R", "completion": "A"}) == ("Q", None, "R", None)
    with pytest.raises(UserError, match="rows.jsonl:1: column 'completion' must be text, .* --response_key"):
        read(tmp_path, {"prompt": "Q", "completion": 3})


# what does not fit

ASK = [user("a")]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt": ASK, "chosen": [SYSTEM, *ASK, bot("b")]},
            "other messages than 'prompt' holds (system: 'be brief')",
        ),
        ({"prompt": "Z", "chosen": dialogue("a", "b")}, "no message of the user in 'chosen' says .* ('Z')"),
        ({"chosen": ASK}, "the last message of 'chosen' is of 'user'"),
        ({"prompt": "a", "chosen": [bot("b")], "rejected": "c"}, "'chosen' a list and 'rejected' text; give both as"),
        ({"prompt": dialogue("a", "b")}, "the last message of 'prompt' is the assistant's .* --messages_key"),
        ({"messages": json.dumps([user("a")])}, "list of messages, each with role and content, not text;"),
        ({"prompt": str([user("a"), bot("b"), user("c")])}, "column 'prompt' holds a list of messages as text"),
        ({"prompt": ["a"]}, "message 1 of 'prompt' must be an object with role and content; .* --prompt_key"),
        ({"prompt": 3, "chosen": [bot("b")]}, "column 'prompt' must be text, not a value of type int"),
    ],
)
def test_what_does_not_fit_is_named(row, wanted, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "fine"}, row])
    message = error_of(path)
    assert message.startswith(f"{path}:2: ")
    assert all(part in message for part in wanted.split(" .* ")), message


def test_texts_that_only_begin_like_messages_stay_texts(tmp_path):
    prompt = f"{json.dumps([user('a')])} Summarise this dialogue."
    row = {"prompt": prompt, "response": json.dumps([bot("b")])}
    (loaded,) = load_source(write(tmp_path / "rows.jsonl", [row])).train
    assert (loaded.prompt, loaded.chosen) == (prompt, row["response"])
