# SPDX-License-Identifier: Apache-2.0
"""What one PPO iteration produces, stage by stage: Rollout (sampled), Trajectory (scored), PPOBatch (with advantages).

Each object holds the one before it; nothing writes into an earlier one. B rows, P prompt and R response positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

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
    # (B, R) float32, 0 off the response: the tokens' log-probs for what drew them, where that is not the actor itself.
    drawn_logprobs: Tensor | None = None
    # (B,) long: which of the responses to its prompt each is, from 0; None where every prompt has one.
    sample_index: Tensor | None = None

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
class ScoredRollout:
    """A rollout with what is known of it before actor and critic are asked; float32."""

    rollout: Rollout
    ref_logprobs: Tensor  # (B, R): log π_ref(y_j | x, y_<j) of the frozen reference
    scores: Tensor  # (B,): from the reward function
    # (B, R): what of the score stands on each token, where macro actions have rewards of their own; what these leave
    # of it stands on the last token.
    segment_rewards: Tensor | None = None

    @property
    def response_mask(self) -> Tensor:
        """(B, R) bool, the rollout's."""
        return self.rollout.response_mask

    def with_numbers(self, logprobs: Tensor, values: Tensor | None) -> "Trajectory":
        """The same with what actor and critic say, (B, R) each."""
        return Trajectory(self.rollout, logprobs, self.ref_logprobs, values, self.scores, self.segment_rewards)


@dataclass(frozen=True)
class Trajectory:
    """A rollout with what the models say of it; float32."""

    rollout: Rollout
    logprobs: Tensor  # (B, R): log π_old(y_j | x, y_<j)
    ref_logprobs: Tensor  # (B, R): the same under the frozen reference
    values: Tensor | None  # (B, R): V(x, y_<j), the state before token j; None without a critic
    scores: Tensor  # (B,): from the reward function
    segment_rewards: Tensor | None = None  # (B, R), see ScoredRollout

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
    returns: Tensor | None  # (B, R): the macro action's return, on each of its tokens; None without a critic
    counted: Tensor | None = None  # (B, R) bool: tokens that the policy's loss is of; the response when None

    @property
    def policy_mask(self) -> Tensor:
        """(B, R) bool, tokens that the policy's loss is of."""
        return self.response_mask if self.counted is None else self.counted

    @property
    def rollout(self) -> Rollout:
        """The trajectory's."""
        return self.trajectory.rollout

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
    return mapped(item, lambda x: torch.index_select(x, 0, rows))


def mapped(item: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same with every tensor in it changed: in dataclasses and mappings, and what these hold.

    Raises:
        TypeError: it holds a list or a tuple, which may hold tensors, too.
    """
    new: Any = item
    if isinstance(item, Tensor):
        new = change(item)
    elif isinstance(item, Mapping):
        new = {name: mapped(value, change) for name, value in item.items()}
    elif is_dataclass(item) and not isinstance(item, type):
        new = replace(item, **{field.name: mapped(getattr(item, field.name), change) for field in fields(item)})
    elif isinstance(item, list | tuple):
        raise TypeError(f"a {type(item).__name__} among tensors")
    return new


def join(items: Sequence[T], pad_id: int = 0) -> T:
    """The rows of all, one below the other.

    Args:
        items: Rollouts, Trajectories, MacroActions or PPOBatches of any numbers of rows; all lack the same tensors.
        pad_id: fills ids.

    Returns:
        A new object of the same type with the rows of all. Prompts are padded on the left, all else on the right.
    """
    first, changes = items[0], {}
    for field in fields(first):  # type: ignore[arg-type]
        parts = [getattr(item, field.name) for item in items]
        if is_dataclass(parts[0]):
            changes[field.name] = join(parts, pad_id)
        elif parts[0] is not None:
            shifts, has_prompts = [0] * len(parts), field.name in ("input_ids", "attention_mask")
            if has_prompts:
                widths = [item.prompt_width for item in items if isinstance(item, Rollout)]
                shifts = [max(widths) - width for width in widths]
            fill = {"input_ids": pad_id, "index": -1}.get(field.name, 0)
            changes[field.name] = torch.cat(_widened(parts, shifts, fill))
    return replace(first, **changes)  # type: ignore[type-var]


def _widened(tensors: list[Tensor], shifts: list[int], fill: int) -> list[Tensor]:
    """Tensors (B, N) of equal widths, each moved to the right by its shift; those of one dimension as they are."""
    if tensors[0].dim() == 1:
        return tensors
    width = max(shift + x.shape[1] for shift, x in zip(shifts, tensors, strict=True))
    return [
        torch.nn.functional.pad(x, (shift, width - shift - x.shape[1]), value=fill)
        for shift, x in zip(shifts, tensors, strict=True)
    ]


def without_responses(rollout: Rollout, rows: Tensor) -> Rollout:
    """The same rollout whose chosen rows have no response token.

    Args:
        rollout: of B rows.
        rows: (B,) bool.
    """
    keep = ~rows[:, None]
    prompt = torch.arange(rollout.attention_mask.shape[1], device=keep.device) < rollout.prompt_width
    return replace(
        rollout,
        attention_mask=rollout.attention_mask & (keep | prompt),
        response_mask=rollout.response_mask & keep,
    )


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


def trim(item: T, width: int) -> T:
    """The same rows with less padding behind the responses.

    Args:
        item: Rollout, ScoredRollout, Trajectory, MacroActions or PPOBatch.
        width: R' ≤ R: columns of the response beyond it are dropped.

    Returns:
        A new object of the same type, its tensors (B, R') or (B, P+R').
    """
    if isinstance(item, Rollout):
        end = item.prompt_width + width
        input_ids, attention_mask = item.input_ids[:, :end], item.attention_mask[:, :end]
        mask = item.response_mask[:, :width]
        drawn = None if item.drawn_logprobs is None else item.drawn_logprobs[:, :width]
        return replace(
            item, input_ids=input_ids, attention_mask=attention_mask, response_mask=mask, drawn_logprobs=drawn
        )
    if isinstance(item, MacroActions):
        return replace(item, index=item.index[:, :width])
    changes = {}
    for field in fields(item):  # type: ignore[arg-type]
        value = getattr(item, field.name)
        if value is not None:
            changes[field.name] = (
                trim(value, width) if is_dataclass(value) else value[:, :width] if value.dim() > 1 else value
            )
    return replace(item, **changes)  # type: ignore[type-var]
