# SPDX-License-Identifier: Apache-2.0
"""Termination conditions: where macro actions end, as ``ends`` of shape (B, R), True on last tokens.

Every condition takes the mask of the tokens that the policy produced, shape (B, R), as bools or as numbers. Rows may
be padded on either side, and a row may consist of several *runs* of tokens with holes between them: a user's turn, a
tool's answer. Each run is cut as if it were a response of its own:

    mask             1 1 1 1 0 0 1 1 1
    fixed, n = 3     . . E E     . . E      lengths 3 1, then 3

So ``ends`` is True on response tokens only, the last token of every run ends a macro action, and the lengths add up to
the number of response tokens. All conditions are pure functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from macro_actions.masked import last_true
from macro_actions.splitmix import GOLDEN, mix, random_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from macro_actions.constituents import ParsingCondition


def fixed(response_mask: Tensor, n: float = 5) -> Tensor:
    """End a macro action after every ``n`` tokens; the remainder is a shorter last one.

    Example: seven tokens with n = 3 give lengths 3 3 1.

    Args:
        response_mask: shape ``(B, R)``.
        n: integer of at least 1 (1 is token-level PPO), or ``math.inf`` for one macro action per run.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: ``n`` is below 1, or neither an integer nor infinite.
    """
    if n < 1 or (not math.isinf(n) and n != int(n)):
        raise ValueError(f"ngram must be an integer of at least 1, or inf, not {n}")
    mask = response_mask.bool()
    if math.isinf(n):
        return last_true(mask)
    position = _count_in_run(mask, mask)
    is_nth = position % int(n) == 0
    return (mask & is_nth) | last_true(mask)


def randomized(
    response_mask: Tensor,
    lengths: Sequence[int] = (2, 3, 5, 10),
    repeat_times: int = 3,
    row_seeds: Tensor | None = None,
) -> Tensor:
    """Give macro actions the lengths ``lengths`` × ``repeat_times`` in random order; tokens left over form one more.

    Each run has a shuffle of its own. It depends only on its row's seed and on its number in the row, so a batch is
    cut as its rows alone are, on any number of ranks. The number of runs is read from the GPU, with one
    synchronisation.

    Args:
        response_mask: shape ``(B, R)``.
        lengths: macro-action lengths in tokens, each at least 1.
        repeat_times: how often each length occurs, at least 1.
        row_seeds: shape ``(B,)``, int64, see :func:`make_row_seeds`; with ``None`` the row numbers, so that
            every batch gets the same cuts.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: ``repeat_times`` or a length is below 1.
    """
    if repeat_times < 1 or not lengths or min(lengths) < 1:
        raise ValueError(f"repeat_times and lengths must be at least 1, not {repeat_times} and {list(lengths)}")
    mask = response_mask.bool()
    if row_seeds is None:
        row_seeds = torch.arange(len(mask))
    row_seeds = row_seeds.to(mask.device)
    multiset = torch.tensor(list(lengths) * repeat_times, device=mask.device)
    run = _run_numbers(mask)
    num_runs = int(run.max()) + 1 if run.numel() else 0

    ends = torch.zeros_like(mask)
    for number in range(num_runs):
        seeds = row_seeds
        if number > 0:
            seeds = mix(row_seeds + GOLDEN * torch.full_like(row_seeds, number))  # wraps around, as int64 does
        order = random_words(seeds, len(multiset)).argsort(dim=1, stable=True)
        ends = ends | _ends_after(multiset[order], run == number)
    return ends


def make_row_seeds(seed: int, prompt_index: Tensor, epoch: int, sample_index: Tensor | None = None) -> Tensor:
    """Seeds for :func:`randomized`, one per row.

    Args:
        seed: the run's seed.
        prompt_index: shape ``(B,)``, int64: number of the prompt in the data set.
        epoch: pass over the data set, so that a prompt is cut differently in each.
        sample_index: shape ``(B,)``, int64: number of the response among those to its prompt; 0 for all when ``None``.

    Returns:
        Shape ``(B,)``, int64.
    """
    parts = torch.tensor([seed, epoch], dtype=torch.long, device=prompt_index.device) + 1
    mixed = mix(mix(parts[0] * GOLDEN) + parts[1] * GOLDEN)
    seeds = mix(mixed + (prompt_index.long() + 1) * GOLDEN)
    if sample_index is None:
        return seeds
    # The first response to a prompt has the seed that an only response has.
    return torch.where(sample_index == 0, seeds, mix(seeds + sample_index))


def ppl(response_mask: Tensor, ref_logprobs: Tensor, mode: str = "chunk") -> Tensor:
    """Cut where the perplexity under the reference model rises. A tie never cuts.

    With nll the negative log-likelihood of a token:

        chunk    close a macro action before the first token that would raise its mean nll
        prefix   cut before token j if the mean nll of tokens 1…j exceeds that of tokens 1…j−1
        token    cut before token j if nll_j > nll_{j−1}

    Example: nll 1 1 2 1 is cut before the third token by all three; 4 1 2 2 by ``chunk`` and ``prefix`` nowhere, by
    ``token`` before the third token.

    Args:
        response_mask: shape ``(B, R)``.
        ref_logprobs: shape ``(B, R)``, log-probabilities of the response tokens under the reference model.
        mode: ``chunk``, ``prefix`` or ``token``.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: the mode is unknown, or the shapes differ.
    """
    if mode not in ("chunk", "prefix", "token"):
        raise ValueError(f"mode must be chunk, prefix or token, not {mode!r}")
    _check_shape(ref_logprobs, response_mask)
    mask = response_mask.bool()
    # Sums in float64 of float32 numbers, so that equal means are recognised as ties.
    nll = torch.where(mask, -ref_logprobs.float(), 0.0).double()
    if mode == "token":
        cut_before = torch.zeros_like(mask)
        cut_before[:, 1:] = nll[:, 1:] > nll[:, :-1]
    else:
        cut_before = _rises_above_mean(nll, mask, restart=mode == "chunk")
    return _ends_before(cut_before, mask)


def surprise(response_mask: Tensor, logprobs: Tensor, probability: float = 0.9, count: int = 5) -> Tensor:
    """Begin a macro action at every ``count``-th unlikely token: the cut points of SPO (Guo et al. 2025).

    Example: probabilities .9 .2 .9 .1 .3 with probability .5 and count 2: the fourth token begins one, lengths 3 2.

    Args:
        response_mask: shape ``(B, R)``.
        logprobs: shape ``(B, R)``, log-probabilities of the response tokens under the policy that sampled them.
        probability: a token is unlikely if its probability is below this; above 0 and at most 1.
        count: unlikely tokens per macro action, an integer of at least 1.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: ``probability`` or ``count`` is out of range, or the shapes differ.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability must be above 0 and at most 1, not {probability}")
    if count < 1 or count != int(count):
        raise ValueError(f"count must be an integer of at least 1, not {count}")
    _check_shape(logprobs, response_mask)
    mask = response_mask.bool()
    unlikely = mask & (logprobs.float() < math.log(probability))
    begins = unlikely & (_count_in_run(unlikely, mask) % count == 0)
    return _ends_before(begins, mask)


def parsing(
    response_mask: Tensor,
    response_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    cutoff: int = 5,
    parser: str = "benepar",
    model: str | None = None,
    end_ids: Collection[int] = (),
) -> Tensor:
    """Make the largest constituents of fewer than ``cutoff`` tokens macro actions, see `macro_actions.constituents`.

    A constituent of a single word joins the macro action before it. The parser is loaded at the first call and stays
    in memory.

    Args:
        response_mask: shape ``(B, R)``.
        response_ids: shape ``(B, R)``, int64.
        tokenizer: the policy's.
        cutoff: in tokens, at least 3.
        parser: ``benepar``, ``chunker``, or ``tree-sitter`` for programs.
        model: model of the parser, where it has several.
        end_ids: ids that end a response, in addition to the tokenizer's special ids.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ModuleNotFoundError: the extra ``parsing`` is not installed.
        ValueError: ``cutoff`` is below 3.
    """
    condition = _parsing_condition(tokenizer, cutoff, parser, model, frozenset(end_ids))
    run = _run_numbers(response_mask.bool()).cpu()
    ids = response_ids.cpu()

    # Every run is parsed as a text of its own.
    texts: list[list[int]] = []
    rows: list[int] = []
    for row in range(len(run)):
        num_runs = int(run[row].max()) + 1 if run.shape[1] else 0
        for number in range(num_runs):
            texts.append(ids[row][run[row] == number].tolist())
            rows.append(row)

    lengths: list[list[int]] = [[] for _ in range(len(run))]
    for row, text_lengths in zip(rows, condition(texts).lengths, strict=True):
        lengths[row].extend(text_lengths)
    return ends_from_lengths(lengths, response_mask)


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


def ends_from_lengths(lengths: Sequence[Sequence[int]], response_mask: Tensor) -> Tensor:
    """Ends of macro actions whose lengths are given.

    Example: lengths 2 3 for six response tokens: ends at the second, the fifth and the last token.

    Args:
        lengths: per row the lengths in tokens, each at least 1; they count response tokens over holes. Tokens beyond
            their sum are one more macro action; lengths beyond the response are ignored.
        response_mask: shape ``(B, R)``.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: a length is below 1, or there is not one list per row.
    """
    if len(lengths) != response_mask.shape[0]:
        raise ValueError(f"{len(lengths)} lists of lengths for {response_mask.shape[0]} rows")
    if any(length < 1 for row in lengths for length in row):
        raise ValueError("every macro-action length must be at least 1")
    mask = response_mask.bool()
    longest = max((len(row) for row in lengths), default=0)
    beyond = mask.shape[1] + 1
    padded = []
    for row in lengths:
        padding = [beyond] * (longest - len(row))
        padded.append([*row, *padding])
    table = torch.tensor(padded, dtype=torch.long, device=mask.device)
    return _ends_after(table.view(len(padded), longest), mask)


def at_most(ends: Tensor, response_mask: Tensor, most: int) -> Tensor:
    """Join neighbours, so that no response of one run has more than ``most`` macro actions.

    Macro action m of M, counted from 0, becomes part of number ⌊m · most / M⌋: with M = 5 and most = 2, the first
    three and the last two are joined. A macro action never spans a hole, so each further run may add one.

    Args:
        ends: shape ``(B, R)``, bool.
        response_mask: shape ``(B, R)``.
        most: at least 1.

    Returns:
        ends, shape ``(B, R)``, bool.

    Raises:
        ValueError: ``most`` is below 1.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most}")
    mask = response_mask.bool()
    last = last_true(mask)
    ends = (ends & mask) | last
    number = ends.cumsum(1) - ends.long()
    total = ends.sum(1, keepdim=True)
    joined_number = number * most // total.clamp(min=1)
    joined = torch.where(total > most, joined_number, number)
    differs_from_next = joined != joined.roll(-1, 1)
    return ends & (last | differs_from_next)


def isolate_last_token(ends: Tensor, response_mask: Tensor) -> Tensor:
    """Make the last token of every run a macro action of its own.

    Args:
        ends: shape ``(B, R)``, bool.
        response_mask: shape ``(B, R)``.

    Returns:
        ends, shape ``(B, R)``, bool.
    """
    mask = response_mask.bool()
    return ends | _ends_before(last_true(mask), mask)


def _run_numbers(mask: Tensor) -> Tensor:
    """Number of each token's run in its row, from 0; −1 off the mask. (B, R) bool → (B, R) int64."""
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, begins.cumsum(1) - 1, -1)


def _count_in_run(flags: Tensor, mask: Tensor) -> Tensor:
    """How many flags are True from the beginning of a token's run to the token itself.

    Args:
        flags: shape ``(B, R)``, bool, False off the mask.
        mask: shape ``(B, R)``, bool.

    Returns:
        Shape ``(B, R)``, int64; undefined off the mask.
    """
    total = flags.cumsum(1)
    before_run = torch.where(mask, 0, total).cummax(1).values
    return total - before_run


def _ends_before(begins: Tensor, mask: Tensor) -> Tensor:
    """Ends on the tokens before those that begin a macro action, and at the end of each run. (B, R) bool each."""
    ends = torch.zeros_like(mask)
    ends[:, :-1] = begins[:, 1:] & mask[:, 1:] & mask[:, :-1]
    return ends | last_true(mask)


def _ends_after(lengths: Tensor, mask: Tensor) -> Tensor:
    """Ends after lengths of response tokens, and at the end of each run.

    Args:
        lengths: shape ``(B, K)``, int64, at least 1 each; those that reach beyond the row are ignored.
        mask: shape ``(B, R)``, bool.

    Returns:
        ends, shape ``(B, R)``, bool.
    """
    num_rows, width = mask.shape
    last = lengths.cumsum(1).clamp(max=width + 1)  # column R + 1 collects all that reach beyond the row
    is_last = torch.zeros(num_rows, width + 2, dtype=torch.bool, device=mask.device)
    is_last.scatter_(1, last, torch.ones_like(last, dtype=torch.bool))
    number = mask.cumsum(1)  # number of the token among the row's response tokens, from 1
    return (mask & is_last.gather(1, number)) | last_true(mask)


def _rises_above_mean(nll: Tensor, mask: Tensor, restart: bool) -> Tensor:
    """Whether each token's nll exceeds the mean nll of the tokens before it in its run.

    Args:
        nll: shape ``(B, R)``, float64, 0 off the mask.
        mask: shape ``(B, R)``, bool.
        restart: the mean begins anew at every token that exceeds it, and is thus that of the current macro action.

    Returns:
        Shape ``(B, R)``, bool; undefined at the beginning of a run and off the mask.
    """
    rises = torch.zeros_like(mask)
    total = nll.new_zeros(len(nll))
    count = nll.new_zeros(len(nll))
    for j in range(nll.shape[1]):
        current = nll[:, j]
        is_above = current * count > total
        rises[:, j] = is_above
        begins = is_above if restart else torch.zeros_like(is_above)
        if j > 0:
            begins = begins | ~mask[:, j - 1]
        total = torch.where(begins, current, total + current)
        count = torch.where(begins, 1.0, count + 1)
    return rises


def _check_shape(x: Tensor, response_mask: Tensor) -> None:
    if x.shape != response_mask.shape:
        raise ValueError(
            f"log-probabilities must have the mask's shape {tuple(response_mask.shape)}, not {tuple(x.shape)}"
        )
