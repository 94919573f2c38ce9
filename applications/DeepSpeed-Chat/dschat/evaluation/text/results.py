# SPDX-License-Identifier: Apache-2.0
"""Rows of single texts → the numbers of a model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat.common.statistics import MeanInterval, Rate, bootstrap_ratio, mean_interval, wilson
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
    loss: Rate
    rouge: dict[str, MeanInterval]
    length: float | None

    @property
    def perplexity(self) -> Rate:
        """exp of the loss and of its interval's ends."""
        low, high = (None if end is None else _exp(end) for end in (self.loss.low, self.loss.high))
        return Rate(_exp(self.loss.value), low, high)


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
    sums = {number: (float(row["loss_sum"]), int(row["loss_tokens"])) for number, row in enumerate(rows)}
    totals, tokens = [total for total, _ in sums.values()], sum(number for _, number in sums.values())
    loss = bootstrap_ratio(sums) if all(map(math.isfinite, totals)) else Rate(sum(totals) / tokens)
    assert loss is not None
    drawn = "rouge1" in rows[0]
    return PolicyResult(
        model=rows[0]["model"],
        update=rows[0]["update"],
        rows=len(rows),
        tokens=tokens,
        loss=loss,
        rouge={name: mean_interval([row[name] for row in rows]) for name in NAMES} if drawn else {},
        length=sum(row["response_tokens"] for row in rows) / len(rows) if drawn else None,
    )


def reward_result(rows: Sequence[Row]) -> RewardResult:
    """Numbers of one reward model; of rows, at least one, with `model`, `update`, `chosen_score`, `rejected_score`."""
    margins = [row["chosen_score"] - row["rejected_score"] for row in rows]
    accuracy = wilson(sum(margin > 0 for margin in margins), len(margins))
    assert accuracy is not None
    losses = [_softplus(-margin) for margin in margins]
    loss = mean_interval(losses) if all(map(math.isfinite, losses)) else MeanInterval(sum(losses) / len(losses))
    return RewardResult(rows[0]["model"], rows[0]["update"], len(rows), loss, accuracy)


def _exp(number: float) -> float:
    return math.exp(min(number, 700.0))


def _softplus(number: float) -> float:
    """log(1 + exp(number)), without overflow."""
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))
