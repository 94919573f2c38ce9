# SPDX-License-Identifier: Apache-2.0
"""Answers that grow: what they say, and why they end."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_cases import MARKER, PROMPT, QUESTION, make_session, save_endless, save_taught, text_tokenizer
from dschat.base.errors import UserError
from dschat.demo.session import Chat, SamplingChoice
from dschat.demo.stream import ENDED, LENGTH, STOPPED, cut_at_marker, longest_marker_start
from dschat.demo.stream import MARKER as BY_MARKER
from factories import make_causal_lm, save_folder

GREEDY = SamplingChoice(do_sample=False, max_new_tokens=40)
LONG = SamplingChoice(do_sample=False, max_new_tokens=4000)
ASK = partial(Chat().prompt, QUESTION)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    save_taught(folder / "ends", " fine, thank you")
    save_taught(folder / "goes-on", f" fine{MARKER} and I", ends=False)
    save_endless(folder / "endless")
    return folder


def answers(session, choice=GREEDY, chat=None, message=QUESTION, stop=None):
    """Every state of the first side's answer."""
    growing = session.answer(partial((chat or Chat()).prompt, message), choice, stop or threading.Event())
    return [sides[0] for sides in growing]


def test_a_greedy_answer_is_what_transformers_itself_generates(models):
    path = models / "endless"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, suppress_tokens=[0, 1])
    expected = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    replies = answers(make_session(path))
    assert replies[-1].text == expected and replies[-1].done == LENGTH and len(replies[-1].tokens) == 40
    assert len(replies) > 10  # it was seen growing
    assert all(after.text.startswith(before.text) for before, after in zip(replies, replies[1:], strict=False))
    assert all(reply.done is None for reply in replies[:-1])


def test_an_answer_ends_with_eos_which_is_not_text(models):
    reply = answers(make_session(models / "ends"))[-1]
    assert reply.text == " fine, thank you" and reply.done == ENDED
    assert "".join(token.text for token in reply.tokens) == " fine, thank you<eos>"


def test_an_answer_ends_before_the_marker_of_the_next_turn_which_is_never_seen(models):
    session, computed = make_session(models / "goes-on"), []
    session._sides[0].model.causal_lm.register_forward_hook(lambda *_: computed.append(1))
    replies = answers(session)
    assert len(computed) == len(text_tokenizer().encode(f" fine{MARKER}", add_special_tokens=False))
    assert replies[-1].text == " fine" and replies[-1].done == BY_MARKER
    assert {reply.text for reply in replies} <= {" fine"[:length] for length in range(6)}
    assert "".join(token.text for token in replies[-1].tokens) == " fine"


def test_an_end_of_conversation_token_ends_an_answer(models):
    comma = "," if len(text_tokenizer().encode(",", add_special_tokens=False)) == 1 else None
    assert comma is not None
    reply = answers(make_session(models / "ends", end_of_conversation_token=comma))[-1]
    assert reply.text == " fine" and reply.done == ENDED and reply.tokens[-1].text == ","


def test_stop_ends_an_answer_after_the_token_that_is_being_computed(models):
    stop, seen = threading.Event(), []
    for (answer,) in make_session(models / "endless").answer(ASK, LONG, stop):
        seen.append(answer)
        stop.set()
    assert seen[-1].done == STOPPED and 0 < len(seen[-1].tokens) < 200


def test_one_who_waits_can_be_stopped_and_a_reader_who_leaves_frees_the_models(models):
    session, stop = make_session(models / "endless"), threading.Event()
    first = session.answer(ASK, LONG, threading.Event())
    next(first)
    stop.set()
    (waiting,) = answers(session, stop=stop)
    assert waiting.done == STOPPED and waiting.text == ""
    first.close()
    assert answers(session)[-1].done == LENGTH


def test_draws_follow_from_the_seed(models):
    choice = SamplingChoice(temperature=1.5, top_k=0, max_new_tokens=20)
    state = torch.random.get_rng_state()
    first, second = (
        [answers(session, choice)[-1].text for _ in range(2)]
        for session in (make_session(models / "endless"), make_session(models / "endless"))
    )
    other = answers(make_session(models / "endless", seed=7), choice)[-1].text
    assert first == second and first[0] != first[1] and other != first[0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_conversation_goes_on_from_the_models_own_answers(models, tmp_path):
    history = f"{PROMPT} fine, thank you\n\nHuman: and now?\n\nAssistant:"
    path = save_taught(tmp_path / "second", " the same", prompt=history)
    session = make_session(models / "ends")
    chat = Chat().with_turn(QUESTION, [answers(session)[-1]])
    assert chat.prompt(" and now? ", 0, SimpleNamespace(tokenizer=text_tokenizer())).row.prompt == history
    session.load(0, path)
    assert answers(session, chat=chat, message=" and now? ")[-1].text == " the same"


def test_what_cannot_be_answered_is_said_in_words(models, tmp_path):
    with pytest.raises(UserError, match="no model is loaded"):
        answers(make_session())
    session = make_session(models / "ends")
    with pytest.raises(UserError, match="type a message first"):
        answers(session, message="  ")
    with pytest.raises(UserError, match=r"has \d+ tokens and the model reads at most 512"):
        answers(session, message="no " * 600)
    broken = make_causal_lm(vocab_size=300)
    with torch.no_grad():
        broken.get_input_embeddings().weight[5] = torch.nan
    session.load(0, save_folder(tmp_path / "broken", broken, text_tokenizer()))
    with pytest.raises(UserError, match="not finite"):
        answers(session)


def test_an_answer_ends_where_the_model_cannot_read_further(models):
    session = make_session(models / "ends")
    choice = SamplingChoice(do_sample=False, max_new_tokens=600)
    message = "no " * 130
    reply = answers(session, choice, message=message)[-1]
    used = len(text_tokenizer().encode(f"\n\nHuman: {message.strip()}\n\nAssistant:"))
    assert len(reply.tokens) <= 512 - used and reply.done in (LENGTH, ENDED)


@pytest.mark.parametrize(
    ("text", "shown", "has_marker", "held_back"),
    [
        ("abc\n\nHum", "abc\n\nHum", False, len("\n\nHum")),
        ("abc\n\nHuman: d", "abc", True, 0),
        ("abc\n", "abc\n", False, 1),
        ("abc\n\n\n", "abc\n\n\n", False, 2),
        ("abc\n\nno", "abc\n\nno", False, 0),
    ],
)
def test_the_start_of_a_marker_is_held_back(text, shown, has_marker, held_back):
    assert cut_at_marker(text, (MARKER,)) == (shown, has_marker)
    assert longest_marker_start(shown, (MARKER,)) == held_back
