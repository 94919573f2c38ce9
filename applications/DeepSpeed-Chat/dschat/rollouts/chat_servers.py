# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible chat servers: address and key, requests with their errors and retries, a cache of answers."""

from __future__ import annotations

import json
import logging
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows, write_rows_once

if TYPE_CHECKING:
    import openai

OPENAI_URL = "https://api.openai.com/v1"
OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
# Seconds before the second try; each further wait is twice as long, up to LONGEST_DELAY.
FIRST_DELAY = 0.5
LONGEST_DELAY = 8.0
LONGEST_RETRY_AFTER = 120.0  # a server that asks for a longer wait is not waited for

T = TypeVar("T")
logger = logging.getLogger(__name__)


# -- endpoints


@dataclass(frozen=True)
class EndpointFlags:
    """Names of a command's flags for an endpoint, and what its model is called in messages."""

    url: str = "--base_url"
    model: str = "--judge_model"
    key: str = "OPENAI_API_KEY or --sk"
    max_tokens: str = "--max_tokens"
    timeout: str = "--timeout"
    tries: str = "--max_tries"
    cache: str = "--cache"
    role: str = "judge"


@dataclass(frozen=True)
class Endpoint:
    """A model on a server. The key is in no file, message or representation.

    Attributes:
        model: name of the model on the server.
        base_url: address of the server, up to and including /v1.
        max_tokens: maximum number of tokens of an answer.
        timeout: seconds to wait for an answer.
        tries: maximum number of times that a request is sent.
        key: API key of the server.
        flags: names of the flags in messages.
    """

    model: str
    base_url: str
    max_tokens: int
    timeout: float
    tries: int
    key: str = field(repr=False, default="")
    flags: EndpointFlags = EndpointFlags()

    @property
    def is_local(self) -> bool:
        """Whether the address is a loopback address."""
        return re.match(r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)", self.base_url) is not None

    def hide_key(self, text: str) -> str:
        """A text without the key: servers may repeat it in errors and answers."""
        return text.replace(self.key, "[key]") if len(self.key) >= 8 else text


def checked_address(url: str, flag: str) -> str:
    """An address without a slash at its end.

    Raises:
        UserError: the address has no scheme or host, or contains a password or a query.
    """
    url = url.rstrip("/")
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"{flag} {url}: an address such as http://127.0.0.1:8000/v1 is needed.")
    if re.match(r"https?://[^/]*@", url) or "?" in url:
        raise UserError(f"{flag} holds a password or a query; give the key in OPENAI_API_KEY and the bare address.")
    return url


def checked_key(key: str | None, source: str, endpoint: Endpoint) -> str:
    """The key of an endpoint; a dummy for a server on this machine.

    Raises:
        UserError: the key is missing, or holds characters that no key has.
    """
    key = (key or "").strip()
    if not key and endpoint.is_local:
        return "none"
    if not key:
        raise UserError(f"no key for {endpoint.base_url}: set the environment variable OPENAI_API_KEY.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{source} holds characters that no key has; copy it again.")
    return key


def warn_if_unencrypted(endpoint: Endpoint) -> None:
    """Warns of a server on another machine that is reached without encryption."""
    if endpoint.base_url.startswith("http://") and not endpoint.is_local:
        logger.warning("%s is not encrypted: the key and the texts can be read on the way", endpoint.base_url)


# -- answers


@dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
        text: content of the answer.
        refusal: the message's field `refusal`, in which a model declines to answer; usually empty.
        model: the server's name of the model that answered.
        flaw: why the text may be incomplete, with the remedy; empty if nothing suggests it.
    """

    text: str
    refusal: str
    model: str
    flaw: str = ""


@dataclass(frozen=True)
class Completion:
    """A reply with the server's count of tokens; None if the server reports none."""

    reply: Reply
    tokens_sent: int | None
    tokens_answered: int | None


def any_reply(reply: Reply) -> bool:
    """A predicate that accepts every answer."""
    return True


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files are written atomically, so several runs may share a folder, and a killed run leaves no broken file. A file
    that cannot be read and an unusable answer count as missing: their questions are asked again.
    """

    def __init__(
        self,
        folder: Path,
        is_usable: Callable[[Reply], bool] = any_reply,
    ) -> None:
        """Makes a cache; `get` and `put` use the predicate `is_usable` unless they are given another one."""
        self.folder = folder
        self._is_usable = is_usable

    def get(self, digest: str, is_usable: Callable[[Reply], bool] | None = None) -> Reply | None:
        """The saved usable answer to a question, None if there is none. `is_usable` replaces the cache's predicate."""
        try:
            reply = Reply(**json.loads(self._file(digest).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return reply if (is_usable or self._is_usable)(reply) else None

    def put(
        self,
        digest: str,
        reply: Reply,
        is_usable: Callable[[Reply], bool] | None = None,
    ) -> None:
        """Saves an answer if it is usable. Raises UserError if the folder cannot be written."""
        if (is_usable or self._is_usable)(reply):
            write_rows(self._file(digest), [asdict(reply)])

    def put_first(self, digest: str, reply: Reply) -> Reply:
        """Save an answer unless another process has saved one to the same question; returns the saved one.

        An answer that is not usable is returned and not saved. Raises UserError where the folder cannot be written.
        """
        if not self._is_usable(reply):
            return reply
        write_rows_once(self._file(digest), [asdict(reply)])
        saved = self.get(digest)
        return reply if saved is None else saved

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"


def digest_of(content: Mapping[str, Any]) -> str:
    """Hash of a question and of everything else that its answer depends on: 64 hexadecimal digits."""
    return content_hash(json.dumps(content, sort_keys=True))


# -- requests


class Unanswered(Exception):
    """A request got no answer; another try may succeed.

    Attributes:
        was_sent: the server may have received the request, and may charge for it.
        retry_after: seconds that the server asks to wait before the next try; None if it does not say.
    """

    def __init__(
        self,
        reason: str,
        was_sent: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.was_sent = was_sent
        self.retry_after = retry_after


class FormRefused(Exception):
    """The server rejects the content of a request (status 400, 413 or 422); another try would be rejected, too.

    Attributes:
        complaint: the server's complete message.
    """

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


def open_client(endpoint: Endpoint) -> openai.OpenAI:
    """The official client, which sends each request once.

    Raises:
        UserError: the openai library is missing, or it does not take the address.
    """
    try:
        import httpx2
        import openai
    except ImportError as error:
        raise UserError(f"{endpoint.flags.url} needs the openai library: pip install 'ma-rlhf[judge]'.") from error

    try:
        return openai.OpenAI(
            api_key=endpoint.key,
            base_url=endpoint.base_url,
            timeout=endpoint.timeout,
            max_retries=0,
            # A server on this machine is reached without a proxy.
            http_client=openai.DefaultHttpxClient(trust_env=not endpoint.is_local),
        )
    except (openai.OpenAIError, httpx2.InvalidURL, ValueError) as error:
        raise UserError(f"{endpoint.flags.url} {endpoint.base_url}: {endpoint.hide_key(str(error))}") from error


def with_retries(
    send: Callable[[], T],
    tries: int,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Calls `send` until it returns, at most `tries` times, and waits longer after each failure.

    Raises:
        Unanswered: the last try failed, or the server asks to wait longer than LONGEST_RETRY_AFTER seconds.
    """
    delay = FIRST_DELAY
    attempt = 1
    while True:
        try:
            return send()
        except Unanswered as error:
            logger.info("try %d of %d: %s", attempt, tries, error)
            seconds = error.retry_after
            if attempt == tries or (seconds is not None and seconds > LONGEST_RETRY_AFTER):
                raise
        if not seconds:  # jitter keeps parallel requests from coming back together
            seconds = delay * random.uniform(0.75, 1.0)
        wait(seconds)
        delay = min(2 * delay, LONGEST_DELAY)
        attempt += 1


def complete(
    client: openai.OpenAI,
    endpoint: Endpoint,
    body: Mapping[str, Any],
) -> Completion:
    """Sends one request once.

    Args:
        client: the client that `open_client` returned for this endpoint.
        endpoint: the server and its model.
        body: arguments of `chat.completions.create`.

    Raises:
        Unanswered: too many requests, a failure of the server or the connection, or no answer in time.
        FormRefused: the server rejects the content of the request.
        UserError: the key, the model or the address is wrong, or the account is empty.
    """
    import openai

    try:
        response = client.chat.completions.with_raw_response.create(**body).http_response
    except openai.APIConnectionError as error:
        raise _connection_error(error.__cause__ or error, endpoint) from error
    except openai.APIStatusError as error:
        raise _status_error(error, endpoint) from error

    try:
        answer = response.json()
        choice = answer["choices"][0]
        text = without_surrogates(text_of(choice["message"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        content_type = response.headers.get("content-type", "of no content type")
        content = short(endpoint.hide_key(response.text))
        problem = f"its answer ({content_type}) is not a chat completion: {content}"
        raise Unanswered(f"{endpoint.base_url} gives no answer: {problem}", was_sent=True) from error

    reply = Reply(
        text=endpoint.hide_key(text),
        refusal=endpoint.hide_key(without_surrogates(str(choice["message"].get("refusal") or ""))),
        model=endpoint.hide_key(without_surrogates(str(answer.get("model") or endpoint.model))),
        flaw=_flaw(choice, text, endpoint),
    )
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        usage = {}
    return Completion(reply, _count_or_none(usage, "prompt_tokens"), _count_or_none(usage, "completion_tokens"))


def text_of(message: Mapping[str, Any]) -> str:
    """The answer's text: a string, or a list of content parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def without_surrogates(text: str) -> str:
    """A text with "?" instead of lone surrogates, which JSON may hold and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


def _count_or_none(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) else None


def _flaw(
    choice: Mapping[str, Any],
    text: str,
    endpoint: Endpoint,
) -> str:
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
    was_sent = not isinstance(error, never_sent)
    if isinstance(error, httpx2.TimeoutException):
        reason = f"{endpoint.base_url} gives no answer within {endpoint.timeout:g} s ({endpoint.flags.timeout})"
        return Unanswered(reason, was_sent)
    return Unanswered(endpoint.hide_key(f"{endpoint.base_url} gives no answer: {error}"), was_sent)


def _status_error(error: openai.APIStatusError, endpoint: Endpoint) -> Exception:
    """The error to raise for a response with an error status."""
    # OpenAI's API puts the reason under "message", servers written with FastAPI under "detail".
    content: object = error.body if error.body else "no reason given"
    if isinstance(content, Mapping):
        content = content.get("message") or content.get("detail") or content
    complaint = endpoint.hide_key(content if isinstance(content, str) else json.dumps(content))

    server = endpoint.base_url
    status = error.status_code
    flags = endpoint.flags
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
        text = error.response.headers.get("retry-after")
        reason = f"{answers} (Retry-After: {text})" if text else answers
        return Unanswered(reason, retry_after=_seconds(text))
    return UserError(answers)


def _seconds(retry_after: str | None) -> float | None:
    """The header Retry-After in seconds from now; None if there is none or it asks for no wait."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return seconds if 0 < seconds < math.inf else None
