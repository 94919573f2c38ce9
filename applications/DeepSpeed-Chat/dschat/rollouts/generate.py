# SPDX-License-Identifier: Apache-2.0
"""Rollout engines that use the actor itself: continuous batching, and transformers' `generate`."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dschat.models.eager import uncompiled
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import COLUMN_STEP, SAMPLING_BUFFERS, SPARE_COLUMNS
from dschat.models.operations import cached_per_token
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.decoder import Capacity, Decoder
from dschat.rollouts.engine import Generation, ResponseSampler, RolloutEngine, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.scheduler import BatchScheduler, DecoderFactory
from dschat.rollouts.static import StaticDecoder, round_up
from dschat.run.distributed import is_main
from dschat.run.stop import raise_if_stopped_here

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
    def session(self, actor: TrainedPolicy) -> Iterator[ResponseSampler]:
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
        self._decoder = StaticDecoder(causal_lm, capacity)
        return self._decoder


class GenerateEngine:
    """Samples from the actor by transformers' `generate`, a batch of prompts at a time."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[ResponseSampler]:
        """See `dschat.rollouts.engine.RolloutEngine`."""
        with actor.gathered() as policy:
            yield self.sampler_for(policy.inner)

    def sampler_for(self, causal_lm: PreTrainedModel) -> ResponseSampler:
        """Samples from a model with whole weights, in evaluation mode."""
        return partial(generate, causal_lm, batch_size=self._batch_size)


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
