# SPDX-License-Identifier: Apache-2.0
"""The data of a PPO iteration by stage: Rollout (sampled), Trajectory (scored), PPOBatch (with advantages).

Each object holds the one of the stage before; none is modified afterwards. B rows, P prompt positions, R response
positions, M macro actions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """Responses sampled from the policy. Prompts are padded on the left, responses on the right.

    Attributes:
        input_ids: shape ``(B, P+R)``, int64.
        attention_mask: shape ``(B, P+R)``, bool, True on real tokens.
        response_mask: shape ``(B, R)``, bool, True on tokens the policy produced, EOS included. A prefix of each row,
            or in an episode of several turns one run for each turn, with the environment's tokens between the runs.
        prompt_index: shape ``(B,)``, int64, number of the prompt in the data set.
        finished: shape ``(B,)``, bool, True if the response ended with EOS, False if it was cut; for an episode
            also False if the environment was not done.
        drawn_logprobs: shape ``(B, R)``, float32, 0 off the response: log-probabilities under the policy that sampled
            the tokens, where they are known apart from the actor's: of another engine, or of lower precision.
        sample_index: shape ``(B,)``, int64, number of the response among those to its prompt, from 0; ``None``
            counts as 0 for all.
        cut_turns: shape ``(B, R)``, bool, True on the last token of each turn that does not end with EOS; ``None`` if
            rows are not episodes.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    prompt_index: Tensor
    finished: Tensor
    drawn_logprobs: Tensor | None = None
    sample_index: Tensor | None = None
    cut_turns: Tensor | None = None

    @property
    def prompt_width(self) -> int:
        """P, the prompt positions, padding included."""
        return self.input_ids.shape[1] - self.response_mask.shape[1]

    @property
    def response_ids(self) -> Tensor:
        """The response part of ``input_ids``, shape (B, R)."""
        return self.input_ids[:, self.prompt_width :]

    def response_rows(self) -> list[list[int]]:
        """Ids of each response as a list, without padding and environments' tokens. The host waits for the device."""
        all_ids = self.response_ids.cpu()
        mask = self.response_mask.cpu()
        return [ids[row_mask].tolist() for ids, row_mask in zip(all_ids, mask, strict=True)]

    def response_runs(self) -> list[list[list[int]]]:
        """Ids of each run of the response mask: for each row, the turns of the policy. The host waits for the device.

        A row without holes has one run, and a row without response tokens has none.
        """
        rows = []
        all_ids = self.response_ids.tolist()
        masks = self.response_mask.tolist()
        for ids, row_mask in zip(all_ids, masks, strict=True):
            runs: list[list[int]] = []
            was_response = False
            for token_id, is_response in zip(ids, row_mask, strict=True):
                if is_response and not was_response:
                    runs.append([])
                if is_response:
                    runs[-1].append(token_id)
                was_response = is_response
            rows.append(runs)
        return rows


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with scores and the reference's log-probabilities, before actor and critic have read it.

    Attributes:
        rollout: the responses.
        ref_logprobs: shape ``(B, R)``, float32, log π_ref(y_j | x, y_<j) under the frozen reference.
        scores: shape ``(B,)``, float32, from the reward function.
        segment_rewards: shape ``(B, R)``, float32, parts of the score on tokens, if macro actions have rewards of
            their own; the last token gets the rest of the score.
        teacher_logprobs: shape ``(B, R)``, float32, log π_T(y_j | x, y_<j) under a teacher; ``None`` without one.
    """

    rollout: Rollout
    ref_logprobs: Tensor
    scores: Tensor
    segment_rewards: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    @property
    def response_mask(self) -> Tensor:
        """The rollout's response mask, shape (B, R)."""
        return self.rollout.response_mask

    def with_numbers(self, logprobs: Tensor, values: Tensor | None) -> "Trajectory":
        """Trajectory with the actor's log-probabilities and the critic's values, shape (B, R) each."""
        return Trajectory(
            rollout=self.rollout,
            logprobs=logprobs,
            ref_logprobs=self.ref_logprobs,
            values=values,
            scores=self.scores,
            segment_rewards=self.segment_rewards,
            teacher_logprobs=self.teacher_logprobs,
        )


@dataclass(frozen=True)
class Trajectory:
    """A rollout with everything that models and reward function computed for it; float32.

    Attributes:
        rollout: the responses.
        logprobs: shape ``(B, R)``, log π_old(y_j | x, y_<j) under the actor.
        ref_logprobs: shape ``(B, R)``, log π_ref(y_j | x, y_<j) under the frozen reference.
        values: shape ``(B, R)``, V(x, y_<j), of the state before token j; ``None`` without a critic.
        scores: shape ``(B,)``, from the reward function.
        segment_rewards: shape ``(B, R)``, see ScoredRollout.
        teacher_logprobs: shape ``(B, R)``, see ScoredRollout.
    """

    rollout: Rollout
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    scores: Tensor
    segment_rewards: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    @property
    def response_mask(self) -> Tensor:
        """The rollout's response mask, shape (B, R)."""
        return self.rollout.response_mask

    @property
    def teacher_log_ratios(self) -> Tensor:
        """log π_T − log π_old of each response token, shape (B, R), 0 off the response; only with a teacher."""
        assert self.teacher_logprobs is not None
        return torch.where(self.response_mask, self.teacher_logprobs - self.logprobs, 0.0)


@dataclass(frozen=True)
class MacroActions:
    """Which macro action each response token belongs to. M is the largest number of macro actions in a row.

    Attributes:
        index: shape ``(B, R)``, int64, number of the token's macro action; −1 off the response.
        lengths: shape ``(B, M)``, int64, tokens per macro action; 0 after the row's last.
        mask: shape ``(B, M)``, bool, True if the macro action exists; a prefix of each row.
    """

    index: Tensor
    lengths: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PPOBatch:
    """The batch that the losses train on. Tensors have shape (B, R), one number per token.

    Attributes:
        trajectory: the scored rollout.
        macro: its macro actions, for losses that weight them and for metrics.
        kl: KL estimate per token.
        rewards: token rewards, with the score on the last token.
        advantages: the macro action's advantage, on each of its tokens.
        returns: the macro action's return, on each of its tokens; ``None`` without a critic.
        counted: bool, tokens that the policy loss is about; all response tokens with ``None``.
        critic_weights: shape ``(B,)``, weights of the rows in the critic's loss; 1 with ``None``.
    """

    trajectory: Trajectory
    macro: MacroActions
    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor | None
    counted: Tensor | None = None
    critic_weights: Tensor | None = None

    @property
    def policy_mask(self) -> Tensor:
        """Tokens that the policy loss is about, shape (B, R), bool."""
        return self.response_mask if self.counted is None else self.counted

    @property
    def rollout(self) -> Rollout:
        """The trajectory's rollout."""
        return self.trajectory.rollout

    @property
    def response_mask(self) -> Tensor:
        """The rollout's response mask, shape (B, R)."""
        return self.trajectory.response_mask


def select_rows(item: T, rows: Tensor) -> T:
    """Object of the same type that holds only some rows.

    Args:
        item: Rollout, Trajectory, MacroActions or PPOBatch; the first dimension of every tensor in it is B.
        rows: shape ``(N,)``, int64, row numbers.

    Returns:
        A new object with N rows.
    """
    return mapped(item, lambda x: torch.index_select(x, 0, rows))


def mapped(item: T, change: Callable[[Tensor], Tensor]) -> T:
    """Copy of dataclasses and mappings, nested as they may be, with ``change`` applied to every tensor.

    Raises:
        TypeError: there is a list or a tuple, which might hold tensors, too.
    """
    new: Any = item
    if isinstance(item, Tensor):
        new = change(item)
    elif isinstance(item, Mapping):
        new = {name: mapped(value, change) for name, value in item.items()}
    elif is_dataclass(item) and not isinstance(item, type):
        changes = {}
        for field in fields(item):
            changes[field.name] = mapped(getattr(item, field.name), change)
        new = replace(item, **changes)
    elif isinstance(item, list | tuple):
        raise TypeError(f"a {type(item).__name__} among tensors")
    return new


def join(items: Sequence[T], pad_id: int = 0) -> T:
    """Concatenate rows. Prompts are padded on the left, everything else on the right.

    Args:
        items: Rollouts, Trajectories, MacroActions or PPOBatches with any numbers of rows; optional tensors are
            present in all of them or in none.
        pad_id: fills ``input_ids``.

    Returns:
        A new object of the same type with the rows of all items.
    """
    first = items[0]
    changes: dict[str, Any] = {}
    for field in fields(first):  # type: ignore[arg-type]
        parts = [getattr(item, field.name) for item in items]
        if parts[0] is None:
            continue
        if is_dataclass(parts[0]):
            changes[field.name] = join(parts, pad_id)
            continue
        left_padding = [0] * len(parts)
        if field.name in ("input_ids", "attention_mask"):
            widths = [item.prompt_width for item in items if isinstance(item, Rollout)]
            left_padding = [max(widths) - width for width in widths]
        fill = {"input_ids": pad_id, "index": -1}.get(field.name, 0)
        changes[field.name] = torch.cat(_widened(parts, left_padding, fill))
    return replace(first, **changes)  # type: ignore[type-var]


def _widened(tensors: list[Tensor], left_padding: list[int], fill: int) -> list[Tensor]:
    """Tensors (B, N) padded to equal widths, on the left by the given numbers; those of one dimension stay as is."""
    if tensors[0].dim() == 1:
        return tensors
    widths = [left + x.shape[1] for left, x in zip(left_padding, tensors, strict=True)]
    padded = []
    for left, width, x in zip(left_padding, widths, tensors, strict=True):
        right = max(widths) - width
        padded.append(torch.nn.functional.pad(x, (left, right), value=fill))
    return padded


def without_responses(rollout: Rollout, rows: Tensor) -> Rollout:
    """Rollout in which the chosen rows have no response token.

    Args:
        rollout: B rows.
        rows: shape ``(B,)``, bool.
    """
    has_response = ~rows[:, None]
    columns = torch.arange(rollout.attention_mask.shape[1], device=rows.device)
    is_prompt = columns < rollout.prompt_width
    cut_turns = rollout.cut_turns
    return replace(
        rollout,
        attention_mask=rollout.attention_mask & (has_response | is_prompt),
        response_mask=rollout.response_mask & has_response,
        cut_turns=None if cut_turns is None else cut_turns & has_response,
    )


def tensors_of(item: object, name: str = "") -> dict[str, Tensor]:
    """Every tensor in nested dataclasses by its path below ``name``, for example ``trajectory.values``."""
    if isinstance(item, Tensor):
        return {name: item}
    tensors: dict[str, Tensor] = {}
    if item is not None:
        for field in fields(item):  # type: ignore[arg-type]
            path = f"{name}.{field.name}" if name else field.name
            tensors |= tensors_of(getattr(item, field.name), path)
    return tensors


def trim(item: T, width: int) -> T:
    """Object of the same type with fewer columns of padding after the responses.

    Args:
        item: Rollout, ScoredRollout, Trajectory, MacroActions or PPOBatch.
        width: R' ≤ R; response columns from R' on are dropped.

    Returns:
        A new object whose tensors have shape (B, R') or (B, P+R').
    """
    if isinstance(item, MacroActions):
        return replace(item, index=item.index[:, :width])
    changes: dict[str, Any] = {}
    for field in fields(item):  # type: ignore[arg-type]
        value = getattr(item, field.name)
        if value is None:
            continue
        if is_dataclass(value):
            changes[field.name] = trim(value, width)
        elif field.name in ("input_ids", "attention_mask") and isinstance(item, Rollout):
            changes[field.name] = value[:, : item.prompt_width + width]
        elif value.dim() > 1:
            changes[field.name] = value[:, :width]
    return replace(item, **changes)  # type: ignore[type-var]
