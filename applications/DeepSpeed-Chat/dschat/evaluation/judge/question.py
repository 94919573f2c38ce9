# SPDX-License-Identifier: Apache-2.0
"""What a judge is asked and what it replies, whichever server it runs on."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class TextRefused(Exception):
    """The server answers, but does not take this text. The message says why."""


class Unanswered(Exception):
    """All tries failed for one question. The message says how."""


class Stopped(Exception):
    """The run is being ended; nothing more is sent."""


@dataclass(frozen=True)
class Endpoint:
    """Whom to ask. The key stands in no file, message or representation."""

    model: str
    base_url: str  # up to /v1
    max_tokens: int  # of an answer
    timeout: float  # seconds to wait for an answer
    tries: int  # how often a request is sent until an answer comes
    key: str = field(repr=False, default="")

    @property
    def is_local(self) -> bool:
        """Whether the address is a loopback one."""
        host = urllib.parse.urlsplit(self.base_url).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def hide_key(self, text: str) -> str:
        """A text without the key: servers may repeat it in errors and answers."""
        return text.replace(self.key, "[key]") if len(self.key) >= 8 else text


@dataclass(frozen=True)
class Question:
    """The messages of a chat, and the JSON schema of the answer."""

    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any]

    def digest(self, endpoint: Endpoint) -> str:
        """Names the question together with model, server and the length allowed; the key is no part of it."""
        whole = {
            "model": endpoint.model,
            "server": endpoint.base_url,
            "max_tokens": endpoint.max_tokens,
            "temperature": 0,
            "messages": self.messages,
            "schema": self.schema,
        }
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Reply:
    """What the judge answered: the text, or what it said where it refused formally; and who answered."""

    text: str
    refusal: str  # empty where there is none
    model: str  # as the server names it
