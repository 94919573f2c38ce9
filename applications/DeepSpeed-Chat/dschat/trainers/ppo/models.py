# SPDX-License-Identifier: Apache-2.0
"""The models of a run of step 3, and what they say of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.models.engines import PolicyEngine, PolicyForward, ScalarForward, Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Layout, layouts
from dschat.rl.types import Rollout, ScoredRollout, Trajectory, without_responses
from dschat.rollouts.engine import RolloutEngine
from dschat.run.stop import raise_if_stopped
from dschat.scoring.source import Measured, ResponseTexts, Scores, ScoreSource

# Numbers (B,) of each response beside its score, by name: what the parts of the score say, and the metric function.
Beside = Mapping[str, Tensor]


@dataclass(frozen=True)
class PPOModels:
    """Engines and score sources of a run, and what draws from the actor; without a critic it is None."""

    actor: TrainedPolicy
    reference: PolicyEngine
    critic: TrainedScalar | None
    reward: ScoreSource
    rollouts: RolloutEngine
    metric: Callable[[Rollout, ResponseTexts], Tensor] | None = None  # a second score, logged and never trained on
    metric_name: str = ""

    @property
    def trained(self) -> dict[str, Trained]:
        """The actor and, where there is one, the critic, by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def score(
        self, rollout: Rollout, texts: ResponseTexts, temperature: float, most: int
    ) -> tuple[ScoredRollout, Beside, Measured]:
        """Scores and reference log-probs; the numbers beside the scores; what scoring measured.

        A response that could not be scored is taken away: its row has no token to train on.

        Args:
            rollout: B responses.
            texts: what they say.
            temperature: that of sampling (1 for greedy).
            most: rows of the longest length that a forward pass may hold.
        """
        found = self.reward(rollout, texts)
        scores = found if isinstance(found, Scores) else Scores(found)
        beside = dict(scores.parts)
        if self.metric is not None:
            beside[self.metric_name] = self.metric(rollout, texts)
        if scores.missing is not None:
            rollout = without_responses(rollout, scores.missing)
        ref_logprobs = response_logprobs(self.reference, rollout, temperature, most)
        return ScoredRollout(rollout, ref_logprobs, scores.values.float()), beside, scores.measured

    def complete(
        self, scored: ScoredRollout, temperature: float, most: int, logprobs: Tensor | None = None
    ) -> Trajectory:
        """The same with the actor's log-probs and, where there is a critic, its values.

        Args:
            scored: B responses.
            temperature: that of sampling (1 for greedy).
            most: rows of the longest length that a forward pass may hold.
            logprobs: (B, R) of the actor, where they are known.
        """
        for engine in self.trained.values():
            engine.eval()
        rollout = scored.rollout
        if logprobs is None:
            logprobs = response_logprobs(self.actor, rollout, temperature, most)
        values = None if self.critic is None else response_values(self.critic, rollout, most)
        return Trajectory(rollout, logprobs, scored.ref_logprobs, values, scored.scores)


def response_logprobs(model: PolicyForward, rollout: Rollout, temperature: float, most: int) -> Tensor:
    """Log-probs of every response token, (B, R) float32, 0 off the response; without gradient.

    Args:
        model: PolicyModel or its engine.
        rollout: B responses.
        temperature: that of sampling (1 for greedy).
        most: rows of the longest length that a forward pass may hold.
    """

    def logprobs(rows: Layout) -> Tensor:
        return rows.spread(model(rows.input_ids, None, rows.targets, temperature, False)[0])

    return _of_rows(rollout, most, logprobs)


def response_values(model: ScalarForward, rollout: Rollout, most: int) -> Tensor:
    """V(x, y_<j), the state before every response token j, (B, R) float32, 0 off the response; without gradient.

    Args:
        model: ScalarModel or its engine.
        rollout: B responses.
        most: rows of the longest length that a forward pass may hold.
    """
    return _of_rows(rollout, most, lambda rows: rows.before(model(rows.input_ids, None)))


@torch.no_grad()
def _of_rows(rollout: Rollout, most: int, numbers: Callable[[Layout], Tensor]) -> Tensor:
    result = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
    for rows in layouts(rollout, most):
        raise_if_stopped()
        result[rows.rows, : rows.width] = numbers(rows)
    return result
