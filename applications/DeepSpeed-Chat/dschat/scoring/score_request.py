# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the JSON of a request to a reward server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Self

from pydantic import ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from dschat.data.messages import reserved_names

MAX_PREFIX_CHARACTERS = 256 << 20  # of all responses up to the end of each macro action, together


class BadRequest(Exception):
    """A request is refused.

    Attributes:
        status: status of the answer, from 400 to 499, so that the request is not repeated.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        """Takes the reason, and the status of the answer."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, config=ConfigDict(strict=True))
class ScoreRequest:
    """N prompts and responses to score."""

    prompts: list[str]
    responses: list[str]
    finished: list[bool] | None = None  # whether each response is complete; None: all are
    messages: list[list[dict[str, object]] | None] | None = None  # conversations that replace prompts
    segments: list[list[str]] | None = None  # texts of each response's macro actions, if these are to be scored
    template_arguments: list[dict[str, object]] | None = None  # further variables of the chat template, as `tools`

    @classmethod
    def read(cls, body: bytes) -> ScoreRequest:
        """Parses the JSON of a request. Raises BadRequest."""
        try:
            return REQUEST.validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            field_name = ".".join(map(str, first["loc"])) or "the request"
            raise BadRequest(f"{field_name}: {first['msg']}") from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises ValueError if lists do not fit together, or variables would replace what the server sets itself."""
        count = len(self.responses)
        for name in ("prompts", "finished", "messages", "segments", "template_arguments"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise ValueError(f"there are {len(values)} {name} for {count} responses")
        for conversation in self.messages or []:
            if conversation is not None and not (conversation and all(map(_is_message, conversation))):
                raise ValueError("messages must be lists of role and content, or null in their place")
        if self.segments is not None:
            _check_segments(self.segments, self.responses)
        for number, variables in enumerate(self.template_arguments or []):
            reserved = reserved_names(variables)
            if reserved:
                names = ", ".join(reserved)
                raise ValueError(
                    f"template_arguments of response {number} hold {names}, which the server sets itself: remove it"
                )
        return self


REQUEST = TypeAdapter(ScoreRequest)


def _is_message(message: Mapping[str, object]) -> bool:
    has_only_calls = "content" not in message and "tool_calls" in message
    return isinstance(message.get("role"), str) and (has_only_calls or isinstance(message.get("content"), str))


def _check_segments(segments: Sequence[Sequence[str]], responses: Sequence[str]) -> None:
    """Raises ValueError if segments are not the parts of their responses, or too many characters in all."""
    prefix_characters = 0
    for texts, response in zip(segments, responses, strict=True):
        if not texts or "".join(texts) != response:
            raise ValueError("segments must be lists of texts, each of which make up the response")
        prefix_characters += sum(accumulate(map(len, texts)))
    if prefix_characters > MAX_PREFIX_CHARACTERS:
        limit = f"{MAX_PREFIX_CHARACTERS >> 20} million characters"
        raise ValueError(f"all responses up to all of their segments are more than {limit}: lower --reward_batch")
