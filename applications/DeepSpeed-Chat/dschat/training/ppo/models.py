# SPDX-License-Identifier: Apache-2.0
"""Models of a step-3 run: engines and score sources, forward passes over a rollout, and the actor's moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.models.engines import PolicyEngine, PolicyForward, ScalarForward, Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Layout, PassSize, layouts
from dschat.rollouts.engine import RolloutEngine
from dschat.run.distributed import largest_over_ranks
from dschat.run.stop import raise_if_stopped
from dschat.scoring.source import ResponseTexts, Scores, ScoreSource
from macro_actions.types import Rollout

DECAY = 0.992  # decay of the moving average, per PPO iteration


@dataclass(frozen=True)
class PPOModels:
    """Engines and score sources of a run.

    Attributes:
        actor: the policy that is trained.
        reference: the frozen policy that the KL penalty compares with.
        critic: the value model; None for estimators without one.
        reward: gives the scores.
        rollouts: samples from the actor.
        metric: a second score that is logged and never trained on.
        metric_name: its name in metrics.
        teacher: the frozen policy whose log-ratios are added to the advantages; None without one.
    """

    actor: TrainedPolicy
    reference: PolicyEngine
    critic: TrainedScalar | None
    reward: ScoreSource
    rollouts: RolloutEngine
    metric: Callable[[Rollout, ResponseTexts], Tensor | Scores] | None = None
    metric_name: str = ""
    teacher: PolicyEngine | None = None

    @property
    def trained(self) -> dict[str, Trained]:
        """The actor and the critic, if any, by name."""
        return trained_engines(self.actor, self.critic)


def trained_engines(
    actor: TrainedPolicy, critic: TrainedScalar | None, critic_alone: bool = False
) -> dict[str, Trained]:
    """The engines that are trained, by name: the actor, unless the critic is trained alone, and the critic, if any."""
    engines: dict[str, Trained] = {}
    if not critic_alone:
        engines["actor"] = actor
    if critic is not None:
        engines["critic"] = critic
    return engines


def response_logprobs(model: PolicyForward, rollout: Rollout, temperature: float, size: PassSize) -> Tensor:
    """Log-probs of every response token, (B, R) float32, 0 off the response; without gradient.

    The temperature is that of sampling, 1 for greedy decoding.
    """

    def logprobs(layout: Layout) -> Tensor:
        token_logprobs, _ = model(layout.input_ids, None, layout.targets, temperature, False)
        return layout.spread(token_logprobs)

    return _compute_by_passes(rollout, size, logprobs)


def response_values(model: ScalarForward, rollout: Rollout, size: PassSize) -> Tensor:
    """V(x, y_<j), the state before every response token j, (B, R) float32, 0 off the response; without gradient."""
    return _compute_by_passes(rollout, size, lambda layout: layout.before(model(layout.input_ids, None)))


@torch.no_grad()
def _compute_by_passes(rollout: Rollout, size: PassSize, forward: Callable[[Layout], Tensor]) -> Tensor:
    """Numbers (B, R) of a rollout, from forward passes of a size over rows of similar length."""
    result = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
    for layout in layouts(rollout, size, largest_over_ranks):
        raise_if_stopped()
        result[layout.rows, : layout.width] = forward(layout)
    return result


class MovingAverage:
    """An exponential moving average of the actor's weights (--enable_ema), in float32.

    Every process averages its own part of each weight, so that nothing is gathered for it.
    """

    def __init__(self, engine: TrainedPolicy, decay: float = DECAY) -> None:
        """Starts at the current weights of the actor's engine; `decay` is the weight of the past."""
        self._engine = engine
        self._decay = decay
        # This process's parts of the average, by name.
        self.parts: dict[str, Tensor] = {}
        for name, part in engine.parts().items():
            self.parts[name] = part.float().clone()

    def update(self) -> None:
        """Moves the average towards the engine's weights."""
        for name, part in self._engine.parts().items():
            self.parts[name].lerp_(part.float(), 1 - self._decay)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The average in the model's data types, one weight at a time; see `TrainedPolicy.whole_weights`."""
        return self._engine.whole_weights(self.parts)
