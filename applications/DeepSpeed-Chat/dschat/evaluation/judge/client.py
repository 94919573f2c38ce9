# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge model: answered from the cache, or asked, again where that helps, and never twice."""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from dschat.errors import UserError
from dschat.evaluation.judge.cache import ReplyCache
from dschat.evaluation.judge.costs import Spending, estimated_tokens, most_tokens
from dschat.evaluation.judge.forms import Form, other_form
from dschat.evaluation.judge.server import (
    Again,
    Endpoint,
    FormRefused,
    ItemRefused,
    Question,
    Reply,
    new_client,
    send,
)

if TYPE_CHECKING:
    from openai import OpenAI

logger = logging.getLogger(__name__)

LONGEST_BACK_OFF = 60.0  # seconds between two tries
LONGEST_RETRY_AFTER = 600.0  # seconds; a server that asks for more ends the run


class Stopped(Exception):
    """The run is being ended; nothing more is sent."""


class Unanswered(Exception):
    """All tries failed for one question, while the server answers others. The message says how."""


class JudgeClient:
    """Asks a judge model from several threads at once.

    Attributes:
        endpoint: whom to ask.
        cache: where answers are kept.
        spending: what the run has used.
        stop: set once nothing more may be sent.
        cached: answers that came from the cache.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cache: ReplyCache,
        spending: Spending,
        tries: int = 8,
        first_wait: float = 1.0,
        control: Question | None = None,
    ) -> None:
        """Opens the client; nothing is sent.

        Args:
            endpoint: whom to ask.
            cache: answers of earlier runs, and where new ones go.
            spending: counts, and holds the limit.
            tries: times that a request is sent until an answer comes.
            first_wait: seconds before the second try; doubled for every further one, up to a minute.
            control: a harmless question. Asked where one question fails before any other has been answered: is it
                that text, or the server? None: it is the server.

        Raises:
            UserError: the openai library is missing, or the cache cannot be written.
        """
        cache.prepare()
        self.endpoint, self.cache, self.spending = endpoint, cache, spending
        self.stop = threading.Event()
        self.cached = 0
        self._client: OpenAI = new_client(endpoint)
        self._tries, self._first_wait = tries, first_wait
        self._control = control
        self._checking = threading.Lock()
        self._form: Form | None = None  # in which the server has answered
        self._jitter = random.Random()
        self._lock = threading.Lock()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def ask(self, question: Question) -> Reply:
        """The answer to a question; two threads with the same question get one answer.

        Raises:
            Stopped: the run is being ended.
            ItemRefused: the server does not take this text.
            Unanswered: all tries failed for this text.
            UserError: the key, model or address is wrong, the limit is reached, or the server answers nothing; ends
                the run.
        """
        digest = question.digest(self.endpoint)
        with self._lock:
            turn = self._turns[digest]
        with turn:
            known = self._known(digest)
            if known is not None:
                return known
            try:
                reply = self._until_answered(question)
                self.cache.put(digest, asdict(reply))
            except UserError:
                self.stop.set()
                raise
            return reply

    def _known(self, digest: str) -> Reply | None:
        content = self.cache.get(digest)
        if content is None:
            return None
        try:
            reply = Reply(**content)
        except TypeError:
            return None
        with self._lock:
            self.cached += 1
        return reply

    def _until_answered(self, question: Question) -> Reply:
        """Tries until an answer comes; the last failure concerns this question alone if the server answers others."""
        answers = self.spending.requests
        for attempt in range(1, self._tries):
            try:
                return self._tried(question)
            except Again as trouble:
                self._pause(attempt, trouble)
        try:
            return self._tried(question)
        except Again as trouble:
            reason = f"no answer after {max(1, self._tries)} tries: {trouble}."
            self._check_server(reason, answers)
            raise Unanswered(reason) from trouble

    def _tried(self, question: Question) -> Reply:
        """One try. A first question that is refused in every form is asked once more if the server takes another."""
        try:
            return self._sent(question)
        except FormRefused as refusal:
            self._check_server(str(refusal), 0)
        return self._sent(question)

    def _check_server(self, reason: str, answers: int) -> None:
        """Ends the run with a reason unless the server answers other questions.

        Args:
            reason: what went wrong with one question.
            answers: how many there were before it; if there are more now, the server need not be asked.
        """
        with self._checking:
            if self.spending.requests > answers:
                return
            if self._control is None:
                raise UserError(reason)
            try:
                self._sent(self._control)
            except (Again, FormRefused, ItemRefused) as error:
                raise UserError(reason) from error

    def _sent(self, question: Question) -> Reply:
        """Sends a question within the limit and counts what it costs."""
        texts, longest = question.texts(), self.endpoint.max_tokens
        with self.spending.reserved(most_tokens(*texts), longest):
            if self.stop.is_set():
                raise Stopped
            try:
                reply = self._in_a_form(question)
            except Again as trouble:
                if trouble.charged:
                    self.spending.add_lost(estimated_tokens(*texts), longest)
                raise
            self.spending.add(reply.input_tokens, reply.output_tokens)
            return reply

    def _pause(self, attempt: int, trouble: Again) -> None:
        """Waits as long as the server asks for, else longer with every attempt; at once over when the run ends."""
        wait = trouble.wait
        if wait is None:
            wait = min(LONGEST_BACK_OFF, self._first_wait * 2 ** min(attempt - 1, 30)) * self._jitter.uniform(0.5, 1.0)
        elif wait > LONGEST_RETRY_AFTER:
            raise UserError(f"{trouble}; it asks to wait {wait:.0f} s. Go on later.") from trouble
        logger.info("%s; try %d of %d in %.1f s", trouble, attempt + 1, self._tries, wait)
        if self.stop.wait(wait):
            raise Stopped

    def _in_a_form(self, question: Question) -> Reply:
        """Sends in the form that was answered before; before the first answer, in one after the other.

        Raises:
            ItemRefused: another question was answered in this form.
            FormRefused: nothing was answered yet, and no form is left.
        """
        form = self._form or Form()
        while True:
            try:
                reply = send(self._client, self.endpoint, question, form)
            except FormRefused as refusal:
                known = self._form
                if known == form:
                    raise ItemRefused(f"the server refuses the text: {refusal}") from refusal
                following = known or other_form(form, refusal.complaint)
                if following is None:
                    raise
                form = following
            else:
                self._keep(form)
                return reply

    def _keep(self, form: Form) -> None:
        """The first form that is answered is that of the run."""
        with self._lock:
            if self._form is not None:
                return
            self._form = form
        if not form.temperature:
            logger.warning("%s takes no temperature 0: its verdicts may vary from run to run", self.endpoint.model)
        if form.structure != Form().structure:
            logger.info("the server takes no %s; asking for %s", Form().structure, form.structure or "plain text")


Ask = Callable[[Question], Reply]
