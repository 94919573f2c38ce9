# SPDX-License-Identifier: Apache-2.0
"""Sampling in step 3: prompts → responses and their texts, drawn from the actor as it is now."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.engines import TrainedPolicy
from dschat.rollouts.engine import Generation, RolloutEngine
from dschat.rollouts.sampling import Sampling, row_seed
from dschat.run.seeds import SeedKind
from dschat.run.stop import stopping_together
from dschat.scoring.source import ResponseTexts


class ActorSampler:
    """Draws responses from the actor."""

    def __init__(
        self,
        actor: TrainedPolicy,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        seed: int,
        engine: RolloutEngine,
    ) -> None:
        """Takes the actor and how to draw.

        Args:
            actor: its engine.
            tokenizer: the actor's.
            sampling: how responses are drawn.
            seed: of the run.
            engine: what draws them.
        """
        self._actor, self._tokenizer, self._seed, self._engine = actor, tokenizer, seed, engine
        self.sampling = sampling

    def __call__(
        self, examples: Sequence[PromptExample], kind: SeedKind, draw: int, samples: int = 1
    ) -> tuple[Generation, ResponseTexts]:
        """Some responses to each prompt, in rows that follow each other. Every rank must call it.

        Args:
            examples: prompts of this rank.
            kind: what the responses are for.
            draw: number of the iteration. A row's seed is made from the run's seed, kind, draw, the prompt's index and
                the sample's number, so that it depends neither on the rank nor on the other rows.
            samples: responses to each prompt.
        """
        self._actor.eval()
        numbers = list(range(samples)) * len(examples)
        examples = [example for example in examples for _ in range(samples)]
        prompts = [example.prompt_ids for example in examples]
        # A first response has the seed of an only one.
        seeds = [
            row_seed(self._seed, kind, draw, example.index, *([number] if number else []))
            for example, number in zip(examples, numbers, strict=True)
        ]
        with stopping_together(), self._engine.session(self._actor) as draw_responses:
            drawn = draw_responses(prompts, self.sampling, seeds)
        index = torch.tensor([example.index for example in examples], device=drawn.bad_rows.device)
        sample_index = torch.tensor(numbers, device=index.device) if samples > 1 else None
        drawn = replace(drawn, rollout=replace(drawn.rollout, prompt_index=index, sample_index=sample_index))
        return drawn, ResponseTexts(
            [example.prompt_text for example in examples],
            [decode_response(self._tokenizer, ids) for ids in drawn.rollout.response_rows()],
            [example.row for example in examples],
        )
