# SPDX-License-Identifier: Apache-2.0
"""Responses drawn with the actor itself: by continuous batching, or by transformers' own `generate`."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dschat.models.compiled import uncompiled
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import COLUMN_STEP, SAMPLING_BUFFERS, SPARE_COLUMNS
from dschat.models.operations import cached_per_token
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.decoder import Capacity, Decoder
from dschat.rollouts.engine import Draw, Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.scheduler import BatchScheduler, DecoderOf
from dschat.rollouts.static import StaticDecoder, round_up
from dschat.run.distributed import is_main
from dschat.run.stop import raise_if_stopped_here

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


class CausalLM(Protocol):
    """A Hugging Face causal LM, as far as `generate` needs it."""

    device: torch.device
    generation_config: GenerationConfig

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]: ...

    def generate(self, **options: object) -> Tensor: ...


class ContinuousEngine:
    """Draws from the actor by continuous batching, with so many live rows."""

    def __init__(self, slots: int, decode_graphs: bool | None = False, report: Report | None = None) -> None:
        """Takes how many rows live at most.

        `decode_graphs`: decode in steps of fixed shapes, on a GPU replayed from CUDA graphs; None: on a GPU alone.
        `report` is told after every session how its steps were launched.
        """
        self._slots, self._decode_graphs, self._report = slots, decode_graphs, report
        self._kept: StaticDecoder | None = None  # with its graphs, as long as weights stay where they are
        self._launches = "launched one by one"

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        with actor.gathered() as policy:
            yield self.draw_from(policy.inner)
        self._note_launches()
        if self._kept is not None and not self._kept.is_valid():
            self._kept = None  # its buffers are of no use while the models train
        if self._report is not None:
            self._report(self._launches)

    def draw_from(self, causal_lm: PreTrainedModel) -> Draw:
        graphs = causal_lm.device.type == "cuda" if self._decode_graphs is None else self._decode_graphs
        decoder_of = self._static_decoder if graphs else Decoder
        return partial(sample, causal_lm, slots=self._slots, decoder_of=decoder_of)

    def kept_bytes(self, causal_lm: PreTrainedModel, prompts: int, tokens: int) -> int:
        """Memory of the device that stays taken while the model trains.

        CUDA graphs go on holding what they write into: the cache of keys and values, and the logits of a step. Under
        ZeRO 3 there is none: weights are gathered anew for every rollout, and the graphs go with them.

        Args:
            causal_lm: the model that responses are sampled from.
            prompts: of a rollout on this process, each counted once per response.
            tokens: of the longest prompt and response together.
        """
        graphs = causal_lm.device.type == "cuda" if self._decode_graphs is None else self._decode_graphs
        is_partitioned = any(hasattr(parameter, "ds_id") for parameter in causal_lm.parameters())
        if not graphs or is_partitioned:
            return 0
        config, slots = causal_lm.config.get_text_config(), min(self._slots, prompts)
        columns = round_up(tokens + (SPARE_COLUMNS if slots < prompts else 0), COLUMN_STEP)
        cache = slots * columns * cached_per_token(config) * causal_lm.dtype.itemsize
        logits = SAMPLING_BUFFERS * torch.float32.itemsize * slots * int(config.vocab_size)
        return cache + logits

    def _note_launches(self) -> None:
        """A decoder whose steps cannot be captured goes, and no other is tried."""
        if self._kept is not None:
            self._launches = self._kept.launches
            if self._kept.refusal is not None:
                self._kept, self._decode_graphs = None, False

    def _static_decoder(self, causal_lm: PreTrainedModel, capacity: Capacity) -> Decoder:
        """The decoder of before, if it serves, or a new one with as much room."""
        self._note_launches()
        if self._decode_graphs is False:
            return Decoder(causal_lm, capacity)
        kept = self._kept
        if kept is None or not kept.serves(causal_lm, capacity):
            self._kept, grown = None, capacity if kept is None else kept.capacity.grown(capacity)
            del kept  # its buffers go before others come
            kept = self._kept = StaticDecoder(causal_lm, grown)
        return kept


class GenerateEngine:
    """Draws from the actor by transformers' `generate`, so many prompts at once."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        with actor.gathered() as policy:
            yield self.draw_from(policy.inner)

    def draw_from(self, causal_lm: CausalLM) -> Draw:
        return partial(generate, causal_lm, batch_size=self._batch_size)


def choose_engine(
    name: str,
    rows: int,
    causal_lm: PreTrainedModel,
    flag: str,
    decode_graphs: str = "auto",
    report: Report | None = None,
) -> ContinuousEngine | GenerateEngine:
    """The engine called continuous or generate, which draws so many rows together; transformers' generate in place of
    continuous batching where that does not fit. `flag` gave the name; graphs are on, off, or auto: on a GPU.
    """
    if name == "continuous":
        if supports(causal_lm):
            return ContinuousEngine(rows, {"on": True, "off": False}.get(decode_graphs), report)
        if is_main():
            told = "%s continuous: it does not know how models of type %s remember a text, so %s draws"
            logger.warning(told, flag, causal_lm.config.model_type, "transformers' generate")
    return GenerateEngine(rows)


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
    decoder_of: DecoderOf = Decoder,
    *,
    limits: Sequence[int] | None = None,
) -> Generation:
    """One response to each of B prompts by continuous batching: live rows only, finished ones make room for waiting
    prompts.

    In float32 a row's response depends on its prompt and seed alone, not on the other rows, their order or ``slots``,
    the rows that are computed together at most. The model is one that `supports` knows, with whole weights, in
    evaluation mode; seeds are 0 to 2**63 - 1.
    """
    on_gpu = causal_lm.device.type == "cuda"
    with torch.cuda.device(causal_lm.device) if on_gpu else nullcontext():  # graphs and events are of the current one
        scheduler = BatchScheduler(causal_lm, prompts, sampling, seeds, slots, decoder_of, limits)
        scheduler.refill()
        while scheduler.live:
            raise_if_stopped_here()
            if scheduler.drop_finished():
                scheduler.refill()
            else:
                scheduler.step()
        return scheduler.generation()


class FiniteLogits(LogitsProcessor):
    """Notes rows whose logits are not finite, and lets them be sampled from evenly, to be thrown away later.

    They are not an error here, or other processes would wait for the one that fails. A logit of −inf beside finite
    ones is fine: it is a token that is never sampled. Ids that are no tokens (`missing`, (K,) long) are never sampled.
    """

    def __init__(self, rows: int, device: torch.device, missing: Tensor | None = None) -> None:
        self.bad_rows = torch.zeros(rows, dtype=torch.bool, device=device)
        self._missing = missing

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        usable = scores.amax(-1).isfinite()
        self.bad_rows |= ~usable
        scores = torch.where(usable[:, None], scores, 0.0)
        return scores if self._missing is None else scores.index_fill_(1, self._missing, -torch.inf)


@torch.no_grad()
def generate(
    causal_lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    batch_size: int,
    *,
    limits: Sequence[int] | None = None,
) -> Generation:
    """One response to each of B prompts by transformers' `generate`, without log-probs; so many of similar length at
    once.

    The model has whole weights and is in evaluation mode. transformers draws a batch from one sequence of numbers, so
    that a row depends on all seeds, and on the other rows; the global random state is left as it was.
    """
    device = causal_lm.device
    input_ids, attention_mask = pad_prompts(prompts, sampling.pad_id, device)
    tokens = torch.full((len(prompts), sampling.max_new_tokens), sampling.pad_id, device=device)
    bad_rows = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    most = sampling.limits(len(prompts), limits)
    order = sorted(range(len(prompts)), key=lambda row: (most[row], -len(prompts[row])))
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with fork, _own_generation_config(causal_lm), uncompiled(cast(PreTrainedModel, causal_lm)):
        torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
        for chosen in _batches(order, most, batch_size):
            raise_if_stopped_here()
            rows = torch.tensor(chosen, device=device)
            width = len(prompts[chosen[0]])
            watch = FiniteLogits(len(rows), device, missing_ids_of(causal_lm))
            sequences = causal_lm.generate(
                input_ids=input_ids[rows, -width:],
                attention_mask=attention_mask[rows, -width:].long(),
                generation_config=replace(sampling, max_new_tokens=most[chosen[0]]).generation_config(),
                logits_processor=LogitsProcessorList([watch]),
            )
            tokens[rows, : sequences.shape[1] - width] = sequences[:, width:]
            bad_rows[rows] = watch.bad_rows
    return Generation(assemble((input_ids, attention_mask), tokens, sampling, limits), None, bad_rows)


def _batches(order: Sequence[int], limits: Sequence[int], size: int) -> Iterator[list[int]]:
    """So many rows in this order at a time, of which all have the same limit."""
    for _, of_limit in groupby(order, key=lambda row: limits[row]):
        rows = list(of_limit)
        yield from (rows[first : first + size] for first in range(0, len(rows), size))


@contextmanager
def _own_generation_config(causal_lm: CausalLM) -> Iterator[None]:
    """Hides the checkpoint's generation config, whose fields would fill whatever is None in the one passed."""
    saved = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = saved
