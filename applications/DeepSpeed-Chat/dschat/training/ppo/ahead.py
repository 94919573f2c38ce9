# SPDX-License-Identifier: Apache-2.0
"""Sampling one rollout ahead (--rollouts_ahead 1): servers sample the next rollout while this one is trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dschat.data.examples import PromptExample
from dschat.rollouts.engine import AheadEngine, Generation, Pending
from dschat.run.state import Progress, SeedKind
from dschat.training.iteration import from_tensors
from dschat.training.ppo.collect import ActorSampler, RolloutSampler, RolloutWork, SampledRollout, SamplerState
from macro_actions.types import tensors_of

logger = logging.getLogger("dschat")


@dataclass(frozen=True)
class UpcomingRollout:
    """The rollout of a later iteration."""

    iteration: int
    responses: Pending | Generation  # still being sampled; or sampled already, after a resume


class AheadSampler(RolloutSampler):
    """Samples the rollout of each iteration during the one before it, with the weights that one begins with."""

    def __init__(
        self,
        actor: ActorSampler,
        examples: Sequence[PromptExample],
        samples_per_prompt: int,
        prompts_of_iteration: Callable[[int], list[int] | None],
    ) -> None:
        """Prepares a sampler whose engine can sample ahead.

        Args:
            actor: samples responses.
            examples: the training prompts.
            samples_per_prompt: responses to each.
            prompts_of_iteration: positions of this rank's prompts in an iteration; None after the last.
        """
        super().__init__(actor, examples, samples_per_prompt)
        assert isinstance(actor.engine, AheadEngine)  # --rollouts_ahead requires it
        self._engine = actor.engine
        self._prompts_of_iteration = prompts_of_iteration
        self._upcoming: UpcomingRollout | None = None
        # While a rollout is scored: that one, if it was sampled ahead. It is kept nowhere else until then.
        self._is_scoring = False
        self._taken: UpcomingRollout | None = None

    def sample(self, work: RolloutWork) -> SampledRollout:
        sampled = self.take(work) or super().sample(work)
        next_prompts = self._prompts_of_iteration(work.iteration + 1)
        if next_prompts is not None:
            self._begin(next_prompts, work.iteration + 1)
        return sampled

    def take(self, work: RolloutWork) -> SampledRollout | None:
        """The rollout of an iteration, if it was sampled ahead. Every rank must call it."""
        upcoming = self._upcoming
        if upcoming is None or upcoming.iteration != work.iteration:
            return None
        generation = upcoming.responses
        if not isinstance(generation, Generation):
            generation = generation.finish()
        # Only now: a signal may interrupt the waiting.
        self._upcoming = None
        self._taken = UpcomingRollout(work.iteration, generation)
        self._is_scoring = True
        examples = [self._examples[number] for number in work.prompt_numbers]
        requested = self._actor.request(examples, SeedKind.TRAINING, work.iteration, self._samples_per_prompt)
        generation, texts = self._actor.decode_responses(generation, requested)
        return SampledRollout(generation, texts, is_stale=True)

    def accept(self) -> None:
        self._is_scoring = False
        self._taken = None

    def state(self) -> SamplerState:
        """The sampled rollout of the next iteration. Every rank must call it.

        As long as a rollout is scored, the actor has the weights with which the next one can be sampled again.
        """
        upcoming = self._taken if self._is_scoring else self._upcoming
        if upcoming is None:
            return {}, {}
        responses = upcoming.responses
        settled = responses if isinstance(responses, Generation) else responses.settle()
        if settled is None:
            logger.warning("The rollout that servers sample ahead cannot be finished now: no checkpoint has it.")
            return {}, {}
        return {"ahead": upcoming.iteration}, tensors_of(settled, "ahead")

    def load(self, state: Progress) -> None:
        if "ahead" in state.rollout:
            generation = from_tensors(Generation, state.tensors, "ahead")
            self._upcoming = UpcomingRollout(state.rollout["ahead"], generation)

    def _begin(self, prompt_numbers: Sequence[int], iteration: int) -> None:
        """Lets servers sample for an iteration, with the actor's current weights."""
        examples = [self._examples[number] for number in prompt_numbers]
        requested = self._actor.request(examples, SeedKind.TRAINING, iteration, self._samples_per_prompt)
        with self._actor.session():
            pending = self._engine.begin(requested.prompt_ids, self._actor.sampling, requested.seeds)
        self._upcoming = UpcomingRollout(iteration, pending)
        self._is_scoring = True
