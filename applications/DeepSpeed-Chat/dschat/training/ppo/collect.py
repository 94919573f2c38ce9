# SPDX-License-Identifier: Apache-2.0
"""Collecting a rollout: stages that wrap one another, each with `collect(work) -> ScoredBatch`.

1. `ScoringCollector` (here) takes responses from a `RolloutSampler` (here), which samples with the current weights, or
   from an `AheadSampler` (ppo/ahead.py), one iteration ahead, and scores them (ppo/score.py). Both ask `ActorSampler`,
   which passes prompts and seeds to the rollout engine: by default continuous batching (rollouts/continuous.py).
2. `RefillCollector` (ppo/refill.py) replaces prompts whose responses all have the same score.
3. `SegmentValueCollector` (ppo/segment_values.py) measures the values of states by sampling completions.

ppo/algorithm.py: `build_collector` chooses the stages of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_sampled
from dschat.data.examples import PromptExample
from dschat.models.layout import Lengths
from dschat.models.tokenizer import end_ids_of, end_token_id
from dschat.rollouts.engine import Generation, PolicySampler, ResponseSampler
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.state import Json, Progress, SeedKind
from dschat.run.stop import stopping_together
from dschat.scoring.source import ResponseTexts
from dschat.settings.ppo import PPOConfig
from dschat.training.iteration import Clock
from dschat.training.ppo.models import PPOModels
from dschat.training.ppo.score import RolloutScorer, ScoredBatch
from macro_actions.rewards import ScoreMoments

SamplerState = tuple[Json, dict[str, Tensor]]  # numbers that are the same on every rank; tensors of this rank


@dataclass(frozen=True)
class RolloutWork:
    """The work of collecting one rollout on this rank."""

    iteration: int
    epoch: int  # pass over the training prompts
    prompt_numbers: list[int]  # positions in the list of training prompts, not `PromptExample.index`
    moments: ScoreMoments | None  # moments of the scores of earlier iterations; None without --normalize_scores
    clock: Clock


class Collector(ABC):
    """A stage of collecting a rollout."""

    @abstractmethod
    def collect(self, work: RolloutWork) -> ScoredBatch:
        """This rank's part of the rollout of an iteration. Every rank must call it."""


class ScoringCollector(Collector):
    """Samples responses and scores them."""

    def __init__(
        self, sampler: RolloutSampler, scorer: RolloutScorer, samples_per_prompt: int, fuses_credit: bool
    ) -> None:
        """Connects the parts of the stage.

        Args:
            sampler: samples the responses.
            scorer: scores them and cuts them into macro actions.
            samples_per_prompt: responses to each prompt.
            fuses_credit: leave the actor's log-probs and the critic's values to the update's own forward passes.
        """
        self._sampler = sampler
        self._scorer = scorer
        self._samples_per_prompt = samples_per_prompt
        self._fuses_credit = fuses_credit

    def collect(self, work: RolloutWork) -> ScoredBatch:
        sampled = self._sampler.sample(work)
        work.clock.record("generation")
        work.clock.sampled += lengths_of_samplings(sampled.generation, sampled.texts)
        batch = self._scorer.score_rollout(sampled.generation, sampled.texts, work.epoch, self._fuses_credit)
        prompt_numbers = torch.tensor(work.prompt_numbers, device=batch.bad_rows.device)
        prompt_of_row = prompt_numbers.repeat_interleave(self._samples_per_prompt)
        return replace(batch, prompt_numbers=prompt_of_row, is_stale=sampled.is_stale)


def lengths_of_samplings(generation: Generation, texts: ResponseTexts) -> list[Lengths]:
    """Lengths of what was sampled together: the responses of a rollout, or the turns of its episodes one by one."""
    if texts.episodes is not None:
        return texts.episodes.samplings
    return [Lengths.of(generation.rollout)]


@dataclass(frozen=True)
class SampledRollout:
    """Responses to the prompts of an iteration."""

    generation: Generation
    texts: ResponseTexts
    is_stale: bool = False  # sampled with the weights of the iteration before


class RolloutSampler:
    """Samples the responses of an iteration with the actor's current weights, `AheadSampler` with earlier ones."""

    def __init__(self, actor: ActorSampler, examples: Sequence[PromptExample], samples_per_prompt: int) -> None:
        self._actor = actor
        self._examples = examples  # the training prompts
        self._samples_per_prompt = samples_per_prompt

    def sample(self, work: RolloutWork) -> SampledRollout:
        """Responses to this rank's prompts. Every rank must call it."""
        examples = [self._examples[number] for number in work.prompt_numbers]
        generation, texts = self._actor.sample(examples, SeedKind.TRAINING, work.iteration, self._samples_per_prompt)
        return SampledRollout(generation, texts)

    def accept(self) -> None:
        """Called once the rollout is stored or skipped: from then on checkpoints do not need the sampler's copy."""

    def state(self) -> SamplerState:
        """State that a checkpoint needs for an exact resume. Every rank must call it."""
        return {}, {}

    def load(self, state: Progress) -> None:
        """Restores what `state` returned, from the numbers (`rollout`) and tensors of a checkpoint."""


@dataclass(frozen=True)
class RequestedRows:
    """Responses to be sampled, prompt after prompt."""

    examples: list[PromptExample]  # the prompt of each row
    sample_numbers: list[int]  # number of each row among the responses to its prompt, from 0
    seeds: list[int]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of each row's prompt."""
        return [example.prompt_ids for example in self.examples]


class ActorSampler(PolicySampler):
    """Samples responses from the actor."""

    def sample(
        self,
        examples: Sequence[PromptExample],
        kind: SeedKind,
        occasion: int,
        samples_per_prompt: int = 1,
        same_weights: bool = False,
    ) -> tuple[Generation, ResponseTexts]:
        """Responses to each prompt, in rows that follow each other, and their texts. Every rank must call it.

        For the first four arguments see `request`, for `same_weights` see `RolloutEngine.session`.
        """
        requested = self.request(examples, kind, occasion, samples_per_prompt)
        with self.session(same_weights) as sample_responses:
            generation = sample_responses(requested.prompt_ids, self.sampling, requested.seeds)
        return self.decode_responses(generation, requested)

    @contextmanager
    def session(self, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """See `RolloutEngine.session`. A stop signal on any rank ends it on every rank."""
        self.policy.eval()
        with stopping_together(), self.engine.session(self.policy, same_weights) as sample_responses:
            yield sample_responses

    def request(
        self, examples: Sequence[PromptExample], kind: SeedKind, occasion: int, samples_per_prompt: int = 1
    ) -> RequestedRows:
        """Rows for `samples_per_prompt` responses to each prompt of this rank, prompt after prompt.

        A row's seed follows from the run's seed, the kind, the occasion (such as an iteration), the prompt's index and
        the number of the response, so that it depends neither on the rank nor on other rows.
        """
        row_examples = []
        sample_numbers = []
        seeds = []
        for example in examples:
            for number in range(samples_per_prompt):
                # Number 0 is left out: the first response has the same seed however many follow.
                number_in_seed = [number] if number else []
                row_examples.append(example)
                sample_numbers.append(number)
                seeds.append(row_seed(self.seed, kind, occasion, example.index, *number_in_seed))
        return RequestedRows(row_examples, sample_numbers, seeds)

    def decode_responses(self, generation: Generation, requested: RequestedRows) -> tuple[Generation, ResponseTexts]:
        """Adds prompt indices (see `with_indices`) and decodes the responses."""
        generation = with_indices(generation, requested)
        finished = generation.rollout.finished.tolist()
        ended_rows = zip(generation.rollout.response_rows(), finished, strict=True)
        responses = [decode_sampled(self.tokenizer, ids, has_end) for ids, has_end in ended_rows]
        prompt_texts = [example.prompt_text for example in requested.examples]
        rows = [example.row for example in requested.examples]
        return generation, ResponseTexts(prompt_texts, responses, rows, finished)


def with_indices(generation: Generation, requested: RequestedRows) -> Generation:
    """Sets `prompt_index` and `sample_index`: each row's prompt, and its number among that prompt's responses."""
    device = generation.bad_rows.device
    indices = [example.index for example in requested.examples]
    prompt_index = torch.tensor(indices, device=device)
    sample_index = torch.tensor(requested.sample_numbers, device=device)
    rollout = replace(generation.rollout, prompt_index=prompt_index, sample_index=sample_index)
    return replace(generation, rollout=rollout)


def build_actor_sampler(models: PPOModels, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> ActorSampler:
    """Builds the sampler of the actor's responses that the flags ask for."""
    model_ends = end_ids_of(models.actor.module.inner.generation_config)
    sampling = actor_sampling(config, tokenizer, model_ends)
    return ActorSampler(models.actor, tokenizer, sampling, config.optimisation.seed, models.rollouts)


def actor_sampling(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, model_ends: Collection[int] = ()
) -> Sampling:
    """How the actor samples.

    A response ends with EOS, --end_of_conversation_token, or one of the model's own end tokens
    (`model_ends`), except one that serves as padding.
    """
    end_ids = {end_token_id(tokenizer, config.data.end_of_conversation_token), tokenizer.eos_token_id}
    end_ids |= set(model_ends) - {tokenizer.pad_token_id}
    return Sampling(
        max_new_tokens=config.sampling.max_answer_seq_len,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=config.sampling.temperature,
        top_k=config.rollouts.top_k,
        top_p=config.rollouts.top_p,
    )
