# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible server: the official client sends and repeats them, here every try is counted."""

import logging
import threading
from typing import Any

import httpx2
import openai

from dschat.common.chat_servers import Endpoint, Reply, complete, no_answer, short, text_of
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Spending, estimated_tokens
from dschat.evaluation.judge.question import Form, Question, Stopped

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
                raise Stopped
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


def new_client(endpoint: Endpoint, spending: Spending, stop: threading.Event) -> openai.OpenAI:
    """The official client over a `CountingHttpClient`; raises UserError where it does not take the address."""
    logging.getLogger("openai").setLevel(logging.INFO)  # it says when it tries again
    try:
        return openai.OpenAI(
            api_key=endpoint.key,
            base_url=endpoint.base_url,
            timeout=endpoint.timeout,
            max_retries=endpoint.tries - 1,
            http_client=CountingHttpClient(endpoint, spending, stop),
        )
    except (openai.OpenAIError, httpx2.InvalidURL, ValueError) as error:
        raise UserError(f"--base-url {endpoint.base_url}: {endpoint.hide_key(str(error))}") from error


def send(client: openai.OpenAI, endpoint: Endpoint, question: Question, form: Form) -> Reply:
    """Sends one question, as often as it takes; raises what `complete` does, and UserError at the limit."""
    return complete(client, endpoint, form.body(endpoint, question))


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
