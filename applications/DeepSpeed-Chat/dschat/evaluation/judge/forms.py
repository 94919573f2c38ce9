# SPDX-License-Identifier: Apache-2.0
"""Forms of a request: what servers and models take differs, and their refusals say which to try next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dschat.evaluation.judge.question import Endpoint, Question


@dataclass(frozen=True)
class Form:
    """How a question is put to the server; the first to be tried has the defaults."""

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

    def after(self, complaint: str) -> Form | None:
        """The form to try when the server refuses this one with a complaint; None if there is none left."""
        if self.limit == "max_tokens" and "max_tokens" in complaint and "max_completion_tokens" in complaint:
            return replace(self, limit="max_completion_tokens")
        if self.temperature and "temperature" in complaint:
            return replace(self, temperature=False)
        if self.structure:
            return replace(self, structure="json_object" if self.structure == "json_schema" else "")
        return None
