# SPDX-License-Identifier: Apache-2.0
"""Which rows are left out when data are prepared, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dschat.data.examples import CUT_TO_NOTHING, EMPTY_PROMPT, EQUAL_PAIR
from dschat.data.prepared.folder import PreparedExample, Stage

DUPLICATE, TOO_LONG, TOO_SHORT, SAME = "duplicate input", "too long", "too short", "same response"
Unit = Literal["tokens", "characters"]


@dataclass(frozen=True)
class Limits:
    """What a row must be to be kept.

    Attributes:
        max_length: tokens of prompt and response; the rest is cut.
        max_prompt_length: of the prompt, in `unit`; BOS counts as a token.
        minimum_response_length: of every response, in `unit`; the token that ends it does not count.
        unit: tokens or characters.
        remove_same_inputs: leave out rows whose prompt and (chosen) response were there before.
        remove_same_responses: leave out pairs of equal texts.
    """

    max_length: int
    max_prompt_length: int
    minimum_response_length: int
    unit: Unit
    remove_same_inputs: bool = True
    remove_same_responses: bool = True


class Filter:
    """Leaves rows out and counts them, over all splits of a folder: what stands in training is no test."""

    def __init__(self, stage: Stage, limits: Limits) -> None:
        self._stage, self._limits = stage, limits
        self._seen: set[tuple[str, str]] = set()
        self.skipped: list[tuple[PreparedExample, str]] = []

    def kept(self, examples: Iterable[PreparedExample], dropped: Counter[str]) -> Iterator[PreparedExample]:
        """The rows that are kept, cut to length; the others are counted in `dropped` and listed in `skipped`."""
        for example in examples:
            reason = self._reason(example)
            self._seen.add((example.prompt, example.chosen))
            cut = _cut(example, self._limits.max_length)
            if reason is None and self._stage == "preference" and cut.chosen_ids == cut.rejected_ids:
                reason = EQUAL_PAIR
            if reason is None:
                yield cut
            else:
                dropped[reason] += 1
                self.skipped.append((example, reason))

    def _reason(self, example: PreparedExample) -> str | None:
        limits = self._limits
        responses = [example.chosen_ids[:-1]] + ([example.rejected_ids[:-1]] if example.rejected_ids else [])
        lengths = [len(example.prompt_ids), *map(len, responses)]
        if limits.unit == "characters":
            texts = [example.prompt, example.chosen] + ([example.rejected] if example.rejected is not None else [])
            lengths = list(map(len, texts))
        if limits.remove_same_inputs and (example.prompt, example.chosen) in self._seen:
            return DUPLICATE
        if lengths[0] > limits.max_prompt_length:
            return TOO_LONG
        if min(lengths[1:]) < limits.minimum_response_length:
            return TOO_SHORT
        if limits.remove_same_responses and self._stage == "preference" and example.chosen == example.rejected:
            return SAME
        if not example.prompt_ids:
            return EMPTY_PROMPT
        return CUT_TO_NOTHING if len(example.prompt_ids) >= limits.max_length else None


def _cut(example: PreparedExample, max_length: int) -> PreparedExample:
    room = max(0, max_length - len(example.prompt_ids))
    rejected = None if example.rejected_ids is None else example.rejected_ids[:room]
    return replace(example, chosen_ids=example.chosen_ids[:room], rejected_ids=rejected)
