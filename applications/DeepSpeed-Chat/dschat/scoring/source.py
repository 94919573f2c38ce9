# SPDX-License-Identifier: Apache-2.0
"""What a source of scores is: it maps a rollout and its texts to one number per response."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dschat.data.rows import Row
from dschat.models.engines import Scalar
from dschat.rl.types import Rollout


@dataclass(frozen=True)
class ResponseTexts:
    """What responses say: B prompts, B responses without special tokens, and the data rows that the prompts are of."""

    prompts: list[str]
    responses: list[str]
    rows: list[Row]


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
