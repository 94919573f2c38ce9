# SPDX-License-Identifier: Apache-2.0
"""From the columns of a data file to a `Row`: preference and response columns, conversations, the published sets."""

from typing import Any

from dschat.data.formats.conversations import message_lists_row, messages_row
from dschat.data.formats.published import PUBLISHED_FORMATS
from dschat.data.formats.rows import DataKeys, Row, check_text, kind_of
from dschat.errors import UserError

CONVERSATION, TEXTS, MESSAGE_LISTS = "conversation", "prompt and responses", "prompt and responses as messages"
COMPLETION = "completion"  # read as the response where no column has that name


def format_of(raw: dict[str, Any], keys: DataKeys) -> str:
    """Name of a row's format, by its columns: the first of PUBLISHED_FORMATS, or one of the three above.

    In these a column that holds null counts as absent.
    """
    for name, (columns, _) in PUBLISHED_FORMATS.items():
        if all(column in raw for column in columns):
            return name
    response = response_column(raw, keys)
    if any(isinstance(raw.get(column), list) for column in (keys.prompt, response, keys.rejected)):
        return MESSAGE_LISTS
    has_response = raw.get(response) is not None
    if raw.get(keys.messages) is not None and not (raw.get(keys.prompt) is not None and has_response):
        return CONVERSATION
    return TEXTS


def response_column(raw: dict[str, Any], keys: DataKeys) -> str:
    """Column of the preferred, or only, response: chosen, else response, else `completion` unless it was renamed."""
    if raw.get(keys.chosen) is not None:
        return keys.chosen
    if keys.response == DataKeys.response and raw.get(keys.response) is None and raw.get(COMPLETION) is not None:
        return COMPLETION
    return keys.response


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
    response = response_column(raw, keys)
    if name == MESSAGE_LISTS:
        return message_lists_row(raw, keys, response, origin)
    chosen = _text(raw, response, "chosen" if response == keys.chosen else "response", origin)
    rejected = _text(raw, keys.rejected, "rejected", origin)
    if name == CONVERSATION:
        return messages_row(raw[keys.messages], keys, (chosen, rejected), raw, origin)
    prompt = _text(raw, keys.prompt, "prompt", origin)
    if prompt is None and keys.prompt in raw:
        raise UserError(f"{origin}: column {keys.prompt!r} is empty; fill it, or remove the row.")
    if prompt is None:
        raise UserError(
            f"{origin}: no column {keys.prompt!r} among {', '.join(map(repr, raw)) or 'none'}; name the prompt's "
            "column with --prompt_key, or a conversation's with --messages_key."
        )
    return Row(prompt, None, chosen, rejected, raw, origin)


def _text(raw: dict[str, Any], column: str, name: str, origin: str) -> str | None:
    """Text of the column that `--NAME_key` names; None where it is absent or null."""
    value = raw.get(column)
    if value is not None:
        remedy = f"correct the row, or name another column with --{name}_key"
        check_text(value, f"column {column!r}", origin, remedy)
    return value
