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
from dschat.data.template_notes import template_notes


def message_row(message, messages=None, **arguments):
    """A row whose response is a message with further fields."""
    content = message.get("content", "")
    return Row(None, messages or [user("a")], content, None, {}, "rows.jsonl:1", None, message, None, arguments)


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


def caller(**more):
    """A message of the assistant that calls a tool."""
    call = {"type": "function", "function": {"name": "sun", "arguments": {"city": "Rome"}}, "id": "123456789"}
    return {"role": "assistant", "tool_calls": [call]} | more


@pytest.mark.parametrize("thinking", [True, False])
def test_prompt_and_turn_with_different_tags_share_no_part_of_a_tag(thinking):
    tokenizer = byte_tokenizer("deepseek-v3.1")
    contents = ["bar", "<think>foo</think>bar", "foo</think>bar"]
    rows = [message_row(bot(content), thinking=thinking) for content in contents]
    rows.append(message_row(caller(), thinking=thinking))
    prompt = "<bos><|User|>a<|Assistant|>" + ("<think>" if thinking else "</think>")
    assert {prompt_text(tokenizer, row) for row in rows} == {prompt}
    thoughts = ["bar", "foo</think>bar", "foo</think>bar"] if thinking else contents
    assert response_texts(tokenizer, rows, "chosen") == [*thoughts, '<|call|>sun{"city": "Rome"}']
    end = turn_end(tokenizer, {"thinking": thinking})
    assert (end.prefill, end.lead) == ("<think>" if thinking else "", "")


def test_other_text_of_training_is_told_for_each_set_of_variables():
    tokenizer = byte_tokenizer("deepseek-v3.1")
    quiet, thinking = message_row(bot("b")), message_row(bot("b"), thinking=True)
    assert template_notes(tokenizer, [quiet], 2) == []
    (note,) = template_notes(tokenizer, [quiet, thinking], 2)
    assert note.startswith('with chat_template_kwargs {"thinking": true}, ')
    assert "<|Assistant|><think>b" in note and "<|Assistant|></think>b" in note


def test_added_tokens_are_not_split():
    tokenizer = byte_tokenizer("chatml")
    tokenizer.add_tokens(["[THINK]", "[TELL]"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ '[TELL]' if m.role == 'assistant' }}{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: [THINK]{% endif %}"
    )
    end = turn_end(tokenizer)
    assert (end.prefill, end.replaced, end.lead) == ("[THINK]", "[TELL]", "")
    assert response_texts(tokenizer, [talk_row([user("a")], "b")], "chosen") == ["b"]
