# SPDX-License-Identifier: Apache-2.0
"""The default rollout engine: continuous batching by the actor itself.

Steps of fixed shapes, which a GPU replays (static.py), and transformers' `generate`, for models without support
(generate.py), are imported when they are used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dschat.models.engines import TrainedPolicy
from dschat.models.layout import COLUMN_STEP, SAMPLING_BUFFERS, SPARE_COLUMNS, round_up
from dschat.models.operations import cached_per_token
from dschat.rollouts.decoder import Capacity, Decoder
from dschat.rollouts.engine import Generation, ResponseSampler, RolloutEngine
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.scheduler import BatchScheduler, DecoderFactory
from dschat.run.distributed import is_main
from dschat.run.stop import raise_if_stopped_here

if TYPE_CHECKING:
    from dschat.rollouts.generate import GenerateEngine
    from dschat.rollouts.static import StaticDecoder

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


class ContinuousEngine:
    """Samples from the actor by continuous batching."""

    def __init__(self, slots: int, decode_graphs: bool | None = False, report: Report | None = None) -> None:
        """Stores the settings.

        Args:
            slots: maximum number of live rows.
            decode_graphs: decode in steps of fixed shapes, which a GPU replays as CUDA graphs; None: only on a GPU.
            report: called after every session with how its steps were launched.
        """
        self._slots = slots
        self._decode_graphs = decode_graphs
        self._report = report
        self._decoder: StaticDecoder | None = None  # with its graphs, as long as weights keep their addresses
        self._launches = "launched one by one"

    @contextmanager
    def session(self, actor: TrainedPolicy, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """See `dschat.rollouts.engine.RolloutEngine`."""
        with actor.gathered() as policy:
            yield self.sampler_for(policy.inner)
        self._record_launches()
        if self._decoder is not None and not self._decoder.is_valid():
            self._decoder = None  # frees its buffers while the models train
        if self._report is not None:
            self._report(self._launches)

    def sampler_for(self, causal_lm: PreTrainedModel) -> ResponseSampler:
        """Samples from a model with whole weights, in evaluation mode."""
        make_decoder = self._static_decoder if self._uses_graphs(causal_lm) else Decoder
        return partial(sample, causal_lm, slots=self._slots, make_decoder=make_decoder)

    def _uses_graphs(self, causal_lm: PreTrainedModel) -> bool:
        return causal_lm.device.type == "cuda" if self._decode_graphs is None else self._decode_graphs

    def kept_bytes(self, causal_lm: PreTrainedModel, prompts: int, tokens: int) -> int:
        """Bytes on the device that stay allocated while the model trains.

        CUDA graphs keep the buffers that they write into: the cache of keys and values, and the logits of a step.
        Under ZeRO 3 there are none: weights are gathered anew for every rollout, which ends the graphs.

        Args:
            causal_lm: the model that responses are sampled from.
            prompts: prompts of a rollout on this process, each counted once per response.
            tokens: longest prompt and response together.
        """
        is_partitioned = any(hasattr(parameter, "ds_id") for parameter in causal_lm.parameters())
        if not self._uses_graphs(causal_lm) or is_partitioned:
            return 0
        config = causal_lm.config.get_text_config()
        slots = min(self._slots, prompts)
        columns = round_up(tokens + (SPARE_COLUMNS if slots < prompts else 0), COLUMN_STEP)
        cache = slots * columns * cached_per_token(config) * causal_lm.dtype.itemsize
        logits = SAMPLING_BUFFERS * torch.float32.itemsize * slots * int(config.vocab_size)
        return cache + logits

    def _record_launches(self) -> None:
        """Records how steps were launched; a decoder whose steps cannot be captured is the last of its kind."""
        if self._decoder is None:
            return
        self._launches = self._decoder.launches
        if self._decoder.refusal is not None:
            self._decoder = None
            self._decode_graphs = False

    def _static_decoder(self, causal_lm: PreTrainedModel, capacity: Capacity) -> Decoder:
        """The decoder of the last rollout if it serves, else a new one that is no smaller."""
        self._record_launches()
        if self._decode_graphs is False:
            return Decoder(causal_lm, capacity)
        if self._decoder is not None:
            if self._decoder.serves(causal_lm, capacity):
                return self._decoder
            capacity = self._decoder.capacity.grown(capacity)
            self._decoder = None  # frees its buffers before others are allocated
        from dschat.rollouts.static import StaticDecoder

        self._decoder = StaticDecoder(causal_lm, capacity)
        return self._decoder


def decoding_bytes(rollouts: RolloutEngine, policy: TrainedPolicy, prompts: int, tokens: int) -> int:
    """Bytes that sampling keeps on this process's device while models train.

    Args:
        rollouts: samples from the policy.
        policy: its engine.
        prompts: responses of a rollout on this process.
        tokens: tokens of the longest prompt and response together.
    """
    if not isinstance(rollouts, ContinuousEngine):
        return 0
    return rollouts.kept_bytes(policy.module.inner, prompts, tokens)


def choose_engine(
    name: str,
    rows: int,
    causal_lm: PreTrainedModel,
    flag: str,
    decode_graphs: str = "auto",
    report: Report | None = None,
) -> ContinuousEngine | GenerateEngine:
    """Makes a rollout engine. Continuous batching falls back to transformers' generate for models without support.

    Args:
        name: "continuous" or "generate".
        rows: maximum number of rows that are sampled together.
        causal_lm: the model to sample from.
        flag: that gave the name, for messages.
        decode_graphs: "on", "off", or "auto" for on a GPU.
        report: see `ContinuousEngine`.
    """
    if name == "continuous" and supports(causal_lm):
        return ContinuousEngine(rows, {"on": True, "off": False}.get(decode_graphs), report)
    if name == "continuous" and is_main():
        logger.warning(
            "%s continuous: it does not know how models of type %s remember a text, so transformers' generate samples",
            flag,
            causal_lm.config.model_type,
        )
    from dschat.rollouts.generate import GenerateEngine

    return GenerateEngine(rows)


def supports(causal_lm: PreTrainedModel) -> bool:
    """Whether a model's only memory is keys and values of ordinary attention, full or sliding."""
    config = causal_lm.config
    if config.is_encoder_decoder or config.get_text_config() is not config or getattr(config, "alibi", False):
        return False
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if not layer_types <= {"full_attention", "sliding_attention"}:
        return False
    backbone = getattr(causal_lm, causal_lm.base_model_prefix)
    backbone_arguments = inspect.signature(backbone.forward).parameters
    model_arguments = inspect.signature(causal_lm.forward).parameters
    for argument in ("position_ids", "logits_to_keep"):
        if argument not in backbone_arguments and argument not in model_arguments:
            return False
    # Models that compile as a whole accept prepared attention masks.
    return bool(causal_lm._can_compile_fullgraph)


@torch.no_grad()
def sample(
    causal_lm: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    slots: int,
    make_decoder: DecoderFactory = Decoder,
    *,
    limits: Sequence[int] | None = None,
) -> Generation:
    """Samples one response to each of B prompts by continuous batching: finished rows make room for waiting prompts.

    In float32 a row's response depends on its prompt and seed alone, not on the other rows, their order or ``slots``.

    Args:
        causal_lm: a model that `supports` accepts, with whole weights, in evaluation mode.
        prompts: B lists of ids, without padding.
        sampling: how to sample.
        seeds: one per prompt, 0 to 2**63 - 1.
        slots: maximum number of rows computed together.
        make_decoder: class or function that makes the decoder.
        limits: optional per-response token limits; each overrides `max_new_tokens` when smaller.
    """
    on_gpu = causal_lm.device.type == "cuda"
    with torch.cuda.device(causal_lm.device) if on_gpu else nullcontext():  # graphs and events use the current device
        scheduler = BatchScheduler(causal_lm, prompts, sampling, seeds, slots, make_decoder, limits)
        scheduler.refill()
        while scheduler.live:
            raise_if_stopped_here()
            if scheduler.drop_finished():
                scheduler.refill()
            else:
                scheduler.step()
        return scheduler.generation()
