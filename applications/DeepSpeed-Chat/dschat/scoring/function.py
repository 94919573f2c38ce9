# SPDX-License-Identifier: Apache-2.0
"""Scores from a user's Python function of texts."""

import logging
import math
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, takes
from dschat.data.rows import Row
from dschat.run.stop import stopping_together
from dschat.scoring.segments import ResponseNumbers, is_finite
from dschat.scoring.source import ResponseTexts, Scores, with_segments
from dschat.scoring.waiting import pause
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

# Takes prompts, responses, rows and, with --segment_rewards, the texts of each response's macro actions. Returns a
# number for each response, or in the latter case a list with a number for each of its macro actions.
RewardFn = Callable[..., object]  # type: ignore[explicit-any]  # three or four arguments
RETRY_WAITS = (1.0, 2.0, 4.0)  # seconds before each further call with --on_reward_error retry


class FunctionScores:
    """Scores from a :data:`RewardFn`, whose result is checked."""

    model: None = None  # the self-check has no model to compare

    def __init__(self, function: RewardFn, flag: str, on_error: str = "stop") -> None:
        """Takes a function.

        Args:
            function: see `RewardFn`.
            flag: that named the function, for messages.
            on_error: "stop" raises UserError. "retry" first calls the function again, three times. "skip" calls it for
                each response alone, and gives NaN to those for which it fails. With stop and retry, numbers that are
                not finite are returned in the end, since the trainer has a rule for them.
        """
        self.name = getattr(function, "__name__", "function")
        self._function = function
        self._flag = flag
        self._on_error = on_error

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        if self._on_error == "retry":
            with stopping_together():
                numbers = self._numbers_with_retries(texts)
        elif self._on_error == "skip":
            numbers = self._numbers_one_by_one(texts)
        else:
            numbers = self.numbers(texts)
        return with_segments(numbers, texts, rollout.input_ids.device, f"{self._flag}: {self.name}")

    def _numbers_with_retries(self, texts: ResponseTexts) -> list[ResponseNumbers]:
        for wait in RETRY_WAITS:
            try:
                numbers = self.numbers(texts)
                if all(map(is_finite, numbers)):
                    return numbers
                problem = f"{self._flag}: {self.name} returned numbers that are not finite"
            except UserError as error:
                problem = str(error)
            logger.warning("%s. It is called again in %g s.", problem.rstrip("."), wait)
            pause(wait)
        return self.numbers(texts)

    def _numbers_one_by_one(self, texts: ResponseTexts) -> list[ResponseNumbers]:
        """Calls the function for all responses; if that fails, for each alone."""
        try:
            return self.numbers(texts)
        except UserError as error:
            problem = str(error)
        numbers: list[ResponseNumbers] = []
        failures = 0
        for row in range(len(texts.responses)):
            try:
                numbers += self.numbers(texts.alone(row))
            except UserError:
                numbers.append(math.nan)
                failures += 1
        logger.warning(
            "%s. Called with each response alone, it fails at %d of %d.", problem.rstrip("."), failures, len(numbers)
        )
        return numbers

    def numbers(self, texts: ResponseTexts) -> list[ResponseNumbers]:
        """The numbers of each response; None becomes NaN."""
        name = f"{self._flag}: {self.name}"
        result = _call(self._function, self._flag, texts)
        if texts.segments is not None:
            result = _to_lists(result)
        has_lists = isinstance(result, list) and any(isinstance(numbers, list) for numbers in result)
        if texts.segments is None or not isinstance(result, list) or not has_lists:
            return checked_numbers(with_nan(result), len(texts.responses), "response", name).tolist()
        if len(result) != len(texts.responses):
            raise UserError(f"{name} returned {len(result)} lists for {len(texts.responses)} responses.")
        numbers: list[ResponseNumbers] = []
        for row, (row_result, lengths) in enumerate(zip(result, texts.segments.lengths, strict=True)):
            if isinstance(row_result, list):
                row_name = f"{name}, response {row} of the call,"
                numbers.append(checked_numbers(with_nan(row_result), len(lengths), "macro action", row_name).tolist())
            else:
                numbers += checked_numbers(with_nan([row_result]), 1, "response", name).tolist()
        return numbers


def _call(function: RewardFn, flag: str, texts: ResponseTexts) -> object:
    """Calls a function with copies of texts, data rows and, if there are any, segments.

    What it changes in them does not reach other sources, the sample files or the next epoch.
    """
    arguments: list[object] = [list(texts.prompts), list(texts.responses), columns_of(texts.rows)]
    if texts.segments is not None:
        arguments.append(deepcopy(texts.segments.texts))
    return call_function(function, flag, *arguments)


def columns_of(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Copies of all columns, also for each of several responses to one row."""
    return [deepcopy(row.extra) for row in rows]


def require_arguments(function: RewardFn, spec: str, flag: str, with_segments: bool) -> None:
    """Raises UserError if the function of a flag does not take three arguments, or four with segments."""
    if takes(function, 4 if with_segments else 3):
        return
    if with_segments:
        raise UserError(
            f"{flag} {spec}: --segment_rewards calls it with a fourth argument, texts of macro actions: make it"
            " f(prompts, responses, rows, segments)."
        )
    remedy = "" if flag != "--reward_function" else " A fourth one, macro actions, comes with --segment_rewards."
    raise UserError(f"{flag} {spec}: it is called with three arguments: make it f(prompts, responses, rows).{remedy}")


def _to_lists(result: object) -> object:
    """Converts tensors, arrays and tuples to lists, at every level."""
    if isinstance(result, Tensor | np.ndarray):
        result = result.tolist()
    if isinstance(result, list | tuple):
        return [_to_lists(element) for element in result]
    return result


def with_nan(result: object) -> object:
    """Replaces None in a list or tuple by NaN; anything else is not changed."""
    if isinstance(result, list | tuple):
        return [math.nan if number is None else number for number in result]
    return result


def checked_numbers(result: object, count: int, kind: str, name: str) -> Tensor:
    """A function's result as (count,) float32 on the CPU; raises UserError if it is anything else."""
    try:
        if not isinstance(result, list | tuple | Tensor | None):  # torch does not read series, nor every array
            result = np.array(result, dtype=np.float64)
        scores = torch.as_tensor(result, dtype=torch.float32, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{name} returned {type(result).__name__}, which is not a list of numbers: {error}") from error
    if scores.shape != (count,):
        raise UserError(
            f"{name} returned shape {tuple(scores.shape)} for {count} {kind}s; it must return one number per {kind}."
        )
    return scores
