# SPDX-License-Identifier: Apache-2.0
"""What draws responses, whichever way it computes them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dschat.models.engines import TrainedPolicy
from dschat.rl.types import Rollout
from dschat.rollouts.sampling import Sampling


@dataclass(frozen=True)
class Drawn:
    """Responses as an engine drew them."""

    rollout: Rollout  # rows in the order of the prompts; prompt_index counts them
    # (B, R) float32, 0 off the response: log-probs of the drawn tokens under the whole softmax(logits / temperature),
    # as the drawing pass computed them; None where the engine does not know them.
    logprobs: Tensor | None
    bad_rows: Tensor  # (B,) bool: some logits were not finite; such a row is of no use


class Draw(Protocol):
    """Draws one response to each prompt."""

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Drawn:
        """B prompts as ids without padding; a seed for each, which alone decides its draws; → Drawn on the device."""


class RolloutEngine(Protocol):
    """Draws responses from the actor as it is now."""

    def session(self, actor: TrainedPolicy) -> AbstractContextManager[Draw]:
        """Makes the actor's weights ready for drawing, once for all draws inside. Every rank must enter it."""
