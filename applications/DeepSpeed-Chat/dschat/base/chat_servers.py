# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible chat servers: address and key, and requests with their errors and retries."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from dschat.base.errors import UserError
from dschat.base.progress import RepeatedLines
from dschat.base.reply_cache import Reply
from dschat.base.secrets import WRONG_KEY, checked_secret
from dschat.base.servers import is_local, open_client

if TYPE_CHECKING:
    import httpx2

OPENAI_URL = "https://api.openai.com/v1"
OPENAI_HOST = "api.openai.com"  # and its regions, such as eu.api.openai.com
OPENAI_KEY = "OPENAI_API_KEY"
DUMMY_KEY = "none"  # sent to a server on this machine if no key is given
SHORTEST_HIDDEN_KEY = 8  # characters; a shorter key may be a part of ordinary words
# Statuses of a gateway that gave up while, or after, the model answered. A server that answers with another error
# status has sent no answer, and does not charge for it.
GATEWAY_STATUSES = (504, 524)
OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
# Seconds before the second try; each further wait is twice as long, up to LONGEST_DELAY.
FIRST_DELAY = 0.5
LONGEST_DELAY = 8.0
LONGEST_RETRY_AFTER = 120.0  # a server that asks for a longer wait is not waited for
LONGEST_EXCERPT = 300  # characters of a server's message in one of ours

T = TypeVar("T")
logger = logging.getLogger(__name__)
retries = RepeatedLines(logger.info)


# -- endpoints


@dataclass(frozen=True)
class EndpointFlags:
    """Words for messages about an endpoint: names of the command's flags, and the role of its model."""

    url: str = "--base_url"
    model: str = "--judge_model"
    key: str = "JUDGE_API_KEY"  # environment variable
    max_tokens: str = "--max_tokens"
    timeout: str = "--timeout"
    tries: str = "--max_tries"
    cache: str = "--cache"
    role: str = "judge"


@dataclass(frozen=True)
class Endpoint:
    """A model on a server. The key is in no file and not in the representation; for messages see `hide_key`.

    Attributes:
        model: name of the model on the server.
        base_url: address of the server, up to and including /v1.
        max_tokens: maximum number of tokens of an answer.
        timeout: seconds to wait for an answer.
        tries: maximum number of times that a request is sent.
        key: API key of the server.
        flags: names of the flags in messages.
        key_source: variable or flag that the key comes from; empty for a dummy.
    """

    model: str
    base_url: str
    max_tokens: int
    timeout: float
    tries: int
    key: str = field(repr=False, default="")
    flags: EndpointFlags = EndpointFlags()
    key_source: str = ""

    def hide_key(self, text: str) -> str:
        """A text with [key] in place of the key, which servers may repeat in errors and answers.

        A key of fewer than SHORTEST_HIDDEN_KEY characters is not replaced: ordinary words may contain it.
        """
        return text.replace(self.key, "[key]") if len(self.key) >= SHORTEST_HIDDEN_KEY else text


def checked_address(url: str, flag: str) -> str:
    """An address without a slash at its end.

    Raises:
        UserError: the address has no scheme or host, or contains blanks, a password, a query or a fragment.
    """
    if "@" in url or "?" in url or "#" in url:
        raise UserError(
            f"{flag} holds a password, a query or a fragment; give the bare address, and the key apart. Azure's is "
            "https://RESOURCE.openai.azure.com/openai/v1, without api-version."
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"{flag}: {error}: give an address such as http://127.0.0.1:8000/v1.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or url.split() != [url]:
        raise UserError(f"{flag} {url}: an address such as http://127.0.0.1:8000/v1 is needed.")
    return parts.geturl().rstrip("/")


def with_key(endpoint: Endpoint, given: str | None = None) -> Endpoint:
    """The endpoint with the key for its server.

    The key given by flag comes first, then the variable of the server's role, such as JUDGE_API_KEY. OPENAI_API_KEY
    is for OpenAI's own servers alone, and never sent without encryption. A server on this machine gets a dummy.

    Args:
        endpoint: server and model.
        given: key of --sk.

    Raises:
        UserError: there is no key for this server, or it holds characters that no key has.
    """
    variable = endpoint.flags.key
    parts = urlsplit(endpoint.base_url)
    is_openai = parts.scheme == "https" and f".{parts.hostname}".endswith(f".{OPENAI_HOST}")
    keys = {"--sk": given, variable: os.environ.get(variable)}
    if is_openai:
        keys[OPENAI_KEY] = os.environ.get(OPENAI_KEY)
    for source, value in keys.items():
        key = checked_secret(source, value)
        if " " in key:  # a secret of one's own may hold one
            raise UserError(WRONG_KEY.format(source))
        if key:
            _warn_if_unencrypted(endpoint, source)
            return replace(endpoint, key=key, key_source=source)

    if is_local(endpoint.base_url):
        return replace(endpoint, key=DUMMY_KEY)
    remedy = f"set the environment variable {variable}"
    if is_openai:
        remedy += f" or {OPENAI_KEY}"
    else:
        remedy += f", to any word if the server wants none; {OPENAI_KEY} goes to https://{OPENAI_HOST} alone"
    raise UserError(f"no key for {endpoint.base_url}: {remedy}.")


def _warn_if_unencrypted(endpoint: Endpoint, source: str) -> None:
    """Warns of a server on another machine that is reached without encryption."""
    if endpoint.base_url.startswith("http://") and not is_local(endpoint.base_url):
        logger.warning(
            "%s is not encrypted: the key of %s and the texts can be read on the way. Use https, or an ssh tunnel:"
            " ssh -L 8000:localhost:PORT HOST, and %s http://localhost:8000/v1",
            endpoint.base_url,
            source,
            endpoint.flags.url,
        )


# -- requests


@dataclass(frozen=True)
class Completion:
    """A reply with the server's count of tokens; None if the server reports none."""

    reply: Reply
    tokens_sent: int | None
    tokens_answered: int | None


class Unanswered(Exception):
    """A request got no answer; another try may succeed.

    Attributes:
        may_be_charged: the model may have answered, although no answer came, and the server may charge for it.
        retry_after: seconds that the server asks to wait before the next try; None if it does not say.
    """

    def __init__(self, reason: str, may_be_charged: bool = False, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.may_be_charged = may_be_charged
        self.retry_after = retry_after


class RequestRejected(Exception):
    """The server rejects the content of a request (status 400, 413 or 422); another try would be rejected, too.

    Attributes:
        complaint: the server's complete message.
    """

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


def open_chat(endpoint: Endpoint) -> httpx2.Client:
    """A client for `complete`. Raises UserError if the address is invalid, or its proxy cannot be used."""
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    return open_client(endpoint.base_url, endpoint.flags.url, endpoint.timeout, headers)


def with_retries(send: Callable[[], T], endpoint: Endpoint, wait: Callable[[float], object] = time.sleep) -> T:
    """Calls `send` until it returns, at most as often as the endpoint says, and waits longer after each failure.

    Raises:
        Unanswered: the last try failed, or the server asks to wait longer than LONGEST_RETRY_AFTER seconds.
    """
    delay = FIRST_DELAY
    tries = endpoint.tries
    for attempt in range(1, tries + 1):
        try:
            return send()
        except Unanswered as error:
            retry_after = error.retry_after or 0.0
            if retry_after > LONGEST_RETRY_AFTER:
                problem = (
                    f"{error}: it asks for a pause of {retry_after:.0f} s, longer than the {LONGEST_RETRY_AFTER:.0f}"
                )
                raise Unanswered(f"{problem} s that are waited for; go on after it", error.may_be_charged) from error
            if attempt == tries:
                raise Unanswered(f"no answer with {endpoint.flags.tries} {tries}: {error}") from error
            retries.add(f"{error}. The request is repeated ({endpoint.flags.tries} {tries}).")
        # Jitter keeps parallel requests from coming back together. Our own pause is at most `delay`, which limits of
        # time rely on; a server may ask for a longer one, never for a shorter one.
        own_pause = delay * random.uniform(0.75, 1.0)
        asked_pause = retry_after * random.uniform(1.0, 1.25)
        wait(max(asked_pause, own_pause))
        delay = min(2 * delay, LONGEST_DELAY)
    raise ValueError(f"{endpoint.flags.tries} is {tries}: a request is sent at least once")


def complete(client: httpx2.Client, endpoint: Endpoint, body: Mapping[str, object]) -> Completion:
    """Sends one request once.

    Args:
        client: the client that `open_chat` returned for this endpoint.
        endpoint: the server and its model.
        body: JSON object of a request for chat completions.

    Raises:
        Unanswered: too many requests, a failure of the server or the connection, or no answer in time.
        RequestRejected: the server rejects the content of the request.
        UserError: the key, the model or the address is wrong, or the account is empty.
    """
    import httpx2

    try:
        response = client.post(f"{endpoint.base_url}/chat/completions", json=body)
    except httpx2.RequestError as error:
        raise _connection_error(error, endpoint) from error
    if not response.is_success:
        raise _status_error(response, endpoint)

    try:
        answer = response.json()
        choice = answer["choices"][0]
        message = choice["message"]
        text = without_surrogates(text_of(message))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        content_type = response.headers.get("content-type", "of no content type")
        content = short(endpoint.hide_key(response.text))
        problem = f"its answer ({content_type}) is not a chat completion: {content}"
        raise Unanswered(f"{endpoint.base_url} gives no answer: {problem}", may_be_charged=True) from error

    reply = Reply(
        text=endpoint.hide_key(text),
        refusal=endpoint.hide_key(without_surrogates(str(message.get("refusal") or ""))),
        model=endpoint.hide_key(without_surrogates(str(answer.get("model") or endpoint.model))),
        flaw=_flaw(choice, text, endpoint),
    )
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        usage = {}
    return Completion(reply, _count_or_none(usage, "prompt_tokens"), _count_or_none(usage, "completion_tokens"))


def text_of(message: Mapping[str, Any]) -> str:
    """The answer's text: its content is a string, a list of parts, or null."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            texts.append(str(part.get("text") or ""))
    return "".join(texts)


def without_surrogates(text: str) -> str:
    """A text with "?" instead of lone surrogates, which JSON may hold and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def short(text: str) -> str:
    """One line of at most LONGEST_EXCERPT characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_EXCERPT else line[: LONGEST_EXCERPT - 1] + "…"


def _count_or_none(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) else None


def _flaw(choice: Mapping[str, Any], text: str, endpoint: Endpoint) -> str:
    """Why an answer may be incomplete, and the remedy; empty if nothing suggests it."""
    finish_reason = choice.get("finish_reason")
    message = choice["message"]
    flag = endpoint.flags.max_tokens
    if finish_reason == "length":
        return f"it was cut off after {flag} {endpoint.max_tokens}: give a larger number"
    if finish_reason == "content_filter":
        return "the server's content filter stopped it"
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        return f"the server sent the {endpoint.flags.role}'s reasoning alone (reasoning_content): give a larger {flag}"
    return ""


def _connection_error(error: BaseException, endpoint: Endpoint) -> Unanswered:
    """The error to raise for a request without a response."""
    import httpx2

    never_sent = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
    may_be_charged = not isinstance(error, never_sent)
    if isinstance(error, httpx2.TimeoutException):
        reason = f"{endpoint.base_url} gives no answer within {endpoint.timeout:g} s ({endpoint.flags.timeout})"
        return Unanswered(reason, may_be_charged)
    return Unanswered(endpoint.hide_key(f"{endpoint.base_url} gives no answer: {error}"), may_be_charged)


def _status_error(response: httpx2.Response, endpoint: Endpoint) -> Exception:
    """The error to raise for a response with an error status."""
    try:
        content: object = response.json()
    except ValueError:
        content = response.text
    # OpenAI's API puts the reason under "error" and "message", servers written with FastAPI under "detail".
    if isinstance(content, Mapping):
        content = content.get("error") or content
    code = content.get("code") if isinstance(content, Mapping) else None
    if isinstance(content, Mapping):
        content = content.get("message") or content.get("detail") or content
    content = response.headers.get("location") or content or "no reason given"  # a redirect is not followed
    complaint = endpoint.hide_key(content if isinstance(content, str) else json.dumps(content))

    server = endpoint.base_url
    status = response.status_code
    flags = endpoint.flags
    answers = f"{server} answers {status}: {short(complaint)}"
    if status == 401:  # the server's message is left out: it may hold a part of the key
        remedy = f"check {endpoint.key_source}" if endpoint.key_source else f"it was sent a dummy; set {flags.key}"
        return UserError(f"{server} refuses the key (401): {remedy}.")
    if status == 402 or code in OUT_OF_MONEY:
        return UserError(f"the account is out of money: {answers}")
    if status == 403:
        return UserError(f"the key does not allow the use of {endpoint.model}: {answers}")
    if status == 404:
        hint = f"Check {flags.model} and {flags.url}, which usually ends in /v1."
        return UserError(f"there is no model {endpoint.model!r}, or nothing at that address. {hint} {answers}")
    if status in (400, 413, 422):
        return RequestRejected(answers, complaint)
    if status in (408, 409, 429) or status >= 500:
        text = response.headers.get("retry-after")
        reason = f"{answers} (Retry-After: {text})" if text else answers
        return Unanswered(reason, status in GATEWAY_STATUSES, _seconds(text))
    return UserError(answers)


def _seconds(retry_after: str | None) -> float | None:
    """The header Retry-After in seconds from now; None if there is none or it asks for no wait."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:  # a date, which these servers do not send
        return None
    return seconds if 0 < seconds < math.inf else None
