# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the actor's weights (``--enable_ema``)."""

from collections.abc import Iterator

from torch import Tensor

from dschat.models.engines import TrainedPolicy

DECAY = 0.992  # per PPO iteration


class MovingAverage:
    """The average in float32. Every process averages its own part of each weight, so nothing is gathered for it."""

    def __init__(self, engine: TrainedPolicy, decay: float = DECAY) -> None:
        """Starts at the engine's weights.

        Args:
            engine: of the actor.
            decay: weight of the past; 1 − decay is that of the present.

        Attributes:
            parts: this process's parts of the average, by name.
        """
        self._engine, self._decay = engine, decay
        self.parts = {name: part.float().clone() for name, part in engine.parts().items()}

    def update(self) -> None:
        """Moves the average towards the engine's weights."""
        for name, part in self._engine.parts().items():
            self.parts[name].lerp_(part.float(), 1 - self._decay)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The average in the model's data types, one weight at a time; see `TrainedPolicy.whole_weights`."""
        return self._engine.whole_weights(self.parts)
