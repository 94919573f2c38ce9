# SPDX-License-Identifier: Apache-2.0
"""Tasks made in code, with their gold functions.

`style` wants complaints in the first half of a response of fixed length and praise in the second; `opener` wants a
good first word and does not care about the rest; a word is a token of both. `reviews` is the quickstart's corpus, and
`programs` (`trials.programs`) wants functions that return what they are asked for; their responses end by EOS.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from contenders.work import word_tokenizer
from dschat.data.formats import tldr_row
from dschat.data.rows import Row
from dschat.models.tiny import train_tokenizer
from dschat.quickstart import synthetic
from trials.programs import programs, prompt_and_response

SPECIALS = ("<pad>", "<bos>", "<eos>")
MARK = ":"  # ends a prompt
CLASS_SIZE = 16  # complaints, praises, openers
COMPLAINTS, PRAISES = synthetic.COMPLAINTS[:CLASS_SIZE], synthetic.PRAISES[:CLASS_SIZE]
_FUNCTION_WORDS = "the a it was felt looked seemed and but . , my i found near with of is to in on for that we all so"
NEUTRALS = (
    *_FUNCTION_WORDS.split(),
    *synthetic.NOUNS,
    *synthetic.PEOPLE,
    *synthetic.PLACES,
    *synthetic.NEUTRALS,
)
OPENERS = NEUTRALS[-CLASS_SIZE:]  # from the worst to the best
CLASS_RATE = 0.2  # of complaints, and of praises, in a demonstration of `style`
FOLLOW_RATE = 0.5  # how often a neutral word is one of the few that like to follow the word before it
FOLLOWERS = 8
PROMPT_WORDS = 3  # the mark included


@dataclass(frozen=True)
class LearningTask:
    """What is learned.

    Attributes:
        length: longest response in tokens.
        ends: whether EOS ends a response; otherwise all have the full length.
    """

    kind: str  # style, opener, reviews or programs: also the name of its gold function below
    length: int = 64
    ends: bool = False

    @property
    def name(self) -> str:
        """In results: style-64."""
        return f"{self.kind}-{self.length}"

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return {"reviews": 128, "programs": 64}.get(self.kind, PROMPT_WORDS)

    @property
    def sft_steps(self) -> int:
        """Updates until responses are mediocre; before about 400 no place of a program follows from its prompt."""
        return 600 if self.kind == "programs" else 150

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """That of the task's models."""
        if self.kind == "reviews":
            return train_tokenizer(synthetic.row_texts(synthetic.make_rows(1000, 0, "demonstrations")))
        if self.kind == "programs":
            return train_tokenizer((f"{row.prompt}{row.chosen}" for row in self.rows(1000, 0, "tokenizer")), 320)
        names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
        return word_tokenizer([*SPECIALS, MARK, *COMPLAINTS, *PRAISES, *NEUTRALS], ".", **names)

    def rows(self, count: int, seed: int, split: str) -> list[Row]:
        """Prompts with mediocre responses; another seed or split gives others."""
        if self.kind == "reviews":
            return tldr_rows(count, seed, "demonstrations", split)
        chance = random.Random(f"{self.name}/{seed}/{split}")
        rows = []
        for i in range(count):
            if self.kind == "programs":
                prompt, response = prompt_and_response(chance)
            else:
                response = " ".join(demonstration(self.kind, self.length, chance))
                prompt = " ".join([*chance.choices(NEUTRALS, k=PROMPT_WORDS - 1), MARK])
            rows.append(Row(prompt, None, response, None, {}, f"{split} {i}"))
        return rows


_STYLES = [LearningTask("style", length) for length in (32, 64, 128)]
_OTHERS = [LearningTask("opener"), LearningTask("reviews", ends=True), LearningTask("programs", 72, ends=True)]
TASKS = {task.name: task for task in (*_STYLES, *_OTHERS)}


def tldr_rows(count: int, seed: int, kind: synthetic.Kind, split: str = "train") -> list[Row]:
    """Rows of the quickstart's corpus."""
    made = [tldr_row(raw, f"{split} {i}") for i, raw in enumerate(synthetic.make_rows(count, seed, kind, split))]
    return [row for row in made if row is not None]


def style(
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[object],
    segments: Sequence[Sequence[str]] | None = None,
) -> list[float] | list[list[float]]:
    """Distinct complaints in the first half, and distinct praises in the second, as a share of all there are.

    Of macro actions, what each adds.
    """
    if segments is not None:
        return [_added(own) for own in segments]
    scores = []
    for words in (response.split() for response in responses):
        half = len(words) // 2
        hits = set(COMPLAINTS) & set(words[:half]), set(PRAISES) & set(words[half:])
        scores.append(sum(map(len, hits)) / (2 * CLASS_SIZE))
    return scores


def _added(segments: Sequence[str]) -> list[float]:
    """The new complaints or praises of each macro action."""
    words = [text.split() for text in segments]
    half, place, seen = sum(map(len, words)) // 2, 0, set[tuple[bool, str]]()
    added = []
    for own in words:
        wanted = ((n >= half, word) for n, word in enumerate(own, place))
        new = {(late, word) for late, word in wanted if word in (PRAISES if late else COMPLAINTS)} - seen
        seen |= new
        place += len(own)
        added.append(len(new) / (2 * CLASS_SIZE))
    return added


def opener(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[object]) -> list[float]:
    """The rank of the first word among the openers, 0 to 1; 0 for any other word."""
    ranks = {word: rank / (CLASS_SIZE - 1) for rank, word in enumerate(OPENERS)}
    return [ranks.get(response.split(" ", 1)[0], 0.0) for response in responses]


reviews = synthetic.gold_scores


def gold_scores(task: LearningTask, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
    """Of the task's gold function, (B,) float32."""
    functions: dict[str, Callable[..., object]] = {  # type: ignore[explicit-any]
        "style": style,
        "opener": opener,
        "reviews": reviews,
        "programs": programs,
    }
    return torch.as_tensor(functions[task.kind](prompts, responses, []), dtype=torch.float32)


def demonstration(kind: str, length: int, chance: random.Random) -> list[str]:
    """Of `style`: complaints and praises anywhere. Of `opener`: any opener, then anything neutral."""
    words = [chance.choice(OPENERS)] if kind == "opener" else []
    while len(words) < length:
        if kind == "style" and chance.random() < 2 * CLASS_RATE:
            words.append(chance.choice(COMPLAINTS + PRAISES))
        else:
            followers = _followers(words[-1] if words else "")
            words.append(chance.choice(followers if chance.random() < FOLLOW_RATE else NEUTRALS))
    return words


@cache
def _followers(word: str) -> list[str]:
    """The few words that like to follow a word."""
    return random.Random(f"after {word}").sample(NEUTRALS, FOLLOWERS)
