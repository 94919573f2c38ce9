# SPDX-License-Identifier: Apache-2.0
"""One request to an OpenAI-compatible server, and what its failures mean: try again, ask otherwise, or stop."""

from __future__ import annotations

import email.utils
import hashlib
import ipaddress
import json
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dschat.errors import UserError
from dschat.evaluation.judge.costs import estimated_tokens

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

    from dschat.evaluation.judge.forms import Form

ITEM_REFUSED = re.compile(
    r"context.?(length|window|size)|maximum context|too (long|many tokens)|string_above_max_length|"
    r"inputs?\b.*max_new_tokens|content.?(filter|policy|management)|usage.?polic|invalid_prompt|moderation|flagged",
    re.IGNORECASE | re.DOTALL,
)
NEVER_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")  # of httpx
OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")


class Again(Exception):
    """The request may succeed later.

    Attributes:
        wait: seconds that the server asks for; None if it says nothing.
        charged: the server may have answered, and charges for it.
    """

    def __init__(self, reason: str, wait: float | None = None, charged: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.charged = wait, charged


class FormRefused(Exception):
    """The server does not take the request in this form. `complaint`: all that it says."""

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


class ItemRefused(Exception):
    """The server answers, but does not take this text. The message says why."""


@dataclass(frozen=True)
class Endpoint:
    """Whom to ask.

    Attributes:
        model: name of the judge model.
        base_url: address of the server, up to /v1.
        max_tokens: the longest answer.
        timeout: seconds to wait for an answer.
        key: for the server; in no file, message or representation.
    """

    model: str
    base_url: str
    max_tokens: int
    timeout: float
    key: str = field(repr=False, default="")

    def hide_key(self, text: str) -> str:
        """A text without the key."""
        return text.replace(self.key, "[key]") if len(self.key) >= 8 else text


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        messages: of the chat.
        schema: JSON schema of the answer.
    """

    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any]

    def texts(self) -> list[str]:
        """Everything that is sent and counts as tokens."""
        return [*(message["content"] for message in self.messages), json.dumps(self.schema)]

    def digest(self, endpoint: Endpoint) -> str:
        """Names the question together with model, server and the length allowed; the key is no part of it."""
        whole = {
            "model": endpoint.model,
            "server": endpoint.base_url,
            "max_tokens": endpoint.max_tokens,
            "temperature": 0,
            "messages": [dict(message) for message in self.messages],
            "schema": self.schema,
        }
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Reply:
    """What the judge answered.

    Attributes:
        text: the answer.
        refusal: the judge's words if it refused formally, else empty.
        model: the model as the server names it.
        input_tokens: counted by the server; estimated where it counts none.
        output_tokens: the same of the answer.
    """

    text: str
    refusal: str
    model: str
    input_tokens: int
    output_tokens: int


def on_this_machine(server: str) -> bool:
    """Whether an address is a loopback one."""
    host = urllib.parse.urlsplit(server).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_client(endpoint: Endpoint) -> OpenAI:
    """The official client, without retries of its own.

    Raises:
        UserError: the library is missing or does not take the address.
    """
    try:
        import openai
    except ImportError as error:
        raise UserError("The judge needs the openai library: pip install openai.") from error
    options: dict[str, Any] = {"timeout": endpoint.timeout, "max_retries": 0}
    if on_this_machine(endpoint.base_url):  # no proxy on the way to it
        options["http_client"] = openai.DefaultHttpxClient(timeout=endpoint.timeout, trust_env=False)
    try:
        return openai.OpenAI(api_key=endpoint.key, base_url=endpoint.base_url, **options)
    except (openai.OpenAIError, ValueError) as error:
        raise UserError(f"--base-url {endpoint.base_url}: {endpoint.hide_key(str(error))}") from error


def send(client: OpenAI, endpoint: Endpoint, question: Question, form: Form) -> Reply:
    """Sends one request.

    Raises:
        Again: too many requests, a failure of the server or the connection, no answer in time, or broken JSON.
        FormRefused: the server refuses the request as it is.
        ItemRefused: the server refuses the text.
        UserError: the key, the model or the address is wrong, or the account is empty.
    """
    import openai

    try:
        answer: Any = client.chat.completions.create(**form.arguments(endpoint, question))
    except openai.APITimeoutError as error:
        raise Again(f"no answer within {endpoint.timeout:g} s (--timeout)", charged=_was_sent(error)) from error
    except openai.APIConnectionError as error:
        reason = endpoint.hide_key(str(error.__cause__ or error))
        raise Again(f"no connection to {endpoint.base_url}: {reason}", charged=_was_sent(error)) from error
    except openai.APIStatusError as error:
        raise _meaning(error, endpoint) from error
    except (openai.OpenAIError, ValueError) as error:
        raise Again("the server's answer is no valid JSON", charged=True) from error
    return _reply(answer, endpoint, question)


def _was_sent(error: Exception) -> bool:
    """Whether a request may have reached the server before the connection failed."""
    return type(error.__cause__).__name__ not in NEVER_SENT


def _reply(answer: Any, endpoint: Endpoint, question: Question) -> Reply:
    choices = getattr(answer, "choices", None)
    message = getattr(choices[0], "message", None) if choices else None
    if message is None:
        problem = getattr(answer, "error", None) or "it has no choices"
        shown = _short(endpoint.hide_key(str(problem)))
        raise Again(f"the answer of {endpoint.base_url} is no chat completion: {shown}", charged=True)
    text = endpoint.hide_key(message.content if isinstance(message.content, str) else "")
    refusal = endpoint.hide_key(str(getattr(message, "refusal", None) or ""))
    usage = getattr(answer, "usage", None)
    sent, answered = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
    return Reply(
        text=text,
        refusal=refusal,
        model=endpoint.hide_key(str(getattr(answer, "model", None) or endpoint.model)),
        input_tokens=sent if isinstance(sent, int) else estimated_tokens(*question.texts()),
        output_tokens=answered if isinstance(answered, int) else estimated_tokens(text),
    )


def _meaning(error: APIStatusError, endpoint: Endpoint) -> Exception:
    """What an error status means for the run."""
    status, code = error.status_code, str(getattr(error, "code", None) or "")
    complaint = endpoint.hide_key(_complaint(error.body))
    words = _short(complaint)
    if status == 401:  # its message may hold a part of the key
        return UserError(f"{endpoint.base_url} refuses the key (401): check OPENAI_API_KEY or --sk.")
    if status == 403:
        return UserError(f"{endpoint.base_url} forbids the use of {endpoint.model} with this key (403): {words}")
    if status == 404:
        return UserError(
            f"{endpoint.base_url} has no model {endpoint.model!r}, or nothing is at that address (404): {words} Check "
            "--judge-model and --base-url, which usually ends in /v1."
        )
    if status == 402 or code in OUT_OF_MONEY:
        return UserError(f"the account at {endpoint.base_url} is out of money ({status}): {words}")
    if status in (408, 409, 429) or status >= 500:
        return Again(f"{endpoint.base_url} answers {status}: {words}", _retry_after(error.response.headers))
    if ITEM_REFUSED.search(f"{code} {complaint}"):
        return ItemRefused(f"the server refuses the text ({status}): {words}")
    if status in (400, 413, 422):
        return FormRefused(f"{endpoint.base_url} refuses the request ({status}): {words}", complaint)
    return UserError(f"{endpoint.base_url} answers {status}: {words}")


def _complaint(body: Any) -> str:
    """What the body of an error says, in the words of OpenAI's API, of FastAPI's servers or of any other."""
    if not isinstance(body, Mapping):
        return str(body or "no reason given")
    told = body.get("message") or body.get("detail") or body
    return told if isinstance(told, str) else json.dumps(told)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: Retry-After in seconds or as a date, or retry-after-ms."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers.get(name, "")) / unit)
        except ValueError:
            continue
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else None


def _short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
