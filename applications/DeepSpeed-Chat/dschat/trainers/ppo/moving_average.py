# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the actor's weights (``--enable_ema``)."""

from torch import Tensor

from dschat.models.engines import TrainedPolicy

DECAY = 0.992  # per PPO iteration


class MovingAverage:
    """The average of whole weights, in float32 in the main process's CPU memory: the same at any ZeRO stage."""

    def __init__(self, engine: TrainedPolicy, decay: float = DECAY) -> None:
        """Starts at the engine's weights. Every rank must call it.

        Args:
            engine: of the actor.
            decay: weight of the past; 1 − decay is that of the present.

        Attributes:
            weights: the average, by name, on the main process; {} on the others.
        """
        self._engine, self._decay = engine, decay
        state = engine.full_state_dict()
        self.weights = {name: tensor.float() for name, tensor in state.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}

    def update(self) -> None:
        """Moves the average towards the engine's weights. Every rank must call it."""
        for name, tensor in self._engine.full_state_dict().items():
            self.weights[name].lerp_(tensor.float(), 1 - self._decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The average in the model's data types on the main process; {} on the others."""
        return {name: tensor.to(self._dtypes[name]) for name, tensor in self.weights.items()}
