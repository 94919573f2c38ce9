# SPDX-License-Identifier: Apache-2.0
"""Renders messages as text with chat templates; nothing else in the package does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.models.template_date import fix_template_clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


class TemplateRefusal(Exception):
    """A chat template raised an error instead of rendering the messages.

    Attributes:
        is_deliberate: whether the template calls `raise_exception`; otherwise one of its expressions failed.
    """

    def __init__(self, message: str, is_deliberate: bool = False) -> None:
        super().__init__(message)
        self.is_deliberate = is_deliberate


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with the tokenizer's chat template.

    Most templates take the arguments of a tool call as an object and accept a message without `content`; some want
    the arguments as JSON text and a content in every message. That second form is tried if the template raises an
    error for the first.

    Args:
        tokenizer: with a chat template.
        messages: with all their fields; the template uses those that it knows.
        add_generation_prompt: end the text with the beginning of the assistant's next message.
        arguments: further variables of the template, for instance `tools`.

    Returns:
        The text, not encoded.

    Raises:
        TemplateRefusal: the template raised an error for both forms; this is the error for the first, unless only
            the second is deliberate.
    """
    fix_template_clock()
    conversation = [dict(message) for message in messages]
    try:
        return _render(tokenizer, conversation, add_generation_prompt, arguments or {})
    except TemplateRefusal as refusal:
        as_texts = [_with_texts(message) for message in conversation]
        if as_texts == conversation:
            raise
        try:
            return _render(tokenizer, as_texts, add_generation_prompt, arguments or {})
        except TemplateRefusal as second_refusal:
            if second_refusal.is_deliberate and not refusal.is_deliberate:
                raise
            raise refusal from None


def _render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=False, **arguments
        )
    # A template is a program, and raises the errors of the Python expressions in it.
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise TemplateRefusal(str(error), is_deliberate=type(error) is TemplateError) from error
    return str(text)


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a content, and with the arguments of its tool calls as JSON text."""
    if "tool_calls" not in message:
        return message
    return {"content": "", **message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_text_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return call
    return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    origin: str,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Renders the messages of a data row, see `apply_template`; errors name the row.

    Args:
        tokenizer: tokenizer of the model.
        messages: messages of the row.
        add_generation_prompt: end the text with the beginning of the assistant's next message.
        origin: file and line of the row, as in "file.jsonl:12".
        arguments: further variables of the template.

    Raises:
        UserError: the tokenizer has no chat template, or the template raised an error.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{origin}: the row holds messages, but the tokenizer has no chat template. Use rows with a prompt "
            "and a response, or a model whose tokenizer folder holds chat_template.jinja."
        )
    try:
        return apply_template(tokenizer, messages, add_generation_prompt, arguments)
    except TemplateRefusal as error:
        raise UserError(
            f"{origin}: the tokenizer's chat template refuses the messages ({error}); correct these messages or leave "
            "them out."
        ) from error
