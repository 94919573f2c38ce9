# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible servers: whom to ask, with which key, and answers on the disk, so that none is paid for twice."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dschat.common.jsonl import write_rows
from dschat.errors import UserError


class Unanswered(Exception):
    """All tries failed for one question."""


@dataclass(frozen=True)
class ServerFlags:
    """What a command line calls the parts of an endpoint, and what its model is; for messages."""

    url: str = "--base-url"
    model: str = "--judge-model"
    key: str = "OPENAI_API_KEY or --sk"
    max_tokens: str = "--max-tokens"
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
    flags: ServerFlags = ServerFlags()

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
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


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
            kept = json.loads(self._file(digest).read_text(encoding="utf-8"))
            reply = Reply(kept["text"], kept["refusal"], kept["model"], kept.get("flaw", ""))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return reply if self._is_usable(reply) else None

    def put(self, digest: str, reply: Reply) -> None:
        """Keeps an answer that is of use; raises UserError where the folder cannot be written."""
        if self._is_usable(reply):
            write_rows(self._file(digest), [asdict(reply)], shared=True)

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
