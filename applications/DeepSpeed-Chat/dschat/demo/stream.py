# SPDX-License-Identifier: Apache-2.0
"""Answers that are shown while they grow, and their macro actions, cut as training with the same flags would.

Each model generates in a thread of its own, and transformers' `TextIteratorStreamer` passes on whole words. When an
answer is done, all of its ids are decoded at once, as everywhere else in this package, and cut into macro actions.
"""

import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response, decode_sampled
from dschat.demo.models import LoadedModel
from dschat.evaluation.macro_actions import MacroToken
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import token_texts
from dschat.rollouts.generate import CausalLM
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms
from dschat.rollouts.termination import TerminationCondition
from dschat.settings.macro_actions import TerminationFlags
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory

POLL_INTERVAL = 0.02  # seconds to wait for the next word of one answer before looking at the other
ENDED = "ended"
MARKER = "ended: it began the next turn"
LENGTH = "cut at its longest"
STOPPED = "stopped"


@dataclass(frozen=True)
class Draft:
    """An answer so far."""

    text: str  # without special tokens
    ids: tuple[int, ...] = ()  # ids of the finished answer, EOS included; empty before
    done: str | None = None  # why it ended; None before


@dataclass(frozen=True)
class ChatQuestion:
    """A prompt for one model."""

    model: LoadedModel  # nobody else may use it meanwhile
    prompt_ids: Sequence[int]  # P of them, not empty
    sampling: Sampling
    markers: Sequence[str]  # texts before which an answer ends


def stream(questions: Sequence[ChatQuestion], seed: int, stop: threading.Event) -> Generator[tuple[int, Draft]]:
    """Generates all answers at once, and yields each draft with the number of its question.

    The last draft of every answer is done. Closing the iterator ends the generation. The same seed gives the same
    answers, and the global random state is not used.

    Args:
        questions: one for each model.
        seed: seed of every answer.
        stop: ends the answers after the current token.

    Raises:
        UserError: a model's numbers are not finite, or memory does not suffice.
    """
    closed = threading.Event()
    answers = [GrowingAnswer(question, seed, (stop, closed)) for question in questions]
    growing = dict(enumerate(answers))
    try:
        while growing:
            for number, answer in list(growing.items()):
                draft = answer.next_draft()
                if draft is None:
                    continue
                if draft.done is not None:
                    del growing[number]
                yield number, draft
    finally:
        closed.set()
        for answer in answers:
            answer.thread.join()


class GrowingAnswer:
    """An answer that a thread generates."""

    def __init__(self, question: ChatQuestion, seed: int, stops: Sequence[threading.Event]) -> None:
        """Starts to generate.

        Args:
            question: the model and its prompt.
            seed: seed of the sampling.
            stops: events that end the answer after the current token.
        """
        self._question = question
        self._seed = seed
        self._stops = stops
        decoder = cast(PreTrainedTokenizerBase, _ResponseDecoder(question.model.tokenizer))
        self._streamer = TextIteratorStreamer(decoder, skip_prompt=True, timeout=POLL_INTERVAL)
        self._text = ""
        self._finished: Draft | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def next_draft(self) -> Draft | None:
        """The answer so far, or the whole answer; None if nothing new has come within POLL_INTERVAL."""
        try:
            words = next(self._streamer)
        except queue.Empty:
            return None if self.thread.is_alive() else self._result()
        except StopIteration:
            return self._result()
        if not words:  # the last token has not ended a word
            return None
        self._text += words
        text, _ = cut_at_marker(self._text, self._question.markers)
        return Draft(text[: len(text) - longest_marker_start(text, self._question.markers)])

    def _result(self) -> Draft:
        """The whole answer. Raises what ended the thread."""
        self.thread.join()
        if isinstance(self._error, torch.OutOfMemoryError):
            message = "the memory does not hold the conversation: clear it, or ask for fewer new tokens."
            raise UserError(message) from self._error
        if self._error is not None:
            raise self._error
        assert self._finished is not None
        return self._finished

    def _run(self) -> None:
        try:
            self._finished = self._generate()
        except BaseException as error:  # raised again by the reader
            self._error = error

    @torch.no_grad()
    def _generate(self) -> Draft:
        """Generates the whole answer, passing words to the streamer."""
        question = self._question
        sampling = question.sampling
        tokenizer = question.model.tokenizer
        causal_lm = cast(CausalLM, question.model.causal_lm)
        device = causal_lm.device
        prompt_length = len(question.prompt_ids)
        input_ids = torch.tensor([list(question.prompt_ids)], device=device)
        sequences = causal_lm.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # `_SampleToken` leaves one token to choose from
            eos_token_id=list(sampling.end_ids),
            pad_token_id=sampling.pad_id,
            logits_processor=LogitsProcessorList([_SampleToken(sampling, self._seed, prompt_length, device)]),
            stopping_criteria=StoppingCriteriaList([_StopAnswer(question, self._stops)]),
            streamer=self._streamer,
        )
        ids = sequences[0, prompt_length:].tolist()
        has_end = bool(ids) and ids[-1] in sampling.end_ids
        whole_text = decode_sampled(tokenizer, ids, has_end)
        text, has_marker = cut_at_marker(whole_text, question.markers)
        if has_marker:
            # Drop the marker's tokens.
            while ids and len(decode_response(tokenizer, ids[:-1])) >= len(text):
                ids.pop()
            return Draft(text, tuple(ids), MARKER)
        if has_end:
            return Draft(text, tuple(ids), ENDED)
        was_stopped = any(stop.is_set() for stop in self._stops) and len(ids) < sampling.max_new_tokens
        return Draft(text, tuple(ids), STOPPED if was_stopped else LENGTH)


def cut_at_marker(text: str, markers: Sequence[str]) -> tuple[str, bool]:
    """The text before the first marker, and whether there is one."""
    positions = []
    for marker in markers:
        if marker in text:
            positions.append(text.find(marker))
    if not positions:
        return text, False
    return text[: min(positions)], True


def longest_marker_start(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of a text that may turn out to be the start of a marker."""
    longest = 0
    for marker in markers:
        for size in range(1, len(marker)):
            if text.endswith(marker[:size]):
                longest = max(longest, size)
    return longest


class _ResponseDecoder:
    """Decodes for a streamer. A tokenizer's own `decode` drops spaces at the beginning of a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, ids)


class _SampleToken(LogitsProcessor):
    """Samples a token as in step 3 (see `TokenSampler`), and leaves it as the only one to choose."""

    def __init__(self, sampling: Sampling, seed: int, prompt_length: int, device: torch.device) -> None:
        self._sampling = sampling
        self._prompt_length = prompt_length
        self._token_sampler: TokenSampler | None = None
        self._uniform = uniforms(torch.tensor([seed]), sampling.max_new_tokens).to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._token_sampler is None:
            self._token_sampler = TokenSampler(self._sampling, scores.shape[1], scores.device)
        position = input_ids.shape[1] - self._prompt_length
        ids, logprobs = self._token_sampler(scores.clone(), self._uniform[:, position])
        if not bool(logprobs.isfinite().all()):
            raise UserError("the model's numbers are not finite: its weights are damaged, or need --dtype fp32.")
        return torch.full_like(scores, -torch.inf).scatter_(1, ids[:, None], 0.0)


class _StopAnswer(StoppingCriteria):
    """Ends an answer at a marker, or when one of the events is set."""

    def __init__(self, question: ChatQuestion, stops: Sequence[threading.Event]) -> None:
        self._question = question
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        ids = input_ids[0, len(self._question.prompt_ids) :].tolist()
        text = decode_response(self._question.model.tokenizer, ids)
        _, has_marker = cut_at_marker(text, self._question.markers)
        is_over = has_marker or any(stop.is_set() for stop in self._stops)
        return torch.full(input_ids.shape[:1], is_over, dtype=torch.bool, device=input_ids.device)


class MacroActionCutter:
    """Cuts a model's answers into macro actions."""

    def __init__(self, model: LoadedModel, flags: TerminationFlags, seed: int) -> None:
        """Loads what the condition needs.

        Args:
            model: whose answers are cut.
            flags: the condition, checked.
            seed: for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._model = model
        self._condition = TerminationCondition(flags, model.tokenizer, model.tokenizer.eos_token_id, seed)
        self._reads_logprobs = flags.reads_logprobs

    def __call__(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[MacroToken]:
        """The tokens of an answer, each with the number of its macro action.

        `ppl`, `surprise` and a user's function read the log-probs of the model that answers, not the reference's.

        Args:
            prompt_ids: P of them.
            answer_ids: R of them, possibly none.

        Raises:
            UserError: a user's function fails.
        """
        if not answer_ids:
            return []
        ids = torch.tensor([[*prompt_ids, *answer_ids]])
        mask = torch.ones(1, len(answer_ids), dtype=torch.bool)
        rollout = Rollout(
            input_ids=ids,
            attention_mask=torch.ones_like(ids).bool(),
            response_mask=mask,
            prompt_index=torch.zeros(1).long(),
            finished=torch.ones(1).bool(),
        )
        zeros = torch.zeros(mask.shape)
        logprobs = self._logprobs(rollout) if self._reads_logprobs else zeros
        trajectory = Trajectory(rollout, logprobs, logprobs, values=zeros, scores=torch.zeros(1))
        macro_actions = segment(self._condition(trajectory, 0).ends, mask)
        texts = token_texts(list(answer_ids), self._model.tokenizer)
        numbers = macro_actions.index[0].tolist()
        tokens: list[MacroToken] = []
        for text, number in zip(texts, numbers, strict=True):
            tokens.append(MacroToken(text, number))
        return tokens

    @torch.no_grad()
    def _logprobs(self, rollout: Rollout) -> Tensor:
        """The model's log-probs of the answer, shape (1, R), float32 on the CPU."""
        device = self._model.causal_lm.device
        policy = PolicyModel(self._model.causal_lm)
        response_length = rollout.response_mask.shape[1]
        input_ids = rollout.input_ids.to(device)
        attention_mask = rollout.attention_mask.to(device)
        outputs = policy(input_ids, attention_mask, response_length, 1.0)
        return outputs[0].float().cpu()
