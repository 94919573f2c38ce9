# SPDX-License-Identifier: Apache-2.0
"""The forward passes of continuous batching: prompts (prefill), then one token of every live row (step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.models.attention import PLAIN_ATTENTION
from dschat.models.eager import compiler_of
from dschat.models.layout import to_device
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms
from dschat.rollouts.slots import SlotCache, StepMasks

SampleTokens = Callable[[TokenSampler, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Capacity:
    """The sizes of a decoder's buffers."""

    slots: int  # live rows
    columns: int  # of the cache
    prompts: int
    tokens: int  # of a response

    def holds(self, other: Capacity) -> bool:
        """Whether no size of the other is larger."""
        return self.grown(other) == self

    def grown(self, other: Capacity) -> Capacity:
        """The larger of the two in every size."""
        return Capacity(*map(max, astuple(self), astuple(other)))


class Decoder:
    """Samples tokens of the rows in the slots. A row writes its keys and values into its slot of the cache.

    With S slots and B prompts of at most T response tokens, it holds on the model's device:

    - for each slot, shape (S,): the `number` of its prompt, how many tokens are `sampled`, `position` and `id` of the
      last of them, whether it has `ended`, and the `first` column of its row;
    - for each prompt, shape (B + 1, T): `tokens` and `logprobs` as sampled, and the `uniform` numbers that decide
      them. The last row is for slots without a prompt.
    """

    def __init__(self, causal_lm: PreTrainedModel, capacity: Capacity) -> None:
        """Allocates the tensors; the first forward pass allocates the cache."""
        device = causal_lm.device
        self.capacity = capacity
        self._model = causal_lm
        self._device = device
        self._compiler = compiler_of(causal_lm)
        self.cache = SlotCache(causal_lm.config, capacity.slots, capacity.columns)
        # Kernels made for many tokens are of no use to a step; a model without a choice keeps its own.
        is_plain = causal_lm.config._attn_implementation in PLAIN_ATTENTION
        steps_by_products = not is_plain and causal_lm._supports_attention_backend
        self._masks = StepMasks(causal_lm.config, self.cache, is_plain or steps_by_products)
        self._step_attention: Callable[[], AbstractContextManager[None]] = nullcontext
        if steps_by_products:
            from dschat.rollouts.attention import one_token_attention

            self._step_attention = partial(one_token_attention, causal_lm)

        self._slot_state = torch.zeros(5, capacity.slots, dtype=torch.long, device=device)
        self.number, self.sampled, self.position, self.id, self.first = self._slot_state
        self.ended = torch.zeros(capacity.slots, dtype=torch.bool, device=device)
        shape = (capacity.prompts + 1, capacity.tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        self._samplers: dict[Sampling, TokenSampler] = {}

    def begin(self, sampling: Sampling, seeds: Sequence[int], slots: int) -> None:
        """Empties the slots for a new rollout.

        Args:
            sampling: sampling of its responses.
            seeds: one per prompt.
            slots: number of slots to use.
        """
        self._sampling = sampling
        self._used_slots = slots
        if sampling not in self._samplers:
            missing = missing_ids_of(self._model)
            missing_ids = [] if missing is None else missing.tolist()
            vocab_size = self._model.config.vocab_size
            self._samplers[sampling] = TokenSampler(sampling, vocab_size, self._device, missing_ids)
        width = min(sampling.max_new_tokens, self.capacity.tokens)  # per-response limits may be smaller
        row_seeds = torch.tensor(seeds, device=self._device)
        self.uniform[: len(seeds), :width] = uniforms(row_seeds, width)
        self.tokens.fill_(sampling.pad_id)
        self.number.fill_(self.capacity.prompts)

    def take(self, rows: slice[int, int], numbers: Sequence[int], lengths: Sequence[int], low: int, end: int) -> None:
        """Gives slots to prompts.

        Args:
            rows: the slots.
            numbers: numbers of the prompts.
            lengths: lengths of the prompts, longest first.
            low: first column of all live rows, these included.
            end: column after the last token of every prompt.
        """
        first_columns = [end - length for length in lengths]
        slot_state = np.array([numbers, lengths, first_columns])
        self.number[rows], self.position[rows], self.first[rows] = to_device(slot_state, self._device)
        self.position[rows] -= 1
        self.sampled[rows] = 0
        self.ended[rows] = False
        self._clear(rows, low, end - lengths[0])

    def _clear(self, rows: slice[int, int], low: int, start: int) -> None:
        """Zeroes columns that will be read and in which earlier rows may have left numbers that are not finite."""
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
        """Runs the model on prompts, and samples their first tokens.

        Args:
            rows: n slots.
            input_ids: shape (n, P), long, padded on the left.
            mask: shape (n, P), bool.
            end: column after the last token of every prompt.
            copies: slots among `rows`, and further slots with the same prompts, which get copies of their keys, values
                and logits.
        """
        start = end - input_ids.shape[1]
        self.cache.window.set(rows, read_start=start, write_start=start, end=end)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with self._uncompiled():
            logits = self._forward(rows, input_ids, positions, mask.long())
        if copies[0]:
            source, target = to_device(np.array(copies), self._device)
            self.cache.move(source, target, slice(start, end))
            self._sample_tokens(target, logits[source - rows.start])  # indexing copies: sampling overwrites logits
        self._sample_tokens(rows, logits)

    def rows_changed(self, live: int, end: int) -> None:
        """To be called before the next step whenever the first `live` slots hold other rows or columns."""
        self._masks.update(self.first[:live])

    def step(self, live: int, low: int, end: int) -> None:
        """Samples the next token of the first `live` slots, which see columns [low, end] and write column `end`."""
        rows = slice(0, live)
        self.cache.window.set(rows, read_start=low, write_start=end, end=end + 1)
        self.position[rows] += 1
        input_ids = self.id[rows, None]
        positions = self.position[rows, None]
        with self._uncompiled(), self._step_attention():
            logits = self._forward(rows, input_ids, positions, self._masks.of_step())
        self._sample_tokens(rows, logits)

    def ended_slots(self, live: int) -> list[bool]:
        """Which of the first `live` slots have ended; waits for the device."""
        return self.ended[:live].tolist()

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: slice[int, int]) -> None:
        """Copies the rows of some slots, whose tokens are in these columns, into other slots."""
        source, target = to_device(np.array([sources, targets]), self._device)
        self.cache.move(source, target, columns)
        for state in (self._slot_state, self.ended):
            state[..., target] = state[..., source]

    def shift(self, live: int, columns: slice[int, int], distance: int) -> None:
        """Moves columns of the first `live` slots to the left."""
        self.cache.shift(live, columns, distance)
        self.first -= distance

    def _forward(
        self, rows: slice[int, int], input_ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor]
    ) -> Tensor:
        """Logits (n, V) after the last tokens of n slots."""
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
        """Inside, layers run uncompiled: for passes over prompts, and for steps whose sizes change each time."""
        return nullcontext() if self._compiler is None else self._compiler.paused()

    def _sample_tokens(
        self, rows: slice[int, int] | Tensor, logits: Tensor, sample: SampleTokens = TokenSampler.__call__
    ) -> None:
        """Samples the next token of some slots. `sample` is `TokenSampler.__call__` or its compiled form."""
        number = self.number[rows]
        sampled = self.sampled[rows]
        sampler = self._samplers[self._sampling]
        ids, logprobs = sample(sampler, logits, self.uniform[number, sampled])
        self.tokens[number, sampled] = ids
        self.logprobs[number, sampled] = logprobs
        self.id[rows] = ids
        self.ended[rows] |= sampler.ended(ids)
        self.sampled[rows] += 1
