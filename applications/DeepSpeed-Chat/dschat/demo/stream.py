# SPDX-License-Identifier: Apache-2.0
"""Answers that grow before one's eyes: transformers' `generate` in a thread of its own, looked at after every token.

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

from dschat.data.encoding import decode_response
from dschat.demo.models import Opened
from dschat.errors import UserError
from dschat.rollouts.generate import CausalLM
from dschat.rollouts.sampling import Sampling, TokenSampler, uniforms

UNFINISHED = "\ufffd"  # what a character looks like of which some bytes are to come
LONGEST_UNFINISHED = 3  # bytes of a character that wait for its last one
ENDED, MARKER, LENGTH, STOPPED = "ended", "ended: it began the next turn", "cut at its longest", "stopped"


@dataclass(frozen=True)
class Draft:
    """An answer, as far as it is there.

    Attributes:
        text: without special tokens; never takes back what it said.
        ids: its tokens, EOS included; empty before it is done.
        done: why it ended; None before that.
    """

    text: str
    ids: tuple[int, ...] = ()
    done: str | None = None


def stream(
    model: Opened,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    markers: Sequence[str],
    stop: threading.Event,
) -> Generator[Draft]:
    """One answer, token by token; the last draft is done. Closing the iterator ends the drawing.

    The same seed draws the same answer: draws do not touch the global random state, so that two models may answer at
    once.

    Args:
        model: which answers; nobody else may use it meanwhile.
        prompt_ids: P of them, not none.
        sampling: how to draw.
        seed: of the draws.
        markers: texts before which an answer ends.
        stop: ends the answer after the token that is being computed.

    Raises:
        UserError: the model's numbers are not finite, or memory does not suffice.
    """
    drafts: queue.Queue[Draft | BaseException] = queue.Queue()
    closed = threading.Event()

    def work() -> None:
        try:
            drafts.put(_generate(model, prompt_ids, sampling, seed, markers, (stop, closed), drafts.put))
        except BaseException as error:  # raised again where the answer is read
            drafts.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while True:
            item = drafts.get()
            if isinstance(item, torch.OutOfMemoryError):
                raise UserError(
                    "the memory does not hold the conversation: clear it, or ask for fewer new tokens."
                ) from item
            if isinstance(item, BaseException):
                raise item
            yield item
            if item.done is not None:
                return
    finally:
        closed.set()
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
    model: Opened,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    markers: Sequence[str],
    stops: Sequence[threading.Event],
    put: Callable[[Draft], None],
) -> Draft:
    """Draws an answer, handing out drafts of it; the whole one."""
    device, width = model.causal_lm.device, len(prompt_ids)
    input_ids = torch.tensor([list(prompt_ids)], device=device)
    watch = _Watch(model, width, markers, stops, put)
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

    def __init__(
        self,
        model: Opened,
        width: int,
        markers: Sequence[str],
        stops: Sequence[threading.Event],
        put: Callable[[Draft], None],
    ) -> None:
        self._model, self._width, self._markers, self._stops, self._put = model, width, markers, stops, put
        self._said = ""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        ids = input_ids[0, self._width :].tolist()
        text, marked = shown_text(decode_response(self._model.tokenizer, ids), self._markers, ended=False)
        if text.startswith(self._said) and text != self._said:
            self._said = text
            self._put(Draft(text))
        over = marked or any(stop.is_set() for stop in self._stops)
        return torch.full(input_ids.shape[:1], over, dtype=torch.bool, device=input_ids.device)
