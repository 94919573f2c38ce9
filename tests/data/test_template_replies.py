# SPDX-License-Identifier: Apache-2.0
"""Where a response begins and ends in a chat template's text: prompts that open a thought, several end tokens.

Expected texts are written out from what the templates of chat_templates.py say.
"""

import re

import pytest

from chat_templates import TEMPLATES, byte_tokenizer
from cli_runs import write_jsonl
from data_cases import talk_row
from dialogue_cases import bot, dialogue, user
from dschat.base.errors import UserError
from dschat.data.check import check_report
from dschat.data.encoding import prompt_text
from dschat.data.examples import pair_examples, sft_examples
from dschat.data.preview import Settings, preview_report
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.data.template_notes import template_notes, warn_of_template
from dschat.data.turn_end import response_texts, turn_end, turn_end_of


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


@pytest.mark.parametrize("content", ["<think>\nfoo</think>bar", "<think>foo</think>bar", "foo</think>bar"])
def test_a_turn_that_holds_its_content_as_it_is_opens_no_thought_twice(content):
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    row = talk_row([user("a")], content)
    assert prompt_text(tokenizer, row).endswith("assistant\n<think>\n")
    assert response_texts(tokenizer, [row], "chosen") == ["foo</think>bar"]


@pytest.mark.parametrize("content", ["<think>foo</think>bar", "foo</think>bar", "bar"])
def test_blanks_alone_between_prompt_and_turn_lose_no_end_of_a_thought(content):
    """The generation prompt ends with a line break that a written turn has not."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "<think>{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}</think>"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    thought = "" if content == "bar" else "foo"
    assert response_texts(tokenizer, [talk_row([user("a")], content)], "chosen") == [f"{thought}</think>bar"]


def test_a_content_that_brings_the_end_of_its_thought_gets_no_other():
    end = turn_end(byte_tokenizer("qwen-3-thinking"))
    assert end.around("bar") == "\n</think>\n\nbar"
    assert end.around("<think>\nfoo</think>bar") == end.around("foo</think>bar") == "foo</think>bar"
    assert turn_end(byte_tokenizer("qwen-3")).around("<think>foo</think>bar") == "<think>foo</think>bar"


def system(text):
    return {"role": "system", "content": text}


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


CALL_ENDS = {
    "gpt-oss": (' to=functions.sun<|channel|>commentary json<|message|>{"city": "Rome"}', "<|call|>", "<|return|>"),
    "llama-3.1-eom": ('{"name": "sun", "parameters": {"city": "Rome"}}', "<|eom_id|>", "<|eot_id|>"),
}


@pytest.mark.parametrize("name", CALL_ENDS)
def test_a_call_with_an_end_of_its_own_is_ended_once_and_told(name):
    tokenizer = byte_tokenizer(name)
    text, end, usual = CALL_ENDS[name]
    end_id = tokenizer.convert_tokens_to_ids(usual)
    row = message_row(caller())
    assert response_texts(tokenizer, [row], "chosen") == [text]
    (example,), _ = sft_examples([row], tokenizer, 999, end_id)
    assert tokenizer.decode(example.response_ids) == text + usual
    pair = Row(**vars(row) | {"rejected": "b"})
    (compared,), _ = pair_examples([pair], tokenizer, 999, end_id)
    assert tokenizer.decode(compared.chosen_ids).endswith(text + usual)
    notes = template_notes(tokenizer, [row, pair, message_row(bot("b"))], end_id)
    assert any(f"training with {usual}: {end}: 2" in note for note in notes)


def test_what_the_template_itself_says_against_calls_is_told():
    """The form without a content fails inside Llama 2's template, before the template looks at roles."""
    messages = [user("a"), caller(), {"role": "tool", "content": "6:40"}]
    with pytest.raises(UserError, match="rows.jsonl:1: .*refuses the messages .Conversation roles must alternate"):
        prompt_text(byte_tokenizer("llama-2"), talk_row(messages))
    two = [user("a"), caller(tool_calls=caller()["tool_calls"] * 2), user("b")]
    with pytest.raises(UserError, match="supports single tool-calls at once!.; correct these messages or leave them"):
        prompt_text(byte_tokenizer("llama-3.1"), talk_row(two))


@pytest.mark.parametrize("place", ["earlier assistant messages", "responses"])
@pytest.mark.parametrize(("name", "is_told"), [("gpt-oss", True), ("qwen-2.5", False), ("mistral-tools", False)])
def test_parallel_calls_of_which_the_template_writes_the_first_alone_are_told(name, is_told, place):
    calls = caller(tool_calls=caller()["tool_calls"] * 2)
    rows = [message_row(calls)]
    if place != "responses":
        rows = [talk_row([user("a"), calls, user("b")], "c")]
    notes_text = "; ".join(template_notes(byte_tokenizer(name), rows))
    assert (f"'tool_calls' after the first of {place}: 1" in notes_text) == is_told
    assert f"'tool_calls' of {place}" not in notes_text


def test_system_prompts_that_the_template_reads_at_one_place_alone_are_told():
    """SmolLM3 writes the first alone, DeepSeek R1 the last alone."""
    tokenizer = byte_tokenizer("chatml")
    turns = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    messages = [system("Be brief."), user("a"), bot("b"), system("Be loud."), user("c")]
    tokenizer.chat_template = "{{ messages[0].content }}" + turns
    (note,) = template_notes(tokenizer, [talk_row(messages, "d")])
    assert note.endswith("does not write: the content of later system messages: 1")
    last = "{{ (messages | selectattr('role', 'equalto', 'system') | list)[-1].content }}"
    tokenizer.chat_template = last + turns
    (note,) = template_notes(tokenizer, [talk_row(messages, "d")])
    assert note.endswith("does not write: the content of earlier system messages: 1")


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
    (example,), _ = sft_examples([row], tokenizer, 999, end, all_turns=True)
    trained = [token for token, is_target in zip(example.response_ids, example.targets, strict=True) if is_target]
    assert tokenizer.decode(trained, clean_up_tokenization_spaces=False) == "b\n\n[END]d\n\n[END]"


@pytest.mark.parametrize(("step", "count"), [(1, 1), (2, 2), (3, 0)])
def test_notes_are_on_the_responses_that_a_step_reads(step, count, tmp_path):
    """Prompts of step 3 often come from data for steps 1 and 2."""
    answer = [user("a"), bot("b") | {"reasoning_content": "so", "audio": "x"}]
    row = {"chosen": answer, "rejected": answer, "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = byte_tokenizer("qwen-3")
    settings = Settings(tokenizer=tokenizer, end_of_response=turn_end(tokenizer).token_id)
    notes_text = preview_report(str(write_jsonl(tmp_path / "rows.jsonl", [row])), 1, step, False, settings)
    assert (f"a closed one: {count};" in notes_text) == (f"'audio' of responses: {count}" in notes_text) == (count > 0)
    assert ("note: " in notes_text) == (count > 0)


def test_no_end_is_told_where_calls_and_texts_end_alike():
    tokenizer = byte_tokenizer("llama-3.1")
    assert template_notes(tokenizer, [message_row(caller())], tokenizer.convert_tokens_to_ids("<|eot_id|>")) == []


def test_special_tokens_that_belong_to_a_turn_stay():
    """The end of a list of calls, and what a content itself ends with."""
    tokenizer = byte_tokenizer("chatml")
    calls = "{% if m.tool_calls %}<|calls_begin|>sun<|calls_end|>{% else %}{{ m.content }}<eos>{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + calls + "{% endfor %}"
    rows = [message_row(caller()), message_row(bot("b<|call|>"))]
    assert response_texts(tokenizer, rows, "chosen") == ["<|calls_begin|>sun<|calls_end|>", "b<|call|>"]


TOOL = {"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}


def test_a_system_prompt_that_only_a_last_question_holds_loses_no_reply():
    tokenizer = byte_tokenizer("mistral-system")
    talk = [{"role": "system", "content": "s"}, user("a")]
    rows = [message_row(message, talk, tools=[TOOL]) for message in (caller(), bot("b"))]
    assert prompt_text(tokenizer, rows[0]).endswith("[/AVAILABLE_TOOLS][INST] s\n\na[/INST]")
    calls = '[TOOL_CALLS] [{"name": "sun", "arguments": {"city": "Rome"}, "id": "123456789"}]'
    assert response_texts(tokenizer, rows, "chosen") == [calls, " b"]
    examples, dropped = sft_examples(rows, tokenizer, 999, 2)
    assert len(examples) == 2 and not dropped
    assert tokenizer.decode(examples[0].response_ids) == calls + "<eos>"


NO_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
TALK = dialogue("a", "b", "c", "d")


def trained_text(tokenizer, messages, end, content="d"):
    """What --train_on all trains on in a conversation with a response."""
    end_id = tokenizer.convert_tokens_to_ids(end)
    (example,), _ = sft_examples([talk_row(messages, content)], tokenizer, 999, end_id, all_turns=True)
    ids = zip(example.response_ids, example.targets, strict=True)
    return tokenizer.decode([number for number, is_trained in ids if is_trained])


def test_all_turns_of_a_template_that_writes_eos_behind_the_last_alone():
    tokenizer = byte_tokenizer("phi-3")
    assert trained_text(tokenizer, TALK[:3], "<|end|>") == "b<|end|>d<|end|>"


def test_a_turn_that_ends_with_another_token_once_others_follow_is_refused():
    with pytest.raises(UserError, match="writes message 2, of the assistant, differently once others follow"):
        trained_text(byte_tokenizer("gpt-oss"), TALK[:3], "<|return|>")


def test_a_template_that_demands_a_system_prompt_is_asked_with_the_rows_own():
    tokenizer = byte_tokenizer("phi-3")
    tokenizer.chat_template = NO_SYSTEM + tokenizer.chat_template
    talk = [{"role": "system", "content": "s"}, *TALK[:3]]
    assert trained_text(tokenizer, talk, "<|end|>") == "b<|end|>d<|end|>"
    assert response_texts(tokenizer, [talk_row(talk, "d")], "chosen") == ["d"]


def test_a_thought_behind_a_closed_one_is_told():
    tokenizer = byte_tokenizer("qwen-3")
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    in_field, in_content = bot("b") | {"reasoning_content": "so"}, bot("<think>so</think>b")
    quiet = [message_row(message, enable_thinking=False) for message in (in_field, in_content, bot("b"))]
    notes = template_notes(tokenizer, quiet, end_id)
    assert any("after a generation prompt that holds a closed one: 2;" in note for note in notes)
    assert any("does not write: 'reasoning_content' of responses: 1" in note for note in notes)
    assert template_notes(tokenizer, [message_row(in_field), message_row(in_content), quiet[2]], end_id) == []


def test_notes_speak_of_the_text_that_is_trained_on():
    """A lost thought is trained on where the content itself is the response, and is not where a call follows it."""
    tokenizer = byte_tokenizer("deepseek-v3.1")
    row = message_row(caller(content="so</think>b"))
    assert response_texts(tokenizer, [row], "chosen") == ['b<|call|>sun{"city": "Rome"}']
    (note,) = template_notes(tokenizer, [row])
    assert note.endswith("does not write: what stands before </think> in responses: 1")
    (note,) = template_notes(tokenizer, [message_row(bot("so</think>b"))])
    assert note.endswith("what stands before </think> in responses, which are trained on all the same: 1")


@pytest.mark.parametrize("message", [{"reasoning_content": "so"}, {"content": "<think>so</think>"}])
def test_a_call_behind_a_closed_thought_is_trained_on(message):
    tokenizer = byte_tokenizer("qwen-3")
    row = message_row(caller(**message), enable_thinking=False)
    calls = '<tool_call>\n{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert [text.strip() for text in response_texts(tokenizer, [row], "chosen")] == [calls]
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert any("a closed one: 1;" in note for note in template_notes(tokenizer, [row], end_id))


# As Command R7B's template for tools: the reply has an opening tag that no generation prompt ends with.
OTHER_OPENING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ '<|answer|>' + m.content if m.role == 'assistant' else m.content }}<eos>{% endfor %}"
    "[assistant]<|thought|><|/thought|>"
)


def reports_of(tokenizer, row, tmp_path, caplog):
    """What check, preview and a step say of a row."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [row] * 40))
    settings = Settings(tokenizer=tokenizer, end_of_response=tokenizer.eos_token_id)
    reports = [check_report(path, "1,0,0", settings), preview_report(path, 1, 1, False, settings)]
    warn_of_template(tokenizer, load_source(path).train, tokenizer.eos_token_id)
    return [*reports, caplog.text]


def test_a_reply_that_does_not_follow_the_generation_prompt_is_told(tmp_path, caplog):
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = OTHER_OPENING
    trained = "[user]a<eos>[assistant]<|thought|><|/thought|>b"
    written = "[user]a<eos>[assistant]<|answer|>b<eos>[assistant]<|thought|><|/thought|>"
    for report in reports_of(tokenizer, {"messages": dialogue("hi", "yes")}, tmp_path, caplog):
        assert repr(trained) in report and repr(written) in report
        assert "a reply does not follow its generation prompt: correct the template" in report


@pytest.mark.parametrize("is_named", [True, False])
def test_the_template_is_also_asked_with_the_tools_of_the_rows(is_named, tmp_path, caplog):
    """Transformers itself takes the template called tool_use for rows with tools; others branch on tools."""
    plain, with_tools = TEMPLATES["chatml"], OTHER_OPENING
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        {"default": plain, "tool_use": with_tools}
        if is_named
        else "{% if tools %}" + with_tools + "{% else %}" + plain + "{% endif %}"
    )
    row = {"messages": dialogue("hi", "yes"), "tools": [TOOL]}
    for report in reports_of(tokenizer, row, tmp_path, caplog):
        assert re.search(r"with the tools of .*rows\.jsonl:\d+, for the user's 'a' and the assistant's 'b'", report)
        assert "<|thought|><|/thought|>b'" in report and "[assistant]<|answer|>b<eos>" in report
    without = talk_row([user("hi")], "yes")
    assert template_notes(tokenizer, [without], tokenizer.convert_tokens_to_ids("<|im_end|>")) == []


def test_a_response_with_tools_is_written_as_the_template_for_tools_writes_it():
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if tools %}" + TEMPLATES["mistral"] + "{% else %}" + TEMPLATES["chatml"] + "{% endif %}"
    )
    rows = [message_row(bot("b")), message_row(bot("b"), tools=[TOOL])]
    assert response_texts(tokenizer, rows, "chosen") == ["b", " b"]
    assert [turn_end_of(tokenizer, row).token for row in rows] == ["<|im_end|>", "<eos>"]
    (note,) = template_notes(tokenizer, rows, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert note.startswith("with the tools of rows.jsonl:1, the chat template ends the assistant's turns with <eos>")
    (example,), _ = sft_examples([message_row(bot("d"), TALK[:3], tools=[TOOL])], tokenizer, 999, 2, all_turns=True)
    trained = [token for token, is_target in zip(example.response_ids, example.targets, strict=True) if is_target]
    assert tokenizer.decode(trained) == " b<eos> d<eos>"


def test_a_difference_is_told_once():
    tokenizer = byte_tokenizer("r1")
    rows = [message_row(bot("b")), message_row(bot("b"), tools=[TOOL]), message_row(bot("b"), date="today")]
    notes = template_notes(tokenizer, rows, 2)
    assert sum("training reads" in note for note in notes) == 1
    tokenizer.chat_template = OTHER_OPENING
    long = TOOL | {"description": "x" * 1000}
    tools_first = template_notes(tokenizer, [message_row(bot("b"), tools=[long])], 2)
    assert all("x" * 201 not in note for note in tools_first)
