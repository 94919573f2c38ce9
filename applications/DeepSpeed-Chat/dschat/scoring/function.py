# SPDX-License-Identifier: Apache-2.0
"""Scores from a user's Python function, which reads text."""

from collections.abc import Callable

import torch
from torch import Tensor

from dschat.common.user_function import call_function
from dschat.errors import UserError
from dschat.rl.types import Rollout
from dschat.scoring.source import ResponseTexts

RewardFn = Callable[[list[str], list[str], list[dict[str, object]]], Tensor]


class FunctionScores:
    """A :data:`RewardFn`; what it returns is checked."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, function: RewardFn, flag: str) -> None:
        self.name = getattr(function, "__name__", "function")
        self._function, self._flag = function, flag

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        rows = [row.extra for row in texts.rows]
        result = call_function(self._function, self._flag, texts.prompts, texts.responses, rows)
        try:
            scores = torch.as_tensor(result, dtype=torch.float32, device=rollout.input_ids.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self._flag}: {self.name} returned {type(result).__name__}, which is no list of numbers: {error}"
            ) from error
        if scores.shape != (len(texts.responses),):
            raise UserError(
                f"{self._flag}: {self.name} returned shape {tuple(scores.shape)} for {len(texts.responses)} "
                "responses; it must return one number per response."
            )
        return scores
