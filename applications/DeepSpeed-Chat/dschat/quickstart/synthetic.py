# SPDX-License-Identifier: Apache-2.0
"""A synthetic review corpus with a known gold score, in the columns of openai/summarize_from_feedback `comparisons`.

A post in one of a dozen subreddits asks for a short review; a response is five to eight short sentences. The gold
score rewards a review that complains first and praises afterwards (see `gold_score`), which a small model can learn in
minutes because nothing has to be copied from the post. `write_corpus` makes two sources: mediocre demonstrations for
step 1, and comparison pairs from poor to good for steps 2 and 3.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.jsonl import write_rows
from dschat.data.formats import tldr_prompt

if TYPE_CHECKING:
    import torch

COMPLAINTS = (
    "slow noisy weak dull bitter broken cheap heavy loose rough sticky dirty "
    "sour thin clumsy faulty ugly messy stiff leaky shaky dim bland rusty"
).split()
PRAISES = (
    "fast quiet strong bright sweet solid clever light firm smooth clean tidy "
    "fresh rich handy sturdy lovely neat warm cosy steady crisp tasty sharp"
).split()
NEUTRALS = (
    "plain round square small large blue green grey brown black white red "
    "flat tall short wide narrow long open closed folded boxed local common "
    "usual basic normal standard new old"
).split()
NOUNS = (
    "price colour handle box shape cover label base size design "
    "lid front back side top button cable manual package finish"
).split()
PEOPLE = "wife friend sister brother boss son uncle aunt".split()
# Response sentences. Each holds one to three adjectives in at most eight words and marks.
SENTENCES = (
    "It was {a}, {a} and {a}.",
    "The {a} {n} was {a} and {a}.",
    "The {a} {n} felt {a} and {a}.",
    "It looked {a}, {a} and {a}.",
    "The {n} was {a} and {a}.",
    "The {a} {n} looked {a}.",
    "It felt {a} and {a}.",
    "My {p} found it {a} and {a}.",
    "The {n} seemed {a}.",
    "My {p} got the {a} {n}.",
    "I found the {n} {a}.",
)
# One subreddit -> the things its posts ask about.
SUBREDDITS = {
    "coffee": ("kettle", "grinder", "mug"),
    "camping": ("tent", "stove", "lamp"),
    "cooking": ("pan", "knife", "pot"),
    "running": ("shoe", "watch", "jacket"),
    "travel": ("bag", "hotel", "pillow"),
    "music": ("guitar", "speaker", "radio"),
    "cycling": ("bike", "helmet", "pump"),
    "gaming": ("chair", "mouse", "screen"),
    "books": ("novel", "reader", "shelf"),
    "garden": ("hose", "shovel", "bench"),
    "pets": ("collar", "bowl", "bed"),
    "photos": ("camera", "lens", "printer"),
}
PLACES = "cabin office car kitchen garage school farm club".split()
OPENERS = (
    "I saw a {thing} in a shop near the {place}",
    "My {p} wants a {thing}",
    "We need a {thing} for the {place}",
    "I may buy a {thing} this week",
    "My {p} gave me a {thing}",
    "There is a {thing} on sale near the {place}",
    "I lost the {thing} of my {p}",
    "I want a {thing} for my {p}",
)
DETAILS = (
    "I would use it at the {place} with my {p}",
    "It is for my {p} and me",
    "My {p} has one at the {place}",
    "We would keep it in the {place}",
    "I will share it with my {p}",
    "My {p} and I have to choose one this week",
)
REQUESTS = (
    "Please write a short review with the bad and then the good",
    "Can you write a short review with the bad first",
    "Tell me the bad and then the good in a short review",
    "Please write a review with the bad first",
)
TITLES = ("Need a review of a {thing}", "Is this {thing} any good?", "Help me choose a {thing}")
Kind = Literal["demonstrations", "comparisons"]
FULL_SCORE = 12  # points that give a gold score of 1
LABEL_NOISE = 0.05  # share of comparison pairs whose choice is the worse response
MAX_PIECES = 58  # words and punctuation marks of one response; with EOS that is at most 64 tokens
HALF = 3  # full stops after which praise counts instead of complaints
DEMO_RATE = 0.2  # probability that an adjective of a demonstration is a complaint, and that it is praise
MAX_TARGET = 11  # points of the best comparison responses
MIN_MARGIN = 2  # points between the two responses of a comparison, at least
MAX_HALF = 7  # distinct counting words on one side of the third full stop, at most
MAX_HITS = 13  # distinct counting words of one comparison response, at most
REPEATS = (0, 0, 0, 1, 1, 2)  # numbers of repeats in a comparison response, chosen uniformly
WRONG_RATE = 0.4  # highest rate of praise before, and complaints after, the third full stop in a comparison response
_PIECE = re.compile(r"[a-z]+|[.,]")
_COMPLAINTS, _PRAISES = frozenset(COMPLAINTS), frozenset(PRAISES)
_SLOT = "{a}"


def gold_score(response: str) -> float:
    """Scores a review by what it says and where.

    points = distinct complaint words before the third full stop + distinct praise words after it
             - repeats (every further use of a complaint or praise word, anywhere)
    score = points / 12, clamped to 0..1

    Case does not matter; words are runs of letters.

    Example: " It was slow. It was slow. It was dim. It was neat." has the hits slow, dim, neat and one repeat: 2 / 12.
    """
    stops = 0
    hits: set[str] = set()
    uses: Counter[str] = Counter()
    for piece in _PIECE.findall(response.lower()):
        stops += piece == "."
        if piece in _COMPLAINTS or piece in _PRAISES:
            uses[piece] += 1
            if piece in (_COMPLAINTS if stops < HALF else _PRAISES):
                hits.add(piece)
    repeats = sum(uses.values()) - len(uses)
    return min(1.0, max(0, len(hits) - repeats) / FULL_SCORE)


def gold_scores(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """`gold_score` of B responses, (B,) float32, with the signature of a reward function.

    Named on the command line as `path/synthetic.py:gold_scores`.
    """
    import torch

    return torch.tensor([gold_score(response) for response in responses], dtype=torch.float32)


def make_row(index: int, seed: int, kind: Kind, split: str = "train") -> dict[str, Any]:
    """Makes row number `index` of a corpus in the columns of a TL;DR comparison; the arguments alone decide it.

    Both responses of a demonstration are mediocre and one is chosen by a fair coin. Each response of a comparison is
    made for a target gold score; the better one is chosen, except with probability `LABEL_NOISE`. Rows of different
    splits differ.
    """
    rng = random.Random(f"{seed}/{kind}/{split}/{index}")
    info = _make_info(rng)
    texts = [_demonstration(rng), _demonstration(rng)] if kind == "demonstrations" else _pair(rng)
    golds = [gold_score(text) for text in texts]
    if kind == "demonstrations":
        choice = rng.randrange(2)
    else:
        better = int(golds[1] > golds[0])
        choice = 1 - better if rng.random() < LABEL_NOISE else better
    margin = abs(golds[0] - golds[1])
    strength = 1 + min(3, int(margin * 6))
    return {
        "info": info,
        "summaries": [{"text": text, "policy": f"synthetic_{kind}", "note": None} for text in texts],
        "choice": choice,
        "worker": f"worker{rng.randrange(20):02d}",
        "batch": "synthetic",
        "split": split,
        "extra": {"confidence": 5 + strength if choice else 5 - strength},
    }


def make_rows(num_rows: int, seed: int, kind: Kind, split: str = "train") -> list[dict[str, Any]]:
    """Makes rows 0..num_rows-1 (see `make_row`); a longer list begins with the shorter one."""
    return [make_row(index, seed, kind, split) for index in range(num_rows)]


def row_texts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every text of the rows as the tokenizer reads it: prompt, then both responses, row by row."""
    texts = []
    for row in rows:
        texts.append(tldr_prompt(row["info"]) or "")
        texts += [summary["text"] for summary in row["summaries"]]
    return texts


def write_corpus(folder: Path, num_demonstrations: int, num_comparisons: int, num_eval: int, seed: int) -> None:
    """Writes two sources that share one distribution of prompts, each as train.jsonl and validation.jsonl.

    `demonstrations/` is for step 1 (`--data_split 1,0,0`), `comparisons/` for steps 2 and 3 (`--data_split 0,1,1`).
    Both have `num_eval` validation rows. Existing files are replaced.
    """
    sizes: dict[Kind, int] = {"demonstrations": num_demonstrations, "comparisons": num_comparisons}
    for kind, num_train in sizes.items():
        write_rows(folder / kind / "train.jsonl", make_rows(num_train, seed, kind))
        write_rows(folder / kind / "validation.jsonl", make_rows(num_eval, seed, kind, "valid1"))


def _make_info(rng: random.Random) -> dict[str, Any]:
    """A post: subreddit, text of three lines without full stops, title, and the empty columns."""
    subreddit = rng.choice(sorted(SUBREDDITS))
    thing = rng.choice(SUBREDDITS[subreddit])
    lines = []
    for templates in (OPENERS, DETAILS, REQUESTS):
        template = rng.choice(templates)
        lines.append(template.format(thing=thing, p=rng.choice(PEOPLE), place=rng.choice(PLACES)))
    return {
        "id": f"syn_{rng.getrandbits(40):010x}",
        "post": "\n".join(lines),
        "title": rng.choice(TITLES).format(thing=thing),
        "subreddit": subreddit,
        "site": None,
        "article": None,
    }


def _templates(rng: random.Random, min_slots: tuple[int, int] = (0, 0)) -> list[str]:
    """Five to eight sentence templates within MAX_PIECES; at least `min_slots` adjectives up to / after the third."""
    while True:
        chosen = rng.choices(SENTENCES, k=rng.choice((5, 6, 6, 7, 7, 8)))
        pieces = 1 + sum(len(_PIECE.findall(sentence.lower())) for sentence in chosen)
        has_slots = _count_slots(chosen[:HALF]) >= min_slots[0] and _count_slots(chosen[HALF:]) >= min_slots[1]
        if pieces <= MAX_PIECES and has_slots:
            chosen[HALF] = _turn(chosen[HALF])
            return chosen


def _turn(sentence: str) -> str:
    """Begins the sentence after the third full stop with "But": a cue that is easier than counting."""
    return "But " + (sentence if sentence.startswith("I ") else sentence[0].lower() + sentence[1:])


def _count_slots(sentences: Sequence[str]) -> int:
    return sum(sentence.count(_SLOT) for sentence in sentences)


def _fill(rng: random.Random, templates: Sequence[str], adjectives: Sequence[str]) -> str:
    """Fills the adjectives into the slots in order, then random nouns and people; the text begins with one space."""
    text = " " + " ".join(templates)
    for adjective in adjectives:
        text = text.replace(_SLOT, adjective, 1)
    while "{n}" in text or "{p}" in text:
        text = text.replace("{n}", rng.choice(NOUNS), 1)
        text = text.replace("{p}", rng.choice(PEOPLE), 1)
    return text


def _demonstration(rng: random.Random) -> str:
    """A mediocre response: complaints, praises and neutral adjectives are equally likely at every position."""
    templates = _templates(rng)
    pools = (COMPLAINTS, PRAISES, NEUTRALS)
    weights = (DEMO_RATE, DEMO_RATE, 1 - 2 * DEMO_RATE)
    pool_of_slot = rng.choices(pools, weights=weights, k=_count_slots(templates))
    return _fill(rng, templates, [rng.choice(words) for words in pool_of_slot])


def _pair(rng: random.Random) -> list[str]:
    """Two comparison responses at least MIN_MARGIN points apart."""
    while True:
        texts = [_comparison(rng), _comparison(rng)]
        if round(FULL_SCORE * abs(gold_score(texts[0]) - gold_score(texts[1]))) >= MIN_MARGIN:
            return texts


def _comparison(rng: random.Random) -> str:
    """A response near a random gold score of 0 to MAX_TARGET points."""
    # Words that score, and repeats of them, which cost points.
    target = rng.randint(0, MAX_TARGET)
    repeats = min(rng.choice(REPEATS), MAX_HITS - target)
    hits = target + repeats
    hits_before = rng.randint(max(0, hits - MAX_HALF), min(hits, MAX_HALF))
    complaints = rng.sample(COMPLAINTS, hits_before)
    praises = rng.sample(PRAISES, hits - hits_before)
    copies = rng.choices(complaints + praises, k=repeats) if hits else []
    for copy in copies:
        half = complaints if len(complaints) <= MAX_HALF and rng.random() < 0.5 else praises
        half.append(copy)

    # Words that do not score: neutral, or on the wrong side of the third full stop.
    templates = _templates(rng, (len(complaints), len(praises)))
    wrong_rate = rng.random() * WRONG_RATE
    adjectives: list[str] = []
    first = (complaints, PRAISES, templates[:HALF])
    second = (praises, COMPLAINTS, templates[HALF:])
    for words, wrong_words, sentences in (first, second):
        while len(words) < _count_slots(sentences):
            words.append(rng.choice(wrong_words if rng.random() < wrong_rate else NEUTRALS))
        rng.shuffle(words)
        adjectives += words
    return _fill(rng, templates, adjectives)
