# SPDX-License-Identifier: Apache-2.0
"""What a source of scores is: a rollout and its texts → one number per response; the weighted sum of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row
from dschat.models.engines import Scalar
from dschat.run.distributed import sum_over_ranks
from dschat.scoring.segments import Numbers, Segments
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

UNSCORED = "unscored"  # the number of a response, 1 where it has no score; its mean is their share


@dataclass(frozen=True)
class ResponseTexts:
    """What responses say: B prompts, B responses without special tokens, and the data rows that the prompts are of."""

    prompts: list[str]
    responses: list[str]
    rows: list[Row]
    segments: Segments | None = None  # with --segment_rewards

    def alone(self, row: int) -> ResponseTexts:
        """One of the responses."""
        segments = None if self.segments is None else self.segments.of_row(row)
        return ResponseTexts([self.prompts[row]], [self.responses[row]], [self.rows[row]], segments)

    def repeated(self, count: int) -> ResponseTexts:
        """The same and so many times the first one more, without segments."""
        more = [0] * count
        prompts, responses = ([*own, *(own[n] for n in more)] for own in (self.prompts, self.responses))
        return ResponseTexts(prompts, responses, [*self.rows, *(self.rows[n] for n in more)])


def prefix_texts(texts: ResponseTexts, ended: Sequence[bool]) -> tuple[ResponseTexts, list[bool]]:
    """Every response up to the end of each of its macro actions, one after the other; the last of these has come to
    its end where the response has, as `ended` (B,) says.
    """
    assert texts.segments is not None  # the caller asks for them
    upto = [(row, text) for row, own in enumerate(texts.segments.texts) for text in accumulate(own)]
    is_last = [
        end
        for own, end_of in zip(texts.segments.texts, ended, strict=True)
        for end in [False] * (len(own) - 1) + [end_of]
    ]
    prompts, rows = [texts.prompts[row] for row, _ in upto], [texts.rows[row] for row, _ in upto]
    return ResponseTexts(prompts, [text for _, text in upto], rows), is_last


Measured = Mapping[str, tuple[float, float]]  # metric → sum and count over this rank's rows; the same on every rank


@dataclass(frozen=True)
class Scores:
    """What a source says of a rollout beside the numbers."""

    values: Tensor  # (B,) float32
    missing: Tensor | None = None  # (B,) bool: could not be scored, whatever their value; left out of training
    measured: Measured = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # further numbers of each response by name, (B,) float32
    # (B, M) float32: rewards of macro actions, parts of the values, where there are such.
    segments: Tensor | None = None


class ScoreSource(Protocol):
    """Scores a rollout: float32 (B,), or `Scores` where there is more to say.

    Attributes:
        model: engine of the scalar model that the self-check compares with plain transformers, if there is one.
    """

    @property
    def model(self) -> Scalar | None: ...

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores: ...


def scores_of(found: Tensor | Scores) -> Scores:
    """What a source says, in its long form."""
    return found if isinstance(found, Scores) else Scores(found)


@cache
def _tell_of_whole_responses(name: str) -> None:
    """Once in a run: sources may be of either kind."""
    logger.warning("%s gives one number for each response, and none for its macro actions.", name)


def with_segments(found: Sequence[Numbers], texts: ResponseTexts, device: torch.device, name: str) -> Tensor | Scores:
    """From what the source of this name says to scores of B responses and, where macro actions were asked for, rewards
    of these.
    """
    if texts.segments is None:
        return torch.tensor(found, device=device)
    if not any(isinstance(numbers, Sequence) for numbers in found):
        _tell_of_whole_responses(name)
    scores, rewards = (x.to(device) for x in texts.segments.rewards(found))
    return Scores(scores, segments=rewards)


class DialogueScores(Protocol):
    """Scores dialogues that end with a reply."""

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        """One number for each of B dialogues, which are of these data rows: (B,) float32, on a CPU."""


@dataclass(frozen=True)
class Weighted:
    """A source in a sum; one without a name is not in metrics and samples beside the sum."""

    name: str
    weight: float
    source: ScoreSource


class WeightedScores:
    """Σ weight · number of the source; every source's own number goes into metrics and samples under its name."""

    def __init__(self, sources: Sequence[Weighted], skips: bool = False) -> None:
        """Takes the sources.

        Args:
            sources: at least one; names differ.
            skips: leave out responses whose sum is not finite. Every rank must then call it, for responses of which
                there are equally many.
        """
        self._sources, self._skips = sources, skips

    @property
    def model(self) -> Scalar | None:
        """The first source's that has one."""
        return next((one.source.model for one in self._sources if one.source.model is not None), None)

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        parts: dict[str, Tensor] = {}
        measured: Measured = {}
        missing = torch.zeros(len(rollout.input_ids), dtype=torch.bool, device=rollout.input_ids.device)
        total, segments = torch.zeros(len(missing), device=missing.device), None
        for one in self._sources:
            scores = scores_of(one.source(rollout, texts))
            total = total + one.weight * scores.values.float()
            if one.name:
                parts[one.name] = scores.values.float()
            if scores.segments is not None:
                own = one.weight * scores.segments
                segments = own if segments is None else segments + own
            missing = missing if scores.missing is None else missing | scores.missing
            measured = {**measured, **scores.measured}
        if not self._skips:
            return Scores(total, missing if missing.any() else None, measured, parts, segments)
        missing = missing | ~torch.isfinite(total)
        (total, *columns) = _filled([total, *parts.values()], missing)
        parts = dict(zip(parts, columns, strict=True)) | {UNSCORED: missing.float()}
        return Scores(total, missing, measured, parts, segments)


def _filled(numbers: Sequence[Tensor], missing: Tensor) -> list[Tensor]:
    """Numbers (B,) with the mean over all ranks in the place of what is missing, so that means stay what they are.

    Where there is none on any rank they are NaN, which the trainer meets as it meets other such numbers.
    """
    sums = torch.stack([torch.where(missing, 0.0, x).double().sum() for x in numbers])
    *sums_of_all, count = sum_over_ranks(torch.cat([sums, (~missing).double().sum()[None]])).unbind()
    return [torch.where(missing, (of_all / count).float(), x) for of_all, x in zip(sums_of_all, numbers, strict=True)]
