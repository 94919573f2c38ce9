# SPDX-License-Identifier: Apache-2.0
"""The scheduler of continuous batching: prompts that wait, rows that live in the slots, and what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.models.layout import SPARE_COLUMNS
from dschat.rollouts.engine import Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms
from dschat.rollouts.slots import SlotCache, StepMasks

SYNC_INTERVAL = {"cuda": 8}  # steps after which the host asks which rows have ended, which waits for the device
DROP_SHARE = 8  # rows are dropped once one in so many has finished: each time, others are copied into their places


@dataclass
class LiveRow:
    """A row that is being sampled, as far as the host knows it."""

    number: int  # of its prompt
    start: int  # column of its first token
    last: int  # columns that are filled when it has drawn all the tokens that it may


class BatchScheduler:
    """Draws one response to each prompt, slot by slot.

    All live rows write into the same column: `_end` of them are filled. Of a live row everything is in the cache but
    the token that was drawn last.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        slots: int,
    ) -> None:
        """Takes what `dschat.rollouts.generate.sample` takes."""
        config, device, longest = causal_lm.config, causal_lm.device, sampling.max_new_tokens
        self._model, self._sampling = causal_lm, sampling
        self._prompts = pad_prompts(prompts, sampling.pad_id, device)
        self._lengths = [len(prompt) for prompt in prompts]
        # The longest come first: later ones then never begin left of those that live, and what needs most memory fails
        # at once.
        self._waiting = sorted(range(len(prompts)), key=self._lengths.__getitem__)
        self.live: list[LiveRow] = []

        self._slots, self._end = min(slots, len(prompts)), max(self._lengths)
        self._columns = self._end + longest + (SPARE_COLUMNS if self._slots < len(prompts) else 0)
        self._cache = SlotCache(config, self._slots, self._columns)
        self._masks = StepMasks(config, self._cache)
        self._sync_interval, self._steps = SYNC_INTERVAL.get(device.type, 1), 0

        self._uniform = uniforms(torch.tensor(seeds, device=device), longest)
        self._sample_tokens = TokenSampler(sampling, config.vocab_size, device)
        self._end_ids = torch.tensor(sampling.end_ids, device=device)
        self._tokens = torch.full((len(prompts), longest), sampling.pad_id, device=device)
        self._logprobs = torch.zeros((len(prompts), longest), device=device)
        # Of each slot: the prompt's number, the number of tokens drawn, the position and id of the last of them.
        self._number, self._drawn, self._position, self._id = torch.zeros(
            4, self._slots, dtype=torch.long, device=device
        )
        self._ended = torch.zeros(self._slots, dtype=torch.bool, device=device)

    def refill(self) -> None:
        """Gives free slots to waiting prompts, and draws their first tokens."""
        taken = len(self.live)
        numbers = [self._waiting.pop() for _ in range(min(self._slots - taken, len(self._waiting)))]
        if not numbers:
            return
        lengths = [self._lengths[number] for number in numbers]
        width, rows = lengths[0], slice(taken, taken + len(numbers))
        last = self._end + self._sampling.max_new_tokens - 1
        self.live += [LiveRow(number, self._end - self._lengths[number], last) for number in numbers]
        start = self._end - width
        if self._low() < start:  # rows that have left these slots may have left numbers that are not finite
            self._cache.clear(rows, slice(self._low(), start))
        self._number[rows], self._position[rows] = torch.tensor([numbers, lengths], device=self._number.device)
        self._position[rows] -= 1
        self._drawn[rows], self._ended[rows] = 0, False
        input_ids, mask = (x[self._number[rows], x.shape[1] - width :] for x in self._prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._cache.window.set(rows, low=start, start=start, end=self._end)
        self._forward(rows, input_ids, positions, mask.long())
        self._update_masks()

    def drop_finished(self) -> bool:
        """Frees the slots of rows that have finished, once they are many enough; whether it did so."""
        at_limit = any(row.last == self._end for row in self.live)
        if not at_limit and self._steps % self._sync_interval:
            return False
        ended = self._ended[: len(self.live)].tolist()
        kept = [slot for slot, row in enumerate(self.live) if not ended[slot] and row.last > self._end]
        if not at_limit and len(self.live) - len(kept) < max(1, len(self.live) // DROP_SHARE):
            return False
        # The first slots stay taken: rows from behind move into those of them that are free now.
        order, free = list(range(len(kept))), sorted(set(range(len(kept))) - set(kept))
        moving = [slot for slot in kept if slot >= len(kept)]
        for source, target in zip(moving, free, strict=True):
            order[target] = source
        self.live = [self.live[slot] for slot in order]
        if moving:
            self._cache.move(moving, free, slice(self._low(), self._end))
            source, target = torch.tensor([moving, free], device=self._number.device)
            for state in (self._number, self._drawn, self._position, self._id, self._ended):
                state[target] = state[source]
        if self.live:
            self._update_masks()
        return True

    def step(self) -> None:
        """Draws the next token of every live row."""
        if self._end == self._columns:
            self._shift()
        rows = slice(0, len(self.live))
        self._cache.window.set(rows, low=self._low(), start=self._end, end=self._end + 1)
        self._end += 1
        self._position[rows] += 1
        self._forward(rows, self._id[rows, None], self._position[rows, None], self._masks.of_step())
        self._steps += 1

    def generation(self) -> Generation:
        """Everything, in the order of the prompts."""
        rollout = assemble(self._prompts, self._tokens, self._sampling)
        mask = rollout.response_mask
        logprobs = torch.where(mask, self._logprobs[:, : mask.shape[1]], 0.0)
        return Generation(rollout, logprobs, bad_rows=logprobs.isnan().any(1))

    def _forward(
        self, rows: slice[int, int], input_ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor]
    ) -> None:
        """Runs the model on new columns of some slots, and draws a token for each of them."""
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        number, drawn = self._number[rows], self._drawn[rows]
        ids, logprobs = self._sample_tokens(output.logits[:, -1], self._uniform[number, drawn])
        self._tokens[number, drawn], self._logprobs[number, drawn] = ids, logprobs
        self._id[rows] = ids
        self._ended[rows] |= torch.isin(ids, self._end_ids)
        self._drawn[rows] += 1

    def _low(self) -> int:
        """The first column of live rows."""
        return min(row.start for row in self.live)

    def _update_masks(self) -> None:
        self._masks.update([row.start for row in self.live])

    def _shift(self) -> None:
        """Moves the live rows to the first columns, where a prompt of any length still fits in on their left."""
        columns = slice(self._low(), self._end)
        self._end = max(self._end - columns.start, max(self._lengths))
        distance = columns.stop - self._end
        self._cache.shift(len(self.live), columns, distance)
        for row in self.live:
            row.start -= distance
            row.last -= distance
        self._update_masks()
