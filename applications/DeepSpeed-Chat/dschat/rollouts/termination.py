# SPDX-License-Identifier: Apache-2.0
"""The functions of the termination conditions: Trajectory → where its macro actions end.

`dschat.settings.conditions` lists the conditions with their flags.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import takewhile
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.settings.conditions import (
    FixedFlags,
    NoFlags,
    ParsingFlags,
    PerplexityFlags,
    RandomizedFlags,
    SurpriseFlags,
)
from dschat.settings.macro_actions import TerminationFlags
from macro_actions import conditions as macro
from macro_actions.conditions import ends_from_lengths, isolate_last_token, make_row_seeds
from macro_actions.masked import last_true
from macro_actions.token_text import TokenReader
from macro_actions.types import Rollout, ScoredRollout, Trajectory, mapped

if TYPE_CHECKING:
    from constituent_treelib.parsing import Backend

FLAG = "--termination_condition"
LINE = re.compile(r"[^\n]*\n+|[^\n]+")  # with the blank lines after it


@dataclass(frozen=True)
class Ends:
    """Where the macro actions of a rollout end."""

    ends: Tensor  # (B, R) bool: True on the last token of each
    totals: Mapping[str, float] = field(default_factory=dict)  # of the parser: metric → sum over the rows


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that conditions may need."""

    tokenizer: PreTrainedTokenizerBase  # the policy's
    end_id: int  # ends a response beside EOS (--end_of_conversation_token)
    seed: int  # the run's, for `randomized`


class FindEnds(Protocol):
    """A termination condition with its parameters; called once per rollout."""

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end; `epoch` counts passes over the data set."""


class TerminationCondition:
    """The termination condition of a run: called once per rollout."""

    def __init__(self, flags: TerminationFlags, tokenizer: PreTrainedTokenizerBase, end_id: int, seed: int) -> None:
        """Makes the condition, and loads its function or parser.

        Args:
            flags: --termination_condition and its parameters, checked.
            tokenizer: the policy's; also passed to a user's function.
            end_id: ends a response beside EOS (--end_of_conversation_token).
            seed: the run's, for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._isolates_last_token = flags.isolate_last_token
        condition = flags.condition
        self._find: FindEnds
        if condition is None:
            self._find = user_condition(flags.termination_condition, tokenizer)
        else:
            make = resolve_name(f"dschat.{condition.function}")
            self._find = make(flags.conditions[condition.name], RunParts(tokenizer, end_id, seed))

    @property
    def parser(self) -> dict[str, str]:
        """Name and version of the parser; empty for other conditions than parsing."""
        return self._find.parser if isinstance(self._find, Parsing) else {}

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end.

        Args:
            trajectory: this rank's; a scored rollout is enough unless the condition reads the policy's log-probs.
            epoch: pass over the data set; `randomized` shuffles anew in each.

        Raises:
            UserError: a user's function fails or returns something else than (B, R) bool.
        """
        result = self._find(trajectory, epoch)
        if not self._isolates_last_token:
            return result
        return replace(result, ends=isolate_last_token(result.ends, trajectory.response_mask))


def fixed(flags: FixedFlags, run: RunParts) -> FindEnds:
    """A macro action every n tokens."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(macro.fixed(trajectory.response_mask, flags.ngram))

    return find


def turn(flags: NoFlags, run: RunParts) -> FindEnds:
    """A turn of the policy is a macro action: the whole response, unless an environment answers in between."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(last_true(trajectory.response_mask))

    return find


def randomized(flags: RandomizedFlags, run: RunParts) -> FindEnds:
    """Macro actions of shuffled lengths, shuffled anew for each row and epoch."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        rollout = trajectory.rollout
        seeds = make_row_seeds(run.seed, rollout.prompt_index, epoch, rollout.sample_index)
        return Ends(macro.randomized(trajectory.response_mask, flags.ngram_lengths, flags.repeat_times, seeds))

    return find


def perplexity(flags: PerplexityFlags, run: RunParts) -> FindEnds:
    """Macro actions that end where the reference is surprised."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(macro.ppl(trajectory.response_mask, trajectory.ref_logprobs, flags.ppl_mode))

    return find


def surprise(flags: SurpriseFlags, run: RunParts) -> FindEnds:
    """Macro actions that begin at tokens which were unlikely under the policy."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        assert isinstance(trajectory, Trajectory)  # `TerminationFlags.reads_policy` asks for one
        mask = trajectory.response_mask
        return Ends(macro.surprise(mask, trajectory.logprobs, flags.surprise_probability, flags.surprise_count))

    return find


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


def user_condition(spec: str, tokenizer: PreTrainedTokenizerBase) -> FindEnds:
    """Calls a user's ``f(trajectory, tokenizer)`` with copies, which it may change, and checks the ends it returns.

    Raises:
        UserError: the function cannot be imported or does not take two arguments; when it is called, it fails or
            returns something else.
    """
    function = load_function(spec, FLAG, ["trajectory", "tokenizer"])

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        assert isinstance(trajectory, Trajectory)  # `TerminationFlags.reads_policy` asks for one
        copies = mapped(trajectory, torch.clone)
        ends = call_function(function, FLAG, copies, tokenizer)
        mask = trajectory.response_mask
        if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
            got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
            raise UserError(
                f"{FLAG} {spec}: the function must return a bool tensor of shape (B, R) = {tuple(mask.shape)}, not"
                f" {got}."
            )
        return Ends(ends.to(mask.device))

    return find


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
