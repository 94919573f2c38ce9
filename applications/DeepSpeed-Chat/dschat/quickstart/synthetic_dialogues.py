# SPDX-License-Identifier: Apache-2.0
"""Dialogues of two turns made in code, with a gold score: small enough for a tiny model to learn in minutes.

In the first turn the user asks for words of one kind. In the second turn half of the users ask for more of these, so
that the answer depends on the first question, and half ask for words of another kind. A good reply is four words of
the kind that was asked for. Demonstrations have the form of a reply, but often name words of other kinds.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dschat.base.jsonl import write_rows

Message = dict[str, str]

KINDS = {
    "colours": "red blue green white black pink gold grey brown".split(),
    "animals": "cat dog cow pig hen fox bear wolf duck".split(),
    "fruits": "apple pear plum lemon grape melon peach cherry mango".split(),
    "metals": "iron tin lead zinc brass steel copper bronze nickel".split(),
}
ALL_WORDS = [word for words in KINDS.values() for word in words]
OPENERS = ("Name some {kind}.", "Tell me some {kind}.", "I want some {kind}.")
MORE = ("More please.", "Give me more.")
OTHERS = ("Now some {kind}.", "And some {kind}?")
REPLY_WORDS = 4
RIGHT_RATE = 0.5  # probability that a word of a demonstration is chosen from the kind that was asked for
REPEAT_RATE = 0.5  # probability that the user asks for more words of the same kind in turn 2

# A user's turn is a line; a reply ends with EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_WORD = re.compile(r"[a-z]+")


def asked_kinds(messages: Sequence[Message]) -> list[str]:
    """The kind that each of the user's messages asks for; "more" asks for the kind of the previous message."""
    kinds: list[str] = []
    for message in messages:
        if message["role"] != "user":
            continue
        named = [kind for kind in KINDS if kind in message["content"]]
        kinds.append(named[0] if named else kinds[-1])
    return kinds


def gold_score(messages: Sequence[Message]) -> float:
    """Mean over the replies, 0 to 1, of: words of the kind that was asked for / max(4, number of words).

    Example: "Name some metals." → " tin lead cat", "More please." → " zinc tin iron lead red": (2 / 4 + 4 / 5) / 2.
    """
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    total = 0.0
    for kind, reply in zip(asked_kinds(messages), replies, strict=False):
        words = _WORD.findall(reply.lower())
        total += sum(word in KINDS[kind] for word in words) / max(REPLY_WORDS, len(words))
    return total / len(replies)


def gold_scores(dialogues: Sequence[Sequence[Message]], rows: Sequence[dict[str, Any]]) -> list[float]:
    """`gold_score` of each dialogue; named on the command line as `path/synthetic_dialogues.py:gold_scores`."""
    return [gold_score(dialogue) for dialogue in dialogues]


def make_dialogue(index: int, seed: int, split: str = "train") -> dict[str, Any]:
    """Makes row number `index` with two turns, {"messages": …}. Equal arguments give the same row."""
    rng = random.Random(f"{seed}/{split}/{index}")
    first_kind, second_kind = rng.sample(list(KINDS), 2)
    is_repeated = rng.random() < REPEAT_RATE
    first_question = rng.choice(OPENERS).format(kind=first_kind)
    if is_repeated:
        second_kind = first_kind
        second_question = rng.choice(MORE)
    else:
        second_question = rng.choice(OTHERS).format(kind=second_kind)
    return {
        "messages": [
            {"role": "user", "content": first_question},
            {"role": "assistant", "content": _reply(rng, first_kind)},
            {"role": "user", "content": second_question},
            {"role": "assistant", "content": _reply(rng, second_kind)},
        ]
    }


def make_demonstration(index: int, seed: int, split: str = "train") -> dict[str, Any]:
    """Makes a row for step 1, which learns the last reply: half of the dialogues end after the first turn."""
    row = make_dialogue(index, seed, split)
    return {"messages": row["messages"][: 4 if index % 2 else 2]}


def texts_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every message, as a tokenizer reads it."""
    texts = []
    for row in rows:
        texts += [message["content"] for message in row["messages"]]
    return texts


def write_dialogues(folder: Path, num_demonstrations: int, num_dialogues: int, num_eval: int, seed: int) -> None:
    """Writes `demonstrations/` for step 1 and `dialogues/` for REFUEL, each as train.jsonl and validation.jsonl.

    All rows are for one step: `--data_split 1,0,0` in step 1. Existing files are replaced.
    """
    sources = (("demonstrations", make_demonstration, num_demonstrations), ("dialogues", make_dialogue, num_dialogues))
    for name, make, count in sources:
        write_rows(folder / name / "train.jsonl", [make(index, seed) for index in range(count)])
        write_rows(folder / name / "validation.jsonl", [make(index, seed, "valid") for index in range(num_eval)])


def _reply(rng: random.Random, kind: str) -> str:
    """Four different words, each with a space before it."""
    reply: list[str] = []
    while len(reply) < REPLY_WORDS:
        word = rng.choice(KINDS[kind] if rng.random() < RIGHT_RATE else ALL_WORDS)
        if word not in reply:
            reply.append(word)
    return "".join(f" {word}" for word in reply)
