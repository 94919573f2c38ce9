# SPDX-License-Identifier: Apache-2.0
"""Rows whose texts are lists of messages: a conversation, or a prompt and responses written as messages.

The two forms of preference data are read alike: `prompt` holds the messages that both responses answer (explicit), or
`chosen` and `rejected` repeat them (implicit). What both share is the prompt, the last message of each the response.
"""

from collections.abc import Sequence
from typing import Any

from dschat.data.formats.rows import DataKeys, Row, check_text, kind_of
from dschat.errors import UserError

QUOTED = 60  # characters of a message in an error
PROMPT_MESSAGES = "prompt_messages"  # column of results: the messages of which a chat template made the prompt

Messages = list[dict[str, Any]]


def messages_row(
    messages: Any, keys: DataKeys, texts: tuple[str | None, str | None], raw: dict[str, Any], origin: str
) -> Row:
    """A conversation in a column of its own: its last message is the response if the assistant wrote it.

    Args:
        messages: what the column holds.
        keys: column names.
        texts: the chosen and the rejected response of other columns.
        raw: the row.
        origin: where it stands.

    Raises:
        UserError: it is no list of messages, holds nothing but the response, or there are two responses.
    """
    chosen, rejected = texts
    checked = check_messages(messages, keys.messages, "--messages_key", origin)
    if checked[-1]["role"] != "assistant":
        return Row(None, checked, chosen, rejected, raw, origin)
    if chosen is not None:
        raise UserError(
            f"{origin}: two responses, the last message of {keys.messages!r} and another column; remove one of them, "
            "or name the right columns with --messages_key, --chosen_key and --response_key."
        )
    if len(checked) == 1:
        raise UserError(f"{origin}: {keys.messages!r} holds only the response; put at least one message before it.")
    return Row(None, checked[:-1], checked[-1]["content"], rejected, raw, origin)


def message_lists_row(raw: dict[str, Any], keys: DataKeys, answered: str, origin: str) -> Row:
    """A row in which the prompt, the responses or both are lists of messages.

    Args:
        raw: the row.
        keys: column names.
        answered: the column of the preferred, or only, response.
        origin: where the row stands.

    Raises:
        UserError: a list is no conversation that ends with the assistant, one response is a text and the other a list,
            or the two are no answers to the same messages; names the row, the columns and what differs.
    """
    prompt: str | Messages | None = raw.get(keys.prompt)
    if isinstance(prompt, list):
        check_messages(prompt, keys.prompt, "--prompt_key", origin)
    elif prompt is not None:
        check_text(prompt, f"column {keys.prompt!r}", origin)
    told = {column: raw[column] for column in (answered, keys.rejected) if raw.get(column) is not None}
    if len({type(value) for value in told.values()}) > 1:
        kinds = " and ".join(f"{column!r} {kind_of(value)}" for column, value in told.items())
        raise UserError(f"{origin}: {kinds}; give both as text or both as lists of messages.")
    if isinstance(prompt, list) and not any(isinstance(value, list) for value in told.values()):
        if prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{origin}: the last message of {keys.prompt!r} is the assistant's, so there is nothing to answer; "
                "end the prompt with a message of the user, or name a whole conversation's column with --messages_key."
            )
        for column, text in told.items():
            check_text(text, f"column {column!r}", origin)
        return Row(None, prompt, told.get(answered), told.get(keys.rejected), raw, origin)
    flags = {keys.chosen: "--chosen_key", keys.rejected: "--rejected_key"}
    whole = {}
    for column, value in told.items():
        messages = check_messages(value, column, flags.get(column, "--response_key"), origin)
        whole[column] = _whole(prompt, messages, column, keys, origin)
    _check_same_prompt(whole, origin)
    last = {column: str(messages[-1]["content"]) for column, messages in whole.items()}
    shared = next(iter(whole.values()))[:-1]
    return Row(None, shared, last.get(answered), last.get(keys.rejected), raw, origin)


def dialogue_text(messages: Messages) -> str:
    """Messages for people to read: the user's only one as it is, others behind their roles."""
    if [message["role"] for message in messages] == ["user"]:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)


def check_messages(messages: Any, column: str, flag: str | None, origin: str) -> Messages:
    """The messages of a column, each an object with the texts role and content.

    Raises:
        UserError: they are none; names the row, the column and the flag, if there is one, that names another one.
    """
    remedy = "correct the row" + (f", or name the conversation's column with {flag}" if flag else "")
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{origin}: column {column!r} must hold a non-empty list of messages, each with role and content; "
            f"{remedy}."
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(
                f"{origin}: message {number} of {column!r} must be an object with role and content; {remedy}."
            )
        for name in ("role", "content"):
            check_text(message.get(name), f"{name} of message {number} in {column!r}", origin)
    return messages


def _whole(prompt: str | Messages | None, messages: Messages, column: str, keys: DataKeys, origin: str) -> Messages:
    """The conversation that ends with a response: the prompt's messages, unless the column repeats them, and its own.

    Raises:
        UserError: the column repeats another prompt, ends with somebody else's message, or holds the response alone.
    """
    if isinstance(prompt, list):
        repeats = len(messages) > len(prompt) and _said(messages[: len(prompt)]) == _said(prompt)
        if not repeats and messages[0]["role"] in (prompt[-1]["role"], "system"):
            other = f"{column!r} begins with other messages than {keys.prompt!r} holds ({_quoted(messages[0])})"
            raise UserError(f"{origin}: {other}; {_without_prompt(column)}.")
        messages = messages if repeats else [*prompt, *messages]
    elif prompt is not None and messages[0]["role"] == "assistant":
        messages = [{"role": "user", "content": prompt}, *messages]
    elif prompt is not None:
        if not any(role == "user" and text.strip() == prompt.strip() for role, text in _said(messages[:-1])):
            other = f"no message of the user in {column!r} says what column {keys.prompt!r} says"
            raise UserError(f"{origin}: {other} ({prompt[:QUOTED]!r}); {_without_prompt(column)}.")
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{origin}: the last message of {column!r} is of {messages[-1]['role']!r}; it is the response, so it must "
            "be the assistant's. Add it, or remove the row."
        )
    if len(messages) == 1:
        raise UserError(
            f"{origin}: {column!r} holds only the response; put the messages that it answers before it, or into column"
            f" {keys.prompt!r}."
        )
    return messages


def _without_prompt(column: str) -> str:
    return f"correct the row, or give --prompt_key the name of a column that is not there, to read {column!r} alone"


def _check_same_prompt(whole: dict[str, Messages], origin: str) -> None:
    """Both conversations must be the same up to their last messages."""
    if len(whole) < 2:
        return
    (first, one), (second, other) = whole.items()
    for number, pair in enumerate(zip(one[:-1], other[:-1], strict=False), start=1):
        if len(set(_said(pair))) > 1:
            raise UserError(
                f"{origin}: {first!r} and {second!r} differ in message {number} already ({_quoted(pair[0])} and "
                f"{_quoted(pair[1])}); only their last messages, the responses, may differ. Correct or remove the row."
            )
    if len(one) != len(other):
        raise UserError(
            f"{origin}: {first!r} comes to {len(one)} messages, {second!r} to {len(other)}; both must be the same up "
            "to their last message, the response. Correct or remove the row."
        )


def _said(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _quoted(message: dict[str, Any]) -> str:
    text = message["content"]
    return f"{message['role']}: {text[:QUOTED]!r}{'…' if len(text) > QUOTED else ''}"
