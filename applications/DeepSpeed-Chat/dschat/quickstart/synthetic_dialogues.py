# SPDX-License-Identifier: Apache-2.0
"""Dialogues of two turns made in code, with a gold score: small enough for a tiny model to learn in minutes.

In the first turn the user asks for words of one kind. In the second, half of them ask for more of these, so that the
answer depends on the first question, and half for words of another kind. A good reply is four words of the kind that
was asked for. Demonstrations know how a reply looks, and often name words of other kinds.
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
OPENERS = ("Name some {kind}.", "Tell me some {kind}.", "I want some {kind}.")
MORE = ("More please.", "Give me more.")
OTHERS = ("Now some {kind}.", "And some {kind}?")
REPLY_WORDS = 4
RIGHT_RATE = 0.5  # probability that a word of a demonstration is drawn from the kind that was asked for
REPEATED = 0.5  # probability that the user wants more of the same in turn 2

# A user's turn is a line, the reply ends with EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_WORD = re.compile(r"[a-z]+")


def asked_kinds(messages: Sequence[Message]) -> list[str]:
    """The kind that each of the user's messages asks for; "more" is of the kind before."""
    kinds: list[str] = []
    for message in messages:
        if message["role"] == "user":
            named = [kind for kind in KINDS if kind in message["content"]]
            kinds.append(named[0] if named else kinds[-1])
    return kinds


def gold_score(messages: Sequence[Message]) -> float:
    """Mean over the replies of: words of the kind that was asked for / number of words, 4 at least. 0 to 1.

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
    """Makes row number `index` of two turns, a function of its arguments alone: {"messages": …}."""
    rng = random.Random(f"{seed}/{split}/{index}")
    first, second = rng.sample(list(KINDS), 2)
    more = rng.random() < REPEATED
    questions = [
        rng.choice(OPENERS).format(kind=first),
        rng.choice(MORE) if more else rng.choice(OTHERS).format(kind=second),
    ]
    messages = []
    for question, kind in zip(questions, (first, first if more else second), strict=True):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _reply(rng, kind)})
    return {"messages": messages}


def make_demonstration(index: int, seed: int, split: str = "train") -> dict[str, Any]:
    """The same for step 1, which learns the last reply: half of the rows end after the first turn."""
    row = make_dialogue(index, seed, split)
    return {"messages": row["messages"][: 4 if index % 2 else 2]}


def texts_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every message, as a tokenizer will read it."""
    return [message["content"] for row in rows for message in row["messages"]]


def write_dialogues(folder: Path, num_demonstrations: int, num_dialogues: int, num_eval: int, seed: int) -> None:
    """Writes `demonstrations/` for step 1 and `dialogues/` for REFUEL, each as train.jsonl and validation.jsonl.

    All rows are for the one step: `--data_split 1,0,0` in step 1. Files that are there are replaced.
    """
    sets = (("demonstrations", make_demonstration, num_demonstrations), ("dialogues", make_dialogue, num_dialogues))
    for name, make, count in sets:
        write_rows(folder / name / "train.jsonl", [make(index, seed) for index in range(count)])
        write_rows(folder / name / "validation.jsonl", [make(index, seed, "valid") for index in range(num_eval)])


def _reply(rng: random.Random, kind: str) -> str:
    """Four different words, each with a space before it."""
    every = [word for words in KINDS.values() for word in words]
    said: list[str] = []
    while len(said) < REPLY_WORDS:
        word = rng.choice(KINDS[kind] if rng.random() < RIGHT_RATE else every)
        said += [] if word in said else [word]
    return "".join(f" {word}" for word in said)
