# SPDX-License-Identifier: Apache-2.0
"""Prompts, two models side by side, scores, macro actions, and the flags."""

import threading

import pytest

from closeness import near
from demo_cases import PROMPT, QUESTION, ids_of, make_session, save_endless, save_reward, save_taught, text_tokenizer
from dschat.base.errors import UserError
from dschat.demo.actions import Stops, answer_html, status_html, summary_html, text_html
from dschat.demo.options import ChatOptions, DemoOptions, SummaryOptions
from dschat.demo.session import (
    Chat,
    SamplingChoice,
    Session,
    ShownAnswer,
    chat_prompt,
    check_system_prompt,
    summary_prompt,
)
from dschat.evaluation.macro_actions import MacroToken
from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE
from dschat.settings.parse import parse
from factories import hf_logprobs, hf_score

GREEDY = SamplingChoice(do_sample=False, max_new_tokens=20)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    save_taught(folder / "ends", " fine, thank you")
    save_endless(folder / "endless")
    save_reward(folder / "reward")
    return folder


def ask(side, model):
    """The question as the first message of a chat."""
    return Chat().prompt(QUESTION, side, model)


def last(session, make_prompt=ask):
    """The whole answers of all sides."""
    (*_, answers) = session.answer(make_prompt, GREEDY, threading.Event())
    return answers


def test_dialogues_have_the_form_of_hh_or_of_the_chat_template():
    turns = [(" Hi ", " Hello.\n")]
    plain = chat_prompt(text_tokenizer(), turns, "Bye")
    assert plain.row.prompt == "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:"
    assert plain.markers == ("\n\nHuman:",)
    templated = chat_prompt(text_tokenizer(CHAT_TEMPLATE), turns, "Bye")
    roles = [(message["role"], message["content"]) for message in templated.row.messages]
    assert roles == [("user", " Hi "), ("assistant", " Hello.\n"), ("user", "Bye")] and templated.markers == ()


TAKES_SYSTEM = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
LEAVES_OUT = "{% for message in messages if message.role != 'system' %}{{ message.content }}\n{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


def test_a_system_prompt_begins_every_conversation():
    tokenizer = text_tokenizer(TAKES_SYSTEM)
    check_system_prompt(tokenizer, "Be brief.", "--model m")
    prompt = chat_prompt(tokenizer, [("Hi", "Hello.")], "Bye", "Be brief.")
    roles = ["system", "user", "assistant", "user"]
    assert [message["role"] for message in prompt.row.messages] == roles
    assert prompt.row.messages[0]["content"] == "Be brief."
    assert Chat(system="Be brief.").with_turn("Hi", [ShownAnswer("Hello.")]).system == "Be brief."


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "without a chat template there is no place for a system prompt"),
        (LEAVES_OUT, "its chat template leaves the system prompt out"),
        (REFUSES + LEAVES_OUT, "its chat template takes no system prompt"),
    ],
)
def test_a_system_prompt_that_a_model_would_not_read_is_refused(template, problem):
    tokenizer = text_tokenizer(template) if template else text_tokenizer()
    with pytest.raises(UserError, match=f"--model m: {problem}: drop --system_prompt"):
        check_system_prompt(tokenizer, "Be brief.", "--model m")
    check_system_prompt(tokenizer, "", "--model m")


def test_the_flag_reaches_the_chat_and_its_model(tmp_path):
    """The model has no chat template."""
    save_taught(tmp_path, " fine")
    session = make_session(tmp_path)
    assert session.new_chat() == Chat()
    options = parse(ChatOptions, ["--model", str(tmp_path), "--system_prompt", "Be brief."])
    session = Session(options, options.termination)
    assert session.new_chat() == Chat(system="Be brief.")
    with pytest.raises(UserError, match="--model .*: without a chat template"):
        session.load_named(0)


def test_posts_have_the_form_of_tldr():
    assert summary_prompt("r/cats", "", " My cat. \n").row.prompt == "POST\nSubreddit: r/cats\nMy cat.\nTL;DR: "
    assert summary_prompt("", "Help", "My cat.").row.prompt == "POST\nHelp\nMy cat.\nTL;DR: "
    with pytest.raises(UserError, match="post is empty"):
        summary_prompt("cats", "title", " ")


def test_two_models_answer_the_same_each_with_its_score_and_macro_actions(models):
    session = make_session(models / "ends", other=str(models / "endless"), reward_model=str(models / "reward"))
    replies = last(session)
    assert replies[0].text == " fine, thank you" and len(replies[1].tokens) == 20
    for reply in replies:
        assert [token.macro_action for token in reply.tokens] == [place // 3 for place in range(len(reply.tokens))]
        end = "<eos>" if reply is replies[0] else ""  # the second was cut at its longest
        answer = text_tokenizer().encode(f"{reply.text}{end}", add_special_tokens=False)
        ids = [*ids_of(PROMPT), *answer]
        assert reply.score == near(hf_score(session.reader.classifier._classifier, ids))
        assert reply.caption.startswith(f"score {reply.score:+.3f}".replace("-", "−"))
    alone = last(make_session(models / "endless"))
    assert alone[0].text == replies[1].text and alone[0].score is None


def test_a_summary_is_asked_for_as_in_training(models, tmp_path):
    path = save_taught(tmp_path / "tldr", "cat sits", prompt="POST\nSubreddit: r/cats\nMy cat sat.\nTL;DR: ")
    session = make_session(path, task="summary")
    assert last(session, lambda *_: summary_prompt("cats", "", "My cat sat."))[0].text == "cat sits"
    assert "template" not in session.status(0) and "form" not in session.status(0)


def test_models_texts_are_shown_and_nothing_in_them_is_obeyed():
    nasty = "<img src=x onerror='f()'> &amp; ${f()} {{f}} `c` \x1b[31m \u202e"
    shown = "&lt;img src=x onerror='f()'&gt; &amp;amp; ${f()} {{f}} `c` \\x1b[31m \\u202e"
    assert text_html(nasty) == shown
    reply = ShownAnswer(nasty, "ended", (MacroToken(nasty, 0), MacroToken("</span>", 1)), -1.5, 0.25)
    for html in (answer_html(reply, True), summary_html(reply, False), status_html(nasty)):
        assert "<img" not in html and "</span></span></span>" not in html.replace("</span></span></div>", "")
        assert not set("`${}\x1b\u202e") & set(html)
    assert "score −1.500 · 2 tokens in 0.2 s · ended · 2 macro actions" in answer_html(reply, True)
    assert "macro action" not in answer_html(reply, False)


def test_stop_is_for_the_answers_of_one_browser():
    stops = Stops()
    with stops.answering("anna") as first, stops.answering("anna") as second, stops.answering("ben") as other:
        stops.stop("anna")
        stops.stop("nobody")
        assert first.is_set() and second.is_set() and not other.is_set()
    assert other.is_set() and not stops._events


@pytest.mark.parametrize(
    "words, message",
    [
        (["chat", "--terminal"], "--model is missing"),
        (["chat", "--top_p", "0"], "--top_p 0"),
        (["chat", "--top_k", "-1"], "--top_k -1"),
        (["chat", "--temperature", "nan"], "--temperature nan"),
        (["chat", "--max_new_tokens", "0"], "--max_new_tokens 0"),
        (["chat", "--seed", "-1"], "--seed -1"),
        (["chat", "--rm_template"], "--rm_template"),
        (["chat", "--ngram", "0"], "--ngram 0"),
        (["chat", "--termination_condition", "no"], "--termination_condition no"),
    ],
)
def test_flags_that_make_no_sense_are_named(words, message):
    with pytest.raises(UserError, match=message):
        parse_options(words)


def parse_options(words: list[str]) -> DemoOptions:
    """Of `dschat demo`."""
    return parse({"chat": ChatOptions, "summary": SummaryOptions}[words[0]], words[1:])


def test_a_word_that_is_no_choice_is_refused_before_a_model_is_opened(capsys):
    with pytest.raises(SystemExit):
        parse_options(["chat", "--ppl_mode", "no"])
    assert "--ppl_mode: invalid choice: 'no'" in capsys.readouterr().err


def test_the_flags_of_macro_actions_are_those_of_step_3():
    options = parse_options(
        ["chat", "--model", "m", "--termination_condition", "ppl", "--ppl_mode", "token", "--isolate_last_token"]
    )
    termination = options.termination
    assert (options.task, options.demo.model, options.demo.host, options.demo.sides) == ("chat", "m", "127.0.0.1", 1)
    assert (termination.termination_condition, termination.conditions["ppl"].ppl_mode) == ("ppl", "token")
    assert termination.isolate_last_token and termination.ngram == 5
    options = parse_options(["summary", "--other", "o", "--ngram", "inf", "--ngram_lengths", "2", "4"])
    termination = options.termination
    assert (
        options.demo.sides == 2
        and termination.ngram == float("inf")
        and termination.conditions["randomized"].ngram_lengths == [2, 4]
    )


@pytest.mark.parametrize("mode", ["token", "prefix"])
def test_perplexity_cuts_by_the_log_probs_of_the_model_that_answers(models, mode):
    session = make_session(models / "endless", termination={"termination_condition": "ppl", "ppl_mode": mode})
    (reply,) = last(session)
    tokenizer, prompt = text_tokenizer(), ids_of(PROMPT)
    answer = tokenizer.encode(reply.text, add_special_tokens=False)
    assert len(answer) == len(reply.tokens)
    logprobs, _ = hf_logprobs(session._sides[0].model.causal_lm, (prompt, answer))
    nll = (-logprobs).double().tolist()
    number, expected = 0, [0]
    for place in range(1, len(nll)):
        before = nll[place - 1] if mode == "token" else sum(nll[:place]) / place
        number += nll[place] > before
        expected.append(number)
    assert [token.macro_action for token in reply.tokens] == expected
