# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request to an OpenAI-compatible server, which the official client sends and repeats."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import openai

from dschat.common.chat_servers import Endpoint, Reply, Unanswered
from dschat.errors import UserError

OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")


class FormRefused(Exception):
    """The server does not take the request in this form. `complaint`: all that it says."""

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


def complete(client: openai.OpenAI, endpoint: Endpoint, body: Mapping[str, Any]) -> Reply:
    """Sends one request, as often as it takes.

    Args:
        client: the official one.
        endpoint: that it asks.
        body: arguments of `chat.completions.create`.

    Raises:
        Unanswered: too many requests, a failure of the server or the connection, or no answer in time, to the last.
        FormRefused: the server refuses the request as it is.
        UserError: the key, the model or the address is wrong, or the account is empty.
    """
    try:
        raw = client.chat.completions.with_raw_response.create(**body)
    except openai.APIConnectionError as error:
        raise Unanswered(no_answer(error.__cause__ or error, endpoint)) from error
    except openai.APIStatusError as error:
        raise _meaning(error, endpoint) from error
    answer = raw.http_response.json()
    choice = answer["choices"][0]
    text, refusal = text_of(choice["message"]), choice["message"].get("refusal")
    said = (text, refusal or "", answer.get("model") or endpoint.model, _flaw(choice, text, endpoint))
    return Reply(*(endpoint.hide_key(str(text)) for text in said))


def text_of(message: Mapping[str, Any]) -> str:
    """The answer's text: a string, or a list of content parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def no_answer(error: BaseException, endpoint: Endpoint) -> str:
    """What went wrong where no answer came."""
    if isinstance(error, httpx2.TimeoutException):
        return f"{endpoint.base_url} gives no answer within {endpoint.timeout:g} s (--timeout)"
    return endpoint.hide_key(f"{endpoint.base_url} gives no answer: {error}")


def short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


def _flaw(choice: Mapping[str, Any], text: str, endpoint: Endpoint) -> str:
    """Why an answer may not be a whole one, and the remedy; empty where the server gives no sign of it."""
    end, message, flag = choice.get("finish_reason"), choice["message"], endpoint.flags.max_tokens
    if end == "length":
        return f"it was cut off after {flag} {endpoint.max_tokens}: give a larger number"
    if end == "content_filter":
        return "the server's content filter stopped it"
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        return f"the server sent the {endpoint.flags.role}'s reasoning alone (reasoning_content): give a larger {flag}"
    return ""


def _meaning(error: openai.APIStatusError, endpoint: Endpoint) -> Exception:
    """What an error status means for the run."""
    server, status, flags = endpoint.base_url, error.status_code, endpoint.flags
    # OpenAI's API has a message, FastAPI's servers have a detail.
    body = error.body if error.body else "no reason given"
    told = body.get("message") or body.get("detail") or body if isinstance(body, Mapping) else body
    complaint = endpoint.hide_key(told if isinstance(told, str) else json.dumps(told))
    answers = f"{server} answers {status}: {short(complaint)}"
    if status == 401:  # its message may hold a part of the key
        return UserError(f"{server} refuses the key (401): check {flags.key}.")
    if status == 402 or error.code in OUT_OF_MONEY:
        return UserError(f"the account is out of money: {answers}")
    if status == 403:
        return UserError(f"the key does not allow the use of {endpoint.model}: {answers}")
    if status == 404:
        hint = f"Check {flags.model} and {flags.url}, which usually ends in /v1."
        return UserError(f"there is no model {endpoint.model!r}, or nothing at that address: {answers} {hint}")
    if status in (400, 413, 422):
        return FormRefused(answers, complaint)
    if status in (408, 409, 429) or status >= 500:
        wait = error.response.headers.get("retry-after")
        return Unanswered(f"{answers} (Retry-After: {wait})" if wait else answers)
    return UserError(answers)
