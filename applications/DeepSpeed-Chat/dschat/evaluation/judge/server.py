# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible server: the official client sends and repeats them, here every try is counted."""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import httpx2
import openai

from dschat.errors import UserError
from dschat.evaluation.judge.costs import Spending, estimated_tokens
from dschat.evaluation.judge.question import Endpoint, Form, Question, Reply, Stopped, Unanswered

# What fails before a request is sent.
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")

logger = logging.getLogger(__name__)


class FormRefused(Exception):
    """The server does not take the request in this form. `complaint`: all that it says."""

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


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
                logger.info("%s", _no_answer(error, self._endpoint))
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
    """Sends one question, as often as it takes.

    Raises:
        Unanswered: too many requests, a failure of the server or the connection, or no answer in time, to the last.
        FormRefused: the server refuses the request as it is.
        UserError: the key, the model or the address is wrong, the account is empty, or the limit is reached.
    """
    try:
        raw = client.chat.completions.with_raw_response.create(**form.body(endpoint, question))
    except openai.APIConnectionError as error:
        raise Unanswered(_no_answer(error.__cause__ or error, endpoint)) from error
    except openai.APIStatusError as error:
        raise _meaning(error, endpoint) from error
    answer = raw.http_response.json()
    choice = answer["choices"][0]
    text, refusal = _text_of(choice["message"]), choice["message"].get("refusal")
    said = (text, refusal or "", answer.get("model") or endpoint.model, _flaw(choice, text, endpoint.max_tokens))
    return Reply(*(endpoint.hide_key(str(text)) for text in said))


def _text_of(message: Mapping[str, Any]) -> str:
    """The answer's text: a string, or a list of content parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def _flaw(choice: Mapping[str, Any], text: str, max_tokens: int) -> str:
    """Why an answer may not be a whole one, and the remedy; empty where the server gives no sign of it."""
    end, message = choice.get("finish_reason"), choice["message"]
    if end == "length":
        return f"it was cut off after --max-tokens {max_tokens}: give a larger number"
    if end == "content_filter":
        return "the server's content filter stopped it"
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        return "the server sent the judge's reasoning alone (reasoning_content): give a larger --max-tokens"
    return ""


def _tokens_used(response: httpx2.Response, size: int, endpoint: Endpoint) -> tuple[int, int]:
    """Tokens sent and answered as the server counts them, or by estimate.

    Raises httpx2.RemoteProtocolError where there is no answer: servers and proxies send other things as well.
    """
    try:
        answer = response.json()
        text = _text_of(answer["choices"][0]["message"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        kind = response.headers.get("content-type", "of no content type")
        problem = f"its answer ({kind}) is no chat completion: {_short(endpoint.hide_key(response.text))}"
        raise httpx2.RemoteProtocolError(problem, request=response.request) from error
    usage = answer.get("usage") or {}
    sent, answered = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (
        sent if isinstance(sent, int) else estimated_tokens(size),
        answered if isinstance(answered, int) else estimated_tokens(len(text)),
    )


def _no_answer(error: BaseException, endpoint: Endpoint) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return f"{endpoint.base_url} gives no answer within {endpoint.timeout:g} s (--timeout)"
    return endpoint.hide_key(f"{endpoint.base_url} gives no answer: {error}")


def _meaning(error: openai.APIStatusError, endpoint: Endpoint) -> Exception:
    """What an error status means for the run."""
    server, status = endpoint.base_url, error.status_code
    # OpenAI's API has a message, FastAPI's servers have a detail.
    body = error.body if error.body else "no reason given"
    told = body.get("message") or body.get("detail") or body if isinstance(body, Mapping) else body
    complaint = endpoint.hide_key(told if isinstance(told, str) else json.dumps(told))
    answers = f"{server} answers {status}: {_short(complaint)}"
    if status == 401:  # its message may hold a part of the key
        return UserError(f"{server} refuses the key (401): check OPENAI_API_KEY or --sk.")
    if status == 402 or error.code in OUT_OF_MONEY:
        return UserError(f"the account is out of money: {answers}")
    if status == 403:
        return UserError(f"the key does not allow the use of {endpoint.model}: {answers}")
    if status == 404:
        hint = "Check --judge-model and --base-url, which usually ends in /v1."
        return UserError(f"there is no model {endpoint.model!r}, or nothing at that address: {answers} {hint}")
    if status in (400, 413, 422):
        return FormRefused(answers, complaint)
    if status in (408, 409, 429) or status >= 500:
        wait = error.response.headers.get("retry-after")
        return Unanswered(f"{answers} (Retry-After: {wait})" if wait else answers)
    return UserError(answers)


def _short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
