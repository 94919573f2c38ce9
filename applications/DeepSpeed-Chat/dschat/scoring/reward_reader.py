# SPDX-License-Identifier: Apache-2.0
"""A reward model that reads texts: with its own tokenizer, of any architecture that has one label.

This is how texts and dialogues become the input of a reward model everywhere: in step 3 and online REFUEL
(`scoring/reward_model.py`), in the server (`scoring/serve.py`), in `inference` and in the demo. In step 3 a reward
model with the policy's tokenizer reads the ids that were sampled instead: `RewardModelScores`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.collate import pad
from dschat.data.dialogues import Dialogue
from dschat.data.encoding import encode_prompts, encode_responses, prompt_text, reply_contents
from dschat.data.rows import Row
from dschat.models.engines import ScalarForward
from dschat.models.layout import PassSize, group_by_length
from dschat.models.limits import position_limit
from dschat.models.load import load_classifier
from dschat.models.scalar import ScalarModel, last_scores
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.models.tokenizer import open_tokenizer
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.source import ResponseTexts


class ClassifierReader:
    """Reads sequences of ids in batches of similar length: a decoder at its last token, others as they are made to."""

    def __init__(
        self,
        classifier: nn.Module,
        pad_id: int | None,
        device: torch.device,
        batch_size: int | None = None,
        offload: bool = False,
        engine: ScalarForward | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Takes a model.

        Args:
            classifier: of transformers, with one label, on the device unless it is offloaded or an engine computes.
            pad_id: of its tokenizer, if that can pad; padding is masked, whatever it is.
            batch_size: sequences read together at most; all if not given.
            offload: keep the model in CPU memory between calls.
            engine: computes in its place, with every rank calling equally often, for as many sequences; of a decoder.
            max_tokens: of a forward pass, padding included; a longer sequence is read alone. Any if not given.
        """
        self.is_decoder = isinstance(getattr(classifier, "score", None), nn.Linear)
        self.limit = position_limit(classifier)  # tokens; None where there is no end
        self._classifier, self._pad_id, self._device = classifier, pad_id or 0, device
        self._batch_size, self._max_tokens, self._offload = batch_size, max_tokens, offload
        self._agree: Callable[[int], int] = int if engine is None else largest_over_ranks
        self._scalar = engine or (ScalarModel(classifier) if self.is_decoder else None)

    def numbers(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """One number for each of B sequences of at least one id: (B,) float32, on the CPU."""
        lengths = [len(ids) for ids in sequences]
        return self.numbers_of(lengths, lambda rows: self._padded([sequences[n] for n in rows]))

    @torch.no_grad()
    def numbers_of(self, lengths: Sequence[int], inputs_of: Callable[[list[int]], Mapping[str, Tensor]]) -> Tensor:
        """One number for each of B rows, the longest first: what does not fit into memory fails at once.

        Args:
            lengths: of the rows, in tokens.
            inputs_of: some of the row numbers → what a tokenizer makes of these rows, tensors (b, T).

        Returns:
            (B,) float32, on the CPU.
        """
        scores = torch.zeros(len(lengths))
        if self._offload:
            self._classifier.to(self._device)
        for rows in self._batches(lengths):
            inputs = {name: tensor.to(self._device) for name, tensor in inputs_of(rows).items()}
            scores[rows] = self._of_inputs(inputs).float().cpu()
        if self._offload:
            self._classifier.to("cpu")
        return scores

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row numbers of each forward pass, the longest first."""
        size = self._batch_size or max(1, len(lengths))
        if self._max_tokens is not None:
            groups = group_by_length(np.array(lengths), PassSize(size, self._max_tokens), self._agree)
            return [group[::-1].tolist() for group in reversed(groups)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        return [order[first : first + size] for first in range(0, len(order), size)]

    def _of_inputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self._scalar is not None:
            mask = inputs["attention_mask"].bool()
            return last_scores(self._scalar(inputs["input_ids"], mask), mask)
        logits: Tensor = self._classifier(**inputs).logits
        return logits[:, 0]

    def _padded(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, T), padded on the right."""
        ids, mask = pad(sequences, self._pad_id, "right")
        return {"input_ids": ids, "attention_mask": mask.long()}


TOO_LONG = "the dialogue is too long for the reward model"
REFUSED = "its chat template refuses the dialogue"
NOT_FINITE = "the reward is not finite"


@dataclass(frozen=True)
class ReaderFlags:
    """What a command line calls a reward model, the use of its chat template, and a way to shorter texts."""

    model: str = "--reward_model"
    template: str = "--rm_template"
    shorter: str = "Lower --max_new_tokens, or leave long prompts out with --max_prompt_len"


FLAGS = ReaderFlags()


def load_reward_tokenizer(path: str, rm_template: bool, flags: ReaderFlags = FLAGS) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of the reward model that a flag names, which need not be able to pad.

    Raises:
        UserError: there is none, or `rm_template` asks for a chat template that it does not have.
    """
    tokenizer: PreTrainedTokenizerBase = open_tokenizer(path, flags.model)
    if rm_template and tokenizer.chat_template is None:
        raise UserError(
            f"{flags.template}: the tokenizer of {flags.model} {path} has no chat template. Leave {flags.template} "
            "out: the reward model then reads prompt + response + EOS."
        )
    return tokenizer


def readable_rows(tokenizer: PreTrainedTokenizerBase, texts: ResponseTexts) -> list[Row]:
    """Rows that a tokenizer can read: one without a chat template gets conversations as the policy reads them."""
    if tokenizer.chat_template is not None:
        return texts.rows
    return [
        row if row.messages is None else replace(row, prompt=texts.prompts[n], messages=None)
        for n, row in enumerate(texts.rows)
    ]


def encode_dialogues(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Mapping[str, object]]],
    arguments: Sequence[Mapping[str, object]] | None = None,
) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    """Token ids of dialogues as the chat template writes them, and why it refuses others; both by their numbers.

    `arguments` are further variables of the template, of each dialogue.
    """
    texts: dict[int, str] = {}
    refused: dict[int, Exception] = {}
    for n, dialogue in enumerate(dialogues):
        try:
            texts[n] = apply_template(tokenizer, dialogue, False, None if arguments is None else arguments[n])
        except TemplateRefusal as error:
            refused[n] = error
    if not texts:
        return {}, refused
    ids = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
    return dict(zip(texts, ids, strict=True)), refused


class RewardReader:
    """Scores texts, in one of three forms.

    - with a chat template: a user's and an assistant's turn, and nothing beside what the template writes;
    - a decoder (it has a `score` layer): [BOS] + prompt + response + EOS, each part encoded alone;
    - any other classifier (BERT and its like): prompt and response as the tokenizer joins a pair of texts.
    """

    def __init__(
        self,
        classifier: ClassifierReader,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        rm_template: bool,
        flags: ReaderFlags = FLAGS,
    ) -> None:
        """Takes a model and its tokenizer.

        Args:
            tokenizer: from `load_reward_tokenizer`.
            path: of both, for messages.

        Raises:
            UserError: the response's end cannot be marked, since the tokenizer has no EOS.
        """
        self.tokenizer = tokenizer
        self._classifier, self._path, self._template = classifier, path, rm_template
        self._flags = flags
        if classifier.is_decoder and not rm_template and tokenizer.eos_token_id is None:
            raise UserError(
                f"{flags.model} {path}: its tokenizer has no eos token, which marks the end of a response. Set "
                f"`eos_token` in its tokenizer_config.json, or give {flags.template} if it was trained with a chat "
                "template."
            )

    def shorten(self, max_tokens: int) -> None:
        """Reads at most so many tokens of a text from now on, or fewer where the model can read no more."""
        limit = self._classifier.limit
        self._classifier.limit = max_tokens if limit is None else min(limit, max_tokens)

    def __call__(self, texts: ResponseTexts) -> Tensor:
        """One number for each of B responses that have come to their end, (B,) float32, on the CPU.

        Raises:
            UserError: a text is too long for the model, or its number is not finite; names the row.
        """
        scores, problems = self.read(texts)
        for problem in problems.values():
            raise UserError(problem)
        for row, number in zip(texts.rows, scores.tolist(), strict=True):
            if not math.isfinite(number):
                raise UserError(
                    f"{self._flags.model} {self._path}: the score of {row.origin} is {number}. Try --dtype fp32; if "
                    "that does not help, the weights are damaged."
                )
        return scores

    def read(self, texts: ResponseTexts, ended: Sequence[bool] | None = None) -> tuple[Tensor, dict[int, str]]:
        """One number for each of B responses, and what is wrong with some of them.

        Args:
            texts: a tokenizer without a chat template reads conversations as the prompts have them, which is how the
                policy reads them; others make their own text of a row.
            ended: whether a response has come to its end, so that EOS follows where that marks it; all if not given.

        Returns:
            (B,) float32, on the CPU; by row number, why a text is too long: its number is that of its beginning.

        Raises:
            UserError: the chat template refuses a row.
        """
        reader, limit, responses = self._classifier, self._classifier.limit, texts.responses
        rows = readable_rows(self.tokenizer, texts)
        if self._template or reader.is_decoder:
            ids = self._templated(rows, responses) if self._template else self._ids(rows, responses, ended)
            lengths = [len(sequence) for sequence in ids]
            scores = reader.numbers([sequence[:limit] for sequence in ids])
        else:
            prompts = [prompt_text(self.tokenizer, row) for row in rows]
            both = self.tokenizer(prompts, responses, verbose=False)["input_ids"]
            lengths = [len(sequence) for sequence in both]
            scores = reader.numbers_of(
                lengths, lambda chosen: self._joined([prompts[n] for n in chosen], [responses[n] for n in chosen])
            )
        long = {} if limit is None else {n: length for n, length in enumerate(lengths) if length > limit}
        return scores, {
            n: f"{self._flags.model} {self._path} reads at most {limit} tokens, but prompt and response of "
            f"{rows[n].origin} have {length}. {self._flags.shorter}."
            for n, length in long.items()
        }

    def score_dialogues(self, dialogues: Sequence[Dialogue], max_length: int) -> list[float | str]:
        """One number for each dialogue, or why there is none.

        It is too long, its number is not finite, or the chat template refuses it.

        Args:
            dialogues: each ends with a reply; they go through the chat template, which must be there.
            max_length: tokens that the model reads at most.
        """
        limit = self._classifier.limit
        most = max_length if limit is None else min(max_length, limit)
        sequences, refused = encode_dialogues(self.tokenizer, dialogues)
        scores: list[float | str] = [REFUSED if n in refused else TOO_LONG for n in range(len(dialogues))]
        fitting = [n for n, ids in sequences.items() if len(ids) <= most]
        numbers = self._classifier.numbers([sequences[n] for n in fitting]).tolist()
        for n, number in zip(fitting, numbers, strict=True):
            scores[n] = number if math.isfinite(number) else NOT_FINITE
        return scores

    def _ids(self, rows: Sequence[Row], responses: Sequence[str], ended: Sequence[bool] | None) -> list[list[int]]:
        prompts, answers = encode_prompts(self.tokenizer, rows), encode_responses(self.tokenizer, responses)
        ends = [[self.tokenizer.eos_token_id] if is_end else [] for is_end in ended or [True] * len(rows)]
        return [[*prompt, *answer, *end] for prompt, answer, end in zip(prompts, answers, ends, strict=True)]

    def _templated(self, rows: Sequence[Row], responses: Sequence[str]) -> list[list[int]]:
        states = [row.messages or [{"role": "user", "content": row.prompt or ""}] for row in rows]
        contents = reply_contents(self.tokenizer, responses)
        replies = [{"role": "assistant", "content": content} for content in contents]
        dialogues = [[*before, reply] for before, reply in zip(states, replies, strict=True)]
        ids, refused = encode_dialogues(self.tokenizer, dialogues, [row.template_arguments for row in rows])
        for n, error in refused.items():
            raise UserError(
                f"{self._flags.template}: the chat template of {self._flags.model} {self._path} refuses "
                f"{rows[n].origin}: {error}. Use a template that takes a user's and an assistant's turn, or leave "
                f"{self._flags.template} out."
            ) from error
        return list(ids.values())

    def _joined(self, prompts: list[str], responses: list[str]) -> Mapping[str, Tensor]:
        """A pair of texts each, cut where the model cannot read more."""
        limit = self._classifier.limit
        joined: Mapping[str, Tensor] = self.tokenizer(
            prompts, responses, padding=True, padding_side="right", return_tensors="pt", verbose=False,
            truncation=limit is not None, max_length=limit,
        )  # fmt: skip
        return joined


def load_reward_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    rm_template: bool,
    device: torch.device,
    dtype: torch.dtype,
    batch_size: int | None = None,
    flags: ReaderFlags = FLAGS,
    max_tokens: int | None = None,
) -> RewardReader:
    """Opens a reward model, whole.

    Args:
        path: folder or hub id; a folder may hold a LoRA adapter alone, which is merged into its base.
        tokenizer: from `load_reward_tokenizer`.
        rm_template: use the chat template.
        batch_size: texts read together at most; all if not given.
        max_tokens: see `ClassifierReader`.

    Raises:
        UserError: there is no such model, or it is none that gives one number.
    """
    classifier = load_classifier(path, flags.model, dtype, tokenizer).to(device).eval()
    reader = ClassifierReader(classifier, tokenizer.pad_token_id, device, batch_size, max_tokens=max_tokens)
    return RewardReader(reader, tokenizer, path, rm_template, flags)
