# SPDX-License-Identifier: Apache-2.0
"""Sampling in step 3: prompts → Rollout and its texts, drawn from the actor as it is now."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config.ppo import PPOConfig
from dschat.data.collate import collate_prompts
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.models.engines import TrainedPolicy
from dschat.rl.types import Rollout
from dschat.rollouts.engine import RolloutEngine
from dschat.rollouts.finite_logits import FiniteLogits
from dschat.rollouts.generate import concatenate, generate
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.vllm import VllmEngine
from dschat.run.distributed import device, rank
from dschat.run.seeds import SeedKind, derive_seed
from dschat.run.stop import raise_if_stopped
from dschat.scoring.source import ResponseTexts


class ActorSampler:
    """Draws responses from the actor."""

    def __init__(
        self,
        actor: TrainedPolicy,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        seed: int,
        engine: RolloutEngine | None = None,
    ) -> None:
        """Takes the actor and how to draw.

        Args:
            actor: its engine.
            tokenizer: the actor's.
            sampling: how responses are drawn.
            seed: of the run.
            engine: that draws; transformers' own `generate` when None.

        Attributes:
            bad_logits: (B,) bool, where the logits of the last rollout were not finite; such rows are of no use.
            logprobs: (B, R) of the last rollout, as the engine computed them in a way of its own; None otherwise.
        """
        self._actor, self._tokenizer, self._seed, self._engine = actor, tokenizer, seed, engine
        self.sampling = sampling
        self.bad_logits: Tensor = torch.zeros(0, dtype=torch.bool)
        self.logprobs: Tensor | None = None

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
        examples = [example for batch in batches for example in batch]
        rollout = self._generated(batches, kind, draw) if self._engine is None else self._drawn(examples, kind, draw)
        return rollout, ResponseTexts(
            [example.prompt_text for example in examples],
            [decode_response(self._tokenizer, ids) for ids in rollout.response_rows()],
            [example.row for example in examples],
        )

    def _drawn(self, examples: Sequence[PromptExample], kind: SeedKind, draw: int) -> Rollout:
        assert self._engine is not None  # the caller looked
        raise_if_stopped()
        drawn_for = [self._seed, kind, draw]
        seeds = [derive_seed(*drawn_for, example.index) for example in examples]
        with self._engine.session(self._actor) as draw_responses:
            drawn = draw_responses([example.prompt_ids for example in examples], self.sampling, seeds)
        self.bad_logits, self.logprobs = drawn.bad_rows, drawn.logprobs
        index = torch.tensor([example.index for example in examples], device=drawn.rollout.prompt_index.device)
        return replace(drawn.rollout, prompt_index=index)

    def _generated(self, batches: Sequence[Sequence[PromptExample]], kind: SeedKind, draw: int) -> Rollout:
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
        return concatenate(rollouts, self.sampling.pad_id)


def actor_sampler(actor: TrainedPolicy, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> ActorSampler:
    """Draws as the flags say."""
    engine = None
    if config.rollout_engine == "vllm":
        max_tokens = config.max_prompt_seq_len + config.max_answer_seq_len
        engine = VllmEngine(config.actor_model_name_or_path, max_tokens, config.vllm_gpu_memory)
    return ActorSampler(actor, tokenizer, Sampling.from_config(config, tokenizer), config.seed, engine)
