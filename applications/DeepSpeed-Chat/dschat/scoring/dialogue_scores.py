# SPDX-License-Identifier: Apache-2.0
"""Scores of whole dialogues: by a reward model with its own chat template, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.user_function import call_function
from dschat.data.dialogues import Dialogue
from dschat.data.encoding import PROBE
from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.scoring.classifier import ClassifierReader

DialogueFn = Callable[[list[Dialogue], list[dict[str, object]]], Tensor]


class DialogueScores(Protocol):
    """Scores dialogues that end with a reply."""

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        """One number for each of B dialogues, which are of these data rows: (B,) float32, on a CPU."""


class FunctionDialogueScores:
    """A :data:`DialogueFn`; what it returns is checked."""

    def __init__(self, function: DialogueFn, flag: str) -> None:
        self._name, self._function, self._flag = getattr(function, "__name__", "function"), function, flag

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        result = call_function(self._function, self._flag, list(dialogues), [row.extra for row in rows])
        try:
            scores = torch.as_tensor(result, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self._flag}: {self._name} returned {type(result).__name__}, which is no list of numbers: {error}"
            ) from error
        if scores.shape != (len(dialogues),):
            raise UserError(
                f"{self._flag}: {self._name} returned shape {tuple(scores.shape)} for {len(dialogues)} dialogues; it "
                "must return one number per dialogue."
            )
        return scores


class RewardModelDialogueScores:
    """The number of a sequence classifier for the dialogue as its own chat template writes it."""

    def __init__(self, classifier: ClassifierReader, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Takes a model and its tokenizer.

        Args:
            classifier: what computes.
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
        self._text(PROBE, "a dialogue of one turn")

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        texts = [self._text(dialogue, row.origin) for dialogue, row in zip(dialogues, rows, strict=True)]
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        limit = self._classifier.limit
        for sequence, row in zip(ids, rows, strict=True):
            if limit is not None and len(sequence) > limit:
                raise UserError(
                    f"{self._name} reads at most {limit} tokens, but a dialogue of {row.origin} has come to "
                    f"{len(sequence)}: lower --max_turns, --max_answer_seq_len or --max_seq_len."
                )
        return self._classifier.numbers(ids)

    def _text(self, dialogue: Dialogue, origin: str) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(dialogue, tokenize=False))
        except TemplateError as error:
            raise UserError(
                f"{self._name}: its chat template refuses {origin}: {error}. Use a template that takes turns of user "
                "and assistant, or --reward_function."
            ) from error
