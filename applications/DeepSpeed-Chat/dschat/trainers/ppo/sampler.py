# SPDX-License-Identifier: Apache-2.0
"""Sampling in step 3: prompts → Rollout and its texts, drawn from the actor as it is now."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import collate_prompts
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.engines import TrainedPolicy
from dschat.rl.types import Rollout
from dschat.rollouts.finite_logits import FiniteLogits
from dschat.rollouts.generate import concatenate, generate
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device, rank
from dschat.run.seeds import SeedKind, derive_seed
from dschat.run.stop import raise_if_stopped
from dschat.scoring.source import ResponseTexts


class ActorSampler:
    """Draws responses from the actor."""

    def __init__(
        self, actor: TrainedPolicy, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, seed: int
    ) -> None:
        """Takes the actor and how to draw.

        Args:
            actor: its engine.
            tokenizer: the actor's.
            sampling: how responses are drawn.
            seed: of the run.

        Attributes:
            bad_logits: (B,) bool, where the logits of the last rollout were not finite; such rows are of no use.
        """
        self._actor, self._tokenizer, self._seed = actor, tokenizer, seed
        self.sampling = sampling
        self.bad_logits: Tensor = torch.zeros(0, dtype=torch.bool)

    def __call__(
        self, batches: Sequence[Sequence[PromptExample]], kind: SeedKind, draw: int
    ) -> tuple[Rollout, ResponseTexts]:
        """One response to each prompt, generation batch by generation batch.

        Args:
            batches: prompts of this rank.
            kind: what the responses are for.
            draw: number of the iteration, or of the evaluation's batch. Every batch draws with a seed of its own, made
                from the run's seed, kind, draw, rank and the batch's place in `batches`.
        """
        self._actor.eval()
        rollouts, bad_logits = [], []
        with self._actor.gathered() as policy:
            for number, examples in enumerate(batches):
                raise_if_stopped()
                prompts = collate_prompts(examples, self.sampling.pad_id)
                prompts = {name: x.to(device()) for name, x in prompts.items()}
                seed = derive_seed(self._seed, kind, draw, rank(), number)
                watch = FiniteLogits()
                rollouts.append(generate(policy.inner, prompts, self.sampling, seed, watch))
                bad_logits.append(watch.bad_rows)
        self.bad_logits = torch.cat(bad_logits)
        rollout = concatenate(rollouts, self.sampling.pad_id)
        examples = [example for batch in batches for example in batch]
        return rollout, ResponseTexts(
            [example.prompt_text for example in examples],
            [decode_response(self._tokenizer, ids) for ids in rollout.response_rows()],
            [example.row for example in examples],
        )
