# SPDX-License-Identifier: Apache-2.0
"""Sampling that computes live rows only: finished rows make room for waiting prompts, in one pool for all of them."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dschat.models.engines import TrainedPolicy
from dschat.rollouts.engine import Draw, Drawn
from dschat.rollouts.pool import Pool
from dschat.rollouts.sampling import Sampling
from dschat.run.stop import raise_if_stopped_here


class CompactingEngine:
    """Draws from the actor with so many live rows."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """See `RolloutEngine`."""
        with actor.gathered() as policy:
            yield self.draw_from(policy.inner)

    def draw_from(self, causal_lm: PreTrainedModel) -> Draw:
        """Draws from a model with whole weights."""

        def draw(prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Drawn:
            return sample(causal_lm, prompts, sampling, seeds, self._slots)

        return draw


def supports(causal_lm: PreTrainedModel) -> bool:
    """Whether keys and values of ordinary attention, full or sliding, are all that a model remembers."""
    config = causal_lm.config
    if config.is_encoder_decoder or config.get_text_config() is not config or getattr(config, "alibi", False):
        return False
    backbone = getattr(causal_lm, causal_lm.base_model_prefix)
    takes = inspect.signature(backbone.forward).parameters.keys() | inspect.signature(causal_lm.forward).parameters
    known = set(get_layer_types_and_kwargs(config)[0]) <= {"full_attention", "sliding_attention"}
    # Models that compile as a whole take attention masks that are made elsewhere.
    return known and {"position_ids", "logits_to_keep"} <= takes and bool(causal_lm._can_compile_fullgraph)


@torch.no_grad()
def sample(
    causal_lm: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    slots: int,
) -> Drawn:
    """One response to each prompt.

    In float32 a row's response depends on its prompt and seed alone, not on the other rows, their order or ``slots``.

    Args:
        causal_lm: one that `supports` knows, with whole weights, in evaluation mode.
        prompts: B lists of ids, none empty.
        sampling: how to draw.
        seeds: of each row, 0 to 2**63 - 1.
        slots: rows that are computed together at most.
    """
    pool = Pool(causal_lm, prompts, sampling, seeds, slots)
    pool.refill()
    while pool.live:
        raise_if_stopped_here()
        if pool.drop_finished():
            pool.refill()
        else:
            pool.step()
    return pool.drawn()
