# SPDX-License-Identifier: Apache-2.0
"""States and replies of dialogues as tokens under every kind of template; rows → dialogues to talk through again."""

from dataclasses import replace

import pytest

from dialogue_cases import TEMPLATES, chat_tokenizer, dialogue
from dschat.base.errors import UserError
from dschat.data.dialogues import (
    MALFORMED,
    PROMPT_TOO_LONG,
    REPLY_TOO_LONG,
    TOO_LONG,
    TOO_MANY_TURNS,
    DialogueLimits,
    check_dialogue,
    dialogue_examples,
    encode_replies,
    encode_states,
    state,
)
from dschat.data.messages import messages_of_text
from dschat.data.rows import Row
from dschat.data.turn_end import turn_end

TALK = dialogue("first question", "an answer", "second question", "more words", "third", "last")
LIMITS = DialogueLimits(turns=2, prompt_tokens=5, reply_tokens=4, total_tokens=100)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turn", [0, 2])
def test_state_and_reply_are_the_template_up_to_the_end_token(name, turn) -> None:
    tokenizer = chat_tokenizer(name)
    end = turn_end(tokenizer)
    assert tokenizer.convert_ids_to_tokens(end.token_id) == TEMPLATES[name][1]
    (state_ids,) = encode_states(tokenizer, [state(TALK, turn)], "talk.jsonl:1")
    (reply_ids,) = encode_replies(tokenizer, [TALK[: 2 * turn + 2]], end, "talk.jsonl:1")
    assert tokenizer.decode(reply_ids[:-1]).strip() == TALK[2 * turn + 1]["content"]
    assert reply_ids[-1] == end.token_id and end.token_id not in reply_ids[:-1]
    # The whole, written by the template itself, begins with these ids.
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    whole = tokenizer.decode([*state_ids, *reply_ids])
    if not end.written:  # EOS stands there for the policy to learn
        whole = whole.removesuffix("<eos>")
    assert text.removeprefix("<bos>").startswith(whole.removeprefix("<bos>"))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "a dialogue must be a list"),
        (dialogue("a", "b")[1:], r"message 1 has the role 'assistant' instead of 'user': roles must alternate"),
        (dialogue("a", "  "), r"message 2 \(assistant\) is empty"),
        ([{"role": "user", "content": None}], "message 1 must be text"),
    ],
)
def test_bad_dialogues_are_named(messages, complaint) -> None:
    with pytest.raises(UserError, match=f"^talk.jsonl:3: {complaint}"):
        check_dialogue(messages, "talk.jsonl:3")


def test_an_empty_reply_of_a_policy_is_none_of_the_datas_faults() -> None:
    messages = dialogue("a", "", "b")
    assert check_dialogue(messages, "x", sampled=True) == messages
    with pytest.raises(UserError, match="message 3"):
        check_dialogue(dialogue("a", "", ""), "x", sampled=True)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if messages | length < 3 else m.content | upper }}|{% endfor %}"
        "{{ '' if add_generation_prompt }}"
    )
    with pytest.raises(UserError, match="does not write a reply behind its generation prompt"):
        encode_replies(tokenizer, [dialogue("a", "b", "c", "d")[1:]], turn_end(tokenizer), "x")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        turn_end(tokenizer)


def test_prompts_of_hh_are_dialogues() -> None:
    prompt = "\n\nHuman: Hi.\n\nAssistant: Hello: you?\nYes\n\nHuman: Bye.\n\nAssistant:"
    assert messages_of_text(prompt) == dialogue("Hi.", "Hello: you?\nYes", "Bye.")
    assert messages_of_text("\n\nHuman: a\n\nHuman: b\n\nAssistant:") == [*dialogue("a"), *dialogue("b")]
    for other in ("", "POST\n\nHuman: a\n\nAssistant:", "\n\nHuman: a", "\n\nHuman: a\n\nAssistant: b"):
        assert messages_of_text(other) is None


def row_of(messages, number=1):
    """As the reader makes it: the last message of the assistant is the response."""
    response = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
    before = messages[:-1] if response is not None else messages
    return Row(None, before, response, None, {"id": number}, f"talk.jsonl:{number}")


def kept(*dialogues, limits=LIMITS, **options):
    rows = [row_of(messages, number) for number, messages in enumerate(dialogues, start=1)]
    return dialogue_examples(rows, chat_tokenizer(), limits, **options)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (dialogue("a", "b", "c", "d", "e"), TOO_MANY_TURNS),
        (dialogue("a", "b", "q" * 6), PROMPT_TOO_LONG),
        (dialogue("a", "q" * 5, "b"), REPLY_TOO_LONG),
        (dialogue("a", "b")[1:] + dialogue("c"), MALFORMED),
    ],
)
def test_what_is_dropped_is_counted_by_reason(messages, reason, caplog):
    examples, dropped = kept(dialogue("a", "b"), messages)
    assert [example.index for example in examples] == [0] and dropped == {reason: 1}
    if reason == MALFORMED:
        assert "the first row that is left out: talk.jsonl:2: message" in caplog.text
    if reason in (PROMPT_TOO_LONG, REPLY_TOO_LONG):
        assert len(kept(messages, limits=replace(LIMITS, prompt_tokens=6, reply_tokens=5))[0]) == 1


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
    with pytest.raises(UserError, match=r"^talk.jsonl:1: message 2 has the role 'user' instead of 'assistant'"):
        kept(dialogue("a") + dialogue("b"))
    with pytest.raises(UserError, match=r"^p.jsonl:1: the row holds no messages"):
        dialogue_examples([Row("text", None, "b", None, {}, "p.jsonl:1")], chat_tokenizer(), LIMITS)
