# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model, which reads the sampled ids."""

import torch
from torch import Tensor

from dschat.models.engines import Scalar
from dschat.models.layout import layouts
from dschat.rl.types import Rollout
from dschat.scoring.source import ResponseTexts


class RewardModelScores:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Scalar, batch_size: int) -> None:
        self.model, self._batch_size = model, batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        scores = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
        for rows in layouts(rollout, self._batch_size):
            scores[rows.rows] = rows.last(self.model(rows.input_ids, None))
        return scores
