# SPDX-License-Identifier: Apache-2.0
"""A rollout engine for models that continuous batching does not know: transformers' `generate`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dschat.models.eager import uncompiled
from dschat.models.engines import TrainedPolicy
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.engine import Generation, ResponseSampler, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.run.stop import raise_if_stopped_here


class GenerateEngine:
    """Samples from the actor by transformers' `generate`, a batch of prompts at a time."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    @contextmanager
    def session(self, actor: TrainedPolicy, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """See `dschat.rollouts.engine.RolloutEngine`."""
        with actor.gathered() as policy:
            yield self.sampler_for(policy.inner)

    def sampler_for(self, causal_lm: PreTrainedModel) -> ResponseSampler:
        """Samples from a model with whole weights, in evaluation mode."""
        return partial(generate, causal_lm, batch_size=self._batch_size)


class FiniteLogits(LogitsProcessor):
    """Records rows whose logits are not finite, and samples them evenly; they are thrown away later.

    An error here would leave other processes waiting for this one. A logit of −inf beside finite ones is a token that
    is never sampled. Ids without a token (`missing`, (K,) long) are never sampled.
    """

    def __init__(self, rows: int, device: torch.device, missing: Tensor | None = None) -> None:
        self.bad_rows = torch.zeros(rows, dtype=torch.bool, device=device)
        self._missing = missing

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        usable = scores.amax(-1).isfinite()
        self.bad_rows |= ~usable
        scores = torch.where(usable[:, None], scores, 0.0)
        if self._missing is None:
            return scores
        return scores.index_fill_(1, self._missing, -torch.inf)


@torch.no_grad()
def generate(
    causal_lm: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    batch_size: int,
    *,
    limits: Sequence[int] | None = None,
) -> Generation:
    """Samples one response to each of B prompts by transformers' `generate`, without log-probs.

    transformers samples a batch from one random sequence, so that a row depends on all seeds and on the other rows.
    The global random state is left as it was.

    Args:
        causal_lm: has whole weights and is in evaluation mode.
        prompts: B lists of ids, without padding.
        sampling: how to sample.
        seeds: one per prompt.
        batch_size: prompts of similar limits and lengths per call, which generates up to the largest limit.
        limits: optional per-response token limits; each overrides `max_new_tokens` when smaller.
    """
    device = causal_lm.device
    input_ids, attention_mask = pad_prompts(prompts, sampling.pad_id, device)
    shape = (len(prompts), sampling.max_new_tokens)
    tokens = torch.full(shape, sampling.pad_id, device=device)
    bad_rows = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    max_tokens = sampling.limits(len(prompts), limits)
    order = sorted(range(len(prompts)), key=lambda row: (max_tokens[row], -len(prompts[row])))
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with fork, _own_generation_config(causal_lm), uncompiled(causal_lm):
        torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
        for first in range(0, len(order), batch_size):
            raise_if_stopped_here()
            batch = order[first : first + batch_size]
            longest = max(max_tokens[row] for row in batch)  # `assemble` cuts rows at their own limits
            width = max(len(prompts[row]) for row in batch)
            rows = torch.tensor(batch, device=device)
            finite_logits = FiniteLogits(len(rows), device, missing_ids_of(causal_lm))
            sequences: Tensor = causal_lm.generate(  # type: ignore[operator]
                input_ids=input_ids[rows, -width:],
                attention_mask=attention_mask[rows, -width:].long(),
                generation_config=replace(sampling, max_new_tokens=longest).generation_config(),
                logits_processor=LogitsProcessorList([finite_logits]),
            )
            tokens[rows, : sequences.shape[1] - width] = sequences[:, width:]
            bad_rows[rows] = finite_logits.bad_rows
    return Generation(assemble((input_ids, attention_mask), tokens, sampling, limits), None, bad_rows)


@contextmanager
def _own_generation_config(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Hides the checkpoint's generation config, whose fields would fill whatever is None in the one passed."""
    saved = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = saved
