# SPDX-License-Identifier: Apache-2.0
"""Row formats of other trainers → messages: ShareGPT (`from` and `value`) and Alpaca (`instruction`, `output`).

Columns and speakers are those that LLaMA-Factory, FastChat, Axolotl and Unsloth read. Everything after the conversion
treats such rows like rows of messages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dschat.base.errors import UserError
from dschat.data.messages import Messages, check_messages, template_arguments
from dschat.data.rows import Row, check_text, kind_of
from dschat.settings.common import ColumnFlags

SHAREGPT, ALPACA = "ShareGPT conversation", "Alpaca instruction"  # names of the formats
CONVERSATIONS = "conversations"  # column of a conversation where none has the name of --messages_key
SPEAKER, VALUE = "from", "value"
SYSTEM, HISTORY, INSTRUCTION, INPUT, OUTPUT = "system", "history", "instruction", "input", "output"
# Speaker of a ShareGPT message → role.
ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS = ("function_call", "tool_call")  # speakers whose value is a call of tools, as JSON
THOUGHT_END = "</think>"  # a thought may stand before a call


def sharegpt_keys(raw: Mapping[str, Any], keys: ColumnFlags) -> ColumnFlags:
    """The column names of a row, with `conversations` as the column of messages where that of the flag is empty."""
    if raw.get(keys.messages_key) is None and isinstance(raw.get(CONVERSATIONS), list):
        return replace(keys, messages_key=CONVERSATIONS)
    return keys


def is_sharegpt(
    raw: Mapping[str, Any],
    keys: ColumnFlags,
    response: str,
) -> bool:
    """Whether a column that is read holds messages of `from` and `value`, or one such message.

    `response` is the column of the preferred, or only, response.
    """
    columns = (sharegpt_keys(raw, keys).messages_key, keys.prompt_key, response, keys.rejected_key)
    return any(_has_speakers(raw.get(column)) for column in columns)


def _has_speakers(value: object) -> bool:
    """Whether a value is a single message, or a list that holds one of `from` and `value`."""
    if isinstance(value, dict):
        return {SPEAKER, VALUE} <= value.keys() or {"role", "content"} <= value.keys()
    return isinstance(value, list) and any(
        isinstance(message, dict) and {SPEAKER, VALUE} <= message.keys() for message in value
    )


def from_sharegpt(
    raw: Mapping[str, Any], keys: ColumnFlags, response: str, origin: str
) -> tuple[dict[str, Any], ColumnFlags]:
    """The columns of a ShareGPT row with messages of role and content, and the names of the columns.

    A text in column `system` becomes the first message. Where the responses are messages, the conversation before them
    is the prompt.

    Raises:
        UserError: an unknown speaker, or a call of tools that is no JSON; names the row, the column and the message.
    """
    keys = sharegpt_keys(raw, keys)
    columns = dict(raw)
    for column in (keys.messages_key, keys.prompt_key, response, keys.rejected_key):
        if _has_speakers(raw.get(column)):
            columns[column] = _with_roles(raw[column], column, origin)
    responses = [column for column in (response, keys.rejected_key) if isinstance(columns.get(column), list)]
    if responses and isinstance(columns.get(keys.messages_key), list) and columns.get(keys.prompt_key) is None:
        columns[keys.prompt_key] = columns.pop(keys.messages_key)
    before = [column for column in (keys.messages_key, keys.prompt_key) if isinstance(columns.get(column), list)]
    for column in before[:1] or responses:
        columns[column] = _with_system(columns[column], raw, origin)
    return columns, keys


def _with_roles(value: Any, column: str, origin: str) -> Messages:
    """Messages of one column by role; a single message becomes a list of one."""
    messages = value if isinstance(value, list) else [value]
    converted = []
    for number, message in enumerate(messages, start=1):
        if isinstance(message, dict) and SPEAKER in message:
            message = _with_role(message, f"message {number} of {column!r}", origin)
        converted.append(message)
    return converted


def _with_role(
    message: Mapping[str, Any],
    name: str,
    origin: str,
) -> dict[str, Any]:
    """One message by role, with all its further fields; `name` says which one, for messages of errors."""
    speaker, text = message[SPEAKER], message.get(VALUE)
    check_text(speaker, f"{SPEAKER!r} of {name}", origin)
    label = speaker.strip().lower()
    if label not in ROLES:
        raise UserError(
            f"{origin}: {name} is from {speaker!r}, an unknown speaker; known are {', '.join(ROLES)}. Rename the "
            "speaker in the data, or remove the row."
        )
    check_text(text, f"{VALUE!r} of {name}", origin)
    further = {field: item for field, item in message.items() if field not in (SPEAKER, VALUE)}
    content = _call_of(str(text), name, origin) if label in CALLS else {"content": text}
    return {**further, "role": ROLES[label], **content}


def _call_of(
    text: str,
    name: str,
    origin: str,
) -> dict[str, Any]:
    """Content and `tool_calls` of a value that holds one call of a tool as JSON, or a list of them."""
    thought, end, call_text = text.rpartition(THOUGHT_END)
    try:
        content = json.loads(call_text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{origin}: {name} is a call of tools that is no valid JSON ({error}); correct the row, or name its "
            "speaker gpt."
        ) from error
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UserError(
            f"{origin}: {name} must hold an object with name and arguments, or a list of them; correct the row."
        )
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {"content": thought + end, "tool_calls": tool_calls}


def _with_system(
    messages: Messages,
    raw: Mapping[str, Any],
    origin: str,
) -> Messages:
    """Messages behind the one of the system column, unless they begin with it themselves.

    Raises:
        UserError: they begin with another system prompt.
    """
    added = _system_message(raw, origin)
    first = messages[0] if messages else None
    if not added or not isinstance(first, dict) or first.get("role") != "system":
        return [*added, *messages]
    if first.get("content") != raw[SYSTEM]:
        raise UserError(
            f"{origin}: two system prompts, the conversation's first message and column {SYSTEM!r}; remove one of "
            "them."
        )
    return messages


def _system_message(raw: Mapping[str, Any], origin: str) -> Messages:
    """The message of a system column; none where it is empty."""
    if not raw.get(SYSTEM):
        return []
    check_text(raw[SYSTEM], f"column {SYSTEM!r}", origin)
    return [{"role": "system", "content": raw[SYSTEM]}]


def is_alpaca(raw: Mapping[str, Any], keys: ColumnFlags) -> bool:
    """Whether a row has an instruction beside an input or output, and neither a prompt nor messages."""
    has_others = raw.get(keys.prompt_key) is not None or raw.get(keys.messages_key) is not None
    return not has_others and raw.get(INSTRUCTION) is not None and (INPUT in raw or OUTPUT in raw)


def alpaca_response(
    raw: Mapping[str, Any],
    keys: ColumnFlags,
    response: str,
) -> str:
    """Column of an Alpaca row's preferred, or only, response.

    `response` (as of `is_sharegpt`) where it holds the preferred one or a flag names it, else `output`.
    """
    is_named = response == keys.chosen_key or keys.response_key != ColumnFlags.response_key
    if raw.get(OUTPUT) is None or (is_named and raw.get(response) is not None):
        return response
    return OUTPUT


def alpaca_row(
    raw: dict[str, Any],
    keys: ColumnFlags,
    response: str,
    origin: str,
) -> Row:
    """A row of instruction, input, history and system prompt, all texts.

    `response` is as of `is_sharegpt`.

    Raises:
        UserError: a column holds a value of another type; names the row and the column.
    """
    answered = alpaca_response(raw, keys, response)
    messages = check_messages(alpaca_messages(raw, origin), "instruction", None, origin)
    for column in (answered, keys.rejected_key):
        if raw.get(column) is not None:
            check_text(raw[column], f"column {column!r}", origin)
    arguments = template_arguments(raw, origin)
    chosen, rejected = raw.get(answered), raw.get(keys.rejected_key)
    return Row(None, messages, chosen, rejected, raw, origin, template_arguments=arguments)


def alpaca_messages(raw: Mapping[str, Any], origin: str) -> Messages:
    """System prompt, history, and the instruction with its input behind a line break, as messages.

    Raises:
        UserError: a column holds a value of another type, or instruction and input are empty; names the row.
    """
    texts = []
    for column in (INSTRUCTION, INPUT):
        if raw.get(column) is not None:
            check_text(raw[column], f"column {column!r}", origin)
            texts.append(raw[column])
    question = "\n".join(filter(None, texts))
    if not question:
        raise UserError(f"{origin}: column {INSTRUCTION!r} is empty; fill it, or remove the row.")
    earlier = _history_messages(raw.get(HISTORY), origin)
    return [*_system_message(raw, origin), *earlier, {"role": "user", "content": question}]


def _history_messages(history: Any, origin: str) -> Messages:
    """Earlier turns, pairs of an instruction and its response, as messages."""
    messages: Messages = []
    if history is None:
        return messages
    if not isinstance(history, list) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in history):
        raise UserError(
            f"{origin}: column {HISTORY!r} must hold a list of pairs of an instruction and its response, not "
            f"{kind_of(history)}; correct the row."
        )
    for number, turn in enumerate(history, start=1):
        for role, text in zip(("user", "assistant"), turn, strict=True):
            check_text(text, f"the {role}'s text of pair {number} in {HISTORY!r}", origin)
            messages.append({"role": role, "content": text})
    return messages


def read_columns(
    name: str,
    raw: Mapping[str, Any],
    keys: ColumnFlags,
    response: str,
) -> tuple[str, ...]:
    """The columns of which a row of one of these formats is made; `response` as of `is_sharegpt`."""
    if name == ALPACA:
        answered = alpaca_response(raw, keys, response)
        return (SYSTEM, HISTORY, INSTRUCTION, INPUT, answered, keys.rejected_key)
    return (SYSTEM, CONVERSATIONS, keys.messages_key, keys.prompt_key, response, keys.rejected_key)
