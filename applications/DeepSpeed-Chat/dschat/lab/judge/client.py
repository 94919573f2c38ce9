# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge model: answered from the cache, or asked in a form that the server takes, and never twice.

The official client of OpenAI-compatible servers sends and repeats them; every try is counted here.
"""

import logging
import threading
from typing import Any

import httpx2
import openai

from dschat.base.errors import UserError
from dschat.base.journal import make_writable
from dschat.lab.judge.costs import Spending, estimated_tokens
from dschat.lab.judge.rubrics import Form, JudgeQuestion, JudgingStopped, TextRefused
from dschat.rollouts.chat_servers import (
    Endpoint,
    FormRefused,
    Reply,
    ReplyCache,
    Unanswered,
    complete,
    no_answer,
    open_client,
    short,
    text_of,
)

# What fails before a request is sent.
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)

logger = logging.getLogger(__name__)


class CountingHttpClient(openai.DefaultHttpxClient):
    """What carries the official client's requests. It sees every try, and so counts the cost of each."""

    def __init__(self, endpoint: Endpoint, spending: Spending, stop: threading.Event) -> None:
        super().__init__(trust_env=not endpoint.is_local)  # no proxy on the way to this machine
        self._endpoint, self._spending, self._stop = endpoint, spending, stop

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """One try. After an httpx2.RequestError (no answer came, or something else) the official client tries again.

        Raises Stopped where the run is being ended, UserError where the limit on the cost is reached.
        """
        size, longest = len(request.content), self._endpoint.max_tokens
        with self._spending.reserve(size, longest):  # no token is shorter than a byte
            if self._stop.is_set():
                raise JudgingStopped
            try:
                response = super().send(request, **options)
                if response.is_success:
                    self._spending.add(*_tokens_used(response, size, self._endpoint))
                elif response.status_code == 429 or response.is_server_error:
                    logger.info("%s answers %d", self._endpoint.base_url, response.status_code)
            except httpx2.RequestError as error:
                logger.info("%s", no_answer(error, self._endpoint))
                if not isinstance(error, NEVER_SENT):
                    self._spending.add(estimated_tokens(size), longest, lost=True)
                raise
        return response


def _tokens_used(response: httpx2.Response, size: int, endpoint: Endpoint) -> tuple[int, int]:
    """Tokens sent and answered as the server counts them, or by estimate.

    Raises httpx2.RemoteProtocolError where there is no answer: servers and proxies send other things as well.
    """
    try:
        answer = response.json()
        text = text_of(answer["choices"][0]["message"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        kind = response.headers.get("content-type", "of no content type")
        problem = f"its answer ({kind}) is no chat completion: {short(endpoint.hide_key(response.text))}"
        raise httpx2.RemoteProtocolError(problem, request=response.request) from error
    usage = answer.get("usage") or {}
    sent, answered = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (
        sent if isinstance(sent, int) else estimated_tokens(size),
        answered if isinstance(answered, int) else estimated_tokens(len(text)),
    )


class JudgeClient:
    """Asks a judge model from several threads at once."""

    def __init__(self, endpoint: Endpoint, cache: ReplyCache, spending: Spending, control: JudgeQuestion) -> None:
        """Opens the client; nothing is sent. Raises UserError where cache or address cannot be used.

        `control` is a harmless question. It is asked where one question fails before any other has been answered: is
        it that text, or the server?
        """
        make_writable(cache.folder, f"--cache {cache.folder}")
        self.stop = threading.Event()  # set once nothing more may be sent
        self.cached = 0  # answers that came from the cache
        self._endpoint, self._cache, self._spending, self._control = endpoint, cache, spending, control
        self._client = open_client(endpoint, CountingHttpClient(endpoint, spending, self.stop))
        self._form: Form | None = None  # in which the server has answered
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def ask(self, question: JudgeQuestion) -> Reply:
        """The answer to a question.

        Raises:
            Stopped, TextRefused, Unanswered: this question has no answer.
            UserError: no question gets one: key, model, address, limit or server; ends the run.
        """
        digest = question.digest(self._endpoint)
        known = self._cache.get(digest)
        if known is not None:
            with self._lock:
                self.cached += 1
            return known
        try:
            reply = self._answer(question)
            self._cache.put(digest, reply)
        except UserError:
            self.stop.set()
            raise
        return reply

    def _answer(self, question: JudgeQuestion) -> Reply:
        answers_before = self._spending.requests
        try:
            return self._in_a_form(question)
        except FormRefused as refusal:
            self._check_server(str(refusal), answers_before=0)
        except Unanswered as trouble:
            reason = f"no answer with --max_tries {self._endpoint.tries}: {trouble}"
            self._check_server(reason, answers_before)
            raise Unanswered(reason) from trouble
        return self._in_a_form(question)  # by now a form is known in which the server answers

    def _check_server(self, reason: str, answers_before: int) -> None:
        """Ends the run with a reason, unless other questions are being answered or the harmless one is."""
        with self._checking:
            if self._spending.requests > answers_before:
                return
            try:
                self._in_a_form(self._control, repeat=False)
            except (Unanswered, FormRefused, TextRefused) as error:
                raise UserError(reason) from error

    def _in_a_form(self, question: JudgeQuestion, repeat: bool = True) -> Reply:
        """Sends in the form that was answered before; before the first answer, in one after the other.

        A refusal is a TextRefused once a question was answered in the form, and a FormRefused after the last form.
        """
        client = self._client if repeat else self._client.with_options(max_retries=0)
        form = self._form or Form()
        while True:
            try:
                reply = complete(client, self._endpoint, form.body(self._endpoint, question))
            except FormRefused as refusal:
                known = self._form
                if known == form:
                    raise TextRefused(f"the server refuses the text: {refusal}") from refusal
                following = known or form.after(refusal.complaint)
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
            logger.warning("%s takes no temperature 0: its verdicts may vary from run to run", self._endpoint.model)
        if form.structure != Form.structure:
            logger.info("the server takes no %s; asking for %s", Form.structure, form.structure or "plain text")
