# SPDX-License-Identifier: Apache-2.0
"""What a source of scores is: a rollout and its texts → one number per response; the weighted sum of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row
from dschat.models.engines import Scalar
from dschat.rl.types import Rollout
from dschat.run.distributed import sum_over_ranks

UNSCORED = "unscored"  # the number of a response, 1 where it has no score; its mean is their share


@dataclass(frozen=True)
class ResponseTexts:
    """What responses say: B prompts, B responses without special tokens, and the data rows that the prompts are of."""

    prompts: list[str]
    responses: list[str]
    rows: list[Row]

    def alone(self, row: int) -> ResponseTexts:
        """One of the responses."""
        return ResponseTexts([self.prompts[row]], [self.responses[row]], [self.rows[row]])


Measured = Mapping[str, tuple[float, float]]  # metric → sum and count over this rank's rows; the same on every rank


@dataclass(frozen=True)
class Scores:
    """What a source says of a rollout beside the numbers."""

    values: Tensor  # (B,) float32
    missing: Tensor | None = None  # (B,) bool: could not be scored, whatever their value; left out of training
    measured: Measured = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # further numbers of each response by name, (B,) float32


class ScoreSource(Protocol):
    """Scores a rollout: float32 (B,), or `Scores` where there is more to say.

    Attributes:
        model: engine of the scalar model that the self-check compares with plain transformers, if there is one.
    """

    @property
    def model(self) -> Scalar | None: ...

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores: ...


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
        total = torch.zeros(len(missing), device=missing.device)
        for one in self._sources:
            found = one.source(rollout, texts)
            scores = found if isinstance(found, Scores) else Scores(found)
            total = total + one.weight * scores.values.float()
            if one.name:
                parts[one.name] = scores.values.float()
            missing = missing if scores.missing is None else missing | scores.missing
            measured = {**measured, **scores.measured}
        if not self._skips:
            return Scores(total, missing if missing.any() else None, measured, parts)
        missing = missing | ~torch.isfinite(total)
        (total, *columns) = _filled([total, *parts.values()], missing)
        parts = dict(zip(parts, columns, strict=True)) | {UNSCORED: missing.float()}
        return Scores(total, missing, measured, parts)


def _filled(numbers: Sequence[Tensor], missing: Tensor) -> list[Tensor]:
    """Numbers (B,) with the mean over all ranks in the place of what is missing, so that means stay what they are.

    Where there is none on any rank they are NaN, which the trainer meets as it meets other such numbers.
    """
    sums = torch.stack([torch.where(missing, 0.0, x).double().sum() for x in numbers])
    *sums_of_all, count = sum_over_ranks(torch.cat([sums, (~missing).double().sum()[None]])).unbind()
    return [torch.where(missing, (of_all / count).float(), x) for of_all, x in zip(sums_of_all, numbers, strict=True)]
