# SPDX-License-Identifier: Apache-2.0
"""Forms of a request: what servers and models take differs, and their refusals say which to try next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dschat.evaluation.judge.server import Endpoint, Question

STRUCTURES = ("json_schema", "json_object", "")  # ways to ask for JSON, from strict to none


@dataclass(frozen=True)
class Form:
    """The form of a request that the server takes; see `other_form`.

    Attributes:
        structure: json_schema, json_object, or empty for no response_format.
        limit: the field that bounds the answer.
        temperature: whether temperature 0 is asked for.
    """

    structure: str = STRUCTURES[0]
    limit: str = "max_tokens"
    temperature: bool = True

    def arguments(self, endpoint: Endpoint, question: Question) -> dict[str, Any]:
        """Arguments of `chat.completions.create`."""
        fields: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [dict(message) for message in question.messages],
            self.limit: endpoint.max_tokens,
        }
        if self.temperature:
            fields["temperature"] = 0
        if self.structure == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": question.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.structure:
            fields["response_format"] = {"type": self.structure}
        return fields


def other_form(form: Form, complaint: str) -> Form | None:
    """The form to try after a refusal; None if there is none left.

    Args:
        form: the one that was refused.
        complaint: the server's message.
    """
    if form.limit in complaint and "max_completion_tokens" in complaint and form.limit == "max_tokens":
        return replace(form, limit="max_completion_tokens")
    if form.temperature and "temperature" in complaint:
        return replace(form, temperature=False)
    if form.structure:
        return replace(form, structure=STRUCTURES[STRUCTURES.index(form.structure) + 1])
    return None
