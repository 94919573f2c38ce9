# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model, which reads the sampled ids or, with its own tokenizer, texts and whole dialogues."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue
from dschat.data.encoding import PROBE
from dschat.data.rows import Row
from dschat.models.engines import Scalar
from dschat.models.layout import PassSize, layouts
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.reward_reader import ClassifierReader, RewardReader, encode_dialogues
from dschat.scoring.source import ResponseTexts, Scores, prefix_texts, with_segments
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)


class RewardModelScores:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Scalar, batch_size: int, max_tokens: int | None = None) -> None:
        """Takes a model, and what a forward pass may hold: see `PassSize`."""
        self.model, self._size = model, PassSize(batch_size, max_tokens)

    @torch.no_grad()
    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """With segments, those at the last token of each macro action."""
        scores = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
        at_tokens = torch.zeros(rollout.response_mask.shape, device=scores.device)
        for rows in layouts(rollout, self._size, largest_over_ranks):
            numbers = self.model(rows.input_ids, None)
            scores[rows.rows] = rows.last(numbers)
            if texts.segments is not None:
                at_tokens[rows.rows, : rows.width] = rows.at(numbers)
        if texts.segments is None:
            return scores
        ends = [[end - 1 for end in accumulate(lengths)] for lengths in texts.segments.lengths]
        found = [[of_row[end] for end in row] for of_row, row in zip(at_tokens.tolist(), ends, strict=True)]
        return with_segments(found, texts, scores.device, "the reward model")


class TextRewardScores:
    """The number of a reward model with a tokenizer of its own, which reads the texts of prompts and responses."""

    model: None = None  # the self-check has nothing to compare: the model does not read the rollout's ids

    def __init__(self, reader: RewardReader, skips: bool = False) -> None:
        """Takes what reads. With `skips`, a text that is too long for it has no number (NaN), else the run stops."""
        self._reader, self._skips = reader, skips

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """With segments, it reads each response up to the end of every macro action, too."""
        finished = rollout.finished.tolist()
        read, ended = (texts, finished) if texts.segments is None else prefix_texts(texts, finished)
        count = len(ended)
        more = 0 if texts.segments is None else largest_over_ranks(count) - count  # so that all ranks read as many
        scores, too_long = self._reader.read(read.repeated(more), ended + ended[:1] * more)
        for row, problem in too_long.items():
            if not self._skips:
                raise UserError(problem)
            scores[row] = torch.nan
        if too_long:
            logger.warning("%s It has no score, nor have %d others.", next(iter(too_long.values())), len(too_long) - 1)
        scores = scores[:count]
        if texts.segments is None:
            return scores.to(rollout.input_ids.device)
        found = [of_row.tolist() for of_row in scores.split([len(row) for row in texts.segments.lengths])]
        return with_segments(found, texts, rollout.input_ids.device, "the reward model")


class RewardModelDialogueScores:
    """The number of a sequence classifier for the dialogue as its own chat template writes it."""

    def __init__(self, classifier: ClassifierReader, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Takes a model and its tokenizer.

        Args:
            tokenizer: its own; it need not be able to pad.
            name: flag and path, for messages.

        Raises:
            UserError: there is no chat template, or it refuses a dialogue.
        """
        self._classifier, self._tokenizer, self._name = classifier, tokenizer, name
        if tokenizer.chat_template is None:
            raise UserError(
                f"{name}: its tokenizer has no chat template, so that nothing says how it reads a dialogue. Use a "
                "reward model of chats, or --reward_function."
            )
        self._ids([PROBE], ["a dialogue of one turn"])

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        ids = self._ids(dialogues, [row.origin for row in rows])
        limit = self._classifier.limit
        for sequence, row in zip(ids, rows, strict=True):
            if limit is not None and len(sequence) > limit:
                raise UserError(
                    f"{self._name} reads at most {limit} tokens, but a dialogue of {row.origin} has come to "
                    f"{len(sequence)}: lower --max_turns, --max_answer_seq_len or --max_seq_len."
                )
        return self._classifier.numbers(ids)

    def _ids(self, dialogues: Sequence[Dialogue], origins: Sequence[str]) -> list[list[int]]:
        ids, refused = encode_dialogues(self._tokenizer, dialogues)
        for n, error in refused.items():
            raise UserError(
                f"{self._name}: its chat template refuses {origins[n]}: {error}. Use a template that takes turns of "
                "user and assistant, or --reward_function."
            ) from error
        return list(ids.values())
