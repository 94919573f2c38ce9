# SPDX-License-Identifier: Apache-2.0
"""The termination condition `parsing`: response ids → macro-action lengths, a whole rollout at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.conditions.parsing.rule import macro_action_lengths
from dschat.conditions.parsing.token_text import TokenReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from constituent_treelib.parsing import Backend, ParseCounts

logger = logging.getLogger(__name__)

ENOUGH_TO_JUDGE = 20  # sentences; of fewer, a share that fell back says little


@dataclass(frozen=True)
class ParsedLengths:
    """Where the responses of a rollout were cut, and how well their text was parsed.

    Attributes:
        lengths: per row the lengths of its macro actions in tokens.
        counts: how many sentences there were, were parsed and fell back to the chunker.
        seconds: wall time of it all.
    """

    lengths: list[list[int]]
    counts: ParseCounts
    seconds: float


class ParsingCondition:
    """Cuts responses along constituents of fewer than `cutoff` tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, backend: Backend, cutoff: int, end_ids: Collection[int] = ()
    ) -> None:
        """Reads the tokenizer once.

        Args:
            tokenizer: of the policy.
            backend: the parser.
            cutoff: C, in tokens.
            end_ids: ids that end a response beside the tokenizer's special ones.
        """
        self.backend, self._cutoff = backend, cutoff
        self._read = TokenReader(tokenizer)
        self._warned = False
        self._ending = frozenset(self._read.special_ids) | frozenset(end_ids)

    def __call__(self, rows: Sequence[Sequence[int]]) -> ParsedLengths:
        """Cuts the responses of a rollout.

        Args:
            rows: per response its ids, EOS included, without padding.
        """
        from constituent_treelib.parsing import parse_texts

        start = time.perf_counter()
        trailing = [self._num_trailing(row) for row in rows]
        read = [self._read(row[: len(row) - count]) for row, count in zip(rows, trailing, strict=True)]
        trees, counts = parse_texts([item.text for item in read], self.backend)
        lengths = [
            macro_action_lengths(sentences, item.text, item.spans, count, self._cutoff)
            for sentences, item, count in zip(trees, read, trailing, strict=True)
        ]
        self._warn_once(counts)
        return ParsedLengths(lengths, counts, time.perf_counter() - start)

    def _warn_once(self, counts: ParseCounts) -> None:
        """Warns when more than half of the sentences fell back: the macro actions are then mostly the chunker's."""
        if not self._warned and counts.sentences >= ENOUGH_TO_JUDGE and counts.fell_back > counts.sentences / 2:
            self._warned = True
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.reasons.most_common())
            logger.warning(
                "--parser %s: %d of %d %ss fell back to the chunker (%s)",
                *(self.backend.name, counts.fell_back, counts.sentences, self.backend.unit, reasons),
            )

    def _num_trailing(self, row: Sequence[int]) -> int:
        """Special tokens at the end of a row."""
        return next((count for count, token in enumerate(reversed(row)) if token not in self._ending), len(row))
