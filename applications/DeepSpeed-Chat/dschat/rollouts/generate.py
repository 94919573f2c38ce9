# SPDX-License-Identifier: Apache-2.0
"""Sampling by transformers' own `generate`, batch by batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from dschat.models.engines import TrainedPolicy
from dschat.rollouts.assembly import assemble, pad_prompts
from dschat.rollouts.engine import Draw, Drawn
from dschat.rollouts.sampling import Sampling
from dschat.run.stop import raise_if_stopped_here


class CausalLM(Protocol):
    """A Hugging Face causal LM, as far as `generate` needs it."""

    device: torch.device
    generation_config: GenerationConfig

    def generate(self, **options: object) -> Tensor: ...


class GenerateEngine:
    """Draws from the actor, so many prompts at once."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """See `RolloutEngine`."""
        with actor.gathered() as policy:
            yield self.draw_from(policy.inner)

    def draw_from(self, causal_lm: CausalLM) -> Draw:
        """Draws from a model with whole weights."""

        def draw(prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Drawn:
            return generate(causal_lm, prompts, sampling, seeds, self._batch_size)

        return draw


class FiniteLogits(LogitsProcessor):
    """Notes rows whose logits are not finite, and lets them be sampled from evenly, to be thrown away later.

    They are not an error here, or other processes would wait for the one that fails. A logit of −inf beside finite
    ones is fine: it is a token that is never sampled.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.bad_rows = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        usable = scores.amax(-1).isfinite()
        self.bad_rows |= ~usable
        return torch.where(usable[:, None], scores, 0.0)


@torch.no_grad()
def generate(
    causal_lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    batch_size: int,
) -> Drawn:
    """One response to each prompt, without log-probs.

    Args:
        causal_lm: with whole weights, in evaluation mode.
        prompts: B lists of ids, none empty.
        sampling: how to draw.
        seeds: of the rows. transformers draws a batch from one sequence of numbers, so that a row depends on all of
            them, and on the other rows; the global random state is left as it was.
        batch_size: prompts answered at once, those of similar length together.
    """
    device = causal_lm.device
    input_ids, attention_mask = pad_prompts(prompts, sampling.pad_id, device)
    tokens = torch.full((len(prompts), sampling.max_new_tokens), sampling.pad_id, device=device)
    bad_rows = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _own_generation_config(causal_lm):
        torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
        for first in range(0, len(order), batch_size):
            raise_if_stopped_here()
            rows = torch.tensor(order[first : first + batch_size], device=device)
            width, watch = len(prompts[order[first]]), FiniteLogits(len(rows), device)
            sequences = causal_lm.generate(
                input_ids=input_ids[rows, -width:],
                attention_mask=attention_mask[rows, -width:].long(),
                generation_config=sampling.generation_config(),
                logits_processor=LogitsProcessorList([watch]),
            )
            tokens[rows, : sequences.shape[1] - width] = sequences[:, width:]
            bad_rows[rows] = watch.bad_rows
    return Drawn(assemble((input_ids, attention_mask), tokens, sampling), None, bad_rows)


@contextmanager
def _own_generation_config(causal_lm: CausalLM) -> Iterator[None]:
    """Hides the checkpoint's generation config, whose fields would fill whatever is None in the one passed."""
    saved = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = saved
