# SPDX-License-Identifier: Apache-2.0
"""Models for tests of the demo: one that repeats what it was trained on, one that never ends, and a run's folder."""

import json
from pathlib import Path
from typing import Any

import torch

from dschat.demo.models import GrowingAnswer
from dschat.demo.options import ChatOptions
from dschat.demo.session import Session, Turns
from dschat.models.tiny import make_gemma, train_tokenizer
from dschat.settings.parse import parse
from factories import TEXTS, make_causal_lm, make_classifier, save_folder

QUESTION = "how are you?"
PROMPT = f"\n\nHuman: {QUESTION}\n\nAssistant:"
MARKER = "\n\nHuman:"
VOCABULARY = 300


def text_tokenizer(chat_template: str | None = None) -> Any:
    """One that knows every byte."""
    tokenizer = train_tokenizer(TEXTS, VOCABULARY)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_taught(folder: Path, response: str, ends: bool = True, prompt: str = PROMPT) -> str:
    """Saves a model that answers one prompt with one response, without sampling; its path.

    Args:
        folder: to write into.
        response: what it says.
        ends: it says EOS behind that.
        prompt: the text before.
    """
    tokenizer = text_tokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
    answer = [*tokenizer.encode(response, add_special_tokens=False), *([tokenizer.eos_token_id] if ends else [])]
    model = make_gemma(tokenizer, hidden_size=64, layers=1).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    input_ids = torch.tensor([ids + answer])
    labels = torch.tensor([[-100] * len(ids) + answer])
    for _ in range(300):
        loss = model(input_ids=input_ids, labels=labels).loss
        if loss.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05, f"not learnt: {loss.item()}"
    return save_folder(folder, model.eval(), tokenizer)


def save_endless(folder: Path) -> str:
    """Saves a model that, unless it is sampled, writes words without end; its path."""
    tokenizer = text_tokenizer()
    model = make_causal_lm(seed=3, vocab_size=VOCABULARY, max_position_embeddings=8192)
    texts = [tokenizer.decode([i]) for i in range(VOCABULARY)]
    words = [text.isascii() and text.startswith(" ") and text[1:].isalpha() for text in texts]
    with torch.no_grad():  # a logit of 0 is never the largest
        model.get_input_embeddings().weight[~torch.tensor(words)] = 0
    return save_folder(folder, model, tokenizer)


def save_reward(folder: Path) -> str:
    """Saves a random reward model; its path."""
    return save_folder(folder, make_classifier(seed=5, vocab_size=VOCABULARY), text_tokenizer())


def as_run(folder: Path, **flags: object) -> Path:
    """Writes the flags of a run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_config.json").write_text(json.dumps(flags))
    return folder


def ids_of(text: str) -> list[int]:
    """BOS and the tokens of a text."""
    tokenizer = text_tokenizer()
    return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]


def make_session(model: str | Path, *words: object) -> Session:
    """A session of `dschat demo chat` on the CPU; macro actions are of three tokens unless told."""
    given = ["--model", model, "--device", "cpu", *words]
    if "--termination_condition" not in words:
        given += ["--ngram", 3]
    return Session(parse(ChatOptions, [str(word) for word in given]))


def last(session: Session, message: str = QUESTION, turns: Turns = ()) -> list[GrowingAnswer]:
    """The whole answers of all models."""
    (*_, answers) = session.chat(turns, message, session.sampling)
    return answers
