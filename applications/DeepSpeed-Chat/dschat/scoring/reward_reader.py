# SPDX-License-Identifier: Apache-2.0
"""A reward model that reads texts: with its own tokenizer, of any architecture that has one label."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dschat.data.dialogues import Dialogue
from dschat.data.encoding import encode_prompts, encode_responses, prompt_text
from dschat.data.formats.rows import Row
from dschat.errors import UserError
from dschat.models.limits import position_limit
from dschat.models.load import explain_missing, load_classifier
from dschat.models.scalar import ScalarModel, last_scores
from dschat.rl.types import Rollout
from dschat.scoring.source import ResponseTexts

logger = logging.getLogger(__name__)

FLAG = "--reward-model"
TOO_LONG = "the dialogue is too long for the reward model"
REFUSED = "its chat template refuses the dialogue"
NOT_FINITE = "the reward is not finite"


def load_reward_tokenizer(path: str, rm_template: bool, flag: str = FLAG) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of the reward model that a flag names, which need not be able to pad.

    Raises:
        UserError: there is none, or `rm_template` asks for a chat template that it does not have.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(explain_missing("tokenizer", path, flag, error)) from error
    if rm_template and tokenizer.chat_template is None:
        raise UserError(
            f"--rm-template: the tokenizer of {flag} {path} has no chat template. Leave --rm-template out: the reward "
            "model then reads prompt + response + EOS."
        )
    return tokenizer


class RewardReader:
    """Scores texts, in one of three forms.

    - with a chat template: a user's and an assistant's turn, and nothing beside what the template writes;
    - a decoder (it has a `score` layer): [BOS] + prompt + response + EOS, each part encoded alone;
    - any other classifier (BERT and its like): prompt and response as the tokenizer joins a pair of texts.
    """

    model: None = None  # the self-check has nothing to compare: this is plain transformers

    def __init__(
        self, classifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str, rm_template: bool
    ) -> None:
        """Takes a model and its tokenizer.

        Args:
            classifier: from `load_classifier`, on its device.
            tokenizer: from `load_reward_tokenizer`.
            path: of both, for messages.
            rm_template: use the chat template.

        Raises:
            UserError: the response's end cannot be marked, since the tokenizer has no EOS.
        """
        self._classifier, self._tokenizer, self._path, self._template = classifier, tokenizer, path, rm_template
        self._is_decoder = isinstance(getattr(classifier, "score", None), nn.Linear)
        self._pad_id = tokenizer.pad_token_id or 0  # masked, whatever it is
        self._limit = position_limit(classifier)
        if self._is_decoder and not rm_template and tokenizer.eos_token_id is None:
            raise UserError(
                f"{FLAG} {path}: its tokenizer has no eos token, which marks the end of a response. Set `eos_token` "
                "in its tokenizer_config.json, or give --rm-template if it was trained with a chat template."
            )

    @torch.no_grad()
    def __call__(self, rollout: Rollout | None, texts: ResponseTexts) -> Tensor:
        """One number for each response, (B,) float32.

        Args:
            rollout: not read, the model has a tokenizer of its own; None for texts that nobody sampled.
            texts: B responses and the rows of their prompts.

        Raises:
            UserError: a text is too long for the model, or its number is not finite; names the row.
        """
        rows, responses = texts.rows, texts.responses
        if self._template or self._is_decoder:
            inputs = self._padded(self._templated(rows, responses) if self._template else self._ids(rows, responses))
        else:
            inputs = self._joined(rows, responses)
        self._check_length(inputs["attention_mask"], rows)
        inputs = {name: tensor.to(self._classifier.device) for name, tensor in inputs.items()}
        scores = self._numbers(inputs).float()
        for row, number in zip(rows, scores.tolist(), strict=True):
            if not math.isfinite(number):
                raise UserError(
                    f"{FLAG} {self._path}: the score of {row.origin} is {number}. Try --dtype fp32; if that does not "
                    "help, the weights are damaged."
                )
        return scores

    @torch.no_grad()
    def score_dialogues(self, dialogues: Sequence[Dialogue], max_length: int) -> list[float | str]:
        """One number for each dialogue, or why there is none.

        It is too long, its number is not finite, or the chat template refuses it.

        Args:
            dialogues: each ends with a reply; they go through the chat template, which must be there.
            max_length: tokens that the model reads at most.
        """
        most = max_length if self._limit is None else min(max_length, self._limit)
        scores: list[float | str] = [TOO_LONG] * len(dialogues)
        sequences: dict[int, list[int]] = {}
        for n, dialogue in enumerate(dialogues):
            row = Row(None, list(dialogue[:-1]), None, None, {}, "a dialogue")
            try:
                (sequences[n],) = self._templated([row], [dialogue[-1]["content"]])
            except UserError:
                scores[n] = REFUSED
        fitting = [n for n, ids in sequences.items() if len(ids) <= most]
        if fitting:
            padded = self._padded([sequences[n] for n in fitting])
            inputs = {name: tensor.to(self._classifier.device) for name, tensor in padded.items()}
            for n, number in zip(fitting, self._numbers(inputs).float().tolist(), strict=True):
                scores[n] = number if math.isfinite(number) else NOT_FINITE
        return scores

    def _numbers(self, inputs: dict[str, Tensor]) -> Tensor:
        if self._is_decoder:
            mask = inputs["attention_mask"].bool()
            return last_scores(ScalarModel(self._classifier)(inputs["input_ids"], mask), mask)
        logits: Tensor = self._classifier(**inputs).logits
        return logits[:, 0]

    def _ids(self, rows: Sequence[Row], responses: Sequence[str]) -> list[list[int]]:
        prompts, answers = encode_prompts(self._tokenizer, rows), encode_responses(self._tokenizer, responses)
        eos = self._tokenizer.eos_token_id
        return [[*prompt, *answer, eos] for prompt, answer in zip(prompts, answers, strict=True)]

    def _templated(self, rows: Sequence[Row], responses: Sequence[str]) -> list[list[int]]:
        from jinja2 import TemplateError

        texts = []
        for row, response in zip(rows, responses, strict=True):
            turns = row.messages or [{"role": "user", "content": row.prompt or ""}]
            turns = [*turns, {"role": "assistant", "content": response}]
            try:
                texts.append(str(self._tokenizer.apply_chat_template(turns, tokenize=False)))
            except TemplateError as error:
                raise UserError(
                    f"--rm-template: the chat template of {FLAG} {self._path} refuses {row.origin}: {error}. Use a "
                    "template that takes a user's and an assistant's turn, or leave --rm-template out."
                ) from error
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _joined(self, rows: Sequence[Row], responses: Sequence[str]) -> dict[str, Tensor]:
        prompts = [prompt_text(self._tokenizer, row) for row in rows]
        return dict(
            self._tokenizer(
                prompts, list(responses), padding=True, padding_side="right", return_tensors="pt", verbose=False
            )
        )

    def _padded(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, T), padded on the right."""
        width = max(map(len, sequences))
        ids = [[*sequence, *[self._pad_id] * (width - len(sequence))] for sequence in sequences]
        mask = [[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def _check_length(self, attention_mask: Tensor, rows: Sequence[Row]) -> None:
        lengths = attention_mask.sum(1)
        longest = int(lengths.argmax())
        if self._limit is not None and int(lengths[longest]) > self._limit:
            raise UserError(
                f"{FLAG} {self._path} reads at most {self._limit} tokens, but prompt and response of "
                f"{rows[longest].origin} have {int(lengths[longest])}. Lower --max-new-tokens, or leave long prompts "
                "out with --max-prompt-len."
            )


def load_reward_model(
    path: str, tokenizer: PreTrainedTokenizerBase, rm_template: bool, device: torch.device, dtype: torch.dtype
) -> RewardReader:
    """Opens a reward model.

    Args:
        path: folder or hub id.
        tokenizer: from `load_reward_tokenizer`.
        rm_template: use the chat template.
        device: where to compute.
        dtype: of the parameters.

    Raises:
        UserError: there is no such model, or it is none that gives one number.
    """
    classifier = load_classifier(path, FLAG, dtype).to(device).eval()
    return RewardReader(classifier, tokenizer, path, rm_template)
