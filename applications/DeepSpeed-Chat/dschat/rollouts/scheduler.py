# SPDX-License-Identifier: Apache-2.0
"""The scheduler of continuous batching: waiting prompts, live rows in slots, and the sampled responses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dschat.models.layout import PREFILL_TOKENS, SPARE_COLUMNS
from dschat.rollouts.decoder import Capacity, Decoder
from dschat.rollouts.engine import Generation, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling

SYNC_INTERVAL = {"cuda": 8}  # steps after which the host asks which rows have ended, which waits for the device
DROP_SHARE = 8  # finished rows are dropped once they are 1/8 of the live ones: dropping copies other rows


DecoderFactory = Callable[[PreTrainedModel, Capacity], Decoder]


@dataclass
class LiveRow:
    """A row that is being sampled, as far as the host knows it."""

    start: int  # column of its first token
    last: int  # columns that are filled once it has reached its token limit


class BatchScheduler:
    """Samples one response to each prompt, slot by slot.

    All live rows write into the same column; `_end` columns are filled. The cache holds all tokens of a live row but
    the one that was sampled last.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        slots: int,
        make_decoder: DecoderFactory = Decoder,
        limits: Sequence[int] | None = None,
    ) -> None:
        """Prepares the decoder.

        With `limits`, optional per-response token limits, prompts are texts of which many have several completions:
        equal ones that get slots together go through the model once.
        """
        device = causal_lm.device
        self._sampling = sampling
        self._given_limits = limits
        self._limits = sampling.limits(len(prompts), limits)
        # Rows with the same key share a prefill.
        self._prefill_keys: list[Hashable] = list(range(len(prompts)))
        if limits is not None:
            self._prefill_keys = [tuple(prompt) for prompt in prompts]
        self._prompts = pad_prompts(prompts, sampling.pad_id, device)
        self._lengths = [len(prompt) for prompt in prompts]
        # Longest first (from the end): later prompts then never begin left of live rows, and the allocation that needs
        # most memory fails at once.
        self._waiting = sorted(range(len(prompts)), key=self._lengths.__getitem__)
        self.live: list[LiveRow] = []

        longest = max(self._limits)
        self._slots = min(slots, len(prompts))
        self._end = max(self._lengths)
        columns = self._end + longest
        if self._slots < len(prompts):
            columns += SPARE_COLUMNS
        self._columns = columns  # not the decoder's, whose capacity depends on earlier rollouts
        capacity = Capacity(self._slots, columns, len(prompts), longest)
        self._decoder = make_decoder(causal_lm, capacity)
        self._decoder.begin(sampling, seeds, self._slots)
        self._sync_interval = SYNC_INTERVAL.get(device.type, 1)
        self._steps = 0

    def refill(self) -> None:
        """Gives free slots to waiting prompts, and samples their first tokens."""
        first_slot = len(self.live)
        count = min(self._slots - first_slot, len(self._waiting))
        if not count:
            return
        numbers = [self._waiting.pop() for _ in range(count)]

        # Of equal prompts the first is run through the model, the others copy its keys and values.
        slot_by_key: dict[Hashable, int] = {}
        computed: list[int] = []
        copied: list[int] = []
        for number in numbers:
            key = self._prefill_keys[number]
            if key in slot_by_key:
                copied.append(number)
            else:
                slot_by_key[key] = first_slot + len(computed)
                computed.append(number)
        sources = [slot_by_key[self._prefill_keys[number]] for number in copied]

        # Slots go to the computed prompts first.
        numbers = computed + copied
        lengths = [self._lengths[number] for number in numbers]
        for number in numbers:
            start = self._end - self._lengths[number]
            last = self._end + self._limits[number] - 1
            self.live.append(LiveRow(start, last))
        new_slots = slice(first_slot, len(self.live))
        self._decoder.take(new_slots, numbers, lengths, self._low(), self._end)

        first_copy = first_slot + len(computed)
        for start, stop in prefill_groups(lengths[: len(computed)]):
            rows = slice(first_slot + start, first_slot + stop)
            width = lengths[start]
            prompt_numbers = self._decoder.number[rows]
            padded_ids, padded_mask = self._prompts
            padding = padded_ids.shape[1] - width
            input_ids = padded_ids[prompt_numbers, padding:]
            mask = padded_mask[prompt_numbers, padding:]
            group_sources: list[int] = []
            group_targets: list[int] = []
            for position, source in enumerate(sources):
                if rows.start <= source < rows.stop:
                    group_sources.append(source)
                    group_targets.append(first_copy + position)
            self._decoder.prefill(rows, input_ids, mask, self._end, (group_sources, group_targets))
        self._rows_changed()

    def drop_finished(self) -> bool:
        """Frees the slots of finished rows once there are enough of them; returns whether it did so."""
        at_limit = any(row.last == self._end for row in self.live)
        if not at_limit and self._steps % self._sync_interval:
            return False
        ended = self._decoder.ended_slots(len(self.live))
        unfinished = []
        for slot, row in enumerate(self.live):
            if not ended[slot] and row.last > self._end:
                unfinished.append(slot)
        finished_count = len(self.live) - len(unfinished)
        if not at_limit and finished_count < max(1, len(self.live) // DROP_SHARE):
            return False

        # The first slots stay occupied: unfinished rows from behind move into those that are free now.
        order = list(range(len(unfinished)))
        free = sorted(set(order) - set(unfinished))
        moving = [slot for slot in unfinished if slot >= len(unfinished)]
        for source, target in zip(moving, free, strict=True):
            order[target] = source
        self.live = [self.live[slot] for slot in order]
        if moving:
            self._decoder.move(moving, free, slice(self._low(), self._end))
        if self.live:
            self._rows_changed()
        return True

    def step(self) -> None:
        """Samples the next token of every live row."""
        if self._end == self._columns:
            self._shift()
        self._decoder.step(len(self.live), self._low(), self._end)
        self._end += 1
        self._steps += 1

    def generation(self) -> Generation:
        """All responses, in the order of the prompts."""
        count = len(self._lengths)
        tokens = self._decoder.tokens[:count, : max(self._limits)]
        rollout = assemble(self._prompts, tokens, self._sampling, self._given_limits)
        mask = rollout.response_mask
        logprobs = self._decoder.logprobs[:count, : mask.shape[1]]
        logprobs = torch.where(mask, logprobs, 0.0)
        return Generation(rollout, logprobs, bad_rows=logprobs.isnan().any(1))

    def _low(self) -> int:
        """First column of the live rows."""
        return min(row.start for row in self.live)

    def _rows_changed(self) -> None:
        self._decoder.rows_changed(len(self.live), self._end)

    def _shift(self) -> None:
        """Moves the live rows to the first columns, leaving room on their left for a prompt of any length."""
        columns = slice(self._low(), self._end)
        self._end = max(self._end - columns.start, max(self._lengths))
        distance = columns.stop - self._end
        self._decoder.shift(len(self.live), columns, distance)
        for row in self.live:
            row.start -= distance
            row.last -= distance
        self._rows_changed()


def prefill_groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Divides prompts, longest first, into forward passes with little padding.

    Returns:
        (start, stop) of each pass. A pass holds at most PREFILL_TOKENS, padding included, or one prompt.
    """
    groups = []
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop - start + 1) * lengths[start] > PREFILL_TOKENS:
            groups.append((start, stop))
            start = stop
    return groups
