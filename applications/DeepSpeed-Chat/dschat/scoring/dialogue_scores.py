# SPDX-License-Identifier: Apache-2.0
"""Scores of whole dialogues: by a reward model with its own chat template, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.common.user_function import call_function
from dschat.data.dialogues import PROBE, Dialogue
from dschat.data.formats.rows import Row
from dschat.errors import UserError
from dschat.models.limits import position_limit
from dschat.models.scalar import ScalarModel, last_scores

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

    def __init__(
        self,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        device: torch.device,
        batch_size: int,
        offload: bool = False,
    ) -> None:
        """Takes a model and its tokenizer.

        Args:
            classifier: from `dschat.models.load.load_classifier`.
            tokenizer: its own; it need not be able to pad.
            name: flag and path, for messages.
            device: where to compute.
            batch_size: dialogues read together at most.
            offload: keep the model in CPU memory between calls.

        Raises:
            UserError: there is no chat template, or it refuses a dialogue.
        """
        self._classifier, self._tokenizer, self._name = classifier.eval(), tokenizer, name
        self._device, self._batch_size, self._offload = device, batch_size, offload
        self._is_decoder = isinstance(getattr(classifier, "score", None), nn.Linear)
        self._pad_id = tokenizer.pad_token_id or 0  # masked, whatever it is
        self._limit = position_limit(classifier)
        if tokenizer.chat_template is None:
            raise UserError(
                f"{name}: its tokenizer has no chat template, so that nothing says how it reads a dialogue. Use a "
                "reward model of chats, or --reward_function."
            )
        self._text(PROBE, "a dialogue of one turn")
        if not offload:
            self._classifier.to(device)

    @torch.no_grad()
    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row]) -> Tensor:
        texts = [self._text(dialogue, row.origin) for dialogue, row in zip(dialogues, rows, strict=True)]
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for sequence, row in zip(ids, rows, strict=True):
            if self._limit is not None and len(sequence) > self._limit:
                raise UserError(
                    f"{self._name} reads at most {self._limit} tokens, but a dialogue of {row.origin} has come to "
                    f"{len(sequence)}: lower --max_turns, --max_answer_seq_len or --max_seq_len."
                )
        order = sorted(range(len(ids)), key=lambda n: -len(ids[n]))
        scores = torch.zeros(len(ids))
        if self._offload:
            self._classifier.to(self._device)
        for first in range(0, len(order), self._batch_size):
            numbers = order[first : first + self._batch_size]
            scores[numbers] = self._numbers([ids[n] for n in numbers]).float().cpu()
        if self._offload:
            self._classifier.to("cpu")
        return scores

    def _numbers(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, sequences))
        ids = torch.tensor([[*ids, *[self._pad_id] * (width - len(ids))] for ids in sequences], device=self._device)
        lengths = torch.tensor([len(ids) for ids in sequences], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]
        if self._is_decoder:
            return last_scores(ScalarModel(self._classifier)(ids, mask), mask)
        logits: Tensor = self._classifier(input_ids=ids, attention_mask=mask.long()).logits
        return logits[:, 0]

    def _text(self, dialogue: Dialogue, origin: str) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(dialogue, tokenize=False))
        except TemplateError as error:
            raise UserError(
                f"{self._name}: its chat template refuses {origin}: {error}. Use a template that takes turns of user "
                "and assistant, or --reward_function."
            ) from error
