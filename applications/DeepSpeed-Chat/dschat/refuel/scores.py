# SPDX-License-Identifier: Apache-2.0
"""Scores of whole dialogues: of a user's function, or of a reward model with a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row
from dschat.data.turn_end import MARK, QUESTION
from dschat.models.classifiers import load_classifier
from dschat.models.reward_notes import noted_end_id
from dschat.scoring.function import checked_numbers, columns_of, with_nan
from dschat.scoring.reward_reader import ClassifierReader, encode_dialogues

FUNCTION = "--reward_function"
MODEL = "--reward_model"

# B dialogues that end with a reply, their data rows, and whether the last reply of each ended (else it was cut) → one
# number for each, (B,) float32 on a CPU.
DialogueScores = Callable[[Sequence[Dialogue], Sequence[Row], Sequence[bool]], Tensor]
DialogueFn = Callable[[list[Dialogue], list[dict[str, object]]], object]


class FunctionDialogueScores:
    """Scores from a user's function of dialogues and rows, whose result is checked."""

    def __init__(self, function: DialogueFn, flag: str) -> None:
        self._function = function
        self._flag = flag

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row], finished: Sequence[bool]) -> Tensor:
        copies = [deepcopy(dialogue) for dialogue in dialogues]
        result = call_function(self._function, self._flag, copies, columns_of(rows))
        name = getattr(self._function, "__name__", "function")
        return checked_numbers(with_nan(result), len(dialogues), "dialogue", f"{self._flag}: {name}")


def function_scores(spec: str) -> FunctionDialogueScores:
    """Scores of the function that --reward_function names.

    Raises:
        UserError: it cannot be imported, or does not take dialogues and rows.
    """
    return FunctionDialogueScores(load_function(spec, FUNCTION, ["dialogues", "rows"]), FUNCTION)


def reward_model_scores(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int | None,
    max_tokens: int | None = None,
    offload: bool = False,
    max_length: int | None = None,
    skips: bool = False,
) -> RewardModelDialogueScores:
    """Opens the reward model of --reward_model.

    Args:
        path: folder or hub id.
        tokenizer: from `dschat.scoring.reward_tokenizer.load_reward_tokenizer`.
        dtype: dtype of its weights.
        device: where it computes.
        batch_size, max_tokens: dialogues and tokens in a forward pass, see `ClassifierReader`.
        offload: keep its weights in main memory between calls.
        max_length: longest dialogue that is read, in tokens; the model's own limit if not given.
        skips: see `RewardModelDialogueScores`.

    Raises:
        UserError: the model cannot be used.
    """
    model = load_classifier(path, MODEL, dtype, tokenizer)
    model.to("cpu" if offload else device)
    reader = ClassifierReader(model, tokenizer.pad_token_id, device, batch_size, offload, max_tokens=max_tokens)
    if max_length is not None:
        reader.limit = min(max_length, reader.limit or max_length)
    return RewardModelDialogueScores(reader, tokenizer, f"{MODEL} {path}", skips)


class RewardModelDialogueScores:
    """The score of a sequence classifier for a dialogue that is rendered by its own chat template."""

    def __init__(
        self, classifier: ClassifierReader, tokenizer: PreTrainedTokenizerBase, name: str, skips: bool = False
    ) -> None:
        """Takes a model and its tokenizer.

        Args:
            classifier: reads token ids.
            tokenizer: the model's own; it need not be able to pad.
            name: flag and path, for messages.
            skips: a dialogue that cannot be read has the score NaN; otherwise it is an error.

        Raises:
            UserError: there is no chat template, or it refuses a dialogue.
        """
        self._classifier = classifier
        self._tokenizer = tokenizer
        self._name = name
        self._skips = skips
        self._end_id: int | None = None
        if classifier.end_token is not None:
            self._end_id = noted_end_id(classifier.end_token, tokenizer, name)
        if tokenizer.chat_template is None:
            raise UserError(
                f"{name}: its tokenizer has no chat template, which would say how the model reads a dialogue. Use a "
                "reward model for chats, or --reward_function."
            )
        probe = [*QUESTION, {"role": "assistant", "content": MARK}]
        _, problems = self._readable([probe], ["a dialogue of one turn"], [True])
        for problem in problems:
            raise UserError(problem)

    def __call__(self, dialogues: Sequence[Dialogue], rows: Sequence[Row], finished: Sequence[bool]) -> Tensor:
        """See `DialogueScores`. Raises UserError if a dialogue cannot be read."""
        ids, problems = self._readable(dialogues, [row.origin for row in rows], finished)
        if problems and not self._skips:
            raise UserError(problems[0])
        scores = torch.full((len(dialogues),), torch.nan)
        scores[list(ids)] = self._classifier.numbers(list(ids.values()))
        return scores

    def _readable(
        self, dialogues: Sequence[Dialogue], origins: Sequence[str], finished: Sequence[bool]
    ) -> tuple[dict[int, list[int]], list[str]]:
        """Token ids of the dialogues that can be read, by number, and what is wrong with the others."""
        ids, refused = encode_dialogues(self._tokenizer, dialogues, finished, end_id=self._end_id)
        problems = []
        for number, error in refused.items():
            problems.append(
                f"{self._name}: its chat template refuses {origins[number]}: {error}. Use a template that takes turns "
                "of user and assistant, or --reward_function."
            )
        limit = self._classifier.limit
        fitting: dict[int, list[int]] = {}
        for number, sequence in ids.items():
            if limit is None or len(sequence) <= limit:
                fitting[number] = sequence
            else:
                problems.append(
                    f"{self._name} reads at most {limit} tokens, but a dialogue of {origins[number]} has come to "
                    f"{len(sequence)}: lower --max_turns, --max_answer_seq_len or --max_seq_len."
                )
        return fitting, problems
