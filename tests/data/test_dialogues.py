# SPDX-License-Identifier: Apache-2.0
"""States and replies of dialogues: the tokens of one reply, its end token included, under every kind of template."""

import pytest

from dialogue_cases import TEMPLATES, chat_tokenizer, dialogue
from dschat.data.dialogues import check_dialogue, encode_replies, encode_states, messages_of_text, num_turns, state
from dschat.data.encoding import turn_end
from dschat.errors import UserError

TALK = dialogue("first question", "an answer", "second question", "more words", "third", "last")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turn", [0, 1, 2])
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
    bos = "" if text.startswith("<bos>") else "<bos>"
    if end.written:
        assert (bos + text).startswith(whole)
    else:  # this template writes no end of a turn: EOS stands there for the policy to learn
        assert (bos + text).startswith(whole.removesuffix("<eos>"))


def test_both_replies_to_a_state_share_its_ids() -> None:
    tokenizer = chat_tokenizer("llama-3")
    other = [*TALK[:3], {"role": "assistant", "content": "something else"}]
    first, second = encode_states(tokenizer, [state(TALK, 1), state(other, 1)], "x")
    assert first == second


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "a dialogue must be a list"),
        ("hello", "a dialogue must be a list"),
        (dialogue("a", "b")[1:], r"message 1 is of 'assistant' where 'user' is next: roles must alternate"),
        ([*dialogue("a"), *dialogue("b")], r"message 2 is of 'user' where 'assistant'"),
        ([{"role": "system", "content": "x"}], r"message 1 is of 'system'"),
        (dialogue("a", "  "), r"message 2 \(assistant\) is empty"),
        ([{"role": "user", "content": None}], "message 1 must be text"),
        (["a"], "message 1 is of None"),
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


def test_turns_are_counted_from_the_users_messages() -> None:
    assert [num_turns(TALK[:length]) for length in range(1, 7)] == [1, 1, 2, 2, 3, 3]
    assert state(TALK, 1) == TALK[:3]


def test_a_template_that_replies_elsewhere_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' if add_generation_prompt }}"
    with pytest.raises(UserError, match="does not write a reply behind its generation prompt"):
        turn_end(tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if messages | length < 3 else m.content | upper }}|{% endfor %}"
        "{{ '' if add_generation_prompt }}"
    )
    with pytest.raises(UserError, match="otherwise once it is answered"):
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
