# SPDX-License-Identifier: Apache-2.0
"""ROUGE of a response against the data set's own, by Google's rouge-score."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

NAMES = ("rouge1", "rouge2", "rougeL")


def rouge(response: str, reference: str) -> dict[str, float]:
    """F1, 0 to 1, of common words (rouge1), pairs of words (rouge2) and the longest common subsequence (rougeL).

    Words are runs of a–z and 0–9 in lower case, without stemming, so that texts in other scripts share none.
    """
    return {name: score.fmeasure for name, score in _scorer().score(reference, response).items()}


@cache
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # with it comes nltk

    return RougeScorer(list(NAMES), use_stemmer=False)
