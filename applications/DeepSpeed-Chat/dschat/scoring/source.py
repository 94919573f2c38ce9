# SPDX-License-Identifier: Apache-2.0
"""The protocol of score sources, which give one number per response; and the weighted sum of several sources."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dschat.data.rows import Row
from dschat.models.engines import Scalar
from dschat.models.layout import Lengths
from macro_actions.types import Rollout

if TYPE_CHECKING:
    from dschat.scoring.segments import ResponseNumbers, Segments

logger = logging.getLogger(__name__)

UNSCORED = "unscored"  # 1 for a response without score, else 0; its mean is the share of such responses


@dataclass(frozen=True)
class EpisodeRecords:
    """What environments did in B episodes of several turns.

    Attributes:
        turn_rewards: shape ``(B, R)``, float32, each turn's reward on its last token, 0 elsewhere.
        failed: shape ``(B,)``, bool: the environment failed, so that the episode has no score.
        done: shape ``(B,)``, bool: the environment ended the episode; others were cut by a limit.
        messages: messages of both sides.
        rewards: rewards of each turn, in their order.
        samplings: lengths of what was read and sampled in each turn.
    """

    turn_rewards: Tensor
    failed: Tensor
    done: Tensor
    messages: list[list[dict[str, object]]]
    rewards: list[list[float]]
    samplings: list[Lengths]

    def columns(self, row: int) -> dict[str, object]:
        """Columns of an episode in sample files."""
        return {"messages": self.messages[row], "turn_rewards": self.rewards[row], "done": bool(self.done[row])}


@dataclass(frozen=True)
class ResponseTexts:
    """Texts of B prompts and responses, without special tokens, and the data rows of the prompts.

    In an episode of several turns the response is everything after the prompt, the environment's messages included.

    Metrics are about the first `counted` rows, or about all with None: in an evaluation, a process with fewer prompts
    than others answers some twice.
    """

    prompts: list[str]
    responses: list[str]
    rows: list[Row]
    finished: list[bool]  # whether each response ended; one that was cut is scored without an end token
    segments: Segments | None = None  # with --segment_rewards
    episodes: EpisodeRecords | None = None  # with --environment
    counted: int | None = None

    @property
    def last_replies(self) -> list[str]:
        """The policy's last message of each episode, empty if it has none; a single response is the whole one."""
        if self.episodes is None:
            return self.responses
        replies = []
        for messages, rewards in zip(self.episodes.messages, self.episodes.rewards, strict=True):
            contents = [str(message["content"]) for message in messages if message["role"] == "assistant"]
            replies.append(contents[-1] if rewards else "")
        return replies

    def alone(self, row: int) -> ResponseTexts:
        """A single response."""
        segments = None if self.segments is None else self.segments.of_row(row)
        return ResponseTexts(
            [self.prompts[row]], [self.responses[row]], [self.rows[row]], [self.finished[row]], segments
        )

    def repeated(self, count: int) -> ResponseTexts:
        """All responses, followed by `count` copies of the first, without segments."""
        return ResponseTexts(
            self.prompts + self.prompts[:1] * count,
            self.responses + self.responses[:1] * count,
            self.rows + self.rows[:1] * count,
            self.finished + self.finished[:1] * count,
        )


def prefix_texts(texts: ResponseTexts) -> ResponseTexts:
    """Every response up to the end of each of its macro actions, one text per macro action.

    Only the last text of a response can be finished. `texts` must have segments.
    """
    assert texts.segments is not None  # the caller asks for macro actions
    prompts: list[str] = []
    prefixes: list[str] = []
    rows: list[Row] = []
    finished: list[bool] = []
    for number, segment_texts in enumerate(texts.segments.texts):
        count = len(segment_texts)
        if not count:
            continue
        prompts += [texts.prompts[number]] * count
        prefixes += accumulate(segment_texts)
        rows += [texts.rows[number]] * count
        finished += [False] * (count - 1) + [texts.finished[number]]
    return ResponseTexts(prompts, prefixes, rows, finished)


Measured = Mapping[str, tuple[float, float]]  # metric → sum and count over this rank's rows; equal names on all ranks


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, and further results of a source."""

    values: Tensor  # (B,) float32
    # (B,) bool: has no score; excluded from training. The value is the mean of the others, NaN if there are none.
    missing: Tensor | None = None
    measured: Measured = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # further numbers of each response by name, (B,) float32
    segments: Tensor | None = None  # (B, M) float32: rewards of macro actions, which are parts of the values
    tokens: Tensor | None = None  # (B, R) float32: rewards of tokens, which are parts of the values


class ScoreSource(Protocol):
    """Scores a rollout: float32 (B,), or `Scores` with further results.

    Attributes:
        model: engine of the scalar model that the self-check compares with plain transformers, if there is one.
    """

    @property
    def model(self) -> Scalar | None: ...

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores: ...


class NoScores:
    """Scores of 0, for a run that learns from a teacher alone."""

    model: None = None  # the self-check has no model to compare

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        return torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)


def scores_of(result: Tensor | Scores) -> Scores:
    """The result of a source as `Scores`."""
    return result if isinstance(result, Scores) else Scores(result)


@cache  # once per run and source
def _warn_of_whole_responses(name: str) -> None:
    logger.warning("%s gives one number for each response, and none for its macro actions.", name)


def with_segments(
    numbers: Sequence[ResponseNumbers], texts: ResponseTexts, device: torch.device, name: str
) -> Tensor | Scores:
    """Converts a source's numbers into scores and, with segments, rewards of macro actions.

    Args:
        numbers: numbers of each of B responses.
        texts: texts of the responses.
        device: device of the result.
        name: name of the source, for messages.
    """
    if texts.segments is None:
        return torch.tensor(numbers, device=device)
    if not any(isinstance(response_numbers, Sequence) for response_numbers in numbers):
        _warn_of_whole_responses(name)
    scores, rewards = texts.segments.rewards(numbers)
    return Scores(scores.to(device), segments=rewards.to(device))


@dataclass(frozen=True)
class Weighted:
    """A source in a weighted sum; its own number is reported under its name, if it has one."""

    name: str | None
    weight: float
    source: ScoreSource
