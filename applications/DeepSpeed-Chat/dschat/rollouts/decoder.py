# SPDX-License-Identifier: Apache-2.0
"""The forward passes of continuous batching: a prompt's first token, then one token of every live row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.models.compiled import compiler_of
from dschat.models.layout import to_device
from dschat.models.opening import PLAIN_ATTENTION
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.attention import grouped_heads, one_token_attention
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms
from dschat.rollouts.slots import SlotCache, StepMasks

Sample = Callable[[TokenSampler, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Capacity:
    """What a decoder has room for."""

    slots: int  # live rows
    columns: int  # of the cache
    prompts: int
    tokens: int  # of a response

    def holds(self, other: Capacity) -> bool:
        """Whether there is room for the other, too."""
        return all(a >= b for a, b in zip(astuple(self), astuple(other), strict=True))

    def grown(self, other: Capacity) -> Capacity:
        """Room for both."""
        return Capacity(*map(max, astuple(self), astuple(other)))


class Decoder:
    """Draws tokens of the rows in the slots. A row writes its keys and values into its slot of the cache.

    Of S slots, and B prompts with T tokens each at most, it has, on the model's device:

    - of each slot (S,): the `number` of its prompt, how many tokens are `drawn`, `position` and `id` of the last of
      them, whether it has `ended`, and the `first` column of its row;
    - of each prompt (B + 1, T): `tokens` and `logprobs` as drawn, and the `uniform` numbers that decide them. The last
      row is for slots without a prompt.
    """

    def __init__(self, causal_lm: PreTrainedModel, capacity: Capacity) -> None:
        """Makes the tensors; the cache's buffers come with the first forward pass."""
        device, self.capacity = causal_lm.device, capacity
        self._model, self._device = causal_lm, device
        self._compiler = compiler_of(causal_lm)
        self.cache = SlotCache(causal_lm.config, capacity.slots, capacity.columns)
        # Kernels that are made for many tokens are of no use to a step; a model without a choice keeps its own.
        is_plain = causal_lm.config._attn_implementation in PLAIN_ATTENTION
        self._steps_by_products = not is_plain and causal_lm._supports_attention_backend
        self._masks = StepMasks(causal_lm.config, self.cache, is_plain or self._steps_by_products)
        self.number, self.drawn, self.position, self.id, self.first = torch.zeros(
            5, capacity.slots, dtype=torch.long, device=device
        )
        self.ended = torch.zeros(capacity.slots, dtype=torch.bool, device=device)
        shape = (capacity.prompts + 1, capacity.tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        self._samplers: dict[Sampling, TokenSampler] = {}

    def begin(self, sampling: Sampling, seeds: Sequence[int], slots: int) -> None:
        """Empties the slots, of which so many are used from now on; `seeds` are of each prompt."""
        self._sampling, self._used = sampling, slots
        if sampling not in self._samplers:
            missing = missing_ids_of(self._model)
            excluded = [] if missing is None else missing.tolist()
            vocab_size = self._model.config.vocab_size
            self._samplers[sampling] = TokenSampler(sampling, vocab_size, self._device, excluded)
        width = min(sampling.max_new_tokens, self.capacity.tokens)  # of limits, fewer
        self.uniform[: len(seeds), :width] = uniforms(torch.tensor(seeds, device=self._device), width)
        self.tokens.fill_(sampling.pad_id)
        self.number.fill_(self.capacity.prompts)

    def take(self, rows: slice[int, int], numbers: Sequence[int], lengths: Sequence[int], low: int, end: int) -> None:
        """Gives slots to the prompts of these numbers and lengths, the longest first.

        `low` is the first column of all live rows, these included; `end` is the column behind the prompts' last
        tokens.
        """
        known = np.array([numbers, lengths, [end - length for length in lengths]])
        self.number[rows], self.position[rows], self.first[rows] = to_device(known, self._device)
        self.position[rows] -= 1
        self.drawn[rows], self.ended[rows] = 0, False
        self._clear(rows, low, end - lengths[0])

    def _clear(self, rows: slice[int, int], low: int, start: int) -> None:
        """Empties columns that are read, and that the rows before may have left with numbers that are not finite."""
        if low < start:
            self.cache.clear(rows, slice(low, start))

    def prefill(
        self,
        rows: slice[int, int],
        input_ids: Tensor,
        mask: Tensor,
        end: int,
        copies: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        """Runs the model on the prompts of n slots, and draws their first tokens.

        `input_ids` (n, P) long are padded on the left, `mask` (n, P) bool; `end` is the column behind the prompts'
        last tokens. `copies` are some of these slots, and others with the same prompts, which get their keys, values
        and logits.
        """
        start = end - input_ids.shape[1]
        self.cache.window.set(rows, low=start, start=start, end=end)
        with self._uncompiled():
            logits = self._forward(rows, input_ids, (mask.cumsum(1) - 1).clamp(min=0), mask.long())
        if copies[0]:
            source, target = to_device(np.array(copies), self._device)
            self.cache.move(source, target, slice(start, end))
            self._draw(target, logits[source - rows.start])  # of a copy: what is drawn from is overwritten
        self._draw(rows, logits)

    def rows_changed(self, live: int, end: int) -> None:
        """To be called before the next step when the first `live` slots have other rows, or these other columns."""
        self._masks.update(self.first[:live])

    def step(self, live: int, low: int, end: int) -> None:
        """Draws the next token of the first `live` slots' rows, which see columns [low, end] and write the last."""
        rows = slice(0, live)
        self.cache.window.set(rows, low=low, start=end, end=end + 1)
        self.position[rows] += 1
        by_products = one_token_attention(self._model) if self._steps_by_products else nullcontext()
        with self._uncompiled(), by_products:
            logits = self._forward(rows, self.id[rows, None], self.position[rows, None], self._masks.of_step())
        self._draw(rows, logits)

    def ended_slots(self, live: int) -> list[bool]:
        """Which of the first slots' rows have ended; waits for the device."""
        return self.ended[:live].tolist()

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: slice[int, int]) -> None:
        """Copies the rows of some slots, whose tokens are in these columns, into other slots."""
        source, target = to_device(np.array([sources, targets]), self._device)
        self.cache.move(source, target, columns)
        for state in (self.number, self.drawn, self.position, self.id, self.first, self.ended):
            state[target] = state[source]

    def shift(self, live: int, columns: slice[int, int], distance: int) -> None:
        """Moves the columns of the first slots to the left."""
        self.cache.shift(live, columns, distance)
        self.first -= distance

    def _forward(
        self, rows: slice[int, int], input_ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor]
    ) -> Tensor:
        """Logits (n, V) behind the last tokens of n slots."""
        with grouped_heads():
            output = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _uncompiled(self) -> AbstractContextManager[None]:
        """Inside, layers run as they are: passes over prompts, and steps whose sizes change each time."""
        return nullcontext() if self._compiler is None else self._compiler.paused()

    def _draw(self, rows: slice[int, int] | Tensor, logits: Tensor, sample: Sample = TokenSampler.__call__) -> None:
        """Draws the next token of these slots' rows; `sample` is `TokenSampler.__call__`, or its compiled form."""
        number, drawn = self.number[rows], self.drawn[rows]
        sampler = self._samplers[self._sampling]
        ids, logprobs = sample(sampler, logits, self.uniform[number, drawn])
        self.tokens[number, drawn], self.logprobs[number, drawn] = ids, logprobs
        self.id[rows] = ids
        self.ended[rows] |= sampler.ended(ids)
        self.drawn[rows] += 1
