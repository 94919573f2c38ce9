# SPDX-License-Identifier: Apache-2.0
"""Two reward sources: a reward model, which reads the sampled ids, and a Python function, which reads text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat.errors import UserError
from dschat.functions import call_function
from dschat.models.scalar import last_scores
from dschat.rl.types import Rollout, select_rows

RewardFn = Callable[[list[str], list[str], list[dict[str, Any]]], Tensor]


@dataclass(frozen=True)
class RolloutText:
    """What a rollout says, for reward functions and samples: B prompts, responses (no special tokens) and rows."""

    prompts: list[str]
    responses: list[str]
    rows: list[dict[str, Any]]


class RewardSource(Protocol):
    """Scores a rollout: float32 (B,)."""

    def __call__(self, rollout: Rollout, text: RolloutText) -> Tensor: ...


class RewardModel:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Callable[..., Tensor], batch_size: int) -> None:
        self.model, self._batch_size = model, batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout, text: RolloutText) -> Tensor:
        parts = []
        for rows in torch.arange(len(rollout.input_ids), device=rollout.input_ids.device).split(self._batch_size):
            part = select_rows(rollout, rows)
            parts.append(last_scores(self.model(part.input_ids, part.attention_mask), part.attention_mask))
        return torch.cat(parts)


class FunctionReward:
    """A :data:`RewardFn`; what it returns is checked."""

    def __init__(self, function: RewardFn, flag: str) -> None:
        self.name = getattr(function, "__name__", "function")
        self._function, self._flag = function, flag

    def __call__(self, rollout: Rollout, text: RolloutText) -> Tensor:
        result = call_function(self._function, self._flag, text.prompts, text.responses, text.rows)
        try:
            scores = torch.as_tensor(result, dtype=torch.float32, device=rollout.input_ids.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self._flag}: {self.name} returned {type(result).__name__}, which is no list of numbers: {error}"
            ) from error
        if scores.shape != (len(text.responses),):
            raise UserError(
                f"{self._flag}: {self.name} returned shape {tuple(scores.shape)} for {len(text.responses)} responses; "
                "it must return one number per response."
            )
        if not bool(torch.isfinite(scores).all()):
            row = int((~torch.isfinite(scores)).nonzero()[0])
            raise UserError(
                f"{self._flag}: {self.name} returned {float(scores[row])} for the response {text.responses[row]!r}; "
                "every score must be finite."
            )
        return scores
