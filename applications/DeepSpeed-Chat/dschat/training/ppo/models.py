# SPDX-License-Identifier: Apache-2.0
"""The models of a run of step 3: what draws from the actor, what they say of a rollout, and the actor's average."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.engines import PolicyEngine, PolicyForward, ScalarForward, Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Layout, PassSize, layouts
from dschat.models.tokenizer import end_token_id
from dschat.rollouts.engine import AheadEngine, Generation, PolicySampler, ResponseSampler, RolloutEngine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.distributed import largest_over_ranks
from dschat.run.state import SeedKind
from dschat.run.stop import raise_if_stopped, stopping_together
from dschat.scoring.source import Measured, ResponseTexts, Scores, ScoreSource, scores_of
from dschat.settings.ppo import PPOConfig
from macro_actions.segments import on_last_tokens
from macro_actions.types import MacroActions, Rollout, ScoredRollout, Trajectory, without_responses

# Numbers (B,) of each response beside its score, by name: what the parts of the score say, and the metric function.
AuxiliaryScores = Mapping[str, Tensor]
DECAY = 0.992  # of the moving average, per PPO iteration


@dataclass(frozen=True)
class PPOModels:
    """Engines and score sources of a run, and what draws from the actor; without a critic it is None."""

    actor: TrainedPolicy
    reference: PolicyEngine
    critic: TrainedScalar | None
    reward: ScoreSource
    rollouts: RolloutEngine
    # A second score, logged and never trained on.
    metric: Callable[[Rollout, ResponseTexts], Tensor | Scores] | None = None
    metric_name: str = ""

    @property
    def trained(self) -> dict[str, Trained]:
        """The actor and, where there is one, the critic, by name."""
        return trained_engines(self.actor, self.critic)

    def score(
        self,
        rollout: Rollout,
        texts: ResponseTexts,
        temperature: float,
        size: PassSize,
        ref_logprobs: Tensor | None = None,
        macro: MacroActions | None = None,
    ) -> tuple[ScoredRollout, AuxiliaryScores, Measured]:
        """Scores and reference log-probs of B responses; the auxiliary scores; what scoring measured.

        A response that could not be scored is taken away: its row has no token to train on. The temperature is that of
        sampling, 1 for greedy. The reference's log-probs may be known; `macro` are the macro actions that the texts
        have as segments.
        """
        scores = scores_of(self.reward(rollout, texts))
        auxiliary = dict(scores.parts)
        if self.metric is not None:
            auxiliary[self.metric_name] = scores_of(self.metric(rollout, replace(texts, segments=None))).values
        if scores.missing is not None:
            rollout = without_responses(rollout, scores.missing)
        if ref_logprobs is None:
            ref_logprobs = response_logprobs(self.reference, rollout, temperature, size)
        ref_logprobs = torch.where(rollout.response_mask, ref_logprobs, 0.0)
        own = None
        if macro is not None and scores.segments is not None:
            own = on_last_tokens(scores.segments, macro)
        return ScoredRollout(rollout, ref_logprobs, scores.values.float(), own), auxiliary, scores.measured

    def complete(
        self, scored: ScoredRollout, temperature: float, size: PassSize, logprobs: Tensor | None = None
    ) -> Trajectory:
        """The same with the actor's log-probs, unless they are known, and, where there is a critic, its values."""
        for engine in self.trained.values():
            engine.eval()
        rollout = scored.rollout
        if logprobs is None:
            logprobs = response_logprobs(self.actor, rollout, temperature, size)
        values = None if self.critic is None else response_values(self.critic, rollout, size)
        return scored.with_numbers(logprobs, values)


def trained_engines(actor: TrainedPolicy, critic: TrainedScalar | None) -> dict[str, Trained]:
    """The actor and, where there is one, the critic, by name."""
    return {"actor": actor} | ({} if critic is None else {"critic": critic})


def response_logprobs(model: PolicyForward, rollout: Rollout, temperature: float, size: PassSize) -> Tensor:
    """Log-probs of every response token, (B, R) float32, 0 off the response; without gradient.

    The temperature is that of sampling, 1 for greedy.
    """

    def logprobs(rows: Layout) -> Tensor:
        return rows.spread(model(rows.input_ids, None, rows.targets, temperature, False)[0])

    return _of_rows(rollout, size, logprobs)


def response_values(model: ScalarForward, rollout: Rollout, size: PassSize) -> Tensor:
    """V(x, y_<j), the state before every response token j, (B, R) float32, 0 off the response; without gradient."""
    return _of_rows(rollout, size, lambda rows: rows.before(model(rows.input_ids, None)))


@torch.no_grad()
def _of_rows(rollout: Rollout, size: PassSize, numbers: Callable[[Layout], Tensor]) -> Tensor:
    result = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
    for rows in layouts(rollout, size, largest_over_ranks):
        raise_if_stopped()
        result[rows.rows, : rows.width] = numbers(rows)
    return result


@dataclass(frozen=True)
class Rows:
    """Responses that are asked for, prompt after prompt."""

    examples: list[PromptExample]  # one for each row
    numbers: list[int]  # of the row among those of its prompt
    seeds: list[int]
    samples: int  # responses to each prompt

    @property
    def prompts(self) -> list[list[int]]:
        """Their ids."""
        return [example.prompt_ids for example in self.examples]


def actor_sampling(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, own_ends: Collection[int] = ()) -> Sampling:
    """How the actor samples. EOS always ends a response; --end_of_conversation_token and the model's own end tokens
    do, too.
    """
    end_ids = {end_token_id(tokenizer, config.data.end_of_conversation_token), tokenizer.eos_token_id}
    end_ids |= set(own_ends) - {tokenizer.pad_token_id}
    return Sampling(
        max_new_tokens=config.sampling.max_answer_seq_len,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=config.sampling.temperature,
        top_k=config.rollouts.top_k,
        top_p=config.rollouts.top_p,
    )


class ActorSampler(PolicySampler):
    """Draws responses from the actor."""

    def __call__(
        self, examples: Sequence[PromptExample], kind: SeedKind, draw: int, samples: int = 1, again: bool = False
    ) -> tuple[Generation, ResponseTexts]:
        """Some responses to each prompt, in rows that follow each other; see `rows`, and `session` for `again`. Every
        rank must call it.
        """
        rows = self.rows(examples, kind, draw, samples)
        with self.session(again) as draw_responses:
            drawn = draw_responses(rows.prompts, self.sampling, rows.seeds)
        return self.told(drawn, rows)

    @contextmanager
    def session(self, again: bool = False) -> Iterator[ResponseSampler]:
        """That of the engine. Every rank must enter it; a signal ends it on all.

        Args:
            again: the actor has the weights of the last session, which an engine that has kept them need not be sent.
        """
        self.policy.eval()
        if again and isinstance(self.engine, AheadEngine):
            opened = self.engine.session_again(self.policy)
        else:
            opened = self.engine.session(self.policy)
        with stopping_together(), opened as draw_responses:
            yield draw_responses

    def rows(self, examples: Sequence[PromptExample], kind: SeedKind, draw: int, samples: int = 1) -> Rows:
        """What is asked for: so many `samples` of each prompt of this rank, in iteration number `draw`.

        A row's seed is made from the run's seed, kind, draw, the prompt's index and the sample's number, so that it
        depends neither on the rank nor on the other rows.
        """
        numbers = list(range(samples)) * len(examples)
        of_rows = [example for example in examples for _ in range(samples)]
        # A first response has the seed of an only one.
        seeds = [
            row_seed(self.seed, kind, draw, example.index, *([number] if number else []))
            for example, number in zip(of_rows, numbers, strict=True)
        ]
        return Rows(of_rows, numbers, seeds, samples)

    def told(self, drawn: Generation, rows: Rows) -> tuple[Generation, ResponseTexts]:
        """What was drawn, with its prompts' indices, and what it says."""
        index = torch.tensor([example.index for example in rows.examples], device=drawn.bad_rows.device)
        sample_index = torch.tensor(rows.numbers, device=index.device) if rows.samples > 1 else None
        drawn = replace(drawn, rollout=replace(drawn.rollout, prompt_index=index, sample_index=sample_index))
        return drawn, ResponseTexts(
            [example.prompt_text for example in rows.examples],
            [decode_response(self.tokenizer, ids) for ids in drawn.rollout.response_rows()],
            [example.row for example in rows.examples],
        )


class MovingAverage:
    """An exponential moving average of the actor's weights (--enable_ema), in float32.

    Every process averages its own part of each weight, so that nothing is gathered for it.
    """

    def __init__(self, engine: TrainedPolicy, decay: float = DECAY) -> None:
        """Starts at the weights of the actor's engine; `decay` is the weight of the past."""
        self._engine, self._decay = engine, decay
        # This process's parts of the average, by name.
        self.parts = {name: part.float().clone() for name, part in engine.parts().items()}

    def update(self) -> None:
        """Moves the average towards the engine's weights."""
        for name, part in self._engine.parts().items():
            self.parts[name].lerp_(part.float(), 1 - self._decay)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The average in the model's data types, one weight at a time; see `TrainedPolicy.whole_weights`."""
        return self._engine.whole_weights(self.parts)
