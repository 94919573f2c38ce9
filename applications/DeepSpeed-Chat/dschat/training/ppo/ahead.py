# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead (--rollouts_ahead 1): servers draw the next rollout while this one trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dschat.data.examples import PromptExample
from dschat.rollouts.engine import AheadEngine, Generation, Pending
from dschat.run.distributed import world_size
from dschat.run.state import Json, Progress, SeedKind
from dschat.scoring.source import ResponseTexts
from dschat.training.iteration import put_together
from dschat.training.ppo.models import ActorSampler
from macro_actions.types import tensors_of

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
        # While a rollout is scored: that one, if it was drawn ahead. It lies nowhere else so far.
        self._is_scoring = False
        self._taken: Upcoming | None = None

    def begin(self, examples: Sequence[PromptExample], iteration: int) -> None:
        """Lets servers draw for an iteration, with the actor's weights of now. Every rank must call it."""
        rows = self._sample.rows(examples, SeedKind.TRAINING, iteration, self._samples)
        with self._sample.session():
            pending = self._engine.begin(rows.prompts, self._sample.sampling, rows.seeds)
        self._upcoming, self._is_scoring = Upcoming(iteration, pending), True

    def take(self, examples: Sequence[PromptExample], iteration: int) -> tuple[Generation, ResponseTexts] | None:
        """The rollout of an iteration, if it was begun. Every rank must call it."""
        upcoming = self._upcoming
        if upcoming is None or upcoming.iteration != iteration:
            return None
        drawn = upcoming.responses
        if not isinstance(drawn, Generation):
            drawn = drawn.finish()
        # Not before: a signal may come.
        self._upcoming, self._taken, self._is_scoring = None, Upcoming(iteration, drawn), True
        return self._sample.told(drawn, self._sample.rows(examples, SeedKind.TRAINING, iteration, self._samples))

    def accept(self) -> None:
        """The rollout has been scored: the iteration has it."""
        self._is_scoring, self._taken = False, None

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a checkpoint holds of it, with which a resumed run goes on exactly. Every rank must call it.

        As long as a rollout is scored, the actor has the weights with which the next one can be drawn again.
        """
        upcoming = self._taken if self._is_scoring else self._upcoming
        if upcoming is None:
            return {}, {}
        drawn = upcoming.responses
        settled = drawn if isinstance(drawn, Generation) else drawn.settle()
        if settled is None:
            logger.warning("The rollout that servers draw ahead cannot be finished now: no checkpoint has it.")
            return {}, {}
        return {"ahead": [upcoming.iteration, world_size()]}, tensors_of(settled, "ahead")

    def load(self, state: Progress) -> None:
        iteration, ranks = state.numbers.get("ahead", (None, world_size()))
        if ranks != world_size():  # each has other prompts now
            logger.warning("The rollout that was drawn ahead by %d processes is drawn again.", ranks)
        elif iteration is not None:
            self._upcoming = Upcoming(iteration, put_together(Generation, state.tensors, "ahead"))
