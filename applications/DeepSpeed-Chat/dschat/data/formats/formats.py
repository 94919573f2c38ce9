# SPDX-License-Identifier: Apache-2.0
"""From the columns of a data file to a `Row`: preference and response columns, conversations, the published sets."""

from typing import Any

from dschat.data.formats.published import PUBLISHED_FORMATS
from dschat.data.formats.rows import DataKeys, Row, check_text, kind_of
from dschat.errors import UserError

CONVERSATION, TEXTS = "conversation", "prompt and responses"


def format_of(raw: dict[str, Any], keys: DataKeys) -> str:
    """Name of a row's format, by its columns: the first of PUBLISHED_FORMATS, conversation, prompt and responses.

    In the last two a column that holds null counts as absent.
    """
    for name, (columns, _) in PUBLISHED_FORMATS.items():
        if all(column in raw for column in columns):
            return name
    has_response = raw.get(keys.chosen) is not None or raw.get(keys.response) is not None
    if raw.get(keys.messages) is not None and not (raw.get(keys.prompt) is not None and has_response):
        return CONVERSATION
    return TEXTS


def parse_row(raw: Any, keys: DataKeys, origin: str) -> Row | None:
    """Recognises the format of one row by its columns (see `format_of`).

    Args:
        raw: the parsed row.
        keys: column names.
        origin: where the row stands.

    Returns:
        The row, or None for a TL;DR row with neither post nor article.

    Raises:
        UserError: the row is not an object, lacks a column or holds a value of the wrong type; the message names
            `origin`, the column and the flag that renames it.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{origin}: {kind_of(raw)} instead of an object with columns; correct the row.")
    name = format_of(raw, keys)
    if name in PUBLISHED_FORMATS:
        return PUBLISHED_FORMATS[name][1](raw, origin)
    prompt, chosen, rejected = (_column(raw, keys, column, origin) for column in ("prompt", "chosen", "rejected"))
    if chosen is None:
        chosen = _column(raw, keys, "response", origin)
    if name == CONVERSATION:
        return _messages_row(raw, keys, chosen, rejected, origin)
    if prompt is None:
        raise UserError(
            f"{origin}: no column {keys.prompt!r} among {', '.join(map(repr, raw)) or 'none'}; name the prompt's "
            "column with --prompt_key, or a conversation's with --messages_key."
        )
    return Row(prompt, None, chosen, rejected, raw, origin)


def _messages_row(raw: dict[str, Any], keys: DataKeys, chosen: str | None, rejected: str | None, origin: str) -> Row:
    """A conversation: the last message is the response if the assistant wrote it."""
    messages = raw[keys.messages]
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{origin}: column {keys.messages!r} must hold a non-empty list of messages, each with role and content; "
            "correct the row, or name the conversation's column with --messages_key."
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(
                f"{origin}: message {number} of {keys.messages!r} must be an object with role and content."
            )
        for name in ("role", "content"):
            check_text(message.get(name), f"{name} of message {number} in {keys.messages!r}", origin)
    if messages[-1]["role"] != "assistant":
        return Row(None, messages, chosen, rejected, raw, origin)
    if chosen is not None:
        raise UserError(
            f"{origin}: two responses, the last message of {keys.messages!r} and another column; remove one of them, "
            "or name the right columns with --messages_key, --chosen_key and --response_key."
        )
    if len(messages) == 1:
        raise UserError(f"{origin}: {keys.messages!r} holds only the response; put at least one message before it.")
    return Row(None, messages[:-1], messages[-1]["content"], rejected, raw, origin)


def _column(raw: dict[str, Any], keys: DataKeys, name: str, origin: str) -> str | None:
    """Text of the column that `keys` gives this name; None where it is absent or null."""
    column = getattr(keys, name)
    value = raw.get(column)
    if value is not None:
        remedy = f"correct the row, or name another column with --{name}_key"
        check_text(value, f"column {column!r}", origin, remedy)
    return value
