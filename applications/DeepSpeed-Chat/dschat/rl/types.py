# SPDX-License-Identifier: Apache-2.0
"""What one PPO iteration produces, stage by stage: Rollout (sampled), Trajectory (scored), PPOBatch (with advantages).

Each object holds the one before it; nothing writes into an earlier one. B rows, P prompt and R response positions.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """Responses sampled from the policy. Prompts are padded on the left, responses on the right."""

    input_ids: Tensor  # (B, P+R) long
    attention_mask: Tensor  # (B, P+R) bool: True on real tokens
    response_mask: Tensor  # (B, R) bool: True on tokens the policy produced, EOS included; a prefix of each row
    prompt_index: Tensor  # (B,) long: the prompt's index in the data set
    finished: Tensor  # (B,) bool: True where the response ended by EOS, False where it was cut

    @property
    def prompt_width(self) -> int:
        """P, padding included."""
        return self.input_ids.shape[1] - self.response_mask.shape[1]

    @property
    def response_ids(self) -> Tensor:
        """(B, R) long: the response part of ``input_ids``."""
        return self.input_ids[:, self.prompt_width :]

    def response_rows(self) -> list[list[int]]:
        """Per row the ids of its response, without padding; waits for the device."""
        ids, mask = self.response_ids.cpu(), self.response_mask.cpu()
        return [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]


@dataclass(frozen=True)
class Trajectory:
    """A rollout with what the four models say of it; float32."""

    rollout: Rollout
    logprobs: Tensor  # (B, R): log π_old(y_j | x, y_<j)
    ref_logprobs: Tensor  # (B, R): the same under the frozen reference
    values: Tensor  # (B, R): V(x, y_<j), the state before token j
    scores: Tensor  # (B,): from the reward function
    # (B, R): what `logprobs` are for the engine that drew the tokens, where it computes them in another way.
    drawn_logprobs: Tensor | None = None

    @property
    def response_mask(self) -> Tensor:
        """(B, R) bool, the rollout's."""
        return self.rollout.response_mask


@dataclass(frozen=True)
class MacroActions:
    """Which macro action each response token belongs to. M is the largest number of macro actions in a row."""

    index: Tensor  # (B, R) long: number of the token's macro action, -1 off the response
    lengths: Tensor  # (B, M) long: tokens per macro action, 0 beyond the row's last
    mask: Tensor  # (B, M) bool: True where the macro action exists; a prefix of each row


@dataclass(frozen=True)
class PPOBatch:
    """What the losses train on: per-token tensors that no longer know of macro steps."""

    trajectory: Trajectory
    macro: MacroActions
    kl: Tensor  # (B, R): the KL estimate per token
    rewards: Tensor  # (B, R): token rewards, the score on the last token included
    advantages: Tensor  # (B, R): the macro action's advantage, on each of its tokens
    returns: Tensor  # (B, R): the macro action's return, on each of its tokens

    @property
    def response_mask(self) -> Tensor:
        """(B, R) bool, the rollout's."""
        return self.trajectory.response_mask


def select_rows(item: T, rows: Tensor) -> T:
    """The same object restricted to some rows.

    Args:
        item: Rollout, Trajectory, MacroActions or PPOBatch; every tensor in it has B as its first dimension.
        rows: (N,) long, row numbers.

    Returns:
        A new object of the same type with N rows.
    """
    changes = {}
    for field in fields(item):  # type: ignore[arg-type]
        value = getattr(item, field.name)
        if value is not None:
            is_object = is_dataclass(value)
            changes[field.name] = select_rows(value, rows) if is_object else torch.index_select(value, 0, rows)
    return replace(item, **changes)  # type: ignore[type-var]


def tensors_of(item: object, name: str = "") -> dict[str, Tensor]:
    """Every tensor in a dataclass of tensors and dataclasses, by its path below ``name``: trajectory.values."""
    if isinstance(item, Tensor):
        return {name: item}
    if item is None:
        return {}
    parts = [
        tensors_of(getattr(item, field.name), f"{name}.{field.name}" if name else field.name)
        for field in fields(item)  # type: ignore[arg-type]
    ]
    return {path: tensor for part in parts for path, tensor in part.items()}


def trim(batch: PPOBatch, prompt_width: int, response_width: int) -> PPOBatch:
    """The same rows with less padding.

    Args:
        batch: (B, P+R).
        prompt_width: P' ≤ P: columns of left padding beyond it are dropped.
        response_width: R' ≤ R: columns of right padding beyond it are dropped.

    Returns:
        PPOBatch of (B, P'+R').
    """
    trajectory, rollout, macro = batch.trajectory, batch.trajectory.rollout, batch.macro
    drawn = trajectory.drawn_logprobs
    start = rollout.prompt_width - prompt_width
    end = start + prompt_width + response_width
    return PPOBatch(
        trajectory=Trajectory(
            rollout=replace(
                rollout,
                input_ids=rollout.input_ids[:, start:end],
                attention_mask=rollout.attention_mask[:, start:end],
                response_mask=rollout.response_mask[:, :response_width],
            ),
            logprobs=trajectory.logprobs[:, :response_width],
            ref_logprobs=trajectory.ref_logprobs[:, :response_width],
            values=trajectory.values[:, :response_width],
            scores=trajectory.scores,
            drawn_logprobs=None if drawn is None else drawn[:, :response_width],
        ),
        macro=replace(macro, index=macro.index[:, :response_width]),
        kl=batch.kl[:, :response_width],
        rewards=batch.rewards[:, :response_width],
        advantages=batch.advantages[:, :response_width],
        returns=batch.returns[:, :response_width],
    )
