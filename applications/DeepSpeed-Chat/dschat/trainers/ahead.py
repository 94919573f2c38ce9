# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead (--rollouts_ahead 1): servers draw the next rollout while this one trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dschat.data.examples import PromptExample
from dschat.rl.types import tensors_of
from dschat.rollouts.engine import AheadEngine, Generation, Pending
from dschat.run.state import Json, SeedKind
from dschat.scoring.source import ResponseTexts
from dschat.trainers.iteration import State, put_together
from dschat.trainers.ppo_models import ActorSampler

logger = logging.getLogger("dschat")


@dataclass(frozen=True)
class Upcoming:
    """The rollout of an iteration to come."""

    iteration: int
    responses: Pending | Generation  # being drawn or, after a resume, drawn


class RolloutAhead:
    """Draws the rollout of each iteration while the one before it trains, with the weights that one begins with."""

    def __init__(self, sample: ActorSampler, samples: int) -> None:
        """Takes what samples, with an engine that can draw ahead, and the responses to each prompt."""
        assert isinstance(sample.engine, AheadEngine)  # the flags say so
        self._sample, self._engine, self._samples = sample, sample.engine, samples
        self._upcoming: Upcoming | None = None
        self._taken: Upcoming | None = None  # what is being scored, and lies nowhere else so far

    def begin(self, examples: Sequence[PromptExample], iteration: int) -> None:
        """Lets servers draw for an iteration, with the actor's weights of now. Every rank must call it."""
        rows = self._sample.rows(examples, SeedKind.TRAINING, iteration, self._samples)
        with self._sample.session():
            pending = self._engine.begin(rows.prompts, self._sample.sampling, rows.seeds)
        self._upcoming = Upcoming(iteration, pending)

    def take(self, examples: Sequence[PromptExample], iteration: int) -> tuple[Generation, ResponseTexts] | None:
        """The rollout of an iteration, if it was begun. Every rank must call it."""
        upcoming = self._upcoming
        if upcoming is None or upcoming.iteration != iteration:
            return None
        drawn = upcoming.responses
        if not isinstance(drawn, Generation):
            drawn = drawn.finish(self._sample.policy)
        self._upcoming, self._taken = None, Upcoming(iteration, drawn)  # not before: a signal may come
        return self._sample.told(drawn, self._sample.rows(examples, SeedKind.TRAINING, iteration, self._samples))

    def accept(self) -> None:
        """The rollout that was taken has been scored: the iteration has it."""
        self._taken = None

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a checkpoint holds of it, with which a resumed run goes on exactly. Every rank must call it.

        As long as a rollout is scored, the actor has the weights with which the next one can be drawn again.
        """
        upcoming = self._taken or self._upcoming
        if upcoming is None:
            return {}, {}
        drawn = upcoming.responses
        settled = drawn if isinstance(drawn, Generation) else drawn.settle()
        if settled is None:
            logger.warning("The rollout that servers draw ahead is not in the checkpoint, since one of them has gone.")
            return {}, {}
        return {"ahead": upcoming.iteration}, tensors_of(settled, "ahead")

    def load(self, state: State) -> None:
        """Takes up what `state` gave."""
        if "ahead" in state.numbers:
            drawn = put_together(Generation, state.tensors, "ahead")
            self._upcoming = Upcoming(state.numbers["ahead"], drawn)
