# SPDX-License-Identifier: Apache-2.0
"""The gold score of a short answer: what the instruction asked for, and a friendly tone.

The tone is that of VADER (Hutto and Gilbert, 2014), a lexicon whose 7,500 words people rated; its package is MIT.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError

if TYPE_CHECKING:
    import torch

SENTENCE_END = re.compile(r"[.!?]+(?=\s|$|[\"')”’])")
WORD = re.compile(r"[a-z'’]+")
# Singulars of topics that are not the plural without its s.
SINGULARS = {
    "beaches": "beach",
    "buses": "bus",
    "glasses": "glass",
    "libraries": "library",
    "scarves": "scarf",
    "stories": "story",
    "tomatoes": "tomato",
}


def gold_score(response: str, topic: str, sentences: int) -> float:
    """Scores an answer between 0 and 1.

    score = ¼ topic + ¼ form + ½ tone − repetition, clamped to 0..1, where
    topic = 1 if the answer names the topic, in the singular or the plural;
    form = 1 if it has as many sentences as asked for, and the last one is complete;
    tone = VADER's compound score if positive, else 0;
    repetition = share of its word pairs that occurred before in the answer.

    Args:
        response: text of the answer.
        topic: a noun as the instruction names it, in lower case: in the plural, or without one ("bread").
        sentences: number of sentences asked for.
    """
    words = WORD.findall(_without_accents(response).lower())
    topic_score = float(_names_topic(words, topic))
    form_score = float(_has_form(response, sentences))
    tone_score = max(0.0, _analyzer().polarity_scores(response)["compound"])
    score = topic_score / 4 + form_score / 4 + tone_score / 2 - _repetition(words)
    return min(1.0, max(0.0, score))


def gold_scores(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, Any]]) -> "torch.Tensor":
    """`gold_score` of B responses, (B,) float32, with the signature of a reward function."""
    import torch

    scores = []
    for response, row in zip(responses, rows, strict=True):
        scores.append(gold_score(response, row["topic"], row["sentences"]))
    return torch.tensor(scores, dtype=torch.float32)


def _names_topic(words: Sequence[str], topic: str) -> bool:
    """Whether the topic or its singular is one of the words, also as a genitive."""
    singular = SINGULARS.get(topic, topic.removesuffix("s"))
    nouns = {word.strip("'’").removesuffix("'s").removesuffix("’s") for word in words}
    return topic in nouns or singular in nouns


def _without_accents(text: str) -> str:
    """The text with the letters below its accents: cafe for café."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(char for char in decomposed if not unicodedata.combining(char))


def _has_form(response: str, sentences: int) -> bool:
    """Whether the text consists of exactly this number of complete sentences."""
    text = response.strip()
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    is_complete = bool(ends) and not any(map(str.isalnum, text[ends[-1] :]))
    return is_complete and len(ends) == sentences


def _repetition(words: Sequence[str]) -> float:
    """Share of neighbouring pairs of words that occurred before; 0 for fewer than two words."""
    pairs = list(pairwise(words))
    if not pairs:
        return 0.0
    return 1 - len(set(pairs)) / len(pairs)


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserError("The gold score needs the package vaderSentiment: pip install 'ma-rlhf[real]'") from error
    return SentimentIntensityAnalyzer()
