# SPDX-License-Identifier: Apache-2.0
"""Step 2, the reward model: the chosen response of a pair shall score above the rejected one."""

from collections.abc import Sequence

from torch import Tensor

from dschat.data.collate import collate_pairs
from dschat.data.examples import PairExample
from dschat.models.engines import TrainedScalar
from dschat.models.scalar import last_scores
from dschat.rl.losses import pairwise_loss
from dschat.run.distributed import device
from dschat.trainers.selfcheck import check_scalar


class RewardTask:
    """Learns to rank pairs of responses."""

    name = "reward"

    def __init__(self, train: Sequence[PairExample], eval: Sequence[PairExample], pad_id: int) -> None:
        self.train, self.eval, self._pad_id = train, eval, pad_id

    def prepare(self, engine: TrainedScalar) -> None:
        pass

    def count(self, examples: Sequence[PairExample]) -> int:
        return len(examples)

    def loss(
        self, engine: TrainedScalar, examples: Sequence[PairExample], count: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.collate(examples)
        scores = last_scores(engine(**tokens), tokens["attention_mask"])
        chosen, rejected = scores.chunk(2)
        return pairwise_loss(chosen, rejected, count)

    def self_check(self, engine: TrainedScalar, examples: Sequence[PairExample]) -> None:
        tokens = self.collate(examples)
        check_scalar(engine, (tokens["input_ids"], tokens["attention_mask"]), self._pad_id)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def collate(self, examples: Sequence[PairExample]) -> dict[str, Tensor]:
        return {name: x.to(device()) for name, x in collate_pairs(examples, self._pad_id).items()}
