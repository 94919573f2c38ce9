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
from dschat.data.messages import ROLE_SPELLINGS, THOUGHT_END, Messages, check_messages, conversation_row
from dschat.data.rows import Row, check_text
from dschat.settings.common import ColumnFlags

# Names of the formats.
SHAREGPT = "ShareGPT conversation"
ALPACA = "Alpaca instruction"

# Columns and fields of ShareGPT.
CONVERSATIONS = "conversations"  # used if no column has the name of --messages_key
SPEAKER = "from"
VALUE = "value"
SYSTEM = "system"  # of Alpaca, too

# Columns of Alpaca.
HISTORY = "history"
INSTRUCTION = "instruction"
INPUT = "input"
OUTPUT = "output"

# Speaker of a ShareGPT message → role.
ROLES: Mapping[str, str] = {
    **ROLE_SPELLINGS,
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS = ("function_call", "tool_call")  # speakers whose value is a tool call, as JSON


def sharegpt_keys(raw: Mapping[str, Any], keys: ColumnFlags) -> ColumnFlags:
    """The column names of a row, with `conversations` as the column of messages if that of the flag is empty."""
    if raw.get(keys.messages_key) is None and isinstance(raw.get(CONVERSATIONS), list):
        return replace(keys, messages_key=CONVERSATIONS)
    return keys


def is_sharegpt(raw: Mapping[str, Any], keys: ColumnFlags, response: str) -> bool:
    """Whether a column that is read holds messages with `from` and `value`, or one such message.

    `response` is the column of the preferred, or only, response.
    """
    columns = (sharegpt_keys(raw, keys).messages_key, keys.prompt_key, response, keys.rejected_key)
    return any(_has_speakers(raw.get(column)) for column in columns)


def _has_speakers(value: object) -> bool:
    """Whether a value is a single message, or a list with a message that has `from` and `value`."""
    if isinstance(value, dict):
        return {SPEAKER, VALUE} <= value.keys() or {"role", "content"} <= value.keys()
    if isinstance(value, list):
        return any(isinstance(message, dict) and {SPEAKER, VALUE} <= message.keys() for message in value)
    return False


def from_sharegpt(
    raw: Mapping[str, Any], keys: ColumnFlags, response: str, origin: str
) -> tuple[dict[str, Any], ColumnFlags]:
    """Converts a ShareGPT row to columns whose messages have role and content; also returns the column names.

    A text in column `system` becomes the first message. If the responses are messages, the conversation before them
    becomes the prompt.

    Raises:
        UserError: an unknown speaker, or a tool call that is not JSON; names the row, the column and the message.
    """
    keys = sharegpt_keys(raw, keys)
    columns = dict(raw)
    for column in (keys.messages_key, keys.prompt_key, response, keys.rejected_key):
        if _has_speakers(raw.get(column)):
            columns[column] = _with_roles(raw[column], column, origin)

    def lists_in(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if isinstance(columns.get(name), list)]

    response_lists = lists_in((response, keys.rejected_key))
    if response_lists and lists_in((keys.messages_key,)) and columns.get(keys.prompt_key) is None:
        columns[keys.prompt_key] = columns.pop(keys.messages_key)
    if raw.get(SYSTEM):
        _add_system(columns, keys, response_lists, origin)
    return columns, keys


def _add_system(columns: dict[str, Any], keys: ColumnFlags, response_lists: Sequence[str], origin: str) -> None:
    """Puts the text of column `system` before every list of messages, but for those that are replies alone."""
    prompt = columns.get(keys.prompt_key)
    are_replies = all(_roles_of(columns[name])[:1] == ["assistant"] for name in response_lists)
    if isinstance(prompt, str) and response_lists and are_replies:
        columns[keys.prompt_key] = [{"role": "user", "content": prompt}]
    prompt_columns = (keys.prompt_key, keys.messages_key)
    has_prompt = bool(_roles_of(columns.get(keys.prompt_key)) or _roles_of(columns.get(keys.messages_key)))
    for column in (*prompt_columns, *response_lists):
        roles = _roles_of(columns.get(column))
        is_reply = column in response_lists and has_prompt and roles[:1] == ["assistant"]
        if roles and roles != ["assistant"] and not is_reply:
            columns[column] = _with_system(columns[column], columns, origin)


def _roles_of(messages: Any) -> list[Any]:
    """The roles of a list of messages; empty for anything else."""
    if not isinstance(messages, list):
        return []
    return [message.get("role") for message in messages if isinstance(message, dict)]


def _with_roles(value: Any, column: str, origin: str) -> Messages:
    """The messages of a column with roles in place of speakers; a single message becomes a list."""
    messages = value if isinstance(value, list) else [value]
    converted = []
    for number, message in enumerate(messages, start=1):
        if isinstance(message, dict) and SPEAKER in message:
            message = _with_role(message, f"message {number} of {column!r}", origin)
        converted.append(message)
    return converted


def _with_role(message: Mapping[str, Any], name: str, origin: str) -> dict[str, Any]:
    """A message with role and content in place of speaker and value; `name` says which one it is, for errors."""
    speaker = message[SPEAKER]
    text = message.get(VALUE)
    check_text(speaker, f"{SPEAKER!r} of {name}", origin)
    label = speaker.strip().lower()
    if label not in ROLES:
        raise UserError(
            f"{origin}: {name} is from {speaker!r}, an unknown speaker; known are {', '.join(ROLES)}. Rename the "
            "speaker in the data, or remove the row."
        )
    check_text(text, f"{VALUE!r} of {name}", origin)
    converted = {field: item for field, item in message.items() if field not in (SPEAKER, VALUE)}
    converted["role"] = ROLES[label]
    if label in CALLS:
        converted |= _call_of(str(text), name, origin)
    else:
        converted["content"] = text
    return converted


def _call_of(text: str, name: str, origin: str) -> dict[str, Any]:
    """Content and `tool_calls` of a value that holds a tool call as JSON, or a list of tool calls."""
    thought, end, call_text = text.rpartition(THOUGHT_END)
    try:
        content = json.loads(call_text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{origin}: {name} is a tool call but not valid JSON ({error}); correct the row, or name its speaker gpt."
        ) from error
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UserError(
            f"{origin}: {name} must hold an object with name and arguments, or a list of them; correct the row."
        )
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {"content": thought + end, "tool_calls": tool_calls}


def _with_system(messages: Messages, raw: Mapping[str, Any], origin: str) -> Messages:
    """Messages after the system prompt of the system column, unless they begin with it themselves.

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
    """The message of a system column as a list; empty if the column is."""
    if not raw.get(SYSTEM):
        return []
    check_text(raw[SYSTEM], f"column {SYSTEM!r}", origin)
    return [{"role": "system", "content": raw[SYSTEM]}]


def is_alpaca(raw: Mapping[str, Any], keys: ColumnFlags) -> bool:
    """Whether a row has an instruction and an input or output, but neither a prompt nor messages."""
    if raw.get(keys.prompt_key) is not None or raw.get(keys.messages_key) is not None:
        return False
    return raw.get(INSTRUCTION) is not None and (INPUT in raw or OUTPUT in raw)


def alpaca_response(raw: Mapping[str, Any], keys: ColumnFlags, response: str) -> str:
    """Column of an Alpaca row's preferred, or only, response.

    It is `response` (see `is_sharegpt`) if that holds the preferred response or a flag names it, else `output`.
    """
    is_named = response == keys.chosen_key or keys.response_key != ColumnFlags.response_key
    if raw.get(OUTPUT) is None or (is_named and raw.get(response) is not None):
        return response
    return OUTPUT


def alpaca_row(raw: dict[str, Any], keys: ColumnFlags, response: str, origin: str) -> Row:
    """A row of instruction, input, history and system prompt, all texts. For `response` see `is_sharegpt`.

    Raises:
        UserError: a column holds a value of another type; names the row and the column.
    """
    chosen_column = alpaca_response(raw, keys, response)
    messages = check_messages(alpaca_messages(raw, origin), "instruction", None, origin)
    for column in (chosen_column, keys.rejected_key):
        if raw.get(column) is not None:
            check_text(raw[column], f"column {column!r}", origin)
    return conversation_row(messages, raw.get(chosen_column), raw.get(keys.rejected_key), raw, origin)


def alpaca_messages(raw: Mapping[str, Any], origin: str) -> Messages:
    """System prompt, history, and the instruction with its input after a line break, as messages.

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
    if history is None:
        return []
    are_pairs = isinstance(history, list) and all(_is_pair(turn) for turn in history)
    if not are_pairs:
        raise UserError(
            f"{origin}: column {HISTORY!r} must hold a list of pairs, each a list of an instruction and its response; "
            "correct the row."
        )
    messages: Messages = []
    for number, turn in enumerate(history, start=1):
        for role, text in zip(("user", "assistant"), turn, strict=True):
            check_text(text, f"the {role}'s text of pair {number} in {HISTORY!r}", origin)
            messages.append({"role": role, "content": text})
    return messages


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def read_columns(name: str, raw: Mapping[str, Any], keys: ColumnFlags, response: str) -> tuple[str, ...]:
    """The columns that rows of one of these formats are made from; for `response` see `is_sharegpt`."""
    if name == ALPACA:
        return (SYSTEM, HISTORY, INSTRUCTION, INPUT, alpaca_response(raw, keys, response), keys.rejected_key)
    return (SYSTEM, CONVERSATIONS, keys.messages_key, keys.prompt_key, response, keys.rejected_key)
