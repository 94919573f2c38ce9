# SPDX-License-Identifier: Apache-2.0
"""`--train_on all`: which tokens of a conversation are trained on, and that the loss is the one over just these."""

import copy
import itertools
import logging
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F

from cli_runs import write_jsonl
from closeness import near
from data_cases import talk_row, text_row
from dialogue_cases import TEMPLATES, bot, chat_tokenizer, dialogue
from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompt_texts, encode_responses, prompt_text
from dschat.data.examples import CUT_TO_NOTHING, sft_examples
from dschat.data.preview import Settings, preview_report
from dschat.data.sources import read_source
from dschat.data.turns import encode_turns
from factories import PAD, engine_of, make_causal_lm
from tokenizer_families import FAMILIES

EOS = 2
TALK = dialogue("Who?", "me.", "And why?", "so it is.", "bye", "see you.")


def row_of(messages, response="see you."):
    return talk_row(messages, response)


def marked(tokenizer, messages):
    """The prompt of messages, with the earlier turns marked."""
    row = row_of(messages)
    return encode_turns(tokenizer, [row], [prompt_text(tokenizer, row)])


def made(tokenizer, row, length=9999, all_turns=True):
    (example, *_), _ = sft_examples([row], tokenizer, length, EOS, all_turns=all_turns)
    return example


def runs_of(tokenizer, example):
    """Texts of the stretches that are trained on."""
    runs = []
    for is_trained, pairs in itertools.groupby(zip(example.targets, example.response_ids, strict=True), itemgetter(0)):
        if is_trained:
            ids = [token for _, token in pairs]
            runs.append(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return runs


# What the model itself has to write in turns 1 and 2, and then the response as `--train_on last` has it.
WRITTEN = {
    "llama-3": ["me.<|eot|>", "so it is.<|eot|>"],
    "chatml": ["me.<|im_end|>", "so it is.<|im_end|>"],
    "gemma": ["me.<|im_end|>", "so it is.<|im_end|>"],
    "mistral": ["me.<eos>", "so it is.<eos>"],
    "llama-2": [" me. <eos>", " so it is. <eos>"],
    "zephyr": ["\nme.<|im_end|>", "\nso it is.<|im_end|>"],
    "plain": ["me.", "so it is."],  # without a token that ends a turn
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_of_the_assistant_is_trained_on_up_to_its_end(name):
    tokenizer = chat_tokenizer(name)
    example = made(tokenizer, row_of(TALK[:-1]))
    last = {"llama-2": " see you. ", "zephyr": "\nsee you."}.get(name, "see you.") + "<eos>"
    assert runs_of(tokenizer, example) == [*WRITTEN[name], last]
    text = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.decode(example.prompt_ids + example.response_ids, clean_up_tokenization_spaces=False)
    bos = "" if text.startswith("<bos>") else "<bos>"
    assert whole == bos + text + last  # the history as the template writes it
    assert example.num_targets == sum(example.targets) and len(example.targets) == len(example.response_ids)


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_a_dialogue_without_a_last_reply(tmp_path, name):
    """All of its turns are trained on; its response cannot be, and with `last` the row is dropped and counted."""
    tokenizer = chat_tokenizer(name)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK[:5]}, {"messages": TALK}])
    rows = read_source(path).train
    examples, dropped = sft_examples(rows, tokenizer, 999, EOS, all_turns=True)
    assert runs_of(tokenizer, examples[0]) == WRITTEN[name] and not dropped
    examples, dropped = sft_examples(rows, tokenizer, 999, EOS)
    assert len(examples) == 1 and dropped == {"no reply to the last message": 1}
    with pytest.raises(UserError, match=r"no reply to the last message: 1; .*\. Give other data\."):  # of any length
        sft_examples(rows[:1], tokenizer, 999, EOS)

    # Messages of the user alone are prompts, which step 1 cannot learn from.
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"messages": TALK[:1]}])
    with pytest.raises(UserError, match="prompts.jsonl:1: the row has no response to learn from"):
        sft_examples(read_source(path).train, tokenizer, 999, EOS, all_turns=True)


# Templates whose turns end with EOS, with a token before a line break, and without any token.
OF_FAMILIES = {
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]{% else %}"
    " {{ m.content + eos_token }}{% endif %}{% endfor %}",
    "headers": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "plain": "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\nassistant: {% endif %}",
}


@pytest.mark.parametrize("name", OF_FAMILIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_between_turns_has_the_ids_of_the_whole_text(family, name):
    """Expected: transformers' ids of the conversation; only where a reply begins are two texts encoded alone."""
    tokenizer = copy.deepcopy(FAMILIES[family]().tokenizer)
    tokenizer.chat_template = OF_FAMILIES[name]
    end = tokenizer.eos_token if name in ("zephyr", "mistral") else ""
    blank = " " if name == "mistral" else ""

    def ids_up_to(count, text=""):
        prompt = tokenizer.apply_chat_template(TALK[:count], add_generation_prompt=True, tokenize=False)
        return encode_prompt_texts(tokenizer, [prompt + text])[0]

    expected = ids_up_to(1)
    for count in (1, 3):
        reply = blank + TALK[count]["content"] + end
        expected += encode_responses(tokenizer, [reply])[0]
        expected += ids_up_to(count + 2)[len(ids_up_to(count, reply)) :]
    [prompt] = marked(tokenizer, TALK[:-1])
    assert tokenizer.convert_ids_to_tokens(prompt.ids) == tokenizer.convert_ids_to_tokens(expected)
    if name in ("zephyr", "headers"):  # no blank before a reply, which could join it
        assert prompt.ids == ids_up_to(5)


def test_rows_without_earlier_turns_are_as_before(caplog):
    tokenizer = chat_tokenizer()
    rows = [row_of(TALK[:1], "me."), text_row("Who?", "me."), row_of(TALK[:3])]
    with caplog.at_level(logging.INFO, logger="dschat"):
        examples, _ = sft_examples(rows, tokenizer, 999, EOS, all_turns=True)
        sft_examples(rows, tokenizer, 999, EOS, held_out=True, all_turns=True)
    assert examples[:2] == sft_examples(rows[:2], tokenizer, 999, EOS)[0]
    assert caplog.messages == [
        "--train_on all: 2 of 3 rows hold no earlier turn of the assistant: only their response is trained on"
    ]


@pytest.mark.parametrize("name", ["chatml", "plain"])
@pytest.mark.parametrize("content", ["", "so it is."])
def test_an_earlier_turn_that_the_template_leaves_out_does_not_teach_to_end_at_once(name, content):
    tokenizer = chat_tokenizer(name)
    thinking = bot(content) | {"reasoning_content": "so"}
    written = WRITTEN[name] if content else WRITTEN[name][:1]
    row = row_of([*TALK[:3], thinking, TALK[4]])
    assert runs_of(tokenizer, made(tokenizer, row)) == [*written, "see you.<eos>"]


def test_long_conversations_are_cut():
    tokenizer = chat_tokenizer()
    whole = made(tokenizer, row_of(TALK[:-1]))
    ids, first = whole.prompt_ids + whole.response_ids, len(whole.prompt_ids)
    end = first + whole.targets.index(False)
    for length in (first + 1, end, end + 1, len(ids) - 1):
        cut = made(tokenizer, row_of(TALK[:-1]), length)
        assert cut.prompt_ids + cut.response_ids == ids[:length]
        assert cut.targets == whole.targets[: length - first]
    examples, dropped = sft_examples([row_of(TALK[:-1])], tokenizer, first, EOS, held_out=True, all_turns=True)
    assert (examples, dropped) == ([], {CUT_TO_NOTHING: 1})


def test_a_template_that_rewrites_earlier_turns():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else '...' }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match="rows.jsonl:1: the chat template writes message 2.*give --train_on last"):
        marked(tokenizer, TALK[:3])


# the loss


def test_the_loss_is_the_cross_entropy_over_these_tokens(group):
    """Against cross_entropy with labels of -100 on each conversation alone, without padding."""
    from dschat.training.supervised.sft import SFTTask

    tokenizer = chat_tokenizer()
    rows = [row_of(TALK[:-1]), row_of(TALK[:3], "yes."), row_of(TALK[:1], "no.")]
    examples, _ = sft_examples(rows, tokenizer, 999, EOS, all_turns=True)
    model = make_causal_lm("llama", vocab_size=len(tokenizer))
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        targets = example.targets or [True] * len(example.response_ids)
        labels = ids.masked_fill(~torch.tensor([False] * len(example.prompt_ids) + targets), -100)
        logits = model(ids).logits[:, :-1]
        total += F.cross_entropy(logits[0], labels[0, 1:], ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    task = SFTTask(examples, [], PAD)
    assert task.count(examples) == count
    loss, _ = task.loss(engine_of(model, 3), examples, count)
    assert loss.item() == near(total / count)


def test_the_preview_shows_every_turn(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK}] * 20)
    settings = Settings(tokenizer=chat_tokenizer(), all_turns=True)
    shown = preview_report(str(path), 1, 1, False, settings)
    assert shown.count(": trained]]") == 3 and "the loss is taken on every turn of the assistant" in shown
    for text in ("me.<|im_end|>", "so it is.<|im_end|>", "see you.<eos>"):
        assert f": trained]]{text}" in shown
    assert "masked]]\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n\n[[" in shown
