# SPDX-License-Identifier: Apache-2.0
"""Prompts, answers and why they end, two models with scores and macro actions, sampling of the run."""

import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from closeness import near
from demo_cases import (
    MARKER,
    PROMPT,
    QUESTION,
    as_run,
    ids_of,
    last,
    make_session,
    save_endless,
    save_reward,
    save_taught,
    text_tokenizer,
)
from dschat.base.errors import UserError
from dschat.demo.models import ENDED, LENGTH, GrowingAnswer
from dschat.demo.models import MARKER as BY_MARKER
from dschat.demo.options import ChatOptions
from dschat.demo.page import answers_html
from dschat.demo.sampling import SamplingChoice, choose_sampling
from dschat.demo.session import Turn, chat_prompt, check_system_prompt, summary_prompt
from dschat.evaluation.macro_actions import MacroToken
from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE
from dschat.settings.parse import parse
from factories import hf_logprobs, hf_score

GREEDY = ("--temperature", 0, "--max_new_tokens", 20)
DRAWN = ("--temperature", 1.5, "--top_k", 0, "--max_new_tokens", 8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    save_taught(folder / "ends", " fine, thank you")
    save_taught(folder / "goes-on", f" fine{MARKER} and I", ends=False)
    save_endless(folder / "endless")
    save_reward(folder / "reward")
    return folder


def test_dialogues_have_the_form_of_hh_or_of_the_chat_template():
    turns = [(" Hi ", " Hello.\n")]
    plain = chat_prompt(text_tokenizer(), turns, "Bye")
    assert plain.prompt == "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:"
    templated = chat_prompt(text_tokenizer(CHAT_TEMPLATE), turns, "Bye")
    roles = [(message["role"], message["content"]) for message in templated.messages]
    assert roles == [("user", " Hi "), ("assistant", " Hello.\n"), ("user", "Bye")]


def test_posts_have_the_form_of_tldr():
    assert summary_prompt("r/cats", "", " My cat. \n").prompt == "POST\nSubreddit: r/cats\nMy cat.\nTL;DR: "
    assert summary_prompt("", "Help", "My cat.").prompt == "POST\nHelp\nMy cat.\nTL;DR: "
    with pytest.raises(UserError, match="post is empty"):
        summary_prompt("cats", "title", " ")


TAKES_SYSTEM = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
LEAVES_OUT = "{% for message in messages if message.role != 'system' %}{{ message.content }}\n{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


def test_a_system_prompt_begins_every_conversation():
    tokenizer = text_tokenizer(TAKES_SYSTEM)
    check_system_prompt(tokenizer, "Be brief.", "m")
    prompt = chat_prompt(tokenizer, [("Hi", "Hello.")], "Bye", "Be brief.")
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[0]["content"] == "Be brief."


@pytest.mark.parametrize("template", [None, LEAVES_OUT, REFUSES + LEAVES_OUT])
def test_a_system_prompt_that_a_model_would_not_read_is_refused(template):
    tokenizer = text_tokenizer(template) if template else text_tokenizer()
    with pytest.raises(UserError, match="m: .* chat template .*: drop --system_prompt"):
        check_system_prompt(tokenizer, "Be brief.", "m")
    check_system_prompt(tokenizer, "", "m")


def test_the_flag_reaches_the_model(models):
    with pytest.raises(UserError, match="without a chat template"):
        make_session(models / "ends", "--system_prompt", "Be brief.")


def test_a_greedy_answer_is_what_transformers_itself_generates(models):
    path = models / "endless"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    session = make_session(path, *GREEDY)
    replies = [answers[0] for answers in session.chat((), QUESTION, session.sampling)]
    assert replies[-1].text == expected and replies[-1].done == LENGTH and len(replies[-1].tokens) == 20
    assert len(replies) > 5  # it was seen growing
    assert all(reply.done is None and expected.startswith(reply.text) for reply in replies[:-1])


@pytest.mark.parametrize(
    ("flags", "text", "end"), [((), " fine, thank you", "<eos>"), (("--end_of_conversation_token", ","), " fine", ",")]
)
def test_an_answer_ends_with_its_end_token_which_is_not_text(models, flags, text, end):
    (reply,) = last(make_session(models / "ends", *GREEDY, *flags))
    assert reply.text == text and reply.done == ENDED
    assert "".join(token.text for token in reply.tokens) == f"{text}{end}"


def test_an_answer_ends_before_the_next_turn(models):
    (reply,) = last(make_session(models / "goes-on", *GREEDY))
    assert reply.text == " fine" and reply.done == BY_MARKER
    assert "".join(token.text for token in reply.tokens) == " fine"


def test_a_reader_who_leaves_ends_the_generation(models):
    session = make_session(models / "endless", "--temperature", 0, "--max_new_tokens", 4000)
    computed = []
    session.models[0].causal_lm.register_forward_hook(lambda *_: computed.append(1))
    growing = session.chat((), QUESTION, session.sampling)
    next(growing)
    growing.close()
    assert len(computed) < 1000


def test_draws_follow_from_the_seed(models):
    sessions = [make_session(models / "endless", *DRAWN, "--seed", seed) for seed in (1, 1, 7)]
    first, second, other = [[last(session)[0].text for _ in range(2)] for session in sessions]
    assert first == second and first[0] != first[1] and other[0] != first[0]


def test_the_conversation_goes_on_from_the_models_own_answers(models, tmp_path):
    history = f"{PROMPT} fine, thank you\n\nHuman: and now?\n\nAssistant:"
    path = save_taught(tmp_path / "second", " the same", prompt=history)
    first = last(make_session(models / "ends", *GREEDY))
    turns = (Turn(QUESTION, tuple(first)), Turn("a message that was not answered", ()))
    assert last(make_session(path, *GREEDY), "and now?", turns)[0].text == " the same"


def test_what_cannot_be_answered_is_said_in_words(models):
    session = make_session(models / "ends", *GREEDY)
    with pytest.raises(UserError, match="type a message first"):
        last(session, "  ")
    with pytest.raises(UserError, match=r"has \d+ tokens, the model reads 512"):
        last(session, "no " * 600)
    long = "no " * 130
    (reply,) = last(make_session(models / "ends", "--temperature", 0, "--max_new_tokens", 600), long)
    used = len(text_tokenizer().encode(f"\n\nHuman: {long.strip()}\n\nAssistant:"))
    assert len(reply.tokens) <= 512 - used and reply.done in (LENGTH, ENDED)


def test_what_is_no_model_that_writes_is_refused(models, tmp_path):
    for path in (models / "reward", tmp_path / "away"):
        with pytest.raises(UserError, match=f"--model {path}"):
            make_session(path)


def test_two_models_answer_the_same_each_with_its_score_and_macro_actions(models):
    session = make_session(
        models / "ends", *GREEDY, "--other", models / "endless", "--reward_model", models / "reward"
    )
    replies = last(session)
    assert replies[0].text == " fine, thank you" and len(replies[1].tokens) == 20
    for reply in replies:
        assert [token.macro_action for token in reply.tokens] == [place // 3 for place in range(len(reply.tokens))]
        end = "<eos>" if reply is replies[0] else ""  # the second was cut at its longest
        answer = text_tokenizer().encode(f"{reply.text}{end}", add_special_tokens=False)
        assert reply.score == near(hf_score(session.reader.classifier._classifier, [*ids_of(PROMPT), *answer]))
        assert reply.caption.startswith(f"score {reply.score:+.3f}".replace("-", "−"))
    alone = last(make_session(models / "endless", *GREEDY))
    assert alone[0].text == replies[1].text and alone[0].score is None


def test_perplexity_cuts_by_the_log_probs_of_the_model_that_answers(models):
    flags = ("--termination_condition", "ppl", "--ppl_mode", "prefix")
    session = make_session(models / "endless", *GREEDY, *flags)
    (reply,) = last(session)
    answer = text_tokenizer().encode(reply.text, add_special_tokens=False)
    logprobs, _ = hf_logprobs(session.models[0].causal_lm, (ids_of(PROMPT), answer))
    nll = (-logprobs).double().tolist()
    number, expected = 0, [0]
    for place in range(1, len(nll)):
        number += nll[place] > sum(nll[:place]) / place
        expected.append(number)
    assert [token.macro_action for token in reply.tokens] == expected


def test_how_a_run_sampled_is_how_the_demo_samples_unless_a_flag_says_otherwise(models, tmp_path):
    run = as_run(tmp_path / "ppo", temperature=0.7, top_k=9, max_answer_seq_len=33)
    shutil.copytree(models / "endless", run / "actor")

    def chosen(path, *words):
        return choose_sampling(parse(ChatOptions, ["--model", str(path), *words]).demo, str(path))

    assert chosen(run / "actor") == SamplingChoice(0.7, 9, 1.0, 33)
    assert chosen(run / "actor", "--top_k", "0", "--temperature", "0") == SamplingChoice(0.0, 0, 1.0, 33)
    alone = shutil.copytree(models / "endless", tmp_path / "alone")
    (alone / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20}'
    )
    assert chosen(alone) == SamplingChoice(0.6, 20, 0.95, 128)
    (alone / "generation_config.json").write_text('{"do_sample": false}')
    assert chosen(alone).temperature == 0
    (alone / "generation_config.json").unlink()
    assert chosen(alone) == SamplingChoice(0.8, 50, 1.0, 128)


def test_models_texts_are_shown_and_nothing_in_them_is_obeyed():
    nasty = "<img src=x onerror='f()'> &amp; ${f()} {{f}} `c` \x1b[31m \u202e"
    tokens = (MacroToken(nasty, 0), MacroToken("</span>", 1))
    done = GrowingAnswer(nasty, "ended", tokens, -1.5, 0.25)
    for html in (answers_html([nasty, "b"], [GrowingAnswer(nasty), done]), answers_html(["a"], [done])):
        assert "<img" not in html and not set("`${}\x1b\u202e") & set(html)
    assert done.caption == "score −1.500 · 2 tokens, 2 macro actions, in 0.2 s · ended"
