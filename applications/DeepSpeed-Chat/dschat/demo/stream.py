# SPDX-License-Identifier: Apache-2.0
"""Answers that grow before one's eyes, and their macro actions: where training with the same flags would cut them.

transformers' `generate` draws each in a thread of its own and is looked at after every token.

transformers' streamers decode piece by piece: they lose the spaces that a tokenizer puts between pieces, know no ids,
and hold words back. Here the whole answer is decoded after every token, as everywhere else in this package.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response
from dschat.demo.models import Opened
from dschat.lab.macro_actions import MacroToken
from dschat.models.policy import PolicyModel
from dschat.models.tokenizer import token_texts
from dschat.rollouts.generate import CausalLM
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms
from dschat.rollouts.termination import TerminationCondition
from dschat.settings.macro_actions import TerminationFlags
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory

UNFINISHED = "\ufffd"  # what a character looks like of which some bytes are to come
LONGEST_UNFINISHED = 3  # bytes of a character that wait for its last one
ENDED, MARKER, LENGTH, STOPPED = "ended", "ended: it began the next turn", "cut at its longest", "stopped"


@dataclass(frozen=True)
class Draft:
    """An answer, as far as it is there."""

    text: str  # without special tokens; never takes back what it said
    ids: tuple[int, ...] = ()  # its tokens, EOS included; empty before it is done
    done: str | None = None  # why it ended; None before that


@dataclass(frozen=True)
class ChatQuestion:
    """What one model answers."""

    model: Opened  # which answers; nobody else may use it meanwhile
    prompt_ids: Sequence[int]  # P of them, not none
    sampling: Sampling  # how to draw
    markers: Sequence[str]  # texts before which an answer ends


def stream(questions: Sequence[ChatQuestion], seed: int, stop: threading.Event) -> Generator[tuple[int, Draft]]:
    """All answers at once, token by token, each draft with its question's number; every answer's last draft is done.

    Closing the iterator ends the drawing. The same seed draws the same answers: draws do not touch the global random
    state.

    Args:
        questions: one for each model.
        seed: of the draws of every answer.
        stop: ends the answers after the token that is being computed.

    Raises:
        UserError: a model's numbers are not finite, or memory does not suffice.
    """
    drafts: queue.Queue[tuple[int, Draft | BaseException]] = queue.Queue()
    closed = threading.Event()

    def work(number: int) -> None:
        try:
            put: Callable[[Draft], None] = lambda draft: drafts.put((number, draft))  # noqa: E731
            put(_generate(questions[number], seed, (stop, closed), put))
        except BaseException as error:  # raised again where the answer is read
            drafts.put((number, error))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(questions))]
    for worker in workers:
        worker.start()
    left = len(workers)
    try:
        while left:
            number, item = drafts.get()
            if isinstance(item, torch.OutOfMemoryError):
                raise UserError(
                    "the memory does not hold the conversation: clear it, or ask for fewer new tokens."
                ) from item
            if isinstance(item, BaseException):
                raise item
            left -= item.done is not None
            yield number, item
    finally:
        closed.set()
        for worker in workers:
            worker.join()


def shown_text(text: str, markers: Sequence[str], ended: bool) -> tuple[str, bool]:
    """What an answer may show of its text, and whether a marker ends it.

    Before the end, what may turn out to be the beginning of a marker or of a character is held back.
    """
    places = [place for place in (text.find(marker) for marker in markers) if place >= 0]
    if places:
        return text[: min(places)], True
    if ended:
        return text, False
    text = text[: max(len(text.rstrip(UNFINISHED)), len(text) - LONGEST_UNFINISHED)]
    held = max((_overlap(text, marker) for marker in markers), default=0)
    return text[: len(text) - held], False


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that begin a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


@torch.no_grad()
def _generate(
    question: ChatQuestion, seed: int, stops: Sequence[threading.Event], put: Callable[[Draft], None]
) -> Draft:
    """Draws an answer, handing out drafts of it; the whole one."""
    model, sampling, markers = question.model, question.sampling, question.markers
    device, width = model.causal_lm.device, len(question.prompt_ids)
    input_ids = torch.tensor([list(question.prompt_ids)], device=device)
    watch = _Watch(question, stops, put)
    causal_lm = cast(CausalLM, model.causal_lm)  # whose own type is that of a module's attribute
    sequences = causal_lm.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,  # the draw below leaves one token to choose from
        eos_token_id=list(sampling.end_ids),
        pad_token_id=sampling.pad_id,
        logits_processor=LogitsProcessorList([_Draw(sampling, seed, width, device)]),
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    ids = sequences[0, width:].tolist()
    ended = bool(ids) and ids[-1] in sampling.end_ids
    text, marked = shown_text(decode_response(model.tokenizer, ids[:-1] if ended else ids), markers, ended=True)
    if marked:
        while ids and len(decode_response(model.tokenizer, ids[:-1])) >= len(text):
            ids.pop()
        return Draft(text, tuple(ids), MARKER)
    stopped = any(stop.is_set() for stop in stops) and len(ids) < sampling.max_new_tokens
    return Draft(text, tuple(ids), ENDED if ended else STOPPED if stopped else LENGTH)


class _Draw(LogitsProcessor):
    """Leaves the one token that is drawn, as step 3 draws it: see `TokenSampler`."""

    def __init__(self, sampling: Sampling, seed: int, width: int, device: torch.device) -> None:
        self._sampling, self._width = sampling, width
        self._token_sampler: TokenSampler | None = None
        self._uniform = uniforms(torch.tensor([seed]), sampling.max_new_tokens).to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._token_sampler is None:
            self._token_sampler = TokenSampler(self._sampling, scores.shape[1], scores.device)
        ids, logprobs = self._token_sampler(scores.clone(), self._uniform[:, input_ids.shape[1] - self._width])
        if not bool(logprobs.isfinite().all()):
            raise UserError("the model's numbers are not finite: its weights are damaged, or need --dtype fp32.")
        return torch.full_like(scores, -torch.inf).scatter_(1, ids[:, None], 0.0)


class _Watch(StoppingCriteria):
    """Hands out a draft after every token, and ends where it is told to or where a marker stands."""

    def __init__(self, question: ChatQuestion, stops: Sequence[threading.Event], put: Callable[[Draft], None]) -> None:
        self._question, self._stops, self._put = question, stops, put
        self._said = ""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        asked = self._question
        ids = input_ids[0, len(asked.prompt_ids) :].tolist()
        text, marked = shown_text(decode_response(asked.model.tokenizer, ids), asked.markers, ended=False)
        if text.startswith(self._said) and text != self._said:
            self._said = text
            self._put(Draft(text))
        over = marked or any(stop.is_set() for stop in self._stops)
        return torch.full(input_ids.shape[:1], over, dtype=torch.bool, device=input_ids.device)


class MacroActionsOf:
    """Cuts a model's answers."""

    def __init__(self, model: Opened, flags: TerminationFlags, seed: int) -> None:
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

        `ppl`, `surprise` and a user's function get the log-probs of the model that answers, not the reference's.

        Args:
            prompt_ids: P of them.
            answer_ids: R of them; none gives none.

        Raises:
            UserError: a user's function fails.
        """
        if not answer_ids:
            return []
        ids = torch.tensor([[*prompt_ids, *answer_ids]])
        mask = torch.ones(1, len(answer_ids), dtype=torch.bool)
        rollout = Rollout(ids, torch.ones_like(ids).bool(), mask, torch.zeros(1).long(), torch.ones(1).bool())
        logprobs = torch.zeros(mask.shape)
        if self._reads_logprobs:
            device = self._model.causal_lm.device
            with torch.no_grad():
                policy = PolicyModel(self._model.causal_lm)
                found = policy(ids.to(device), rollout.attention_mask.to(device), len(answer_ids), 1.0)
            logprobs = found[0].float().cpu()
        trajectory = Trajectory(rollout, logprobs, logprobs, torch.zeros(mask.shape), torch.zeros(1))
        numbers = segment(self._condition(trajectory, 0).ends, mask).index[0].tolist()
        texts = token_texts(list(answer_ids), self._model.tokenizer)
        return [MacroToken(text, number) for text, number in zip(texts, numbers, strict=True)]
