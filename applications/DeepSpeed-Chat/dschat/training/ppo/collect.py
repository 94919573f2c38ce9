# SPDX-License-Identifier: Apache-2.0
"""Collecting a rollout: stages that wrap one another, each with `collect(work) -> ScoredBatch`.

1. `ScoringCollector` (here) takes samples from a `Sampler`, with the current weights (`CurrentSampler`) or one
   iteration ahead (ppo/ahead.py: `AheadSampler`), and scores them (ppo/score.py).
2. `RefillCollector` (ppo/refill.py) replaces prompts whose responses all have the same score.
3. `SegmentValueCollector` (ppo/segment_values.py) measures the values of states by sampling completions.

ppo/algorithm.py: `build_collector` chooses the stages of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat.data.examples import PromptExample
from dschat.models.layout import Lengths
from dschat.rollouts.engine import Generation
from dschat.run.state import Json, Progress, SeedKind
from dschat.scoring.source import ResponseTexts
from dschat.training.iteration import Clock
from dschat.training.ppo.batch import ScoredBatch
from dschat.training.ppo.models import ActorSampler
from dschat.training.ppo.score import RolloutScorer
from macro_actions.rewards import ScoreMoments

CollectorState = tuple[Json, dict[str, Tensor]]  # numbers that are the same on every rank; tensors of this rank


@dataclass(frozen=True)
class RolloutWork:
    """The work of collecting one rollout on this rank."""

    iteration: int
    epoch: int  # pass over the training prompts
    prompt_numbers: list[int]  # positions in the training data
    moments: ScoreMoments | None  # moments of the scores of earlier iterations; None without --normalize_scores
    clock: Clock


@dataclass(frozen=True)
class Samples:
    """Responses to the prompts of an iteration."""

    generation: Generation
    texts: ResponseTexts
    is_stale: bool = False  # sampled with the weights of the iteration before


def lengths_of_samplings(generation: Generation, texts: ResponseTexts) -> list[Lengths]:
    """Lengths of what was sampled together: the responses of a rollout, or the turns of its episodes one by one."""
    if texts.episodes is not None:
        return texts.episodes.samplings
    return [Lengths.of(generation.rollout)]


class Sampler(ABC):
    """Samples the responses of an iteration."""

    @abstractmethod
    def sample(self, work: RolloutWork) -> Samples:
        """Responses to this rank's prompts. Every rank must call it."""

    def accept(self) -> None:
        """Called when the iteration has its rollout, which a resumed run then does not sample again."""
        return None

    def state(self) -> CollectorState:
        """State that a checkpoint needs for an exact resume. Every rank must call it."""
        return {}, {}

    def load(self, state: Progress) -> None:
        """Restores what `state` returned."""
        return None


class CurrentSampler(Sampler):
    """Samples with the actor's current weights."""

    def __init__(
        self,
        actor: ActorSampler,
        prompts: Sequence[PromptExample],
        samples_per_prompt: int,
    ) -> None:
        self._actor = actor
        self._prompts = prompts
        self._samples_per_prompt = samples_per_prompt

    def sample(self, work: RolloutWork) -> Samples:
        examples = [self._prompts[number] for number in work.prompt_numbers]
        generation, texts = self._actor.sample(
            examples,
            SeedKind.TRAINING,
            work.iteration,
            self._samples_per_prompt,
        )
        return Samples(generation, texts)


class Collector(ABC):
    """A stage of collecting a rollout."""

    @abstractmethod
    def collect(self, work: RolloutWork) -> ScoredBatch:
        """This rank's part of the rollout of an iteration. Every rank must call it."""

    @abstractmethod
    def accept(self) -> None:
        """Called when the iteration has its rollout, which a resumed run then does not collect again."""

    @abstractmethod
    def state(self) -> CollectorState:
        """State that a checkpoint needs for an exact resume. Every rank must call it."""

    @abstractmethod
    def load(self, state: Progress) -> None:
        """Restores what `state` returned."""


class ScoringCollector(Collector):
    """Samples responses and scores them."""

    def __init__(
        self,
        sampler: Sampler,
        scorer: RolloutScorer,
        samples_per_prompt: int,
        fuses_credit: bool,
    ) -> None:
        """Connects the parts of the stage.

        Args:
            sampler: samples the responses.
            scorer: scores them and cuts them into macro actions.
            samples_per_prompt: responses to each prompt.
            fuses_credit: leave the actor's log-probs and the critic's values to the update's own forward passes.
        """
        self.sampler = sampler
        self._scorer = scorer
        self._samples_per_prompt = samples_per_prompt
        self._fuses_credit = fuses_credit

    def collect(self, work: RolloutWork) -> ScoredBatch:
        samples = self.sampler.sample(work)
        work.clock.record("generation")
        work.clock.sampled += lengths_of_samplings(samples.generation, samples.texts)
        batch = self._scorer.score_rollout(
            samples.generation,
            samples.texts,
            work.epoch,
            self._fuses_credit,
        )
        numbers = torch.tensor(work.prompt_numbers, device=batch.bad_rows.device)
        numbers = numbers.repeat_interleave(self._samples_per_prompt)
        return replace(batch, prompt_numbers=numbers, is_stale=samples.is_stale)

    def accept(self) -> None:
        self.sampler.accept()

    def state(self) -> CollectorState:
        return self.sampler.state()

    def load(self, state: Progress) -> None:
        self.sampler.load(state)
