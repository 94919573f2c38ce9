# SPDX-License-Identifier: Apache-2.0
"""Tasks whose data is made in code, with their gold functions.

`style` rewards complaints in the first half of a response and praise in the second; `opener` rewards a good first
word, whatever follows. In both, a word is a token, and EOS is never trained, so that responses have the full length.
`reviews` is the quickstart's corpus, and `programs` (`function_task`) rewards functions that return what the prompt
asks for; responses of both end with EOS.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dschat.data.formats import parse_row
from dschat.data.rows import Row
from dschat.models.tiny import train_tokenizer
from dschat.quickstart import synthetic
from dschat.settings.common import ColumnFlags
from function_task import make_prompt_and_response, programs

TextRow = dict[str, str]  # columns prompt, chosen and, for a pair, rejected
SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
MARK = ":"  # ends a prompt
CLASS_SIZE = 16  # number of complaints, of praises, and of openers
COMPLAINTS = synthetic.COMPLAINTS[:CLASS_SIZE]
PRAISES = synthetic.PRAISES[:CLASS_SIZE]
_FUNCTION_WORDS = "the a it was felt looked seemed and but . , my i found near with of is to in on for that we all so"
NEUTRALS = (*_FUNCTION_WORDS.split(), *synthetic.NOUNS, *synthetic.PEOPLE, *synthetic.PLACES, *synthetic.NEUTRALS)
OPENERS = NEUTRALS[-CLASS_SIZE:]  # in the order of their score, the worst first
CLASS_RATE = 0.2  # share of complaints, and of praises, in a demonstration of `style`
FOLLOW_RATE = 0.5  # probability that a neutral word is one of the FOLLOWERS of the word before it
FOLLOWERS = 8
PROMPT_WORDS = 3  # including the mark


@dataclass(frozen=True)
class LearningTask:
    """A task that a policy learns.

    Attributes:
        kind: style, opener, reviews or programs; also the name of its gold function.
        length: maximum number of tokens of a response.
        ends: whether responses end with EOS; otherwise all of them have `length` tokens.
    """

    kind: str
    length: int = 64
    ends: bool = False

    @property
    def name(self) -> str:
        """Kind and length, such as style-64."""
        return f"{self.kind}-{self.length}"

    @property
    def max_prompt(self) -> int:
        """Maximum number of tokens of a prompt."""
        return {"reviews": 128, "programs": 64}.get(self.kind, PROMPT_WORDS)

    @property
    def sft_steps(self) -> int:
        """Updates of SFT that make responses mediocre. `programs` needs more than 400 to read its prompts at all."""
        return 600 if self.kind == "programs" else 150

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the task's models."""
        if self.kind == "reviews":
            rows = synthetic.make_rows(1000, 0, "demonstrations")
            return train_tokenizer(synthetic.row_texts(rows))
        if self.kind == "programs":
            rows = self.rows(1000, 0, "tokenizer")
            return train_tokenizer([row["prompt"] + row["chosen"] for row in rows], 320)
        return word_tokenizer([*SPECIALS.values(), MARK, *COMPLAINTS, *PRAISES, *NEUTRALS])

    def rows(self, count: int, seed: int, split: str) -> list[TextRow]:
        """Makes prompts with mediocre responses, different ones for each seed and split."""
        if self.kind == "reviews":
            return review_rows(count, seed, "demonstrations", split)
        rng = random.Random(f"{self.name}/{seed}/{split}")
        rows = []
        for _ in range(count):
            if self.kind == "programs":
                prompt, response = make_prompt_and_response(rng)
            else:
                response = " ".join(make_demonstration(self.kind, self.length, rng))
                prompt = " ".join([*rng.choices(NEUTRALS, k=PROMPT_WORDS - 1), MARK])
            rows.append({"prompt": prompt, "chosen": response})
        return rows

    def parse(self, rows: Sequence[TextRow]) -> list[Row]:
        """Parses rows as `dschat` parses those of a file."""
        parsed = []
        for number, row in enumerate(rows):
            parsed.append(parse_row(dict(row), ColumnFlags(), str(number)))
        return [row for row in parsed if isinstance(row, Row)]


TASKS = {
    "style-32": LearningTask("style", 32),
    "style-64": LearningTask("style", 64),
    "style-128": LearningTask("style", 128),
    "opener-64": LearningTask("opener"),
    "reviews-64": LearningTask("reviews", ends=True),
    "programs-72": LearningTask("programs", 72, ends=True),
}


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word between spaces."""
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIALS)


def review_rows(count: int, seed: int, kind: synthetic.Kind, split: str = "train") -> list[TextRow]:
    """Rows of the quickstart's corpus."""
    rows = []
    for number, raw in enumerate(synthetic.make_rows(count, seed, kind, split)):
        row = parse_row(raw, ColumnFlags(), str(number))
        if isinstance(row, Row):
            rows.append({"prompt": row.prompt or "", "chosen": row.chosen or "", "rejected": row.rejected or ""})
    return rows


# ---- Gold functions, with the signature of reward functions ----


def style(
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[object],
    segments: Sequence[Sequence[str]] | None = None,
) -> list[float] | list[list[float]]:
    """Distinct complaints in the first half plus distinct praises in the second, divided by the number of both, 32.

    With `segments`, the texts of each response's macro actions: the part of the score that each of them adds.
    """
    if segments is not None:
        return [_style_by_segment(texts) for texts in segments]
    return [sum(_style_by_segment([response])) for response in responses]


def _style_by_segment(segments: Sequence[str]) -> list[float]:
    """The part of a response's score that each macro action adds: a word scores at its first correct use alone."""
    half = sum(len(text.split()) for text in segments) // 2
    position = 0
    hits: set[tuple[str, bool]] = set()
    added = []
    for text in segments:
        hits_before = len(hits)
        for word in text.split():
            is_late = position >= half
            if word in (PRAISES if is_late else COMPLAINTS):
                hits.add((word, is_late))
            position += 1
        added.append((len(hits) - hits_before) / (2 * CLASS_SIZE))
    return added


def opener(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[object]) -> list[float]:
    """The rank of a response's first word in OPENERS, scaled to 0 to 1; 0 for a word that is no opener."""
    ranks = {word: rank / (CLASS_SIZE - 1) for rank, word in enumerate(OPENERS)}
    return [ranks.get(response.split(" ", 1)[0], 0.0) for response in responses]


reviews = synthetic.gold_scores
GOLD_FUNCTIONS: dict[str, Callable[..., object]] = {  # type: ignore[explicit-any]
    "style": style,
    "opener": opener,
    "reviews": reviews,
    "programs": programs,
}


def gold_scores(task: LearningTask, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
    """Gold scores of B responses: shape (B,), float32."""
    scores = GOLD_FUNCTIONS[task.kind](prompts, responses, [])
    return torch.as_tensor(scores, dtype=torch.float32)


def standardized_scores(
    kind: str,
    mean: float,
    spread: float,
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[object],
    segments: Sequence[Sequence[str]] | None = None,
) -> list[float] | list[list[float]]:
    """Gold scores minus `mean`, divided by the standard deviation `spread`.

    `functools.partial` binds the first three arguments, which leaves the signature of a reward function. With
    `segments`, the mean is subtracted from the score of the last macro action.
    """
    gold = GOLD_FUNCTIONS[kind]
    if segments is None:
        scores = torch.as_tensor(gold(prompts, responses, rows), dtype=torch.float64)
        return ((scores - mean) / spread).tolist()
    by_segment = []
    for scores_of_row in gold(prompts, responses, rows, segments):  # type: ignore[attr-defined]
        scaled = [score / spread for score in scores_of_row]
        scaled[-1] -= mean / spread
        by_segment.append(scaled)
    return by_segment


# ---- Demonstrations ----


def make_demonstration(kind: str, length: int, rng: random.Random) -> list[str]:
    """The words of a mediocre response.

    For `style`, complaints and praises are anywhere in it; for `opener`, its first word is a random opener.
    """
    words = [rng.choice(OPENERS)] if kind == "opener" else []
    while len(words) < length:
        if kind == "style" and rng.random() < 2 * CLASS_RATE:
            words.append(rng.choice(COMPLAINTS + PRAISES))
            continue
        followers = _followers(words[-1] if words else "")
        words.append(rng.choice(followers if rng.random() < FOLLOW_RATE else NEUTRALS))
    return words


@cache
def _followers(word: str) -> list[str]:
    """The FOLLOWERS words that are more likely after a word."""
    return random.Random(f"after {word}").sample(NEUTRALS, FOLLOWERS)
