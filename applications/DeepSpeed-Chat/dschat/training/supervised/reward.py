# SPDX-License-Identifier: Apache-2.0
"""Step 2, the reward model: learns to score the chosen response of a pair above the rejected one."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dschat.data.collate import collate_pairs
from dschat.data.examples import PairExample
from dschat.models.engines import TrainedScalar
from dschat.run.distributed import device, is_main
from dschat.run.metrics import STANDARD_ERROR
from dschat.settings.flags import default_of
from dschat.settings.kl import KLFlags
from dschat.training.iteration import on_device
from dschat.training.scalar_check import check_scalar
from dschat.training.supervised.algorithm import RowStatistics, Task, statistics_of_rows
from macro_actions.reward_losses import Pairs, RewardLoss, reward_loss
from macro_actions.types import select_rows

logger = logging.getLogger(__name__)

SMALLEST_SHIFT = 5.0  # nats by which a pair's margin must move the policy, at step 3's default --kl_ctl


class RewardTask(Task[PairExample, TrainedScalar]):
    """Learns to rank pairs of responses."""

    name = "reward"

    def __init__(
        self,
        train: Sequence[PairExample],
        eval: Sequence[PairExample],
        pad_id: int,
        loss: RewardLoss = "end",
        centering: float = 0.0,
    ) -> None:
        """Prepares training on pairs; for `loss` and `centering` see `macro_actions.reward_losses`."""
        self.train = train
        self.eval = eval
        self._pad_id = pad_id
        self._loss = loss
        self._centering = centering

    def count(self, examples: Sequence[PairExample]) -> int:
        if self._loss == "per_sample":
            return sum(example.chosen_ids != example.rejected_ids for example in examples)
        return super().count(examples)

    def lengths(self, examples: Sequence[PairExample]) -> list[int]:
        lengths = []
        for example in examples:
            lengths += [len(example.chosen_ids), len(example.rejected_ids)]
        return lengths

    def loss(
        self, engine: TrainedScalar, examples: Sequence[PairExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected, pairs = self._scores(engine, examples)
        return reward_loss(self._loss, chosen, rejected, pairs, self._centering, count)

    def row_statistics(self, engine: TrainedScalar, examples: Sequence[PairExample]) -> RowStatistics:
        chosen, rejected, pairs = self._scores(engine, examples)
        losses = []
        for row in torch.arange(len(examples), device=device()).split(1):
            pair = select_rows(pairs, row)
            losses.append(reward_loss(self._loss, chosen[row], rejected[row], pair, self._centering, 1.0))
        return statistics_of_rows(losses, [self.count([example]) for example in examples])

    def _scores(self, engine: TrainedScalar, examples: Sequence[PairExample]) -> tuple[Tensor, Tensor, Pairs]:
        """The model's numbers at every token of the chosen and of the rejected sequences, (N, T) each; the pairs."""
        tokens = self.collate(examples)
        chosen, rejected = engine(tokens["input_ids"], tokens["attention_mask"]).chunk(2)
        ids, other_ids = tokens["input_ids"].chunk(2)
        mask, other_mask = tokens["attention_mask"].chunk(2)
        margins = torch.tensor([example.margin for example in examples], dtype=torch.float32, device=device())
        return chosen, rejected, Pairs(ids, other_ids, mask, other_mask, margins)

    def conclude(self, metrics: Mapping[str, float]) -> None:
        error = metrics.get(f"margin{STANDARD_ERROR}", 0.0)
        warning = margin_warning(metrics["accuracy"], metrics["margin"], error)
        if warning is not None and is_main():
            logger.warning("%s", warning)

    def self_check(self, engine: TrainedScalar, examples: Sequence[PairExample]) -> None:
        tokens = self.collate(examples)
        check_scalar(engine, (tokens["input_ids"], tokens["attention_mask"]), self._pad_id)

    def collate(self, examples: Sequence[PairExample]) -> dict[str, Tensor]:
        return on_device(collate_pairs(examples, self._pad_id))


def margin_warning(accuracy: float, margin: float, error: float) -> str | None:
    """Warning that step 3 will learn little, or the wrong thing, from a reward model; None if its margin suffices.

    With the coefficient β of the KL penalty, the best policy prefers the chosen response of a pair to the rejected one
    by margin / β nats more than the reference does (Rafailov et al. 2023, equation 5).

    Args:
        accuracy: share of pairs that are ranked correctly.
        margin: mean of chosen score − rejected score.
        error: standard error of the margin; 0 if it is not known.
    """
    coefficient: float = default_of(KLFlags, "kl_coef")
    nats = max(0.0, margin / coefficient)
    if nats >= SMALLEST_SHIFT:
        return None
    if margin < -2 * error:
        return (
            f"the rejected response of a pair scores {-margin:.2g} higher on average than the chosen one (accuracy"
            f" {accuracy:.3f}): step 3 would train towards rejected responses. See whether --chosen_key and"
            " --rejected_key name the right columns, then train longer or with a higher --learning_rate."
        )
    return (
        f"the scores of a pair differ by only {margin:.2g} on average (accuracy {accuracy:.3f}): with --kl_ctl"
        f" {coefficient:g}, step 3 will prefer the chosen response by at most {nats:.2g} nats, and its KL penalty"
        " decides. Train longer or with a higher --learning_rate, or give step 3"
        " --normalize_scores or a smaller --kl_ctl."
    )
