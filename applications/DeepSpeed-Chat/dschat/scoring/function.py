# SPDX-License-Identifier: Apache-2.0
"""Scores from a user's Python function, which reads texts or whole dialogues."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dschat.common.user_function import call_function
from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.rl.types import Rollout
from dschat.run.stop import stopping_together
from dschat.scoring.source import ResponseTexts
from dschat.scoring.url import pause

logger = logging.getLogger(__name__)

RewardFn = Callable[[list[str], list[str], list[dict[str, object]]], Tensor | Sequence[float | None]]
DialogueFn = Callable[[list[Dialogue], list[dict[str, object]]], Tensor]
WAITS = (1.0, 2.0, 4.0)  # seconds before each further call of --on_reward_error retry


class FunctionScores:
    """A :data:`RewardFn`; what it returns is checked."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, function: RewardFn, flag: str, on_error: str = "stop") -> None:
        """Takes a function.

        Args:
            function: prompts, responses and rows → a number for each response.
            flag: that named it, for messages.
            on_error: stop raises what went wrong. retry calls the function again, three times, first. skip calls it
                with each response alone, and gives NaN to those at which it fails. With stop and retry a number that
                is not finite is passed on in the end, since the trainer has a rule for it.
        """
        self.name = getattr(function, "__name__", "function")
        self._function, self._flag, self._on_error = function, flag, on_error

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        if self._on_error == "retry":
            with stopping_together():
                scores = self._tried_again(texts)
        elif self._on_error == "skip":
            scores = self._as_far_as_possible(texts)
        else:
            scores = self._numbers(texts)
        return scores.to(rollout.input_ids.device)

    def _tried_again(self, texts: ResponseTexts) -> Tensor:
        for wait in WAITS:
            try:
                scores = self._numbers(texts)
                if bool(torch.isfinite(scores).all()):
                    return scores
                problem = f"{self._flag}: {self.name} returned numbers that are not finite"
            except UserError as error:
                problem = str(error)
            logger.warning("%s It is called again in %g s.", problem.rstrip(".") + ".", wait)
            pause(wait)
        return self._numbers(texts)

    def _as_far_as_possible(self, texts: ResponseTexts) -> Tensor:
        try:
            scores = self._numbers(texts)
        except UserError as error:
            problem = str(error)
            scores = torch.cat([self._one(texts, row) for row in range(len(texts.responses))])
            failed = int(torch.isnan(scores).sum())
            alone = "%s. Called with each response alone, it fails at %d of %d."
            logger.warning(alone, problem.rstrip("."), failed, len(scores))
        return scores

    def _one(self, texts: ResponseTexts, row: int) -> Tensor:
        try:
            return self._numbers(texts.alone(row))
        except UserError:
            return torch.full((1,), torch.nan)

    def _numbers(self, texts: ResponseTexts) -> Tensor:
        """(B,) float32, on the CPU; None in a list is NaN."""
        rows = [row.extra for row in texts.rows]
        result = call_function(self._function, self._flag, texts.prompts, texts.responses, rows)
        if isinstance(result, list):
            result = [torch.nan if number is None else number for number in result]
        return _checked(result, len(texts.responses), "response", f"{self._flag}: {self.name}")


class FunctionDialogueScores:
    """A :data:`DialogueFn`; what it returns is checked."""

    def __init__(self, function: DialogueFn, flag: str) -> None:
        self._function, self._flag = function, flag

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        result = call_function(self._function, self._flag, list(dialogues), [row.extra for row in rows])
        name = getattr(self._function, "__name__", "function")
        return _checked(result, len(dialogues), "dialogue", f"{self._flag}: {name}")


def _checked(result: object, count: int, kind: str, name: str) -> Tensor:
    """What a function returned, as (count,) float32 on the CPU; raises UserError where it is something else."""
    try:
        scores = torch.as_tensor(result, dtype=torch.float32, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} returned {type(result).__name__}, which is no list of numbers: {error}") from error
    if scores.shape != (count,):
        raise UserError(
            f"{name} returned shape {tuple(scores.shape)} for {count} {kind}s; it must return one number per {kind}."
        )
    return scores
