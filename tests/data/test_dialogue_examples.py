# SPDX-License-Identifier: Apache-2.0
"""Rows → dialogues that a policy can talk through again: what is kept, what is dropped and why."""

from dataclasses import replace

import pytest

from dialogue_cases import chat_tokenizer, dialogue
from dschat.data.dialogues import (
    MALFORMED,
    PROMPT_TOO_LONG,
    REPLY_TOO_LONG,
    TOO_LONG,
    TOO_MANY_TURNS,
    DialogueLimits,
    dialogue_examples,
)
from dschat.data.rows import Row
from dschat.errors import UserError

LIMITS = DialogueLimits(turns=2, prompt_tokens=5, reply_tokens=4, total_tokens=100)


def row_of(messages, number=1):
    """As the reader makes it: the last message of the assistant is the response."""
    response = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
    before = messages[:-1] if response is not None else messages
    return Row(None, before, response, None, {"id": number}, f"talk.jsonl:{number}")


def kept(*dialogues, limits=LIMITS, **options):
    rows = [row_of(messages, number) for number, messages in enumerate(dialogues, start=1)]
    return dialogue_examples(rows, chat_tokenizer(), limits, **options)


def test_rows_of_hh_are_read_as_they_are():
    row = Row("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", None, " d", " e", {}, "hh.jsonl:1")
    (example,), dropped = dialogue_examples([row], chat_tokenizer(), LIMITS)
    assert [m["content"].strip() for m in example.messages] == ["a", "b", "c", "d"] and not dropped


def test_messages_and_response_are_put_together_again():
    examples, dropped = kept(dialogue("a", "b", "c", "d"), dialogue("e"))
    assert [example.messages for example in examples] == [dialogue("a", "b", "c", "d"), dialogue("e")]
    assert [(example.num_turns, example.index) for example in examples] == [(2, 0), (1, 1)]
    assert not dropped


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (dialogue("a", "b", "c", "d", "e"), TOO_MANY_TURNS),
        (dialogue("a", "b", "q" * 6), PROMPT_TOO_LONG),
        (dialogue("a", "q" * 5, "b"), REPLY_TOO_LONG),
        (dialogue("a", "b")[1:] + dialogue("c"), MALFORMED),
        (dialogue("a", " ", "b", "c"), MALFORMED),
        ([{"role": "system", "content": "s"}, *dialogue("a", "b")], MALFORMED),
    ],
)
def test_what_is_dropped_is_counted_by_reason(messages, reason, caplog):
    examples, dropped = kept(dialogue("a", "b"), messages)
    assert [example.index for example in examples] == [0] and dropped == {reason: 1}
    if reason == MALFORMED:
        assert "the first row that is left out: talk.jsonl:2: message" in caplog.text
    if reason in (PROMPT_TOO_LONG, REPLY_TOO_LONG):
        limits = replace(LIMITS, prompt_tokens=6, reply_tokens=5)
        assert len(kept(dialogue("a", "b"), messages, limits=limits)[0]) == 2


def test_the_length_counts_every_reply_as_the_longest_that_may_be_drawn():
    """ChatML: <|im_start|> user \\n a <|im_end|> \\n, then <|im_start|> assistant \\n and a reply of 4."""
    tokenizer = chat_tokenizer()
    messages = dialogue("a", "b", "c", "d")
    text = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    state = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = 1 + len(state) - 1 + 2 * 4  # BOS, which the tokenizer puts before a text; the first reply is one token
    (example,), _ = kept(messages)
    assert example.length == len(example) == expected
    assert len(kept(messages, limits=replace(LIMITS, total_tokens=expected))[0]) == 1
    assert kept(messages, limits=replace(LIMITS, total_tokens=expected - 1), held_out=True) == ([], {TOO_LONG: 1})


def test_where_none_is_left_one_message_says_why():
    with pytest.raises(UserError, match=r"^--max_turns 2, .*: none of the 2 rows is left \(too many turns: 2;"):
        kept(dialogue(*"abcdef"), dialogue(*"abcdef"))
    with pytest.raises(UserError, match=r"^talk.jsonl:1: message 2 is of 'user' where 'assistant' is next"):
        kept(dialogue("a") + dialogue("b"))
    with pytest.raises(UserError, match=r"^talk.jsonl:1: message 1 \(user\) is empty"):
        kept(dialogue(" ", "b"))
    with pytest.raises(UserError, match=r"^p.jsonl:1: the row holds no messages"):
        dialogue_examples([Row("text", None, "b", None, {}, "p.jsonl:1")], chat_tokenizer(), LIMITS)
