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


# -- whom to ask


@dataclass(frozen=True)
class EndpointFlags:
    """Flags that a command has for the parts of an endpoint, and the role of its model; for messages."""

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
        model: its name on the server.
        base_url: address, up to /v1.
        max_tokens: longest answer.
        timeout: seconds to wait for an answer.
        tries: how often a request is sent until an answer comes.
        key: secret of the server.
        flags: names for messages.
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
    """An address without a slash at its end; raises UserError where it is no bare address."""
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
        text: what it said.
        refusal: what it said where it refused formally; empty otherwise.
        model: who answered, as the server names it.
        flaw: why the text may be incomplete, with the remedy; empty where the server gives no sign of it.
    """

    text: str
    refusal: str
    model: str
    flaw: str = ""


@dataclass(frozen=True)
class Completion:
    """A reply with the tokens that the server counted; None where it counted none."""

    reply: Reply
    tokens_sent: int | None
    tokens_answered: int | None


def any_reply(reply: Reply) -> bool:
    """Counts every answer as usable."""
    return True


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files appear whole or not at all, so that several runs may share a folder and a kill breaks nothing. A file that
    cannot be read counts as missing. So does an unusable answer: its question is asked again.
    """

    def __init__(
        self,
        folder: Path,
        is_usable: Callable[[Reply], bool] = any_reply,
    ) -> None:
        """Takes the folder, and a predicate of usable answers for questions that have none of their own."""
        self.folder = folder
        self._is_usable = is_usable

    def get(self, digest: str, is_usable: Callable[[Reply], bool] | None = None) -> Reply | None:
        """The usable answer to a question; None if there is none. `is_usable`: the question's own predicate."""
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
        """Save an answer if it is usable; raises UserError where the folder cannot be written."""
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
    """64 hexadecimal digits that name a question with all that its answer depends on."""
    return content_hash(json.dumps(content, sort_keys=True))


# -- requests


class Unanswered(Exception):
    """No answer came, which another try may change.

    Attributes:
        was_sent: the server may have got the request, and may charge it.
        retry_after: seconds to wait before the next try, where the server says so.
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
    """The server does not take the request in this form.

    Attributes:
        complaint: the whole message of the server.
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
    """Call `send` until it returns, `tries` times at most, with growing waits between.

    Raises:
        Unanswered: of the last try, or of one after which the server asks for more than LONGEST_RETRY_AFTER seconds.
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
    """Send one request once.

    Args:
        client: of `open_client`.
        endpoint: the one that the client was opened for.
        body: arguments of `chat.completions.create`.

    Raises:
        Unanswered: too many requests, a failure of the server or the connection, or no answer in time.
        FormRefused: the server refuses the request as it is.
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
        problem = f"its answer ({content_type}) is no chat completion: {content}"
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
    """A text with "?" in the place of lone surrogates, which JSON may hold and UTF-8 cannot encode."""
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
    """Why an answer may be incomplete, and the remedy; empty where the server gives no sign of it."""
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
    """The error of a request to which no response came."""
    import httpx2

    never_sent = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
    was_sent = not isinstance(error, never_sent)
    if isinstance(error, httpx2.TimeoutException):
        reason = f"{endpoint.base_url} gives no answer within {endpoint.timeout:g} s ({endpoint.flags.timeout})"
        return Unanswered(reason, was_sent)
    return Unanswered(endpoint.hide_key(f"{endpoint.base_url} gives no answer: {error}"), was_sent)


def _status_error(error: openai.APIStatusError, endpoint: Endpoint) -> Exception:
    """The error that a status means for the run."""
    # OpenAI's API has a message, FastAPI's servers have a detail.
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
