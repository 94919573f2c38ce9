# SPDX-License-Identifier: Apache-2.0
"""What a judge is asked and in which form, and what it replied: on the disk, so that no question is paid for twice."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dschat.common.jsonl import write_rows


class TextRefused(Exception):
    """The server answers, but does not take this text."""


class Unanswered(Exception):
    """All tries failed for one question."""


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
        return re.match(r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)", self.base_url) is not None

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
        whole = {"model": endpoint.model, "server": endpoint.base_url, "max_tokens": endpoint.max_tokens}
        whole |= {"temperature": 0, "messages": self.messages, "schema": self.schema}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Form:
    """How a question is put to the server. Servers and models differ; the defaults are tried first."""

    structure: str = "json_schema"  # or json_object; empty for no response_format
    limit: str = "max_tokens"  # the field that bounds the answer
    temperature: bool = True  # whether temperature 0 is asked for

    def body(self, endpoint: Endpoint, question: Question) -> dict[str, Any]:
        """The request: arguments of `chat.completions.create`."""
        body: dict[str, Any] = {"model": endpoint.model, "messages": list(question.messages)}
        body[self.limit] = endpoint.max_tokens
        if self.temperature:
            body["temperature"] = 0
        if self.structure:
            body["response_format"] = {"type": self.structure}
        if self.structure == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"]["json_schema"] = schema
        return body

    def after(self, complaint: str) -> "Form | None":
        """The form to try when the server refuses this one with a complaint; None if there is none left."""
        if self.limit == "max_tokens" and "max_tokens" in complaint and "max_completion_tokens" in complaint:
            return replace(self, limit="max_completion_tokens")
        if self.temperature and "temperature" in complaint:
            return replace(self, temperature=False)
        if self.structure:
            return replace(self, structure="json_object" if self.structure == "json_schema" else "")
        return None


@dataclass(frozen=True)
class Reply:
    """What the judge answered: the text, or what it said where it refused formally; and who answered."""

    text: str
    refusal: str  # empty where there is none
    model: str  # as the server names it
    flaw: str = ""  # why the text may be no whole answer, with the remedy; empty where nothing is known


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files appear whole or not at all, so that several runs may share a folder and a kill breaks nothing. A file that
    cannot be read counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, digest: str) -> Reply | None:
        """The answer to a question; None if there is none."""
        try:
            kept = json.loads(self._file(digest).read_text(encoding="utf-8"))
            return Reply(kept["text"], kept["refusal"], kept["model"], kept.get("flaw", ""))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, digest: str, reply: Reply) -> None:
        """Keeps an answer; raises UserError where the folder cannot be written."""
        write_rows(self._file(digest), [asdict(reply)])

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
