# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the one place that renders messages as text."""

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
    """A chat template raised an error instead of rendering the messages."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Messages as the tokenizer's chat template writes them.

    Templates differ in what they expect of tool calls: most take the arguments as an object and a message without
    `content`, some add them to texts. A template that raises an error for the first form gets the second one.

    Args:
        tokenizer: with a chat template.
        messages: with all their fields; the template reads those that it knows.
        add_generation_prompt: whether the text ends where the assistant's next message begins.
        arguments: further variables of the template, for instance `tools`.

    Raises:
        TemplateRefusal: the template raised an error for both forms; it is the error of the first one.
    """
    fix_template_clock()
    conversation = [dict(message) for message in messages]
    try:
        return _applied(tokenizer, conversation, add_generation_prompt, arguments or {})
    except TemplateRefusal as refusal:
        as_texts = [_with_texts(message) for message in conversation]
        if as_texts == conversation:
            raise
        try:
            return _applied(tokenizer, as_texts, add_generation_prompt, arguments or {})
        except TemplateRefusal:
            raise refusal from None


def _applied(
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
    # A template is a program: beside its own errors it raises those of the Python expressions in it.
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise TemplateRefusal(str(error)) from error
    return str(text)


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a content, and the arguments of its tool calls as JSON text."""
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
    """As `apply_template`; errors name the row.

    Args:
        origin: where the messages are from: "file.jsonl:12".

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
            f"{origin}: the tokenizer's chat template refuses the messages ({error}); correct their roles and order."
        ) from error
