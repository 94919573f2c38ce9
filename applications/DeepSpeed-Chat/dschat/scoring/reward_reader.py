# SPDX-License-Identifier: Apache-2.0
"""A reward model that reads texts with its own tokenizer, of any architecture with one label.

Texts and dialogues become input of a reward model here and nowhere else: for step 3 (`scoring/reward_texts.py`),
REFUEL (`refuel/scores.py`), the server (`serve.py`), evaluation and the demo. In step 3, a reward model with the
policy's tokenizer reads the sampled ids instead, see `RewardModelScores`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.batches import pad
from dschat.data.encoding import encode_prompt_texts, encode_prompts, encode_responses, prompt_text
from dschat.data.rows import Row
from dschat.data.turn_end import MARK, reply_contents, response_texts
from dschat.models.classifiers import load_classifier
from dschat.models.engines import ScalarForward
from dschat.models.layout import PassSize, group_by_length
from dschat.models.limits import position_limit
from dschat.models.reward_notes import noted_end_id, noted_end_token
from dschat.models.scalar import ScalarModel, last_scores
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.reward_tokenizer import FLAGS, ReaderFlags
from dschat.scoring.source import ResponseTexts


class ClassifierReader:
    """Reads sequences of ids in batches of similar length: decoders at the last token, others by their own forward."""

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
            classifier: sequence classifier with one label, on the device unless it is offloaded or has an engine.
            pad_id: pad id of its tokenizer, if it has one; padding is masked, so any id will do.
            device: on which it computes.
            batch_size: maximum number of sequences in a forward pass; unlimited if not given.
            offload: keep the model in CPU memory between calls.
            engine: computes instead of the classifier, a decoder; every rank must then call equally often, for equally
                many sequences.
            max_tokens: maximum number of tokens in a forward pass, padding included; a longer sequence is read alone.
                Unlimited if not given.
        """
        self.is_decoder = isinstance(getattr(classifier, "score", None), nn.Linear)
        self.limit = position_limit(classifier)  # tokens; None without limit
        self.end_token = noted_end_token(getattr(classifier, "config", None))  # None if the model does not say
        self._classifier = classifier
        self._pad_id = pad_id or 0
        self._device = device
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._offload = offload
        self._agree: Callable[[int], int] = int if engine is None else largest_over_ranks
        self._scalar: ScalarForward | None = engine
        if engine is None and self.is_decoder:
            self._scalar = ScalarModel(classifier)

    def numbers(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """One number for each of B sequences with at least one id: (B,) float32, on the CPU."""

        def padded_inputs(rows: list[int]) -> dict[str, Tensor]:
            ids, mask = pad([sequences[row] for row in rows], self._pad_id, "right")
            return {"input_ids": ids, "attention_mask": mask.long()}

        return self.numbers_of([len(ids) for ids in sequences], padded_inputs)

    @torch.no_grad()
    def numbers_of(self, lengths: Sequence[int], inputs_of: Callable[[list[int]], Mapping[str, Tensor]]) -> Tensor:
        """One number for each of B rows, the longest first, so that a run out of memory fails at once.

        Args:
            lengths: lengths of the rows, in tokens.
            inputs_of: maps row numbers to a tokenizer's output for these rows, tensors (b, T).

        Returns:
            (B,) float32, on the CPU.
        """
        scores = torch.zeros(len(lengths))
        if self._offload:
            self._classifier.to(self._device)
        for rows in self._batches(lengths):
            inputs = {}
            for name, tensor in inputs_of(rows).items():
                inputs[name] = tensor.to(self._device)
            scores[rows] = self._forward(inputs).float().cpu()
        if self._offload:
            self._classifier.to("cpu")
        return scores

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row numbers of each forward pass, the longest first."""
        size = self._batch_size or max(1, len(lengths))
        if self._max_tokens is not None:
            groups = group_by_length(np.array(lengths), PassSize(size, self._max_tokens), self._agree)
            return [group[::-1].tolist() for group in reversed(groups)]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        return [order[first : first + size] for first in range(0, len(order), size)]

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self._scalar is not None:
            mask = inputs["attention_mask"].bool()
            return last_scores(self._scalar(inputs["input_ids"], mask), mask)
        logits: Tensor = self._classifier(**inputs).logits
        return logits[:, 0]


def readable_rows(tokenizer: PreTrainedTokenizerBase, texts: ResponseTexts) -> list[Row]:
    """Rows for a tokenizer: without a chat template, messages are replaced by the prompt as the policy reads it."""
    if tokenizer.chat_template is not None:
        return texts.rows
    rows: list[Row] = []
    for row, prompt in zip(texts.rows, texts.prompts, strict=True):
        rows.append(row if row.messages is None else replace(row, prompt=prompt, messages=None))
    return rows


def encode_dialogues(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Mapping[str, object]]],
    finished: Sequence[bool],
    arguments: Sequence[Mapping[str, object]] | None = None,
    end_id: int | None = None,
) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    """Renders dialogues with the chat template and encodes them.

    Args:
        tokenizer: with a chat template.
        dialogues: lists of messages; the last one is the assistant's.
        finished: whether the last message of each ended. The ids of one that was cut end with its content, without
            what the template writes after it.
        arguments: further variables of the template, for each dialogue.
        end_id: the token that ended a response when the model was trained by step 2. Dialogues are then encoded as
            there: they end with it. None = the template's whole text.

    Returns:
        Token ids by number of the dialogue; and the errors of dialogues that the template refuses, by number.
    """
    dialogues = list(map(_marked, dialogues, finished))
    if end_id is not None:
        return _encode_as_trained(tokenizer, dialogues, finished, arguments, end_id)
    texts: dict[int, str] = {}
    refused: dict[int, Exception] = {}
    for number, dialogue in enumerate(dialogues):
        dialogue_arguments = None if arguments is None else arguments[number]
        try:
            text = apply_template(tokenizer, dialogue, False, dialogue_arguments)
        except TemplateRefusal as error:
            refused[number] = error
            continue
        texts[number] = _up_to_mark(text, finished[number])
    if not texts:
        return {}, refused
    ids = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
    return dict(zip(texts, ids, strict=True)), refused


def _marked(dialogue: Sequence[Mapping[str, object]], finished: bool) -> Sequence[Mapping[str, object]]:
    """The dialogue, with a mark after the content of its last message if this was cut."""
    if finished:
        return dialogue
    *before, reply = dialogue
    return [*before, {**reply, "content": f"{reply.get('content') or ''}{MARK}"}]


def _up_to_mark(text: str, finished: bool) -> str:
    """The text up to the mark of a message that was cut."""
    return text if finished else text.rsplit(MARK, 1)[0]


def _encode_as_trained(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Mapping[str, object]]],
    finished: Sequence[bool],
    arguments: Sequence[Mapping[str, object]] | None,
    end_id: int,
) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    """`encode_dialogues` as step 2 encodes rows of messages: prompt, last message and end token, each alone."""
    rows: dict[int, Row] = {}
    prompts: list[str] = []
    refused: dict[int, Exception] = {}
    for number, dialogue in enumerate(dialogues):
        messages = [dict(message) for message in dialogue[:-1]]
        reply = str(dialogue[-1].get("content") or "")
        variables = {} if arguments is None else dict(arguments[number])
        try:
            prompt = apply_template(tokenizer, messages, True, variables)
            apply_template(tokenizer, dialogue, False, variables)
        except TemplateRefusal as error:
            refused[number] = error
            continue
        rows[number] = Row(None, messages, reply, None, {}, f"dialogue {number + 1}", template_arguments=variables)
        prompts.append(prompt)
    are_finished = [finished[number] for number in rows]
    replies = response_texts(tokenizer, list(rows.values()), "chosen", prompts)
    prompt_ids = encode_prompt_texts(tokenizer, prompts)
    reply_ids = encode_responses(tokenizer, list(map(_up_to_mark, replies, are_finished)))
    sequences: dict[int, list[int]] = {}
    for number, before, ids in zip(rows, prompt_ids, reply_ids, strict=True):
        end = [end_id] if finished[number] else []
        sequences[number] = [*before, *ids, *end]
    return sequences, refused


class RewardReader:
    """Scores texts in one of three forms.

    - With a chat template: a user's and an assistant's turn, exactly as the template renders them.
    - Decoders, which have a `score` layer: [BOS] + prompt + response + EOS, each part encoded alone.
    - Other classifiers, such as BERT: prompt and response joined by the tokenizer as a pair of texts.

    A reward model of step 2 was trained at the token that its config notes. In the first two forms its texts end with
    that token: in place of EOS, and without what the template writes after the turn.

    A response that was cut is read without its end in the first two forms: neither EOS nor what a template writes
    after a turn follows it.
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
            classifier: reads token ids.
            tokenizer: from `load_reward_tokenizer`.
            path: path of both, for messages.
            rm_template: render texts with the chat template.
            flags: names of flags, for messages.

        Raises:
            UserError: the response's end cannot be marked, since the tokenizer has no EOS.
        """
        self.tokenizer = tokenizer
        self.classifier = classifier
        self._uses_template = rm_template
        self._flags = flags
        self._name = f"{flags.model} {path}"
        self.trained_end_id: int | None = None
        if classifier.end_token is not None:
            self.trained_end_id = noted_end_id(classifier.end_token, tokenizer, self._name)
        has_end = self.trained_end_id is not None or tokenizer.eos_token_id is not None
        if classifier.is_decoder and not rm_template and not has_end:
            raise UserError(
                f"{self._name}: its tokenizer has no eos token, which marks the end of a response. Set "
                f"`eos_token` in its tokenizer_config.json, or give {flags.template} if it was trained with a chat "
                "template."
            )

    @property
    def form(self) -> str:
        """The form in which a prompt and a response are read, in words."""
        if self._uses_template:
            return "its chat template"
        if self.classifier.is_decoder:
            is_eos = self.trained_end_id in (None, self.tokenizer.eos_token_id)
            return "prompt + response + " + ("EOS" if is_eos else str(self.classifier.end_token))
        return "a pair of prompt and response"

    def shorten(self, max_tokens: int) -> None:
        """Reads at most `max_tokens` tokens of a text from now on, or fewer if the model's limit is lower."""
        model_limit = self.classifier.limit
        self.classifier.limit = max_tokens if model_limit is None else min(model_limit, max_tokens)

    def __call__(self, texts: ResponseTexts) -> Tensor:
        """One number for each of B responses, (B,) float32, on the CPU.

        Raises:
            UserError: a text is too long for the model, or its number is not finite; the message names the row.
        """
        scores, problems = self.read(texts)
        for problem in problems.values():
            raise UserError(problem)
        for row, number in zip(texts.rows, scores.tolist(), strict=True):
            if not math.isfinite(number):
                raise UserError(
                    f"{self._name}: the score of {row.origin} is {number}. Try --dtype fp32; if "
                    "that does not help, the weights are damaged."
                )
        return scores

    def read(self, texts: ResponseTexts) -> tuple[Tensor, dict[int, str]]:
        """One number for each of B responses, and messages about those that are too long.

        Args:
            texts: with a chat template, a tokenizer renders the rows' messages; without one, conversations are read as
                in the prompts, which is how the policy reads them.

        Returns:
            (B,) float32, on the CPU; and messages by row number. The number of a text that is too long is that of its
            beginning.

        Raises:
            UserError: the chat template refuses a row.
        """
        rows = readable_rows(self.tokenizer, texts)
        limit = self.classifier.limit
        if self._uses_template:
            sequences = self._encode_templated(rows, texts.responses, texts.finished)
        elif self.classifier.is_decoder:
            sequences = self._encode_parts(rows, texts.responses, texts.finished)
        else:
            return self._read_pairs(rows, texts.responses)
        scores = self.classifier.numbers([sequence[:limit] for sequence in sequences])
        return scores, self._too_long(rows, [len(sequence) for sequence in sequences])

    def _read_pairs(self, rows: Sequence[Row], responses: list[str]) -> tuple[Tensor, dict[int, str]]:
        """Reads prompts and responses as pairs of texts, see `read`."""
        limit = self.classifier.limit
        prompts = [prompt_text(self.tokenizer, row) for row in rows]
        sequences = self.tokenizer(prompts, responses, verbose=False)["input_ids"]
        lengths = [len(sequence) for sequence in sequences]

        def pair_inputs(numbers: list[int]) -> Mapping[str, Tensor]:
            inputs: Mapping[str, Tensor] = self.tokenizer(
                [prompts[number] for number in numbers],
                [responses[number] for number in numbers],
                padding=True,
                padding_side="right",
                return_tensors="pt",
                verbose=False,
                truncation=limit is not None,
                max_length=limit,
            )
            return inputs

        return self.classifier.numbers_of(lengths, pair_inputs), self._too_long(rows, lengths)

    def _too_long(self, rows: Sequence[Row], lengths: Sequence[int]) -> dict[int, str]:
        """Messages about texts with more tokens than the model reads, by row number."""
        limit = self.classifier.limit
        messages: dict[int, str] = {}
        for number, length in enumerate(lengths):
            if limit is not None and length > limit:
                messages[number] = (
                    f"{self._name} reads at most {limit} tokens, but prompt and response of {rows[number].origin} "
                    f"have {length}. {self._flags.shorter}."
                )
        return messages

    def _encode_parts(
        self, rows: Sequence[Row], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[list[int]]:
        """Encodes prompt and response alone, with the end token after finished responses."""
        end_id = self.tokenizer.eos_token_id if self.trained_end_id is None else self.trained_end_id
        prompt_ids = encode_prompts(self.tokenizer, rows)
        response_ids = encode_responses(self.tokenizer, responses)
        sequences: list[list[int]] = []
        for number, prompt in enumerate(prompt_ids):
            sequence = [*prompt, *response_ids[number]]
            if finished[number]:
                sequence.append(end_id)
            sequences.append(sequence)
        return sequences

    def _encode_templated(
        self, rows: Sequence[Row], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[list[int]]:
        """Encodes dialogues that the chat template has rendered."""
        dialogues: list[list[Mapping[str, object]]] = []
        for row, content in zip(rows, reply_contents(self.tokenizer, responses), strict=True):
            messages = row.messages or [{"role": "user", "content": row.prompt or ""}]
            dialogues.append([*messages, {"role": "assistant", "content": content}])
        arguments = [row.template_arguments for row in rows]
        ids, refused = encode_dialogues(self.tokenizer, dialogues, finished, arguments, self.trained_end_id)
        for number, error in refused.items():
            raise UserError(
                f"{self._flags.template}: the chat template of {self._name} refuses {rows[number].origin}: {error}. "
                f"Use a template that takes a user's and an assistant's turn, or leave {self._flags.template} out."
            ) from error
        return list(ids.values())


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
    """Opens a reward model on one device.

    Args:
        path: folder or hub id; a folder with a LoRA adapter alone opens as its base with the adapter merged.
        tokenizer: from `load_reward_tokenizer`.
        rm_template: render texts with the chat template.
        device: on which the model computes.
        dtype: dtype of its weights.
        batch_size: see `ClassifierReader`.
        flags: names of flags, for messages.
        max_tokens: see `ClassifierReader`.

    Raises:
        UserError: there is no such model, or it does not have one label.
    """
    classifier = load_classifier(path, flags.model, dtype, tokenizer).to(device)
    reader = ClassifierReader(classifier, tokenizer.pad_token_id, device, batch_size, max_tokens=max_tokens)
    return RewardReader(reader, tokenizer, path, rm_template, flags)
