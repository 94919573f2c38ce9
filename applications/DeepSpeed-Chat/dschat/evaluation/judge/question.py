# SPDX-License-Identifier: Apache-2.0
"""What a judge is asked and in which form."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dschat.common.chat_servers import Endpoint, digest_of


class TextRefused(Exception):
    """The server answers, but does not take this text."""


class Stopped(Exception):
    """The run is being ended; nothing more is sent."""


@dataclass(frozen=True)
class Question:
    """The messages of a chat, and the JSON schema of the answer."""

    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any]

    def digest(self, endpoint: Endpoint) -> str:
        """Names the question together with model, server and the length allowed; the key is no part of it."""
        whole = {"model": endpoint.model, "server": endpoint.base_url, "max_tokens": endpoint.max_tokens}
        whole |= {"temperature": 0, "messages": self.messages, "schema": self.schema}
        return digest_of(whole)


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
