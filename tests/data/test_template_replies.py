# SPDX-License-Identifier: Apache-2.0
"""Where a response begins and ends in a chat template's text: thoughts, tool calls, system prompts, several ends.

Expected texts are written out from what the templates of chat_templates.py say.
"""

import itertools
import re

import pytest

from chat_templates import SPECIAL_TEMPLATES, TEMPLATES, byte_tokenizer
from cli_runs import write_jsonl
from data_cases import talk_row
from dialogue_cases import bot, dialogue, user
from dschat.base.errors import UserError
from dschat.data.check import check_report
from dschat.data.encoding import prompt_text
from dschat.data.examples import sft_examples
from dschat.data.notes import warn_of_template
from dschat.data.preview import Settings, preview_report
from dschat.data.rows import Row
from dschat.data.template_notes import template_notes
from dschat.data.turn_end import response_texts, turn_end, turn_end_of

TOOL = {"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "sun", "arguments": {"city": "Rome"}}, "id": "123456789"}
SYSTEM = {"role": "system", "content": "s"}
NO_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
# The reply has an opening tag that no generation prompt ends with, as in a template of Command R7B.
OTHER_OPENING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ '<|answer|>' + m.content if m.role == 'assistant' else m.content }}<eos>{% endfor %}"
    "[assistant]<|thought|><|/thought|>"
)


def message_row(message, messages=None, **arguments):
    """A row whose response is a message with further fields."""
    content = message.get("content", "")
    return Row(None, messages or [user("a")], content, None, {}, "rows.jsonl:1", None, message, None, arguments)


def caller(count=1, **more):
    """A message of the assistant that calls a tool."""
    return {"role": "assistant", "tool_calls": [CALL] * count} | more


def trained_text(tokenizer, messages, end, **arguments):
    """What --train_on all trains on in a conversation whose response is "d"."""
    row = message_row(bot("d"), messages, **arguments)
    (example,), _ = sft_examples([row], tokenizer, 999, tokenizer.convert_tokens_to_ids(end), all_turns=True)
    ids = itertools.compress(example.response_ids, example.targets)
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


# thoughts

THOUGHT = "<think>\nfoo\n</think>\n\nbar"
TIGHT = "<think>foo</think>bar"
OPEN = "foo</think>bar"
OPENING_CHATML = TEMPLATES["chatml"].replace("assistant\n", "assistant\n<think>\n")
# The generation prompt ends with a line break that a written turn has not.
BLANKS_BETWEEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}</think>"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Template and variables → end of the prompt; content → response.
RESPONSES_WITH_THOUGHTS = {
    "qwen-3": (TEMPLATES["qwen-3"], {}, "assistant\n", {THOUGHT: THOUGHT, TIGHT: THOUGHT}),
    "qwen-3-thoughts-off": (
        *(TEMPLATES["qwen-3"], {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        {TIGHT: TIGHT, "bar": "bar"},
    ),
    "qwen-3-thinking": (
        *(SPECIAL_TEMPLATES["qwen-3-thinking"], {}, "<think>\n"),
        {THOUGHT: THOUGHT[8:], TIGHT: THOUGHT[8:], OPEN: THOUGHT[8:], "bar": "\n</think>\n\nbar"},
    ),
    "r1": (
        *(TEMPLATES["r1"], {}, "<|Assistant|><think>\n"),
        {THOUGHT: THOUGHT[8:], TIGHT: OPEN, OPEN: OPEN, "\n<think>\n\n</think>b": "\n</think>b", "bar": "bar"},
    ),
    "deepseek-v3.1": (SPECIAL_TEMPLATES["deepseek-v3.1"], {}, "</think>", {"bar": "bar", TIGHT: TIGHT, OPEN: OPEN}),
    "deepseek-v3.1-thoughts-on": (
        *(SPECIAL_TEMPLATES["deepseek-v3.1"], {"thinking": True}, "<|Assistant|><think>"),
        {"bar": "</think>bar", TIGHT: OPEN, OPEN: OPEN},
    ),
    "content-as-it-is": (OPENING_CHATML, {}, "<think>\n", {"<think>\n" + OPEN: OPEN, TIGHT: OPEN, OPEN: OPEN}),
    "blanks-between": (BLANKS_BETWEEN, {}, "<think>\n", {TIGHT: OPEN, OPEN: OPEN, "bar": "</think>bar"}),
}


@pytest.mark.parametrize("name", RESPONSES_WITH_THOUGHTS)
def test_a_thought_is_opened_once_and_never_lost(name):
    template, variables, prompt_end, expected = RESPONSES_WITH_THOUGHTS[name]
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = template
    rows = [message_row(bot(content), **variables) for content in expected]
    assert prompt_text(tokenizer, rows[0]).endswith(prompt_end)
    assert response_texts(tokenizer, rows, "chosen") == list(expected.values())


def test_a_thought_in_a_field_behind_a_closed_one_is_refused():
    row = message_row(bot("bar") | {"reasoning_content": "foo"})
    assert response_texts(byte_tokenizer("qwen-3-thinking"), [row], "chosen") == ["foo\n</think>\n\nbar"]
    tokenizer = byte_tokenizer("qwen-3")
    for message in (bot("b") | {"reasoning_content": "so"}, caller(content="<think>so</think>")):
        with pytest.raises(UserError, match="rows.jsonl:1: .*behind its generation prompt.*remove enable_thinking"):
            response_texts(tokenizer, [message_row(message, enable_thinking=False)], "chosen")


# ends of turns and calls

CALL_ENDS = {
    "gpt-oss": (' to=functions.sun<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', "<|return|>"),
    "llama-3.1-eom": ('{"name": "sun", "parameters": {"city": "Rome"}}<|eom_id|>', "<|eot_id|>"),
}


@pytest.mark.parametrize("name", CALL_ENDS)
def test_a_call_keeps_the_end_that_the_template_gives_it(name):
    tokenizer = byte_tokenizer(name)
    text, usual = CALL_ENDS[name]
    row = message_row(caller())
    assert response_texts(tokenizer, [row], "chosen") == [text]
    (example,), _ = sft_examples([row], tokenizer, 999, tokenizer.convert_tokens_to_ids(usual))
    assert tokenizer.decode(example.response_ids) == text + usual


@pytest.mark.parametrize(("name", "is_told"), [("gpt-oss", True), ("qwen-2.5", False)])
def test_parallel_calls_of_which_the_template_writes_the_first_alone_are_told(name, is_told):
    rows = [message_row(caller(2)), talk_row([user("a"), caller(2), user("b")], "c")]
    notes_text = "; ".join(template_notes(byte_tokenizer(name), rows))
    for place in ("earlier assistant messages", "responses"):
        assert (f"'tool_calls' after the first of {place}: 1" in notes_text) == is_told
        assert f"'tool_calls' of {place}" not in notes_text


def test_an_added_token_that_is_not_special_ends_turns_too():
    """`add_tokens` marks no token as special. Runs of blanks are added tokens in vocabularies such as Gemma's."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "\n\n[END]\n")
    tokenizer.add_tokens(["\n\n", "[END]"])
    end = tokenizer.convert_tokens_to_ids("[END]")
    assert turn_end(tokenizer).token_id == end and turn_end(tokenizer).tail == "\n\n"
    row = talk_row([user("a"), bot("b"), user("c")], "d")
    (note,) = template_notes(tokenizer, [row], tokenizer.eos_token_id)
    assert "ends the assistant's turns with [END], but in training a response ends with <eos>" in note
    assert template_notes(tokenizer, [row], end) == []
    assert trained_text(tokenizer, row.messages, "[END]") == "b\n\n[END]d\n\n[END]"


def test_all_turns_of_a_template_that_writes_eos_behind_the_last_alone():
    assert trained_text(byte_tokenizer("phi-3"), dialogue("a", "b", "c"), "<|end|>") == "b<|end|>d<|end|>"


def test_a_turn_that_ends_with_another_token_once_others_follow_is_refused():
    with pytest.raises(UserError, match="writes message 2, of the assistant, differently once others follow"):
        trained_text(byte_tokenizer("gpt-oss"), dialogue("a", "b", "c"), "<|return|>")


# system prompts


def test_a_system_prompt_that_only_a_last_question_holds_loses_no_reply():
    tokenizer = byte_tokenizer("mistral-system")
    rows = [message_row(message, [SYSTEM, user("a")], tools=[TOOL]) for message in (caller(), bot("b"))]
    assert prompt_text(tokenizer, rows[0]).endswith("[/AVAILABLE_TOOLS][INST] s\n\na[/INST]")
    calls = '[TOOL_CALLS] [{"name": "sun", "arguments": {"city": "Rome"}, "id": "123456789"}]'
    assert response_texts(tokenizer, rows, "chosen") == [calls, " b"]


def test_a_template_that_demands_a_system_prompt_is_asked_with_the_rows_own():
    tokenizer = byte_tokenizer("phi-3")
    tokenizer.chat_template = NO_SYSTEM + tokenizer.chat_template
    talk = [SYSTEM, *dialogue("a", "b", "c")]
    assert trained_text(tokenizer, talk, "<|end|>") == "b<|end|>d<|end|>"
    assert response_texts(tokenizer, [talk_row(talk, "d")], "chosen") == ["d"]


# several templates, and others that are refused


def test_a_reply_that_does_not_follow_the_generation_prompt_is_refused_with_both_texts(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = OTHER_OPENING
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": dialogue("hi", "yes")}] * 40))
    settings = Settings(tokenizer=tokenizer)
    long_tool = TOOL | {"description": "x" * 1000}
    for read in (
        lambda: check_report(path, "1,0,0", settings),
        lambda: preview_report(path, 1, 1, False, settings),
        lambda: response_texts(tokenizer, [message_row(bot("b"), tools=[long_tool])], "chosen"),
    ):
        words = r"rows.jsonl:\d+: .*is '.*\[assistant\]<\|thought\|>.*'.*<\|answer\|>.*Correct the template"
        with pytest.raises(UserError, match=words) as caught:
            read()
        assert "x" * 201 not in str(caught.value)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_response_with_tools_is_written_as_the_template_for_tools_writes_it(is_named, tmp_path, caplog):
    """Transformers itself takes the template called tool_use for rows with tools; others branch on tools."""
    plain, with_tools = TEMPLATES["chatml"], TEMPLATES["mistral"]
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        {"default": plain, "tool_use": with_tools}
        if is_named
        else "{% if tools %}" + with_tools + "{% else %}" + plain + "{% endif %}"
    )
    rows = [message_row(bot("b")), message_row(bot("b"), tools=[TOOL])]
    assert response_texts(tokenizer, rows, "chosen") == ["b", " b"]
    assert [turn_end_of(tokenizer, row, {}).token for row in rows] == ["<|im_end|>", "<eos>"]
    warn_of_template(tokenizer, rows, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    said = r"with tools of rows.jsonl:1, the chat template ends the assistant's turns with <eos>"
    assert re.search(said, caplog.text)
    assert trained_text(tokenizer, dialogue("a", "b", "c"), "<eos>", tools=[TOOL]) == " b<eos> d<eos>"
