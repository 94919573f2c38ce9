# SPDX-License-Identifier: Apache-2.0
"""The scheduler of continuous batching: prompts that wait, rows that live in the slots, and what was drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dschat.models.layout import PREFILL_TOKENS, SPARE_COLUMNS
from dschat.rollouts.decoder import Capacity, Decoder
from dschat.rollouts.engine import Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling

SYNC_INTERVAL = {"cuda": 8}  # steps after which the host asks which rows have ended, which waits for the device
DROP_SHARE = 8  # rows are dropped once one in so many has finished: each time, others are copied into their places


DecoderOf = Callable[[PreTrainedModel, Capacity], Decoder]


@dataclass
class LiveRow:
    """A row that is being sampled, as far as the host knows it."""

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
        decoder_of: DecoderOf = Decoder,
        limits: Sequence[int] | None = None,
    ) -> None:
        """Takes what to draw.

        Where there are `limits`, the most tokens of each response, prompts are texts of which many have several
        completions: equal ones that get slots together go through the model once.
        """
        device = causal_lm.device
        self._sampling, self._given = sampling, limits
        self._limits = sampling.limits(len(prompts), limits)
        self._same = [tuple(prompt) if limits is not None else number for number, prompt in enumerate(prompts)]
        longest = max(self._limits)
        self._prompts = pad_prompts(prompts, sampling.pad_id, device)
        self._lengths = [len(prompt) for prompt in prompts]
        # The longest come first: later ones then never begin left of those that live, and what needs most memory fails
        # at once.
        self._waiting = sorted(range(len(prompts)), key=self._lengths.__getitem__)
        self.live: list[LiveRow] = []

        self._slots, self._end = min(slots, len(prompts)), max(self._lengths)
        columns = self._end + longest + (SPARE_COLUMNS if self._slots < len(prompts) else 0)
        self._decoder = decoder_of(causal_lm, Capacity(self._slots, columns, len(prompts), longest))
        self._decoder.begin(sampling, seeds, self._slots)
        self._columns = columns  # and not the decoder's, whose room depends on what was drawn before
        self._sync_interval, self._steps = SYNC_INTERVAL.get(device.type, 1), 0

    def refill(self) -> None:
        """Gives free slots to waiting prompts, and draws their first tokens."""
        taken = len(self.live)
        numbers = [self._waiting.pop() for _ in range(min(self._slots - taken, len(self._waiting)))]
        if not numbers:
            return
        firsts = {self._same[number]: number for number in reversed(numbers)}  # of those that are the same
        read = [number for number in numbers if firsts[self._same[number]] == number]
        copies = [number for number in numbers if firsts[self._same[number]] != number]
        numbers = read + copies
        slot_of = {self._same[number]: taken + place for place, number in enumerate(read)}
        sources = [slot_of[self._same[number]] for number in copies]
        lengths = [self._lengths[number] for number in numbers]
        self.live += [
            LiveRow(self._end - length, self._end + self._limits[number] - 1)
            for number, length in zip(numbers, lengths, strict=True)
        ]
        self._decoder.take(slice(taken, len(self.live)), numbers, lengths, self._low(), self._end)
        for first, behind in prefill_groups(lengths[: len(read)]):
            rows, width = slice(taken + first, taken + behind), lengths[first]
            number = self._decoder.number[rows]
            input_ids, mask = (x[number, x.shape[1] - width :] for x in self._prompts)
            chosen = [place for place, source in enumerate(sources) if rows.start <= source < rows.stop]
            targets = [taken + len(read) + place for place in chosen]
            self._decoder.prefill(rows, input_ids, mask, self._end, ([sources[place] for place in chosen], targets))
        self._rows_changed()

    def drop_finished(self) -> bool:
        """Frees the slots of rows that have finished, once they are many enough; whether it did so."""
        at_limit = any(row.last == self._end for row in self.live)
        if not at_limit and self._steps % self._sync_interval:
            return False
        ended = self._decoder.ended_slots(len(self.live))
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
            self._decoder.move(moving, free, slice(self._low(), self._end))
        if self.live:
            self._rows_changed()
        return True

    def step(self) -> None:
        """Draws the next token of every live row."""
        if self._end == self._columns:
            self._shift()
        self._decoder.step(len(self.live), self._low(), self._end)
        self._end += 1
        self._steps += 1

    def generation(self) -> Generation:
        """Everything, in the order of the prompts."""
        count, longest = len(self._lengths), max(self._limits)
        rollout = assemble(self._prompts, self._decoder.tokens[:count, :longest], self._sampling, self._given)
        mask = rollout.response_mask
        logprobs = torch.where(mask, self._decoder.logprobs[:count, : mask.shape[1]], 0.0)
        return Generation(rollout, logprobs, bad_rows=logprobs.isnan().any(1))

    def _low(self) -> int:
        return min(row.start for row in self.live)

    def _rows_changed(self) -> None:
        self._decoder.rows_changed(len(self.live), self._end)

    def _shift(self) -> None:
        """Moves the live rows to the first columns, where a prompt of any length still fits in on their left."""
        columns = slice(self._low(), self._end)
        self._end = max(self._end - columns.start, max(self._lengths))
        distance = columns.stop - self._end
        self._decoder.shift(len(self.live), columns, distance)
        for row in self.live:
            row.start -= distance
            row.last -= distance
        self._rows_changed()


def prefill_groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First and behind-last prompt of each forward pass over prompts, the longest first, without much padding.

    A pass holds at most PREFILL_TOKENS, padding included, or one prompt.
    """
    groups, first = [], 0
    for number in range(1, len(lengths) + 1):
        if number == len(lengths) or (number - first + 1) * lengths[first] > PREFILL_TOKENS:
            groups.append((first, number))
            first = number
    return groups
