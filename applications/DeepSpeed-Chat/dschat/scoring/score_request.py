# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the JSON of a request to a reward server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from dschat.data.messages import reserved_names

T = TypeVar("T")
MAX_PREFIX_CHARACTERS = 256 << 20  # of all responses up to the end of each macro action, together


class BadRequest(Exception):
    """A request is refused.

    Attributes:
        status: status of the answer, from 400 to 499, so that the request is not repeated.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        """Takes the reason, and the status of the answer."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ScoreRequest:
    """N prompts and responses to score."""

    prompts: list[str]
    responses: list[str]
    finished: list[bool]  # whether each response is complete
    messages: list[list[dict[str, object]] | None]  # conversations that replace prompts
    segments: list[list[str]] | None = None  # texts of each response's macro actions, if these are to be scored
    template_arguments: list[dict[str, object]] | None = None  # further variables of the chat template, as `tools`

    @classmethod
    def read(cls, body: bytes) -> ScoreRequest:
        """Parses the JSON of a request. Raises BadRequest."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:  # RecursionError for deeply nested lists
            raise BadRequest(f"the request is not JSON: {error}") from error
        _require_text(content)
        if not isinstance(content, dict):
            raise BadRequest("the request must be an object with prompts and responses")
        responses = _list_of(content, "responses", str)
        count = len(responses)
        prompts = _list_of(content, "prompts", str, count)
        finished = _list_of(content, "finished", bool, count) if "finished" in content else [True] * count
        messages = content.get("messages")
        if messages is None:
            messages = [None] * count
        if not isinstance(messages, list) or len(messages) != count or not all(map(_is_conversation, messages)):
            raise BadRequest(f"messages must be {count} lists of role and content, or null in their place")
        segments = content.get("segments")
        if segments is not None and not _are_segments(segments, responses):
            raise BadRequest(f"segments must be {count} lists of texts, each of which make up the response")
        arguments = None
        if content.get("template_arguments") is not None:
            arguments = _list_of(content, "template_arguments", dict, count)
            _require_variables(arguments)
        return cls(prompts, responses, finished, messages, segments, arguments)


def _require_text(content: object) -> None:
    """Raises BadRequest if a text has half of a surrogate pair, which no tokenizer reads."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise BadRequest(f"a text of the request holds {half}, half of a surrogate pair: remove it", 422) from error
    except RecursionError as error:
        raise BadRequest(f"the request is not JSON that can be read: {error}") from error


def _require_variables(arguments: list[dict[str, object]]) -> None:
    """Raises BadRequest if a variable would replace one that the server sets in the chat template, or the template."""
    for number, variables in enumerate(arguments):
        reserved = reserved_names(variables)
        if reserved:
            raise BadRequest(
                f"template_arguments of response {number} hold {', '.join(reserved)}, which the server sets itself: "
                "remove it",
                422,
            )


def _list_of(content: Mapping[str, object], name: str, kind: type[T], count: int | None = None) -> list[T]:
    values = content.get(name)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise BadRequest(f"{name} must be a list of {kind.__name__}")
    if count is not None and len(values) != count:
        raise BadRequest(f"there are {len(values)} {name} for {count} responses")
    return values


def _is_conversation(messages: object) -> bool:
    if messages is None:
        return True
    if not isinstance(messages, list) or not messages:
        return False
    return all(map(_is_message, messages))


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    has_only_calls = "content" not in message and "tool_calls" in message
    return has_only_calls or isinstance(message.get("content"), str)


def _are_segments(segments: object, responses: list[str]) -> bool:
    if not isinstance(segments, list) or len(segments) != len(responses):
        return False
    prefix_characters = 0
    for texts, response in zip(segments, responses, strict=True):
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            return False
        if "".join(texts) != response:
            return False
        prefix_characters += sum(accumulate(map(len, texts)))
    if prefix_characters > MAX_PREFIX_CHARACTERS:
        limit = f"{MAX_PREFIX_CHARACTERS >> 20} million characters"
        raise BadRequest(f"all responses up to all of their segments are more than {limit}: lower --reward_batch")
    return True
