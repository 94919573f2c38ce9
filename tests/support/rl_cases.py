# SPDX-License-Identifier: Apache-2.0
"""Ragged batches for the tests of the core: Hypothesis strategies, masks and random trajectories."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

import rl_references as ref
from macro_actions.estimators import ESTIMATORS, EstimatorSettings
from macro_actions.segments import segment
from macro_actions.types import PPOBatch, Rollout, Trajectory

PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)
VALUE_FUNCTIONS = ("equal", "unit", "position", "first")
PPL_MODES = ("chunk", "prefix", "token")

SEEDS = st.integers(0, 2**31 - 1)
# Response lengths of a batch, empty rows and batches of empty rows among them.
ROW_LENGTHS = st.lists(st.integers(0, 14), min_size=1, max_size=5)
# Macro-action lengths of every row; an empty list is a row without a response.
SEGMENTS = st.lists(st.lists(st.integers(1, 6), max_size=5), min_size=1, max_size=5)
PADDING = st.integers(0, 3)


def width_of(lengths: Sequence[int], padding: int = 0) -> int:
    """R of a batch with these response lengths and `padding` extra columns; at least 1."""
    return max(1, max(lengths) + padding)


def mask_of(lengths: Sequence[int], width: int) -> torch.Tensor:
    """response_mask (B,R) bool with a prefix of each row True."""
    return torch.arange(width)[None, :] < torch.tensor(list(lengths))[:, None]


def ends_of(segments: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """ends (B,R) bool of these macro-action lengths."""
    return torch.tensor([ref.ends_row(row, width) for row in segments])


def masked_case(segments: Sequence[Sequence[int]], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ends, response_mask), each (B,R) bool, of these macro-action lengths."""
    lengths = [sum(row) for row in segments]
    width = width_of(lengths, padding)
    return ends_of(segments, width), mask_of(lengths, width)


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
    """Standard normal float32 numbers times `scale`, from their own generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw(mask: torch.Tensor, seed: int, scale: float = 1.0, off_mask: float = math.nan) -> torch.Tensor:
    """Random numbers (B,R) with a trap off the mask."""
    return normal(tuple(mask.shape), seed, scale).masked_fill(~mask, off_mask)


def trajectory_of(
    lengths: Sequence[int], width: int, seed: int, *, prompt_width: int = 3, off_mask: float = 0.0
) -> Trajectory:
    """A random trajectory. A row's numbers depend on seed and row only, never on the width.

    Args:
        lengths: response length of each row.
        width: R.
        seed: of the numbers.
        prompt_width: P.
        off_mask: what logprobs, ref_logprobs and values hold off the mask (give nan or inf to plant a trap).
    """
    mask = mask_of(lengths, width)
    rows = len(lengths)
    noise = normal((rows, 4, 64), seed)[:, :, :width]
    ref_logprobs = -2.0 - 0.5 * noise[:, 0].abs()
    fill = torch.tensor(off_mask)
    logprobs = torch.where(mask, ref_logprobs + 0.3 * noise[:, 1], fill)
    rollout = Rollout(
        input_ids=torch.ones(rows, prompt_width + width, dtype=torch.long),
        attention_mask=torch.cat([torch.ones(rows, prompt_width, dtype=torch.bool), mask], dim=1),
        response_mask=mask,
        prompt_index=torch.arange(rows),
        finished=torch.arange(rows) % 2 == 0,
    )
    return Trajectory(
        rollout=rollout,
        logprobs=logprobs,
        ref_logprobs=torch.where(mask, ref_logprobs, fill),
        values=torch.where(mask, noise[:, 2], fill),
        scores=normal((rows,), seed + 1),
    )


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside nested dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def credit_of(trajectory: Trajectory, ends: torch.Tensor, estimator: str = "gae", **options: Any) -> PPOBatch:
    """The estimator's batch, where macro actions end at `ends` (B,R); `options` are its settings."""
    macro = segment(ends, trajectory.response_mask)
    return ESTIMATORS[estimator](trajectory, macro, EstimatorSettings(**options))
