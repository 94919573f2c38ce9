# SPDX-License-Identifier: Apache-2.0
"""Termination conditions for masks of any kind: where macro actions end, as ``ends`` (B, R) bool.

A mask is (B, R), bool or numbers, and says which tokens the policy produced. Rows may be padded on either side, and
masks may have holes: a tool's answer, a turn of the user. A condition is asked of every run of the mask as of a
response of its own, so a macro action never spans a hole, and n-grams are counted anew behind it. On a mask that is a
prefix of each row, the ends are those of `macro_actions.termination`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from macro_actions import termination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from macro_actions.constituents import ParsingCondition


@dataclass(frozen=True)
class Runs:
    """The N runs of a mask, in the order of rows and columns, each as a row of its own; W is the longest."""

    shape: torch.Size  # (B, R)
    mask: Tensor  # (N, W) bool, a prefix of each row
    row: Tensor  # (N,) long: in which row of the batch
    number: Tensor  # (N,) long: how many runs that row has before it
    places: tuple[Tensor, Tensor, Tensor, Tensor]  # of each token: row, column, run, position in the run

    @classmethod
    def of(cls, response_mask: Tensor) -> Runs:
        """The runs of a mask (B, R)."""
        mask = response_mask.bool()
        starts = mask.clone()
        starts[:, 1:] &= ~mask[:, :-1]
        first_row, first_column = starts.nonzero(as_tuple=True)
        rows, columns = mask.nonzero(as_tuple=True)
        run = starts[rows, columns].cumsum(0) - 1
        position = columns - first_column[run]
        width = int(position.max()) + 1 if len(position) else 0
        runs = mask.new_zeros(len(first_row), width)
        runs[run, position] = True
        number = starts.cumsum(1)[first_row, first_column] - 1
        return cls(mask.shape, runs, first_row, number, (rows, columns, run, position))

    def take(self, x: Tensor) -> Tensor:
        """(B, R) → (N, W), 0 behind the runs. Raises ValueError where x has another shape than the mask."""
        if x.shape != self.shape:
            raise ValueError(
                f"what the condition reads must have the mask's shape {tuple(self.shape)}, not {tuple(x.shape)}"
            )
        rows, columns, run, position = self.places
        taken = x.new_zeros(self.mask.shape)
        taken[run, position] = x[rows, columns]
        return taken

    def put(self, x: Tensor) -> Tensor:
        """(N, W) → (B, R), 0 between the runs."""
        rows, columns, run, position = self.places
        put = x.new_zeros(self.shape)
        put[rows, columns] = x[run, position]
        return put


def fixed(response_mask: Tensor, n: float = 5) -> Tensor:
    """Ends a macro action after every ``n`` tokens; with `math.inf`, where a run (a turn) ends. → ends (B, R) bool.

    Example: seven tokens, n = 3 → lengths 3 3 1; with a hole behind the fourth → 3 1, 3.

    Raises:
        ValueError: ``n`` is below 1 or neither an integer nor infinite.
    """
    return _by_run(response_mask, lambda runs: termination.fixed_ngram_ends(runs.mask, n))


def randomized(
    response_mask: Tensor,
    lengths: Sequence[int] = (2, 3, 5, 10),
    repeat_times: int = 3,
    row_seeds: Tensor | None = None,
) -> Tensor:
    """Shuffles ``lengths`` × ``repeat_times`` and consumes them in order; what is left is one macro action.

    Args:
        response_mask: (B, R).
        lengths: of macro actions in tokens.
        repeat_times: how often each length occurs.
        row_seeds: (B,) long; give other ones in every epoch, see :func:`macro_actions.termination.make_row_seeds`. The
            row numbers when None: then every batch is cut alike.

    Returns:
        ends (B, R) bool.

    Raises:
        ValueError: ``repeat_times`` or a length is below 1.
    """
    rows = torch.arange(len(response_mask), device=response_mask.device) if row_seeds is None else row_seeds

    def ends(runs: Runs) -> Tensor:
        seeds = rows.to(runs.row.device)[runs.row]
        later = termination.mix(seeds + runs.number * termination.GOLDEN)
        seeds = torch.where(runs.number == 0, seeds, later)
        return termination.randomized_ngram_ends(runs.mask, repeat_times, lengths, seeds)

    return _by_run(response_mask, ends)


def ppl(response_mask: Tensor, ref_logprobs: Tensor, mode: str = "chunk") -> Tensor:
    """Cuts where the perplexity under the reference rises, see :func:`macro_actions.termination.perplexity_ends`.

    Args:
        response_mask: (B, R).
        ref_logprobs: (B, R) float, log-probabilities of the tokens under the reference model.
        mode: ``chunk``, ``prefix`` or ``token``.

    Returns:
        ends (B, R) bool.
    """
    return _by_run(
        response_mask, lambda runs: termination.perplexity_ends(runs.take(ref_logprobs).float(), runs.mask, mode)
    )


def surprise(response_mask: Tensor, logprobs: Tensor, probability: float = 0.9, count: int = 5) -> Tensor:
    """Begins a macro action at every ``count``-th token less likely than ``probability`` under the policy.

    See :func:`macro_actions.termination.surprise_ends`; logprobs (B, R) are the policy's. → ends (B, R) bool.
    """
    return _by_run(
        response_mask,
        lambda runs: termination.surprise_ends(runs.take(logprobs).float(), runs.mask, probability, count),
    )


def parsing(
    response_mask: Tensor,
    response_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    cutoff: int = 5,
    parser: str = "benepar",
    model: str | None = None,
    end_ids: Collection[int] = (),
) -> Tensor:
    """Makes constituents of fewer than ``cutoff`` tokens macro actions, see `macro_actions.constituents`.

    The parser is loaded at the first call and kept.

    Args:
        response_mask: (B, R).
        response_ids: (B, R) long.
        tokenizer: of the policy.
        cutoff: in tokens, at least 3.
        parser: benepar, link-grammar, chunker, or tree-sitter for programs.
        model: of the parser, where it has several.
        end_ids: ids that end a response beside the tokenizer's special ones.

    Returns:
        ends (B, R) bool.

    Raises:
        ModuleNotFoundError: the extra `parsing` is not installed.
    """
    condition = _parsing_condition(tokenizer, cutoff, parser, model, frozenset(end_ids))

    def ends(runs: Runs) -> Tensor:
        ids = runs.take(response_ids).cpu()
        rows = [row[kept].tolist() for row, kept in zip(ids, runs.mask.cpu(), strict=True)]
        return termination.span_ends(condition(rows).lengths, runs.mask)

    return _by_run(response_mask, ends)


@lru_cache(maxsize=4)
def _parsing_condition(
    tokenizer: PreTrainedTokenizerBase, cutoff: int, parser: str, model: str | None, end_ids: frozenset[int]
) -> ParsingCondition:
    if cutoff < 3:
        raise ValueError(f"cutoff must be at least 3, not {cutoff}: below it, each sentence becomes one macro action")
    try:
        from constituent_treelib.parsing import make_backend
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"parsing needs constituent_treelib ({error}). In MA-RLHF's repository: "
            "pip install ./Constituent-Treelib 'applications/macro-actions[parsing]'"
        ) from error
    from macro_actions.constituents import ParsingCondition

    return ParsingCondition(tokenizer, make_backend(parser, model=model), cutoff, end_ids)


def _by_run(response_mask: Tensor, condition: Callable[[Runs], Tensor]) -> Tensor:
    """Ends (B, R) of a condition that is asked of each run."""
    runs = Runs.of(response_mask)
    return runs.put(condition(runs))
