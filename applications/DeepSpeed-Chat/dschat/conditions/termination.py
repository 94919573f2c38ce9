# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition: Trajectory → where its macro actions end."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.user_function import call_function, load_function
from dschat.errors import UserError
from dschat.settings.macro_actions import TerminationFlags
from macro_actions.constituents import ParsingCondition
from macro_actions.termination import (
    fixed_ngram_ends,
    isolate_last_token,
    make_row_seeds,
    perplexity_ends,
    randomized_ngram_ends,
    span_ends,
    surprise_ends,
)
from macro_actions.token_text import TokenReader
from macro_actions.types import ScoredRollout, Trajectory

if TYPE_CHECKING:
    from constituent_treelib.parsing import Backend

FLAG = "--termination_condition"
LINE = re.compile(r"[^\n]*\n+|[^\n]+")  # with the blank lines behind it


@dataclass(frozen=True)
class Ends:
    """Where the macro actions of a rollout end."""

    ends: Tensor  # (B, R) bool: True on the last token of each
    totals: Mapping[str, float] = field(default_factory=dict)  # what the parser reports: metric → sum over the rows


class TerminationCondition:
    """The termination condition of a run: called once per rollout."""

    def __init__(self, flags: TerminationFlags, tokenizer: PreTrainedTokenizerBase, end_id: int, seed: int) -> None:
        """Loads what the condition needs.

        Args:
            flags: --termination_condition and its parameters, checked.
            tokenizer: of the policy; also handed to a user's own function.
            end_id: ends a response beside EOS (--end_of_conversation_token).
            seed: of the run, for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._flags, self._seed = flags, seed
        self._user = self._parsing = self._units = None
        self.parser: dict[str, str] = {}  # name and version; empty for other conditions than parsing
        if ":" in flags.termination_condition:
            self._user = UserCondition(flags.termination_condition, tokenizer)
        elif flags.termination_condition == "parsing":
            # Every rank parses its own rows with a parser of its own.
            backend = load_backend(flags.parser, flags.parser_model, flags.parser_device)
            self._parsing = ParsingCondition(tokenizer, backend, flags.parsing_cutoff, {end_id})
            self.parser = {"name": backend.name, "version": backend.version}
        elif flags.termination_condition in UNITS:
            if flags.termination_condition == "sentence" and find_spec("constituent_treelib") is None:
                raise UserError(
                    f"{FLAG} sentence: the package constituent_treelib is not installed. Run `cd Constituent-Treelib"
                    " && pip install -e .`, or use another condition."
                )
            self._units = UnitCondition(tokenizer, UNITS[flags.termination_condition], {end_id})

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end.

        Args:
            trajectory: of this rank; a scored rollout is enough unless the condition reads the policy's log-probs.
            epoch: pass over the data set; `randomized` draws anew in each.

        Raises:
            UserError: a user's function fails or returns something else than (B, R) bool.
        """
        flags, mask = self._flags, trajectory.response_mask
        totals: dict[str, float] = {}
        if self._user is not None:
            assert isinstance(trajectory, Trajectory)  # the caller asked
            ends = self._user(trajectory)
        elif self._parsing is not None:
            found = self._parsing(trajectory.rollout.response_rows())
            ends = span_ends(found.lengths, mask)
            totals = {f"parsing/{name}": getattr(found.counts, name) for name in ("sentences", "parsed", "fell_back")}
            totals["parsing/seconds"] = found.seconds
        elif self._units is not None:
            ends = span_ends(self._units(trajectory.rollout.response_rows()), mask)
        elif flags.termination_condition == "surprise":
            assert isinstance(trajectory, Trajectory)  # the caller asked
            ends = surprise_ends(trajectory.logprobs, mask, flags.surprise_probability, flags.surprise_count)
        elif flags.termination_condition == "ppl":
            ends = perplexity_ends(trajectory.ref_logprobs, mask, flags.ppl_mode)
        elif flags.termination_condition == "randomized":
            rollout = trajectory.rollout
            seeds = make_row_seeds(self._seed, rollout.prompt_index, epoch, rollout.sample_index)
            ends = randomized_ngram_ends(mask, flags.repeat_times, flags.ngram_lengths, seeds)
        elif flags.termination_condition == "fixed":
            ends = fixed_ngram_ends(mask, flags.ngram)
        else:
            raise ValueError(f"termination condition {flags.termination_condition} has no branch here")
        return Ends(isolate_last_token(ends, mask) if flags.isolate_last_token else ends, totals)


class UserCondition:
    """Calls ``f(trajectory, tokenizer)`` and checks the ends that it returns."""

    def __init__(self, spec: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Imports the function. Raises UserError where it cannot be imported."""
        self._function, self._spec, self._tokenizer = load_function(spec, FLAG), spec, tokenizer

    def __call__(self, trajectory: Trajectory) -> Tensor:
        """Where macro actions end: (B, R) bool.

        Raises:
            UserError: the function fails, or returns something else.
        """
        ends = call_function(self._function, FLAG, trajectory, self._tokenizer)
        mask = trajectory.response_mask
        if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
            got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
            raise UserError(
                f"{FLAG} {self._spec}: the function must return a bool tensor of shape (B, R) = {tuple(mask.shape)}, "
                f"not {got}."
            )
        return ends.to(mask.device)


def sentence_ends(text: str) -> list[int]:
    """The character after the last one of every sentence: after . ! or ? before blanks, and at every line break."""
    from constituent_treelib.chunker import sentence_spans

    return [end for _, end in sentence_spans(text)]


def line_ends(text: str) -> list[int]:
    """The character after the line break, or breaks, of every line."""
    return [line.end() for line in LINE.finditer(text)]


class UnitCondition:
    """Cuts responses where units of their texts end."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Callable[[str], list[int]], end_ids: Collection[int] = ()
    ) -> None:
        """Reads the tokenizer once.

        Args:
            ends: text → ends of its units in characters, in order.
            end_ids: ids that end a response beside the tokenizer's special ones.
        """
        self._read, self._ends = TokenReader(tokenizer), ends
        self._ending = frozenset(self._read.special_ids) | frozenset(end_ids)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per response, of which the ids are given without padding, the lengths of its macro actions in tokens."""
        return [self._lengths(row) for row in rows]

    def _lengths(self, row: Sequence[int]) -> list[int]:
        """A token belongs to the unit of its first character; the special ones at the end are one more."""
        trailing = len(list(takewhile(self._ending.__contains__, reversed(row))))
        read = self._read(row[: len(row) - trailing])
        ends = self._ends(read.text)[:-1]
        counts = Counter(bisect_right(ends, start) for start, _ in read.spans)
        return [counts[unit] for unit in sorted(counts)] + [trailing] * (trailing > 0)


UNITS = {"sentence": sentence_ends, "line": line_ends}


def load_backend(parser: str, model: str | None, device: str = "cpu") -> Backend:
    """The parser of `--parser`.

    Args:
        parser: name of a backend of constituent_treelib, or module.py:function, which returns one.
        model: name or path of its model; each backend's own default if None.
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
        backend: Backend = call_function(load_function(parser, "--parser"), "--parser", model)
        _check_backend(backend, parser)
        return backend
    try:
        return make_backend(parser, model=model, device=device)
    except TreelibError as error:
        flags = f"--parser {parser}" + ("" if model is None else f" --parser_model {model}")
        raise UserError(f"{flags}: {error}") from error


def _check_backend(backend: Backend, parser: str) -> None:
    """Raises UserError where a user's function returned something else."""
    missing = [name for name in ("name", "version", "unit", "parse") if not hasattr(backend, name)]
    if missing or backend.unit not in ("sentence", "text"):
        lacks = f"lacks {', '.join(missing)}" if missing else f"has the unit {backend.unit!r}"
        raise UserError(
            f"--parser {parser}: the function must return an object with name, version, unit (sentence or text) and "
            f"parse(units); what it returned {lacks}."
        )
