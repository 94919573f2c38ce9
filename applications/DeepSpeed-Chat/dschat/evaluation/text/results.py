# SPDX-License-Identifier: Apache-2.0
"""Rows of single texts → the numbers of a model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat.common.statistics import MeanInterval, Rate, bounded_interval, wilson
from dschat.evaluation.text.rouge import NAMES

Row = Mapping[str, Any]  # of a result file


@dataclass(frozen=True)
class PolicyResult:
    """What a policy makes of a split.

    Attributes:
        model: its name.
        update: optimiser updates it had; None if that is not known.
        rows: texts.
        tokens: that the loss is a mean over.
        loss: nats per token, with a 95 % interval over texts; without one where a text's loss is not finite.
        rouge: name → mean over texts, with a 95 % interval; empty where no responses were drawn.
        length: mean of the drawn responses, in tokens; None likewise.
    """

    model: str
    update: int | None
    rows: int
    tokens: int
    loss: MeanInterval
    rouge: dict[str, MeanInterval]
    length: float | None

    @property
    def perplexity(self) -> MeanInterval:
        """exp of the loss and of its interval's ends."""
        low, high = (None if end is None else _exp(end) for end in (self.loss.low, self.loss.high))
        return MeanInterval(_exp(self.loss.value), low, high)


@dataclass(frozen=True)
class RewardResult:
    """What a reward model makes of a split: the mean of −log σ(chosen − rejected), and the share ranked right."""

    model: str
    update: int | None
    rows: int
    loss: MeanInterval
    accuracy: Rate


def policy_result(rows: Sequence[Row]) -> PolicyResult:
    """Numbers of one policy.

    Args:
        rows: at least one, each with `model`, `update`, `loss_sum` (nats) and `loss_tokens`; and where responses were
            drawn `response_tokens`, rouge1, rouge2 and rougeL.
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


def _exp(number: float) -> float:
    return math.exp(min(number, 700.0))


def _softplus(number: float) -> float:
    """log(1 + exp(number)), without overflow."""
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))
