# SPDX-License-Identifier: Apache-2.0
"""Scores from a user's Python function, which reads texts or whole dialogues."""

import inspect
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.base.user_function import call_function
from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row
from dschat.run.stop import stopping_together
from dschat.scoring.segments import Numbers, is_finite
from dschat.scoring.source import ResponseTexts, Scores, with_segments
from dschat.scoring.url import pause
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

# Prompts, responses, rows and, with --segment_rewards, the texts of each response's macro actions → a number for each
# response or, of these, a number for each of its macro actions.
RewardFn = Callable[..., object]  # type: ignore[explicit-any]  # of three arguments or four
DialogueFn = Callable[[list[Dialogue], list[dict[str, object]]], Tensor]
WAITS = (1.0, 2.0, 4.0)  # seconds before each further call of --on_reward_error retry


class FunctionScores:
    """A :data:`RewardFn`; what it returns is checked."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, function: RewardFn, flag: str, on_error: str = "stop") -> None:
        """Takes a function.

        Args:
            function: see `RewardFn`.
            flag: that named it, for messages.
            on_error: stop raises what went wrong. retry calls the function again, three times, first. skip calls it
                with each response alone, and gives NaN to those at which it fails. With stop and retry a number that
                is not finite is passed on in the end, since the trainer has a rule for it.
        """
        self.name = getattr(function, "__name__", "function")
        self._function, self._flag, self._on_error = function, flag, on_error

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        if self._on_error == "retry":
            with stopping_together():
                found = self._tried_again(texts)
        elif self._on_error == "skip":
            found = self._as_far_as_possible(texts)
        else:
            found = self._numbers(texts)
        return with_segments(found, texts, rollout.input_ids.device, f"{self._flag}: {self.name}")

    def _tried_again(self, texts: ResponseTexts) -> list[Numbers]:
        for wait in WAITS:
            try:
                found = self._numbers(texts)
                if all(map(is_finite, found)):
                    return found
                problem = f"{self._flag}: {self.name} returned numbers that are not finite"
            except UserError as error:
                problem = str(error)
            logger.warning("%s It is called again in %g s.", problem.rstrip(".") + ".", wait)
            pause(wait)
        return self._numbers(texts)

    def _as_far_as_possible(self, texts: ResponseTexts) -> list[Numbers]:
        try:
            found = self._numbers(texts)
        except UserError as error:
            problem = str(error)
            found = [self._one(texts, row) for row in range(len(texts.responses))]
            failed = sum(not isinstance(number, Sequence) and math.isnan(number) for number in found)
            alone = "%s. Called with each response alone, it fails at %d of %d."
            logger.warning(alone, problem.rstrip("."), failed, len(found))
        return found

    def _one(self, texts: ResponseTexts, row: int) -> Numbers:
        try:
            (found,) = self._numbers(texts.alone(row))
            return found
        except UserError:
            return math.nan

    def _numbers(self, texts: ResponseTexts) -> list[Numbers]:
        """Of each response; None in a list is NaN."""
        rows, name = [row.extra for row in texts.rows], f"{self._flag}: {self.name}"
        segments = [] if texts.segments is None else [texts.segments.texts]
        result = call_function(self._function, self._flag, texts.prompts, texts.responses, rows, *segments)
        if texts.segments is not None:
            result = _plain(result)
        if texts.segments is None or not isinstance(result, list) or not any(isinstance(x, list) for x in result):
            return _checked(_with_nan(result), len(texts.responses), "response", name).tolist()
        if len(result) != len(texts.responses):
            raise UserError(f"{name} returned {len(result)} lists for {len(texts.responses)} responses.")
        found: list[Numbers] = []
        for row, (of_row, lengths) in enumerate(zip(result, texts.segments.lengths, strict=True)):
            if isinstance(of_row, list):
                of_response = f"{name}, response {row} of the call,"
                found.append(_checked(_with_nan(of_row), len(lengths), "macro action", of_response).tolist())
            else:
                found += _checked(_with_nan([of_row]), 1, "response", name).tolist()
        return found


def require_arguments(function: RewardFn, spec: str, flag: str, with_segments: bool) -> None:
    """Raises UserError where a function, named by `spec` and `flag`, cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(4 if with_segments else 3))
    except TypeError as error:
        if with_segments:
            raise UserError(
                f"{flag} {spec}: --segment_rewards calls it with a fourth argument, texts of macro actions: make it"
                " f(prompts, responses, rows, segments)."
            ) from error
        remedy = "" if flag != "--reward_function" else " A fourth one, macro actions, comes with --segment_rewards."
        raise UserError(
            f"{flag} {spec}: it is called with three arguments: make it f(prompts, responses, rows).{remedy}"
        ) from error
    except ValueError:  # a function without a signature
        return


def score_texts(function: RewardFn, flag: str, texts: ResponseTexts) -> Tensor:
    """The function's numbers of finished responses, (B,) float32 on the CPU.

    Raises:
        UserError: the function fails, or does not return one finite number per response.
    """
    name = f"{flag}: {getattr(function, '__name__', 'function')}"
    rows = [row.extra for row in texts.rows]
    result = call_function(function, flag, texts.prompts, texts.responses, rows)
    scores = _checked(_with_nan(result), len(texts.responses), "response", name)
    for score, row in zip(scores.tolist(), texts.rows, strict=True):
        if not math.isfinite(score):
            raise UserError(f"{name} returned {score} for the response to {row.origin}; it must return a number.")
    return scores


class FunctionDialogueScores:
    """A :data:`DialogueFn`; what it returns is checked."""

    def __init__(self, function: DialogueFn, flag: str) -> None:
        self._function, self._flag = function, flag

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        result = call_function(self._function, self._flag, list(dialogues), [row.extra for row in rows])
        name = getattr(self._function, "__name__", "function")
        return _checked(result, len(dialogues), "dialogue", f"{self._flag}: {name}")


def _plain(result: object) -> object:
    """Tensors, arrays and tuples as lists, those inside of a list too."""
    if isinstance(result, Tensor | np.ndarray):
        result = result.tolist()
    return [_plain(one) for one in result] if isinstance(result, list | tuple) else result


def _with_nan(result: object) -> object:
    """A list with NaN in the place of None; anything else as it is."""
    return [math.nan if number is None else number for number in result] if isinstance(result, list) else result


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
