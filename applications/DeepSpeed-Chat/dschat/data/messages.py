# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation as data files hold them → messages as chat templates read them.

A message is an object with `role` and `content`; all other fields are kept for the chat template: `tool_calls`,
`reasoning_content`, `name`, `tool_call_id` and so on. A null counts as an absent field in messages, calls, tools and
functions themselves, not inside arguments and schemas, where it says something. Files of columns (parquet, Arrow) fill
the fields that other rows have with null at every depth: those are taken out before, see `without_nulls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dschat.base.errors import UserError
from dschat.data.rows import check_text, is_plain, kind_of

Messages = list[dict[str, Any]]
TOOLS, DOCUMENTS, TEMPLATE_VARIABLES = "tools", "documents", "chat_template_kwargs"
TEMPLATE_COLUMNS = (TOOLS, DOCUMENTS, TEMPLATE_VARIABLES)  # columns of a row that its chat template reads
# Arguments of `apply_chat_template` that are not variables of a template, and functions that templates call.
RESERVED = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "conversations", "strftime_now", "raise_exception"),
)
WEIGHT = "weight"  # of an assistant's message: 0 = not trained on in step 1
# Fields that say the same to other trainers: Axolotl and ms-swift, with false and true as well.
WEIGHT_ALIASES = ("train", "training", "loss")
EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of fields that say nothing; false and 0 do
FUNCTION_CALL, TOOL_CALLS, THOUGHT = "function_call", "tool_calls", "reasoning_content"
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types of a content's parts that are joined
THOUGHT_PARTS = ("reasoning", "thinking")  # types of parts that are an assistant's thought


def check_messages(
    messages: Any,
    column: str,
    flag: str | None,
    origin: str,
) -> Messages:
    """The messages of a column in the form that chat templates read.

    `content` must be text, or a list of parts of text, which are joined; parts that are thoughts become
    `reasoning_content`. An assistant's message with `tool_calls` may lack it. Arguments of tool calls that are JSON
    text become objects, a `function_call` the only one of `tool_calls`, and WEIGHT_ALIASES `weight`.

    Raises:
        UserError: they are none; names the row, the column and the flag, if there is one, that names another one.
    """
    remedy = "correct the row" + (f", or name the conversation's column with {flag}" if flag else "")
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{origin}: column {column!r} must hold a non-empty list of messages, each with role and content; "
            f"{remedy}."
        )
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(
                f"{origin}: message {number} of {column!r} must be an object with role and content; {remedy}."
            )
        checked.append(_checked(message, f"message {number} in {column!r}", origin))
    return checked


def _checked(
    raw: dict[str, Any],
    name: str,
    origin: str,
) -> dict[str, Any]:
    """One message in the form that chat templates read; `name` says which one, for messages of errors."""
    check_text(raw.get("role"), f"role of {name}", origin)
    if raw.keys() == {"role", "content"} and isinstance(raw["content"], str):
        check_text(raw["content"], f"content of {name}", origin)
        return raw
    message = {field: value for field, value in raw.items() if value is not None}
    _take_calls(message, name, origin)
    _take_weight(message, name, origin)
    content = message.get("content")
    if isinstance(content, list):
        _take_parts(message, content, name, origin)
        content = message["content"]
    if content is not None or message["role"] != "assistant" or TOOL_CALLS not in message:
        check_text(content, f"content of {name}", origin)
    return message


def _take_calls(
    message: dict[str, Any],
    name: str,
    origin: str,
) -> None:
    """Brings the calls of a message into the form of `tool_calls`, and removes empty ones."""
    function_call = _parsed(message.pop(FUNCTION_CALL, None))
    calls = _tool_calls(message.pop(TOOL_CALLS, []), name, origin)
    if function_call not in (None, "", {}):
        if not isinstance(function_call, dict):
            raise UserError(f"{origin}: {FUNCTION_CALL} of {name} must be an object; correct the row.")
        if calls:
            raise UserError(
                f"{origin}: {name} has both {FUNCTION_CALL} and {TOOL_CALLS}; remove {FUNCTION_CALL} from the row."
            )
        calls = _tool_calls([{"type": "function", "function": function_call}], name, origin)
    if calls:  # templates ask whether the field is there
        message[TOOL_CALLS] = calls


def _take_weight(
    message: dict[str, Any],
    name: str,
    origin: str,
) -> None:
    """Brings what says whether a message is trained on into the form of `weight`, 0 or 1."""
    weights = {field: message.pop(field) for field in (WEIGHT, *WEIGHT_ALIASES) if field in message}
    for field, value in weights.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(
                f"{origin}: {field} of {name} must be 0 (not trained on) or 1, or false or true, not {value!r}; "
                "correct the row."
            )
    if len(set(weights.values())) > 1:
        raise UserError(
            f"{origin}: {' and '.join(weights)} of {name} contradict each other; correct the row, or remove one."
        )
    for value in weights.values():
        message[WEIGHT] = int(value)


def without_nulls(value: Any) -> Any:
    """A value without the fields of objects that hold null, at every depth.

    Dates, bytes and other values that JSON does not have become texts.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value if is_plain(value) else str(value)


def _take_parts(
    message: dict[str, Any],
    parts: list[Any],
    name: str,
    origin: str,
) -> None:
    """Makes a content that is a list of parts, {"type": "text", "text": …} or a text alone, the text of all.

    An assistant's parts that are thoughts become `reasoning_content`.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        fields = part if isinstance(part, dict) else {"text": part}
        kind = fields.get("type")
        is_thought = kind in THOUGHT_PARTS and message["role"] == "assistant"
        text = fields.get("text")
        if is_thought and text is None:
            text = fields.get(kind)
        if not isinstance(text, str) or not (is_thought or kind in TEXT_PARTS):
            shown = kind if isinstance(part, dict) else kind_of(part)
            raise UserError(
                f"{origin}: content of {name} has a part of type {shown!r}; only texts can be read, and thoughts "
                f"({', '.join(THOUGHT_PARTS)}) of the assistant. Remove the row, or write the part as text."
            )
        (thoughts if is_thought else texts).append(text)
    message["content"] = "".join(texts)
    thought = "".join(thoughts)
    if not thought:
        return
    if message.get(THOUGHT) not in (None, "", thought):
        raise UserError(
            f"{origin}: {name} has a {THOUGHT} and other thoughts in its content; remove one of them from the row."
        )
    check_text(thought, f"thoughts of {name}", origin)
    message[THOUGHT] = thought


def _tool_calls(
    value: Any,
    name: str,
    origin: str,
) -> list[dict[str, Any]]:
    calls = _parsed(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{origin}: tool_calls of {name} must be a list of objects; correct the row.")
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, where they are JSON text, are the object that the text holds.

    Fields of the call and of its function that hold null are left out, arguments that do not.
    """
    call = {field: value for field, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    arguments = _parsed(call.get("arguments"))
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call


def _parsed(value: Any) -> Any:
    """What a JSON text holds; another value, or a text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def template_arguments(
    raw: Mapping[str, Any],
    origin: str,
) -> dict[str, Any]:
    """What a row's columns TEMPLATE_COLUMNS give to its chat template, by the names of the template's variables.

    Each column may hold JSON text. A tool is an object as the API of OpenAI has it; one that is the function alone
    becomes such an object.

    Raises:
        UserError: a column holds something else; names the row and the column.
    """
    arguments: dict[str, Any] = {}
    for column in (TOOLS, DOCUMENTS):
        listed = _parsed(raw.get(column))
        if listed in (None, "", []):
            continue
        items = [_parsed(item) for item in listed] if isinstance(listed, list) else []
        if not items or not all(isinstance(item, dict) for item in items):
            raise UserError(
                f"{origin}: column {column!r} must hold a list of objects, which the chat template reads, or the same "
                "as JSON text; correct the row, or rename the column."
            )
        arguments[column] = [_whole_tool(item) for item in items] if column == TOOLS else items
    variables = _parsed(raw.get(TEMPLATE_VARIABLES))
    if variables in (None, ""):
        return arguments
    if not isinstance(variables, dict):
        raise UserError(
            f"{origin}: column {TEMPLATE_VARIABLES!r} must hold an object with variables of the chat template, not "
            f"{kind_of(variables)}; correct the row, or rename the column."
        )
    reserved = reserved_names(variables)
    if reserved:
        raise UserError(
            f"{origin}: column {TEMPLATE_VARIABLES!r} holds {', '.join(reserved)}, which training sets itself; remove "
            "it from the row."
        )
    return {name: value for name, value in variables.items() if value is not None} | arguments


def reserved_names(variables: Mapping[str, Any]) -> list[str]:
    """Those of a chat template's variables that only the caller of the template sets."""
    return [name for name in RESERVED if name in variables]


def _whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the API of OpenAI has it; its fields and its function's that hold null are left out."""
    tool = {field: value for field, value in tool.items() if value is not None}
    if "name" in tool and "function" not in tool:
        return {"type": "function", "function": tool}
    function = tool.get("function")
    if isinstance(function, dict):
        tool["function"] = {field: value for field, value in function.items() if value is not None}
    return tool


def message_text(message: Mapping[str, Any]) -> str:
    """What a message says, for people to read: its content, and its tool calls as JSON."""
    content = str(message.get("content") or "")
    calls = message.get("tool_calls")
    if not calls:
        return content
    return "\n".join(filter(None, [content, json.dumps(calls, ensure_ascii=False, default=str)]))


def dialogue_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages for people to read: the user's only one as it is, others behind their roles."""
    if [message["role"] for message in messages] == ["user"]:
        return message_text(messages[0])
    return "\n\n".join(f"{message['role'].capitalize()}: {message_text(message)}" for message in messages)
