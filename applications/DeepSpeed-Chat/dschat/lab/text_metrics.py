# SPDX-License-Identifier: Apache-2.0
"""Rows of single texts → the numbers of a model: perplexity, ROUGE, loss and accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dschat.base.statistics import MeanInterval, Rate, bounded_interval, wilson

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

NAMES = ("rouge1", "rouge2", "rougeL")
Row = Mapping[str, Any]  # of a result file


def rouge(response: str, reference: str) -> dict[str, float]:
    """F1, 0 to 1, of common words (rouge1), pairs of words (rouge2) and the longest common subsequence (rougeL).

    Words are runs of a–z and 0–9 in lower case, without stemming, so that texts in other scripts share none.
    """
    return {name: score.fmeasure for name, score in _scorer().score(reference, response).items()}


@cache
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # with it comes nltk

    return RougeScorer(list(NAMES), use_stemmer=False)


@dataclass(frozen=True)
class PolicyResult:
    """What a policy makes of a split; the intervals are of 95 %, over texts."""

    model: str
    update: int | None  # optimiser updates it had; None if that is not known
    rows: int  # texts
    tokens: int  # that the loss is a mean over
    loss: MeanInterval  # nats per token; without an interval where a text's loss is not finite
    rouge: dict[str, MeanInterval]  # name → mean over texts; empty where no responses were drawn
    length: float | None  # mean of the drawn responses, in tokens; None likewise

    @property
    def perplexity(self) -> MeanInterval:
        """exp of the loss and of its interval's ends."""
        low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (self.loss.low, self.loss.high))
        return MeanInterval(math.exp(min(self.loss.value, 700.0)), low, high)


@dataclass(frozen=True)
class RewardResult:
    """What a reward model makes of a split: the mean of −log σ(chosen − rejected), and the share ranked right."""

    model: str
    update: int | None
    rows: int
    loss: MeanInterval
    accuracy: Rate


def policy_result(rows: Sequence[Row]) -> PolicyResult:
    """Numbers of one policy; of rows, at least one, with `model`, `update`, `loss_sum` (nats) and `loss_tokens`.

    And where responses were drawn with `response_tokens`, rouge1, rouge2 and rougeL.
    """
    sums = [(float(row["loss_sum"]), int(row["loss_tokens"])) for row in rows]
    total, tokens = (sum(column) for column in zip(*sums, strict=True))
    loss = bounded_interval(sums) if math.isfinite(total) else MeanInterval(total / tokens)
    drawn = "rouge1" in rows[0]
    return PolicyResult(
        model=rows[0]["model"],
        update=rows[0]["update"],
        rows=len(rows),
        tokens=int(tokens),
        loss=loss,
        rouge={name: bounded_interval([(row[name], 1) for row in rows]) for name in NAMES} if drawn else {},
        length=sum(row["response_tokens"] for row in rows) / len(rows) if drawn else None,
    )


def reward_result(rows: Sequence[Row]) -> RewardResult:
    """Numbers of one reward model; of rows, at least one, with `model`, `update`, `chosen_score`, `rejected_score`."""
    margins = [row["chosen_score"] - row["rejected_score"] for row in rows]
    accuracy = wilson(sum(margin > 0 for margin in margins), len(margins))
    assert accuracy is not None
    losses = [(_softplus(-margin), 1) for margin in margins]
    total = sum(loss for loss, _ in losses)
    loss = bounded_interval(losses) if math.isfinite(total) else MeanInterval(total / len(losses))
    return RewardResult(rows[0]["model"], rows[0]["update"], len(rows), loss, accuracy)


def _softplus(number: float) -> float:
    """log(1 + exp(number)), without overflow."""
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


def without_nan(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
