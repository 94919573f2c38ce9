# SPDX-License-Identifier: Apache-2.0
"""What a source of scores is: it maps a rollout and its texts to one number per response."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dschat.data.formats.rows import Row
from dschat.models.engines import Scalar
from dschat.rl.types import Rollout


@dataclass(frozen=True)
class ResponseTexts:
    """What responses say: B prompts, B responses without special tokens, and the data rows that the prompts are of."""

    prompts: list[str]
    responses: list[str]
    rows: list[Row]


class ScoreSource(Protocol):
    """Scores a rollout: float32 (B,).

    Attributes:
        model: engine of the scalar model that the self-check compares with plain transformers, if there is one.
    """

    @property
    def model(self) -> Scalar | None: ...

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor: ...
