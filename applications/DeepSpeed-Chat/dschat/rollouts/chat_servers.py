# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible servers: whom to ask, with which key, what becomes of a request, and answers kept on the disk."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows

if TYPE_CHECKING:
    import openai

OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached")


class Unanswered(Exception):
    """All tries failed for one question."""


@dataclass(frozen=True)
class EndpointFlags:
    """What a command line calls the parts of an endpoint, and what its model is; for messages."""

    url: str = "--base_url"
    model: str = "--judge_model"
    key: str = "OPENAI_API_KEY or --sk"
    max_tokens: str = "--max_tokens"
    role: str = "judge"


@dataclass(frozen=True)
class Endpoint:
    """Whom to ask. The key stands in no file, message or representation."""

    model: str
    base_url: str  # up to /v1
    max_tokens: int  # of an answer
    timeout: float  # seconds to wait for an answer
    tries: int  # how often a request is sent until an answer comes
    key: str = field(repr=False, default="")
    flags: EndpointFlags = EndpointFlags()

    @property
    def is_local(self) -> bool:
        """Whether the address is a loopback one."""
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
    """The key that was found; a dummy for a server on this machine. Raises UserError where it is bad or missing."""
    key = (key or "").strip()
    if not key and endpoint.is_local:
        return "none"
    if not key:
        raise UserError(f"no key for {endpoint.base_url}: set the environment variable OPENAI_API_KEY.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{source} holds characters that no key has; copy it again.")
    return key


def digest_of(content: Mapping[str, Any]) -> str:
    """64 hexadecimal digits that name a question with all that its answer depends on."""
    return content_hash(json.dumps(content, sort_keys=True))


@dataclass(frozen=True)
class Reply:
    """What a model answered: the text, or what it said where it refused formally; and who answered."""

    text: str
    refusal: str  # empty where there is none
    model: str  # as the server names it
    flaw: str = ""  # why the text may be no whole answer, with the remedy; empty where nothing is known


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files appear whole or not at all, so that several runs may share a folder and a kill breaks nothing. A file that
    cannot be read counts as missing. So does an answer of no use: its question is asked again.
    """

    def __init__(self, folder: Path, is_usable: Callable[[Reply], bool]) -> None:
        """Takes the folder, and what tells whether an answer is of use."""
        self.folder, self._is_usable = folder, is_usable

    def get(self, digest: str) -> Reply | None:
        """The usable answer to a question; None if there is none."""
        try:
            reply = Reply(**json.loads(self._file(digest).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return reply if self._is_usable(reply) else None

    def put(self, digest: str, reply: Reply) -> None:
        """Keeps an answer that is of use; raises UserError where the folder cannot be written."""
        if self._is_usable(reply):
            write_rows(self._file(digest), [asdict(reply)])

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"


class FormRefused(Exception):
    """The server does not take the request in this form. `complaint`: all that it says."""

    def __init__(self, reason: str, complaint: str) -> None:
        super().__init__(reason)
        self.complaint = complaint


def open_client(endpoint: Endpoint, http_client: Any) -> openai.OpenAI:
    """The official client over another that carries its requests; UserError where it does not take the address."""
    import httpx2
    import openai

    logging.getLogger("openai").setLevel(logging.INFO)  # it says when it tries again
    try:
        return openai.OpenAI(
            api_key=endpoint.key,
            base_url=endpoint.base_url,
            timeout=endpoint.timeout,
            max_retries=endpoint.tries - 1,
            http_client=http_client,
        )
    except (openai.OpenAIError, httpx2.InvalidURL, ValueError) as error:
        raise UserError(f"{endpoint.flags.url} {endpoint.base_url}: {endpoint.hide_key(str(error))}") from error


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
    import openai

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
    import httpx2

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
