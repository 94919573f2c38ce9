# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout laid out for a forward pass: grouped by length, each beginning in the first column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from macro_actions.types import Rollout

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# Shared by `rollouts`, which samples with these sizes, and `plan`, which counts the memory.
# Spare columns of the key-value buffers while prompts wait for slots, so that live rows are moved back to the first
# columns only now and then.
SPARE_COLUMNS = 64
SAMPLING_BUFFERS = 4  # float32 tensors of the logits' size: raw, divided by the temperature, truncated, their softmax
COLUMN_STEP = 256  # a decoding step of fixed shapes reads a multiple of this many columns
PREFILL_TOKENS = 8192  # per forward pass over prompts: enough to keep a GPU busy

SEARCHED = 256  # rows among which the best cuts are searched; the search takes cubic time
PADDING = 0.05  # maximum share of padding in groups that are cut by tokens
WITHOUT_GRADIENT = 4  # size of a pass without gradients, relative to a training pass: it keeps no activations


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


@dataclass(frozen=True)
class PassSize:
    """Maximum size of one forward pass on one process."""

    rows: int
    tokens: int | None = None  # padding included; None: as many as `rows` rows of the maximum length

    @property
    def without_gradient(self) -> PassSize:
        """Size of a pass that no backward pass follows; unchanged if passes are limited by rows alone."""
        if self.tokens is None:
            return self
        return PassSize(WITHOUT_GRADIENT * self.rows, WITHOUT_GRADIENT * self.tokens)


@dataclass(frozen=True)
class Lengths:
    """Token counts of the B rows of a rollout, in host memory.

    Attributes:
        prompts: shape ``(B,)``.
        responses: shape ``(B,)``, including an environment's tokens between the turns of a response.
        holes: shape ``(B, R)``, True on the environment's tokens; None if there are none.
    """

    prompts: Integers
    responses: Integers
    holes: Bools | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> Lengths:
        """Reads the lengths from the device; only episodes of several turns take a second transfer."""
        is_response = rollout.attention_mask[:, rollout.prompt_width :]
        responses = is_response.sum(1)
        prompts = rollout.attention_mask.sum(1) - responses
        sampled = rollout.response_mask.sum(1)
        lengths = torch.stack([prompts, responses, sampled])
        prompt_lengths, response_lengths, sampled_lengths = lengths.cpu().numpy()
        if (sampled_lengths == response_lengths).all():
            return cls(prompt_lengths, response_lengths)
        holes = (is_response & ~rollout.response_mask).cpu().numpy()
        return cls(prompt_lengths, response_lengths, holes)

    @property
    def totals(self) -> Integers:
        """Prompt plus response, (B,)."""
        return self.prompts + self.responses

    @property
    def sampled(self) -> Integers:
        """Tokens of each response that the policy sampled, (B,)."""
        return self.responses if self.holes is None else self.responses - self.holes.sum(1)


@dataclass(frozen=True)
class Layout:
    """Some rows of a rollout for one forward pass without attention mask; b rows, N response tokens, T ≤ P + R."""

    input_ids: Tensor  # (b, T) long: prompt, response, then arbitrary ids
    targets: Tensor  # (N,) long: indices of the sampled tokens in input_ids.flatten(), row by row
    response_indices: Tensor  # (N,) long: indices of the same tokens in a flattened (b, R') tensor
    rows: Tensor  # (b,) long: row numbers in the rollout
    ends: Tensor  # (b,) long: column of each row's last token
    width: int  # R', length of the longest response of these rows with its holes, at least 1

    def spread(self, x: Tensor) -> Tensor:
        """Scatters numbers of response tokens (N, …) into (b, R', …), 0 elsewhere; differentiable."""
        further = x.shape[1:]
        flat = x.new_zeros(len(self.rows) * self.width, *further)
        return flat.index_copy(0, self.response_indices, x).view(len(self.rows), self.width, *further)

    def before(self, x: Tensor) -> Tensor:
        """Selects a scalar model's outputs (b, T, …) at the state before each response token: (b, R', …)."""
        return self.spread(x.flatten(0, 1)[self.targets - 1])

    def at(self, x: Tensor) -> Tensor:
        """Selects a scalar model's outputs (b, T) at each response token: (b, R')."""
        return self.spread(x.flatten()[self.targets])

    def last(self, x: Tensor) -> Tensor:
        """Selects a scalar model's outputs (b, T) at each row's last token: (b,)."""
        return x.gather(1, self.ends[:, None]).squeeze(1)


def lay_out(rollout: Rollout, rows: Integers, lengths: Lengths) -> Layout:
    """Lays out some rows of a rollout; all indices are computed on the host, which never waits for the device.

    Args:
        rollout: B rows.
        rows: (b,) row numbers.
        lengths: lengths of all B rows.
    """
    prompts = lengths.prompts[rows]
    responses = lengths.responses[rows]
    totals = prompts + responses
    columns = int(totals.max())
    width = max(int(responses.max()), 1)

    # For each response token, its row in this layout and its column in the response.
    token_row = np.repeat(np.arange(len(rows)), responses)
    first_token = np.cumsum(responses) - responses
    token_index = np.arange(len(token_row)) - first_token[token_row]
    if lengths.holes is not None:
        is_sampled = ~lengths.holes[rows][token_row, token_index]
        token_row = token_row[is_sampled]
        token_index = token_index[is_sampled]
    indices = [
        rows,
        rollout.prompt_width - prompts,  # column of each row's first token
        totals - 1,  # column of its last token, once shifted
        token_row * columns + prompts[token_row] + token_index,
        token_row * width + token_index,
    ]

    # One copy to the device.
    device = rollout.input_ids.device
    copied = to_device(np.concatenate(indices), device)
    row_numbers, first_columns, ends, targets, response_indices = copied.split([len(index) for index in indices])

    # Shift every row to the first column.
    source_columns = first_columns[:, None] + torch.arange(columns, device=device)
    source_columns = source_columns.clamp(max=rollout.input_ids.shape[1] - 1)
    input_ids = rollout.input_ids[row_numbers].gather(1, source_columns)
    return Layout(input_ids, targets, response_indices, row_numbers, ends, width)


def group_by_length(lengths: Integers, size: PassSize, agree: Callable[[int], int] = int) -> list[Integers]:
    """Groups rows of similar length with as little padding as possible, the shortest first.

    Limited by rows, there are ⌈n / rows⌉ groups, each no larger in tokens than `size.rows` rows of the maximum length;
    a group of short rows may have more rows. Limited by tokens, there are as few groups as fit both limits with a
    share of padding of at most `PADDING`; a row longer than the limit forms its own group.

    Args:
        lengths: (n,), each at least 1. Every process must pass equally many.
        size: limits of a group.
        agree: maps the number of groups that this process needs to the maximum over all processes; called once for
            every `SEARCHED` rows when limited by tokens.

    Returns:
        Row numbers of each group.
    """
    order = np.argsort(lengths, kind="stable")
    step = SEARCHED if size.tokens is not None else max(1, SEARCHED // size.rows) * size.rows
    groups: list[Integers] = []
    for start in range(0, len(order), step):
        rows = order[start : start + step]
        if size.tokens is None:
            budget = size.rows * int(lengths.max())
            cuts = _best_cuts(lengths[rows], budget, len(rows), -(-len(rows) // size.rows))
        else:
            cuts = _best_cuts(lengths[rows], size.tokens, size.rows, 1, PADDING)
            count = agree(len(cuts))
            if count > len(cuts):
                cuts = _best_cuts(lengths[rows], size.tokens, size.rows, count, PADDING)
        for begin, end in cuts:
            groups.append(rows[begin:end])
    return groups


def _best_cuts(
    ordered: Integers, budget: int, max_rows: int, count: int, padding: float = 1.0
) -> list[tuple[int, int]]:
    """Cuts rows, sorted by length, into groups with the smallest total area, by dynamic programming.

    The area of a group is its number of rows (at most `max_rows`) times its longest row, at most `budget`. Uses
    `count` groups, at most one per row, and adds groups until padding is at most the share `padding` of the area.

    Returns:
        Begin and end of each group.
    """
    n = len(ordered)
    positions = np.arange(n + 1)
    row_counts = (positions[None, :] - positions[:, None])[:, 1:]  # of the group of rows i … j, at [i, j]
    area = row_counts * ordered.astype(np.int64)
    fits = (row_counts > 1) & (row_counts <= max_rows) & (area <= budget)
    is_allowed = (row_counts == 1) | fits  # a row alone has a group even above the budget
    area = np.where(is_allowed, area, np.inf)

    # cost[i]: smallest area of the first i rows in the groups so far.
    cost = np.full(n + 1, np.inf)
    cost[0] = 0
    cuts: list[Integers] = []
    while len(cuts) < count or cost[n] * (1 - padding) > ordered.sum():
        candidates = cost[:, None] + area
        best = candidates.argmin(0)
        cuts.append(np.concatenate([[0], best]))
        cost = np.concatenate([[np.inf], candidates[best, np.arange(n)]])

    # Follow the best cuts back from the last row.
    bounds = [n]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    bounds.reverse()
    return list(pairwise(bounds))


def layouts(rollout: Rollout, size: PassSize, agree: Callable[[int], int] = int) -> Iterator[Layout]:
    """Lays out all rows of a rollout for forward passes of a size; see `group_by_length`."""
    lengths = Lengths.of(rollout)
    for rows in group_by_length(lengths.totals, size, agree):
        yield lay_out(rollout, rows, lengths)


def to_device(numbers: Integers, device: torch.device) -> Tensor:
    """Copies numbers to a device without making the host wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
