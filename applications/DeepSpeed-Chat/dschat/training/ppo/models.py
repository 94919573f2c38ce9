# SPDX-License-Identifier: Apache-2.0
"""Models of a step-3 run: engines and score sources, the sampler of the actor, and the actor's moving average."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.engines import PolicyEngine, PolicyForward, ScalarForward, Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Layout, PassSize, layouts
from dschat.models.tokenizer import end_ids_of, end_token_id
from dschat.rollouts.engine import AheadEngine, Generation, PolicySampler, ResponseSampler, RolloutEngine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.distributed import largest_over_ranks
from dschat.run.state import SeedKind
from dschat.run.stop import raise_if_stopped, stopping_together
from dschat.scoring.source import ResponseTexts, Scores, ScoreSource
from dschat.settings.ppo import PPOConfig
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
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    critic_alone: bool = False,
) -> dict[str, Trained]:
    """The engines that are trained, by name: the actor, unless the critic is trained alone, and the critic, if any."""
    engines: dict[str, Trained] = {}
    if not critic_alone:
        engines["actor"] = actor
    if critic is not None:
        engines["critic"] = critic
    return engines


def response_logprobs(
    model: PolicyForward,
    rollout: Rollout,
    temperature: float,
    size: PassSize,
) -> Tensor:
    """Log-probs of every response token, (B, R) float32, 0 off the response; without gradient.

    The temperature is that of sampling, 1 for greedy decoding.
    """

    def logprobs(layout: Layout) -> Tensor:
        token_logprobs, _ = model(layout.input_ids, None, layout.targets, temperature, False)
        return layout.spread(token_logprobs)

    return _compute_by_passes(rollout, size, logprobs)


def response_values(model: ScalarForward, rollout: Rollout, size: PassSize) -> Tensor:
    """V(x, y_<j), the state before every response token j, (B, R) float32, 0 off the response; without gradient."""
    return _compute_by_passes(
        rollout,
        size,
        lambda layout: layout.before(model(layout.input_ids, None)),
    )


@torch.no_grad()
def _compute_by_passes(
    rollout: Rollout,
    size: PassSize,
    forward: Callable[[Layout], Tensor],
) -> Tensor:
    """Numbers (B, R) of a rollout, from forward passes of a size over rows of similar length."""
    result = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
    for layout in layouts(rollout, size, largest_over_ranks):
        raise_if_stopped()
        result[layout.rows, : layout.width] = forward(layout)
    return result


def actor_sampling(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, model_ends: Collection[int] = ()
) -> Sampling:
    """How the actor samples.

    A response ends with EOS, --end_of_conversation_token, or one of the model's own end tokens (`model_ends`).
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


@dataclass(frozen=True)
class RequestedRows:
    """Responses to be sampled, prompt after prompt."""

    examples: list[PromptExample]  # the prompt of each row
    sample_numbers: list[int]  # numbers of each row among the responses to its prompt
    seeds: list[int]
    samples: int  # responses to each prompt

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of each row's prompt."""
        return [example.prompt_ids for example in self.examples]


class ActorSampler(PolicySampler):
    """Samples responses from the actor."""

    def sample(
        self,
        examples: Sequence[PromptExample],
        kind: SeedKind,
        iteration: int,
        samples: int = 1,
        same_weights: bool = False,
    ) -> tuple[Generation, ResponseTexts]:
        """Responses to each prompt, in rows that follow each other, and their texts. Every rank must call it.

        For the first four arguments see `request`, for `same_weights` see `session`.
        """
        requested = self.request(examples, kind, iteration, samples)
        with self.session(same_weights) as draw_responses:
            generation = draw_responses(requested.prompts, self.sampling, requested.seeds)
        return self.label(generation, requested)

    @contextmanager
    def session(self, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """A session of the rollout engine. Every rank must enter it; a signal ends it on all.

        Args:
            same_weights: the actor's weights have not changed since the last session, so that an engine that keeps a
                copy need not be sent them.
        """
        self.policy.eval()
        if same_weights and isinstance(self.engine, AheadEngine):
            session = self.engine.session_again(self.policy)
        else:
            session = self.engine.session(self.policy)
        with stopping_together(), session as draw_responses:
            yield draw_responses

    def request(
        self,
        examples: Sequence[PromptExample],
        kind: SeedKind,
        iteration: int,
        samples: int = 1,
    ) -> RequestedRows:
        """Rows for `samples` responses to each prompt of this rank.

        A row's seed follows from the run's seed, the kind, the iteration, the prompt's index and the number of the
        response, so that it depends neither on the rank nor on other rows.
        """
        row_examples = []
        sample_numbers = []
        seeds = []
        for example in examples:
            for number in range(samples):
                # The first response has the seed that it would have as the only one.
                number_in_seed = [number] if number else []
                row_examples.append(example)
                sample_numbers.append(number)
                seeds.append(row_seed(self.seed, kind, iteration, example.index, *number_in_seed))
        return RequestedRows(row_examples, sample_numbers, seeds, samples)

    def label(
        self,
        generation: Generation,
        requested: RequestedRows,
    ) -> tuple[Generation, ResponseTexts]:
        """Adds the indices of the prompts to sampled responses; returns them with their texts."""
        generation = self.with_indices(generation, requested)
        texts = ResponseTexts(
            [example.prompt_text for example in requested.examples],
            [decode_response(self.tokenizer, ids) for ids in generation.rollout.response_rows()],
            [example.row for example in requested.examples],
        )
        return generation, texts

    def with_indices(self, generation: Generation, requested: RequestedRows) -> Generation:
        """Adds the indices of the prompts to sampled responses."""
        device = generation.bad_rows.device
        prompt_index = torch.tensor([example.index for example in requested.examples], device=device)
        sample_index = torch.tensor(requested.sample_numbers, device=device) if requested.samples > 1 else None
        rollout = replace(generation.rollout, prompt_index=prompt_index, sample_index=sample_index)
        return replace(generation, rollout=rollout)


def build_actor_sampler(
    models: PPOModels,
    tokenizer: PreTrainedTokenizerBase,
    config: PPOConfig,
) -> ActorSampler:
    """Builds the sampler of the actor's responses that the flags ask for."""
    model_ends = end_ids_of(models.actor.module.inner.generation_config)
    sampling = actor_sampling(config, tokenizer, model_ends)
    return ActorSampler(models.actor, tokenizer, sampling, config.optimisation.seed, models.rollouts)


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
