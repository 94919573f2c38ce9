# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model, which reads the sampled ids."""

import torch
from torch import Tensor

from dschat.models.engines import Scalar
from dschat.models.scalar import last_scores
from dschat.rl.types import Rollout, select_rows
from dschat.scoring.source import ResponseTexts


class RewardModelScores:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Scalar, batch_size: int) -> None:
        self.model, self._batch_size = model, batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        parts = []
        for rows in torch.arange(len(rollout.input_ids), device=rollout.input_ids.device).split(self._batch_size):
            part = select_rows(rollout, rows)
            parts.append(last_scores(self.model(part.input_ids, part.attention_mask), part.attention_mask))
        return torch.cat(parts)
