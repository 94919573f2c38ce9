# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation as data files hold them → messages as chat templates read them.

A message is an object with `role` and `content`; all other fields are kept for the chat template: `tool_calls`,
`reasoning_content`, `name`, `tool_call_id` and so on. A null counts as an absent field in messages, calls, tools and
functions themselves, but not inside arguments and schemas, where it has a meaning. Files of columns (parquet, Arrow)
fill the fields that only other rows have with null, at every depth: these are removed first, see `without_nulls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import without_repeats
from dschat.data.rows import Row, check_text, check_texts_in, is_plain, kind_of

Messages = list[dict[str, Any]]
# Columns of a row that its chat template reads.
TOOLS = "tools"
DOCUMENTS = "documents"
TEMPLATE_VARIABLES = "chat_template_kwargs"
TEMPLATE_COLUMNS = (TOOLS, DOCUMENTS, TEMPLATE_VARIABLES)
# Arguments of `apply_chat_template` that are not variables of a template, and functions that templates call.
RESERVED = (
    "conversation",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "conversations",
    "strftime_now",
    "raise_exception",
)
# Fields of messages.
WEIGHT = "weight"  # 0 = step 1 does not train on this message of the assistant
WEIGHT_ALIASES = ("train", "training", "loss")  # the names in Axolotl and ms-swift, where false and true are allowed
TOOL_CALLS = "tool_calls"
THOUGHT = "reasoning_content"
THOUGHT_END = "</think>"
EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of fields without content; false and 0 are contents
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types of a content's parts that are joined
SPEAKERS = re.compile(r"\n\n(Human|Assistant):")  # in the prompts of HH-RLHF
ASSISTANT = "\n\nAssistant:"  # what a reply of a prompt of HH-RLHF follows
QUOTED = 100  # characters of a tool call that an error shows
# Roles in other spellings, in lower case → the role that chat templates read.
ROLE_SPELLINGS: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "tool": "tool",
}


def check_messages(messages: Any, column: str, flag: str | None, origin: str) -> Messages:
    """The messages of a column in the form that chat templates read.

    `content` must be text, or a list of parts of text, which are joined. An assistant's message with `tool_calls` may
    lack it. Arguments of tool calls that are JSON text become objects, and WEIGHT_ALIASES become `weight`.

    Raises:
        UserError: these are no messages; names the row, the column and, if there is one, the flag that names the
            column.
    """
    remedy = "correct the row"
    if flag:
        remedy += f", or name the conversation's column with {flag}"
    if isinstance(messages, str):
        remedy = "write it as a list, into a file of JSON Lines or Parquet (cells of CSV are always text)"
    if not isinstance(messages, list) or not messages:
        kind = "" if isinstance(messages, list) else f", not {kind_of(messages)}"
        raise UserError(
            f"{origin}: column {column!r} must hold a non-empty list of messages, each with role and content{kind}; "
            f"{remedy}."
        )
    converted = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(
                f"{origin}: message {number} of {column!r} must be an object with role and content; {remedy}."
            )
        converted.append(_convert_message(message, f"message {number} in {column!r}", origin))
    return converted


def _convert_message(raw: dict[str, Any], name: str, origin: str) -> dict[str, Any]:
    """A message in the form that chat templates read; `name` says which one it is, for errors."""
    _check_role(raw.get("role"), name, origin)
    if raw.keys() == {"role", "content"} and isinstance(raw["content"], str):
        check_text(raw["content"], f"content of {name}", origin)
        return raw
    message = _without_null_fields(raw)
    calls = _tool_calls(message.pop(TOOL_CALLS, []), name, origin)
    if calls:  # templates test whether the field exists
        message[TOOL_CALLS] = calls
    _convert_weight(message, name, origin)
    content = message.get("content")
    if isinstance(content, list):
        content = _joined_parts(content, name, origin)
        message["content"] = content
    if content is not None or message["role"] != "assistant" or TOOL_CALLS not in message:
        check_text(content, f"content of {name}", origin)
    for field, value in message.items():
        check_texts_in(value, f"{field} of {name}", origin)
    return message


def _check_role(role: Any, name: str, origin: str) -> None:
    """Raises UserError unless a role is text, and not another spelling of a role that chat templates read.

    Many templates write any role into the prompt: a reply of "gpt" or "Assistant" would be read as a part of it.
    """
    check_text(role, f"role of {name}", origin)
    template_role = ROLE_SPELLINGS.get(role.strip().lower(), role)
    if role != template_role:
        raise UserError(
            f"{origin}: role of {name} is {role!r}, which chat templates do not read as {template_role!r}; write "
            f"{template_role!r}."
        )


def _convert_weight(message: dict[str, Any], name: str, origin: str) -> None:
    """Converts the field that says whether a message is trained on to `weight`, 0 or 1."""
    weights = {}
    for field in (WEIGHT, *WEIGHT_ALIASES):
        if field in message:
            weights[field] = message.pop(field)
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


def _joined_parts(parts: list[Any], name: str, origin: str) -> str:
    """The text of a content of parts, each {"type": "text", "text": …} or a text."""
    texts: list[str] = []
    for part in parts:
        fields = part if isinstance(part, dict) else {"text": part}
        text = fields.get("text")
        if not isinstance(text, str) or fields.get("type") not in TEXT_PARTS:
            shown = fields.get("type") if isinstance(part, dict) else kind_of(part)
            raise UserError(
                f"{origin}: content of {name} has a part of type {shown!r}; only texts can be read. Remove the row, "
                f"or write the part as text, and a thought as {THOUGHT} beside the content."
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(value: Any, name: str, origin: str) -> list[dict[str, Any]]:
    calls = _parsed(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{origin}: tool_calls of {name} must be a list of objects; correct the row.")
    converted = []
    for call in calls:
        converted_call = _parse_arguments(call, name, origin)
        function = converted_call.get("function", converted_call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            raise UserError(
                f"{origin}: a tool call of {name} must hold a function with name and arguments, {{}} for none, not "
                f"{json.dumps(call, default=str)[:QUOTED]}; correct the row."
            )
        converted.append(converted_call)
    return converted


def _parse_arguments(call: dict[str, Any], name: str, origin: str) -> dict[str, Any]:
    """A tool call, or its function, with arguments as an object even if they are JSON text.

    Fields of the call and of its function that hold null are left out; arguments that hold null are kept.

    Raises:
        UserError: the arguments are neither an object nor the JSON text of one; a template would write them as they
            are, and the model would learn calls that cannot be read.
    """
    call = _without_null_fields(call)
    if isinstance(call.get("function"), dict):
        call["function"] = _parse_arguments(call["function"], name, origin)
        return call
    if "arguments" not in call:
        return call
    arguments = _parsed(call["arguments"])
    if not isinstance(arguments, dict):
        raise UserError(
            f"{origin}: a tool call of {name} has the arguments {call['arguments']!r}; they must be an object or the "
            "JSON text of one, {} for none. Correct the row."
        )
    call["arguments"] = arguments
    return call


def _parsed(value: Any) -> Any:
    """The content of a JSON text; other values, and texts that are not JSON or repeat a key, as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError):
        return value


def template_arguments(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Variables of the chat template from a row's TEMPLATE_COLUMNS, by name.

    Each column may hold JSON text. A tool is an object as in OpenAI's API; a function alone is wrapped into such an
    object.

    Raises:
        UserError: a column holds something else; names the row and the column.
    """
    arguments: dict[str, Any] = {}
    for column in (TOOLS, DOCUMENTS):
        items = _parsed(raw.get(column))
        if items in (None, "", []):
            continue
        objects = [_parsed(item) for item in items] if isinstance(items, list) else []
        if not objects or not all(isinstance(item, dict) for item in objects):
            raise UserError(
                f"{origin}: column {column!r} must hold a list of objects, which the chat template reads, or the same "
                "as JSON text; correct the row, or rename the column."
            )
        check_texts_in(objects, f"a text in column {column!r}", origin)
        arguments[column] = list(map(_whole_tool, objects)) if column == TOOLS else objects
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
    check_texts_in(variables, f"a text in column {TEMPLATE_VARIABLES!r}", origin)
    return _without_null_fields(variables) | arguments


def conversation_row(
    messages: Messages,
    chosen: str | dict[str, Any] | None,
    rejected: str | dict[str, Any] | None,
    raw: dict[str, Any],
    origin: str,
    no_response: str | None = None,
) -> Row:
    """A row of messages, whose responses are texts or messages of the assistant.

    A response is kept as a message if it has other fields than role and content.
    """
    return Row(
        prompt=None,
        messages=messages,
        chosen=_text_of(chosen),
        rejected=_text_of(rejected),
        extra=raw,
        origin=origin,
        no_response=no_response,
        chosen_message=_with_other_fields(chosen),
        rejected_message=_with_other_fields(rejected),
        template_arguments=template_arguments(raw, origin),
    )


def _text_of(response: str | dict[str, Any] | None) -> str | None:
    return response.get("content", "") if isinstance(response, dict) else response


def _with_other_fields(response: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """A response that is a message with other fields than role and content, else None."""
    return response if isinstance(response, dict) and response.keys() != {"role", "content"} else None


def reserved_names(variables: Mapping[str, Any]) -> list[str]:
    """The names among a chat template's variables that only the caller of the template may set."""
    return [name for name in RESERVED if name in variables]


def _whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as in OpenAI's API; fields of the tool and of its function that hold null are left out."""
    tool = _without_null_fields(tool)
    if "name" in tool and "function" not in tool:
        return {"type": "function", "function": tool}
    function = tool.get("function")
    if isinstance(function, dict):
        tool["function"] = _without_null_fields(function)
    return tool


def _without_null_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def trains_response(row: Row) -> bool:
    """Whether step 1 trains on the preferred response of a row: unless its weight is 0."""
    # Only a response with further fields is kept as a message; one of them may be its weight.
    return (row.chosen_message or {}).get(WEIGHT) != 0


def is_unwritten(message: Mapping[str, Any] | None, text: str) -> bool:
    """Whether the text written for a message is blank though it holds something, such as tool calls or thoughts."""
    return message is not None and has_further_fields(message) and not text.strip()


def has_further_fields(message: Mapping[str, Any]) -> bool:
    """Whether a message holds something in addition to role, content and weight."""
    for name, value in message.items():
        if name not in ("role", "content", WEIGHT) and value not in EMPTY:
            return True
    return False


def message_text(message: Mapping[str, Any]) -> str:
    """A message for people to read: its content, and its tool calls as JSON."""
    content = str(message.get("content") or "")
    calls = message.get("tool_calls")
    if not calls:
        return content
    calls_text = json.dumps(calls, ensure_ascii=False, default=str)
    return f"{content}\n{calls_text}" if content else calls_text


def messages_of_text(prompt: str) -> Messages | None:
    """A prompt of HH-RLHF as messages; None for other texts.

    Every speaker comes after a blank line, and the last one is to reply.

    Example: "\\n\\nHuman: Hi.\\n\\nAssistant: Hello.\\n\\nHuman: Bye.\\n\\nAssistant:" has three messages.
    """
    pieces = SPEAKERS.split(prompt)
    has_text_before = bool(pieces[0].strip())
    if has_text_before or len(pieces) < 3 or pieces[-2] != "Assistant" or pieces[-1].strip():
        return None
    messages = []
    speakers = pieces[1:-2:2]
    texts = pieces[2:-2:2]
    for speaker, text in zip(speakers, texts, strict=True):
        role = "assistant" if speaker == "Assistant" else "user"
        messages.append({"role": role, "content": text.strip()})
    return messages


def dialogue_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages for people to read: a single message of the user as it is, others after their roles."""
    if [message["role"] for message in messages] == ["user"]:
        return message_text(messages[0])
    return "\n\n".join(f"{message['role'].capitalize()}: {message_text(message)}" for message in messages)


def quoted_dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages after their roles, for a judge: every line of a message begins with a bar.

    No message can therefore pose as another one.
    """
    blocks = []
    for message in messages:
        blocks.append(f"{str(message['role']).capitalize()}:\n{quoted_lines(message_text(message))}")
    return "\n\n".join(blocks)


def quoted_lines(text: str) -> str:
    """A text with a bar before each line."""
    return "\n".join(f"| {line}" for line in text.splitlines())
