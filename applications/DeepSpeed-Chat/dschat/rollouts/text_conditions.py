# SPDX-License-Identifier: Apache-2.0
"""The termination conditions that read the texts of responses: constituents of a parse, sentences, lines."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.rollouts.termination import FLAG, Ends, FindEnds, RunParts
from dschat.settings.conditions import NoFlags, ParsingFlags
from macro_actions.conditions import ends_from_lengths
from macro_actions.token_text import TokenReader
from macro_actions.types import Rollout, ScoredRollout, Trajectory

if TYPE_CHECKING:
    from constituent_treelib.parsing import Backend

LINE = re.compile(r"[^\n]*\n+|[^\n]+")  # with the blank lines after it


class Parsing:
    """Macro actions that are constituents of a parse. Every rank parses its own rows."""

    def __init__(self, flags: ParsingFlags, run: RunParts) -> None:
        """Loads the parser. Raises UserError if it cannot be loaded."""
        from macro_actions.constituents import ParsingCondition

        backend = load_backend(flags.parser, flags.parser_model, flags.parser_device)
        self._parse = ParsingCondition(run.tokenizer, backend, flags.parsing_cutoff, {run.end_id})
        self.parser = {"name": backend.name, "version": backend.version}

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where constituents end, and counts the sentences that were parsed."""
        texts, rows = _runs_of(trajectory.rollout)
        parsed = self._parse(texts)
        totals = {
            "parsing/sentences": parsed.counts.sentences,
            "parsing/parsed": parsed.counts.parsed,
            "parsing/fell_back": parsed.counts.fell_back,
            "parsing/seconds": parsed.seconds,
        }
        lengths = _by_row(parsed.lengths, rows, len(trajectory.response_mask))
        return Ends(ends_from_lengths(lengths, trajectory.response_mask), totals)


def sentences(flags: NoFlags, run: RunParts) -> FindEnds:
    """Each sentence is a macro action. Raises UserError if the package that splits sentences is missing."""
    if find_spec("constituent_treelib") is None:
        raise UserError(
            f"{FLAG} sentence: the package constituent_treelib is not installed. Run `cd Constituent-Treelib"
            " && pip install -e .`, or use another condition."
        )
    return _of_units(UnitCondition(run.tokenizer, sentence_ends, {run.end_id}))


def lines(flags: NoFlags, run: RunParts) -> FindEnds:
    """Each line is a macro action."""
    return _of_units(UnitCondition(run.tokenizer, line_ends, {run.end_id}))


def _of_units(units: UnitCondition) -> FindEnds:
    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        texts, rows = _runs_of(trajectory.rollout)
        lengths = _by_row(units(texts), rows, len(trajectory.response_mask))
        return Ends(ends_from_lengths(lengths, trajectory.response_mask))

    return find


def _runs_of(rollout: Rollout) -> tuple[list[list[int]], list[int]]:
    """Ids of every turn of the policy, and the row of each. A row without response tokens is one empty text."""
    texts = []
    rows = []
    for row, runs in enumerate(rollout.response_runs()):
        for ids in runs or [[]]:
            texts.append(ids)
            rows.append(row)
    return texts, rows


def _by_row(lengths: Sequence[Sequence[int]], rows: Sequence[int], num_rows: int) -> list[list[int]]:
    """Macro-action lengths of turns, put together for each of `num_rows` rows; `rows` is the row of each turn."""
    lengths_of_rows: list[list[int]] = [[] for _ in range(num_rows)]
    for turn_lengths, row in zip(lengths, rows, strict=True):
        lengths_of_rows[row] += turn_lengths
    return lengths_of_rows


def sentence_ends(text: str) -> list[int]:
    """End positions of the sentences: after . ! or ? before blanks, and at every line break."""
    from constituent_treelib.chunker import sentence_spans

    return [end for _, end in sentence_spans(text)]


def line_ends(text: str) -> list[int]:
    """End positions of the lines, after their line breaks."""
    return [line.end() for line in LINE.finditer(text)]


class UnitCondition:
    """Cuts responses at the ends of units of their texts, such as sentences."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Callable[[str], list[int]], end_ids: Collection[int] = ()
    ) -> None:
        """Prepares the reader of tokens.

        Args:
            tokenizer: the policy's.
            ends: text → end positions of its units in characters, in order.
            end_ids: ids that end a response beside the tokenizer's special ones.
        """
        self._reader = TokenReader(tokenizer)
        self._ends = ends
        self._end_ids = frozenset(self._reader.end_ids) | frozenset(end_ids)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Lengths in tokens of the macro actions of each response; `rows` are ids without padding."""
        return [self._lengths(row) for row in rows]

    def _lengths(self, row: Sequence[int]) -> list[int]:
        """A token belongs to the unit of its first character; special tokens at the end are one more macro action."""
        end_count = len(list(takewhile(self._end_ids.__contains__, reversed(row))))
        tokens = self._reader(row[: len(row) - end_count])
        ends = self._ends(tokens.text)[:-1]
        token_counts = Counter(bisect_right(ends, start) for start, _ in tokens.spans)
        lengths = [token_counts[unit] for unit in sorted(token_counts)]
        if end_count:
            lengths.append(end_count)
        return lengths


def load_backend(parser: str, model: str | None, device: str = "cpu") -> Backend:
    """Loads the parser of `--parser`.

    Args:
        parser: name of a backend of constituent_treelib, or module.py:function, which returns one.
        model: name or path of its model; the backend's default if None.
        device: where a neural parser computes.

    Raises:
        UserError: the package, a library, the model or the user's function is missing; the message says what to do.
    """
    try:
        from constituent_treelib.parsing import make_backend
        from constituent_treelib.trees import TreelibError
    except ModuleNotFoundError as error:
        raise UserError(
            f"--parser {parser}: the package constituent_treelib is not installed ({error}). Run "
            "`cd Constituent-Treelib && pip install -e .`, or use another --termination_condition."
        ) from error
    if ":" in parser:
        backend: Backend = call_function(load_function(parser, "--parser", ["model"]), "--parser", model)
        _check_backend(backend, parser)
        return backend
    try:
        return make_backend(parser, model=model, device=device)
    except TreelibError as error:
        flags = f"--parser {parser}" + ("" if model is None else f" --parser_model {model}")
        raise UserError(f"{flags}: {error}") from error


def _check_backend(backend: Backend, parser: str) -> None:
    """Raises UserError if a user's function did not return a backend."""
    missing = [name for name in ("name", "version", "unit", "parse") if not hasattr(backend, name)]
    if missing or backend.unit not in ("sentence", "text"):
        fault = f"lacks {', '.join(missing)}" if missing else f"has the unit {backend.unit!r}"
        raise UserError(
            f"--parser {parser}: the function must return an object with name, version, unit (sentence or text) and "
            f"parse(units); what it returned {fault}."
        )
