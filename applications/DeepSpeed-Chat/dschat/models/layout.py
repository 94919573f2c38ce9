# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout laid out for a forward pass: grouped by length, each beginning in the first column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from macro_actions.types import Rollout

Integers = npt.NDArray[np.int64]
# Of the buffers of keys and values while prompts wait for slots, so that live rows move back to the first columns only
# now and then.
SPARE_COLUMNS = 64
SAMPLING_BUFFERS = 4  # float32: logits of the model, at a temperature, truncated, and their softmax
COLUMN_STEP = 256  # the columns that a decoding step of fixed shapes reads are a multiple of it
PREFILL_TOKENS = 8192  # of a forward pass over prompts: as much as keeps a GPU busy
SEARCHED = 256  # rows among which the best cuts are searched; the search takes their number cubed
PADDING = 0.05  # largest share of it in groups that are cut by tokens
WITHOUT_GRADIENT = 4  # times what a training pass holds: no activations wait for a backward pass


@dataclass(frozen=True)
class PassSize:
    """What one forward pass on one process may hold."""

    rows: int
    tokens: int | None = None  # padding included; None: as many as that many rows of the longest length

    @property
    def without_gradient(self) -> PassSize:
        """The same for a pass that no backward pass follows; by rows alone no other."""
        if self.tokens is None:
            return self
        return PassSize(WITHOUT_GRADIENT * self.rows, WITHOUT_GRADIENT * self.tokens)


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row of a rollout, known to the host; B rows."""

    prompts: Integers  # (B,)
    responses: Integers  # (B,)

    @classmethod
    def of(cls, rollout: Rollout) -> Lengths:
        """Reads them from the device, once."""
        responses = rollout.response_mask.sum(1)
        both = torch.stack([rollout.attention_mask.sum(1) - responses, responses]).cpu().numpy()
        return cls(both[0], both[1])

    @property
    def totals(self) -> Integers:
        """(B,): prompt and response."""
        return self.prompts + self.responses


@dataclass(frozen=True)
class Layout:
    """Some rows of a rollout for one forward pass, without an attention mask; b rows, N response tokens, T ≤ P+R."""

    input_ids: Tensor  # (b, T) long: prompt, response, then anything
    targets: Tensor  # (N,) long: places of the response tokens in input_ids.flatten(), row by row
    places: Tensor  # (N,) long: places of the same tokens in a (b, R') tensor, flattened
    rows: Tensor  # (b,) long: the rows' numbers in the rollout
    ends: Tensor  # (b,) long: the column of each row's last token
    width: int  # R', the longest response here, 1 at least

    def spread(self, x: Tensor) -> Tensor:
        """Numbers of the response tokens (N,), differentiable, as (b, R'), 0 elsewhere."""
        flat = x.new_zeros(len(self.rows) * self.width)
        return flat.index_copy(0, self.places, x).view(len(self.rows), self.width)

    def before(self, x: Tensor) -> Tensor:
        """Of a scalar model's numbers at every token (b, T): that of the state before each response token, (b, R')."""
        return self.spread(x.flatten()[self.targets - 1])

    def at(self, x: Tensor) -> Tensor:
        """Of a scalar model's numbers at every token (b, T): those at the response tokens, (b, R')."""
        return self.spread(x.flatten()[self.targets])

    def last(self, x: Tensor) -> Tensor:
        """Of a scalar model's numbers at every token (b, T): that at each row's last token, (b,)."""
        return x.gather(1, self.ends[:, None]).squeeze(1)


def lay_out(rollout: Rollout, rows: Integers, lengths: Lengths) -> Layout:
    """Lays out the rows of these numbers (b,), of B rows with these lengths; the host knows all indices, so that
    nothing waits for the device.
    """
    prompts, responses = lengths.prompts[rows], lengths.responses[rows]
    total, width = int((prompts + responses).max()), max(int(responses.max()), 1)
    offset = np.concatenate([np.arange(count) for count in responses]) if len(rows) else np.zeros(0, np.int64)
    row = np.repeat(np.arange(len(rows)), responses)
    starts = rollout.prompt_width - prompts
    indices = [rows, starts, prompts + responses - 1, row * total + prompts[row] + offset, row * width + offset]
    device = rollout.input_ids.device
    copied = to_device(np.concatenate(indices), device)
    numbers, first, ends, targets, places = copied.split([len(index) for index in indices])
    columns = first[:, None] + torch.arange(total, device=device)
    columns = columns.clamp(max=rollout.input_ids.shape[1] - 1)
    input_ids = rollout.input_ids[numbers].gather(1, columns)
    return Layout(input_ids, targets, places, numbers, ends, width)


def group_by_length(lengths: Integers, size: PassSize, agree: Callable[[int], int] = int) -> list[Integers]:
    """Row numbers of groups of similar length, the shortest first, so that as little as possible is padding.

    By rows there are ⌈n / rows⌉ groups, none of them larger than that many rows of the longest length; of short rows
    there may be more in one. By tokens there are as few as hold no more than that, rows included, and of which at most
    `PADDING` is padding; a row that is longer has a group of its own.

    `lengths` (n,) are 1 at least. `agree`: the number of groups that this process needs by tokens → that of all, the
    largest. Every process must have as many rows; it is asked once for each `SEARCHED` of them.
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
        groups += [rows[begin:end] for begin, end in cuts]
    return groups


def _best_cuts(ordered: Integers, budget: int, most: int, count: int, padding: float = 1.0) -> list[tuple[int, int]]:
    """Begin and end of groups of rows in the order of their lengths, their areas together the smallest.

    A group's area, at most `budget`, is the number of its rows, at most `most`, times the longest of them. There are
    `count` groups, or more until at most that share of their areas is `padding`.
    """
    n = len(ordered)
    first = np.arange(n + 1)
    number = (first[None, :] - first[:, None])[:, 1:]  # of rows i … j, at [i, j]
    area = number * ordered.astype(np.int64)
    allowed = (number == 1) | (number > 1) & (number <= most) & (area <= budget)
    area = np.where(allowed, area, np.inf)
    cost = np.full(n + 1, np.inf)  # the least area of the first so many rows in the groups so far
    cost[0] = 0
    cuts: list[Integers] = []
    while len(cuts) < count or cost[n] * (1 - padding) > ordered.sum():
        candidates = cost[:, None] + area
        best = candidates.argmin(0)
        cuts.append(np.concatenate([[0], best]))
        cost = np.concatenate([[np.inf], candidates[best, np.arange(n)]])
    ends = [n]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    return list(zip(ends, ends[1:], strict=False))


def layouts(rollout: Rollout, size: PassSize, agree: Callable[[int], int] = int) -> Iterator[Layout]:
    """All rows of a rollout for forward passes of a size; see `group_by_length`."""
    lengths = Lengths.of(rollout)
    for rows in group_by_length(lengths.totals, size, agree):
        yield lay_out(rollout, rows, lengths)


def to_device(numbers: Integers, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
