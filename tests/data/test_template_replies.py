# SPDX-License-Identifier: Apache-2.0
"""Where a response begins and ends in a chat template's text: prompts that open a thought, several end tokens.

Expected texts are written out from what the templates of chat_templates.py say.
"""

import pytest

from chat_templates import byte_tokenizer
from data_cases import talk_row
from dialogue_cases import bot, user
from dschat.data.encoding import prompt_text, response_texts, turn_end
from dschat.data.rows import Row


def message_row(message, messages=(user("a"),), **arguments):
    """A row whose response is a message with further fields."""
    content = message.get("content", "")
    return Row(None, list(messages), content, None, {}, "rows.jsonl:1", None, message, None, arguments)


@pytest.mark.parametrize(
    "content", ["<think>\nfoo\n</think>\n\nbar", "<think>foo</think>bar", "foo\n</think>\n\nbar", "foo</think>bar"]
)
def test_a_thought_that_prompt_and_turn_open_is_opened_once(content):
    tokenizer = byte_tokenizer("qwen-3-thinking")
    rows = [talk_row([user("a")], content), message_row(bot("bar") | {"reasoning_content": "foo"})]
    assert prompt_text(tokenizer, rows[0]).endswith("<|im_start|>assistant\n<think>\n")
    assert response_texts(tokenizer, rows, "chosen") == ["foo\n</think>\n\nbar"] * 2


def test_a_content_that_brings_the_end_of_its_thought_gets_no_other():
    end = turn_end(byte_tokenizer("qwen-3-thinking"))
    assert end.around("bar") == "\n</think>\n\nbar"
    assert end.around("<think>\nfoo</think>bar") == end.around("foo</think>bar") == "foo</think>bar"
    assert turn_end(byte_tokenizer("qwen-3")).around("<think>foo</think>bar") == "<think>foo</think>bar"
