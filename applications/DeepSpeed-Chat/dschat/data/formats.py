# SPDX-License-Identifier: Apache-2.0
"""Makes a `Row` from the columns of a data file: texts, lists of messages, the published data sets.

Preference data come in two forms: `prompt` holds the messages that both responses answer (explicit), or `chosen` and
`rejected` repeat them (implicit; for texts see `dschat.data.transcripts`). The messages that both share are the
prompt, the last message of each the response.

Prompts and responses of the published sets are those of the published runs, character by character: a reward model
that was trained on one form scores another form differently. HH-RLHF has the columns of `ColumnFlags`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dschat.base.errors import UserError
from dschat.data import chat_formats
from dschat.data.chat_formats import ALPACA, SHAREGPT
from dschat.data.messages import (
    ASSISTANT,
    TEMPLATE_COLUMNS,
    WEIGHT,
    Messages,
    check_messages,
    conversation_row,
    message_text,
    messages_of_text,
    template_arguments,
    without_nulls,
)
from dschat.data.rows import Row, SkipReason, check_text, kind_of
from dschat.settings.common import ColumnFlags

CONVERSATION = "conversation"
TEXTS = "prompt and responses"
MESSAGE_LISTS = "prompt and responses as messages"
TRANSCRIPTS = "dialogues as chosen and rejected"
GSM8K = "GSM8K problem"
# The instruction of the published runs of PPO on GSM8K.
GSM8K_INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
COMPLETION = "completion"  # read as the response if no column has the name of --response_key
QUOTED = 60  # characters of a message that an error shows
PROMPT_MESSAGES = "prompt_messages"  # column of results: the messages from which a chat template made the prompt
NO_TEXT = "neither post nor article"  # why a TL;DR row is skipped
NO_SOLUTION = "no reference solution"  # why an APPS row has no response
NO_LAST_REPLY = "no reply to the last message"  # why a dialogue has no response
# A list of objects as JSON, or as Python prints it, which is what CSV files made from rows of messages hold.
OBJECTS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:.*\}\s*\]\s*""", re.DOTALL)
KEYS_OF_A_MESSAGE = (("role", "content"), ("from", "value"))
# Citations: with the space before them, then without one.
_CITATIONS = (re.compile(r" [\(\[].*?[\)\]]"), re.compile(r"[\(\[].*?[\)\]]"))


def _is_messages_text(prompt: str) -> bool:
    """Whether a prompt is a list of messages that was written as text."""
    if not OBJECTS_AS_TEXT.fullmatch(prompt):
        return False
    for keys in KEYS_OF_A_MESSAGE:
        if all(re.search(rf"""(['"]){key}\1\s*:""", prompt) for key in keys):
            return True
    return False


def format_of(raw: dict[str, Any], keys: ColumnFlags) -> str:
    """Name of a row's format, by its columns: the first of PUBLISHED_FORMATS, ShareGPT, Alpaca, or one of those above.

    In all but the published formats a column that holds null counts as absent.
    """
    for name, (columns, _) in PUBLISHED_FORMATS.items():
        if all(column in raw for column in columns):
            return name
    response = response_column(raw, keys)
    if chat_formats.is_sharegpt(raw, keys, response):
        return SHAREGPT
    text_columns = (keys.prompt_key, response, keys.rejected_key)
    if any(isinstance(raw.get(column), list) for column in text_columns):
        return MESSAGE_LISTS
    keys = chat_formats.sharegpt_keys(raw, keys)
    if chat_formats.is_alpaca(raw, keys):
        return ALPACA
    has_prompt = raw.get(keys.prompt_key) is not None
    if raw.get(keys.messages_key) is not None and not (has_prompt and raw.get(response) is not None):
        return CONVERSATION
    has_responses = any(raw.get(column) is not None for column in (response, keys.rejected_key))
    if not has_prompt and not has_responses and _is_gsm8k(raw):
        return GSM8K
    sides = [str(raw[column]) for column in (response, keys.rejected_key) if column in raw]
    if not has_prompt and len(sides) == 2 and any(ASSISTANT in side for side in sides):
        return TRANSCRIPTS
    return TEXTS


def _is_gsm8k(raw: dict[str, Any]) -> bool:
    """Whether a row is of GSM8K: a question, and a solution that ends with #### and its result."""
    return isinstance(raw.get("question"), str) and "\n#### " in str(raw.get("answer"))


def response_column(raw: dict[str, Any], keys: ColumnFlags) -> str:
    """Column of the preferred, or only, response: chosen, else response, else `completion` unless it was renamed."""
    if raw.get(keys.chosen_key) is not None:
        return keys.chosen_key
    is_default = keys.response_key == ColumnFlags.response_key
    if is_default and raw.get(keys.response_key) is None and raw.get(COMPLETION) is not None:
        return COMPLETION
    return keys.response_key


def parse_row(raw: Any, keys: ColumnFlags, origin: str, fills_nulls: bool = False) -> Row | SkipReason:
    """Parses one row by its format, see `format_of`.

    Args:
        raw: the row as it was read.
        keys: the names of the columns.
        origin: where the row comes from, for messages.
        fills_nulls: see `RawSource`; nulls inside messages and tools then count as absent fields at every depth.

    Returns:
        The row; or why it is skipped, if its format allows such rows.

    Raises:
        UserError: the row is not an object, lacks a column or holds a value of the wrong type; the message names
            `origin`, the column and the flag that renames it.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{origin}: {kind_of(raw)} instead of an object with columns; correct the row.")
    columns = raw
    if fills_nulls and format_of(raw, keys) not in PUBLISHED_FORMATS:
        columns = dict(raw)
        for name, value in raw.items():
            if isinstance(value, list | dict):
                columns[name] = without_nulls(value)
    row = _parse_columns(columns, keys, origin)
    if isinstance(row, str):
        return row
    if columns is not raw:
        row = replace(row, extra=raw)
    if row.prompt is not None and keys.apply_chat_template:
        messages = messages_of_text(row.prompt)
        if messages is None:
            messages = [{"role": "user", "content": row.prompt}]
        else:  # replies of HH-RLHF begin with the blank behind "Assistant:"
            chosen = row.chosen and row.chosen.strip()
            row = replace(row, chosen=chosen, rejected=row.rejected and row.rejected.strip())
        arguments = template_arguments(without_nulls(raw) if fills_nulls else raw, origin)
        row = replace(row, prompt=None, messages=messages, template_arguments=arguments)
    return row


def _parse_columns(raw: dict[str, Any], keys: ColumnFlags, origin: str) -> Row | SkipReason:
    """`parse_row` for an object whose nulls were removed; a prompt of text stays text."""
    name = format_of(raw, keys)
    if name in PUBLISHED_FORMATS:
        return _published_row(name, raw, origin)
    response = response_column(raw, keys)
    if name == SHAREGPT:
        columns, sharegpt_keys = chat_formats.from_sharegpt(raw, keys, response, origin)
        row = _parse_columns(columns, sharegpt_keys, origin)
        return row if isinstance(row, str) else replace(row, extra=raw)
    if name == ALPACA:
        return chat_formats.alpaca_row(raw, keys, response, origin)
    keys = chat_formats.sharegpt_keys(raw, keys)
    if name == MESSAGE_LISTS:
        return message_lists_row(raw, keys, response, origin)
    chosen = _text(raw, response, "chosen" if response == keys.chosen_key else "response", origin)
    rejected = _text(raw, keys.rejected_key, "rejected", origin)
    if name == CONVERSATION:
        return messages_row(raw[keys.messages_key], keys, (chosen, rejected), raw, origin)
    if name == TRANSCRIPTS:
        from dschat.data.transcripts import transcripts_row

        return transcripts_row(chosen or "", rejected or "", raw, origin, keys.apply_chat_template)
    if name == GSM8K:
        end = "" if keys.apply_chat_template else "\n"
        return Row(raw["question"] + GSM8K_INSTRUCTION + end, None, raw["answer"], None, raw, origin)
    prompt = _text(raw, keys.prompt_key, "prompt", origin)
    if prompt is not None and _is_messages_text(prompt):
        raise UserError(
            f"{origin}: column {keys.prompt_key!r} holds a list of messages as text, which would be read as one plain "
            "prompt; write it as a list, into a file of JSON Lines or parquet (cells of CSV are always text)."
        )
    if prompt is not None:
        return Row(prompt, None, chosen, rejected, raw, origin)
    if keys.prompt_key in raw:
        raise UserError(f"{origin}: column {keys.prompt_key!r} is empty; fill it, or remove the row.")
    raise UserError(
        f"{origin}: no column {keys.prompt_key!r} among {', '.join(map(repr, raw)) or 'none'}; name the prompt's "
        "column with --prompt_key, or a conversation's with --messages_key."
    )


def _text(raw: dict[str, Any], column: str, name: str, origin: str) -> str | None:
    """Text of the column that `--NAME_key` names; None if it is absent or null."""
    value = raw.get(column)
    if value is not None:
        remedy = f"correct the row, or name another column with --{name}_key"
        check_text(value, f"column {column!r}", origin, remedy)
    return value


def messages_row(
    messages: Any, keys: ColumnFlags, texts: tuple[str | None, str | None], raw: dict[str, Any], origin: str
) -> Row:
    """A row with a conversation in one column; its last message is the response if it is the assistant's.

    `texts` are the chosen and the rejected response in other columns.

    Raises:
        UserError: the column is not a list of messages or holds only the response, or there are two responses.
    """
    chosen, rejected = texts
    conversation = check_messages(messages, keys.messages_key, "--messages_key", origin)
    if conversation[-1]["role"] != "assistant":
        has_replies = any(message["role"] == "assistant" for message in conversation)
        no_response = NO_LAST_REPLY if has_replies and chosen is None else None
        return conversation_row(conversation, chosen, rejected, raw, origin, no_response)
    if chosen is not None:
        raise UserError(
            f"{origin}: two responses, the last message of {keys.messages_key!r} and another column; remove one of "
            "them, or name the right columns with --messages_key, --chosen_key and --response_key."
        )
    if len(conversation) == 1:
        raise UserError(
            f"{origin}: {keys.messages_key!r} holds only the response; put at least one message before it."
        )
    return conversation_row(conversation[:-1], conversation[-1], rejected, raw, origin)


def message_lists_row(raw: dict[str, Any], keys: ColumnFlags, response: str, origin: str) -> Row | SkipReason:
    """A row in which the prompt, the responses or both are lists of messages; or why it is skipped, if these differ.

    `response` is the column of the preferred, or only, response.

    Raises:
        UserError: a list is not a conversation that ends with the assistant, or one response is a text and the other a
            list; names the row and the columns.
    """
    prompt: str | Messages | None = raw.get(keys.prompt_key)
    if prompt is None and isinstance(raw.get(keys.messages_key), list):
        prompt = check_messages(raw[keys.messages_key], keys.messages_key, "--messages_key", origin)
    elif isinstance(prompt, list):
        prompt = check_messages(prompt, keys.prompt_key, "--prompt_key", origin)
    elif prompt is not None:
        check_text(prompt, f"column {keys.prompt_key!r}", origin)
    responses = {}
    for column in (response, keys.rejected_key):
        if raw.get(column) is not None:
            responses[column] = raw[column]
    if len({type(value) for value in responses.values()}) > 1:
        kinds = " and ".join(f"{column!r} {kind_of(value)}" for column, value in responses.items())
        raise UserError(f"{origin}: {kinds}; give both as text or both as lists of messages.")

    has_message_lists = any(isinstance(value, list) for value in responses.values())
    if isinstance(prompt, list) and not has_message_lists:
        if prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{origin}: the last message of {keys.prompt_key!r} is the assistant's, so there is nothing to "
                "answer; end the prompt with a message of the user, or name a whole conversation's column with "
                "--messages_key, and with --prompt_key a column that is not there."
            )
        for column, text in responses.items():
            check_text(text, f"column {column!r}", origin)
        return conversation_row(prompt, responses.get(response), responses.get(keys.rejected_key), raw, origin)

    flags = {keys.chosen_key: "--chosen_key", keys.rejected_key: "--rejected_key"}
    conversations: dict[str, Messages] = {}
    for column, value in responses.items():
        messages = check_messages(value, column, flags.get(column, "--response_key"), origin)
        conversations[column] = _join_conversation(prompt, messages, column, keys, origin)
    if len(conversations) == 2:
        from dschat.data.transcripts import shared_turns

        shared = shared_turns(*map(_without_weights, conversations.values()))
        if isinstance(shared, str):
            return shared
    for column, messages in conversations.items():
        _check_reply(messages, column, keys, origin)
    shared_messages = next(iter(conversations.values()))[:-1]
    last_messages = {column: messages[-1] for column, messages in conversations.items()}
    return conversation_row(
        shared_messages, last_messages.get(response), last_messages.get(keys.rejected_key), raw, origin
    )


def unread_columns(row: Row, keys: ColumnFlags) -> list[str]:
    """Columns of a row that hold something, but are read neither for its texts nor by its chat template.

    All columns of the published formats count as read.
    """
    raw = row.extra
    name = format_of(raw, keys)
    response = response_column(raw, keys)
    if name == GSM8K or name in PUBLISHED_FORMATS:
        return []
    if name in (SHAREGPT, ALPACA):
        read_columns = {*chat_formats.read_columns(name, raw, keys, response)}
    else:
        read_columns = {response, keys.rejected_key}
        if name == CONVERSATION:
            read_columns.add(chat_formats.sharegpt_keys(raw, keys).messages_key)
        else:
            read_columns.add(keys.messages_key if raw.get(keys.prompt_key) is None else keys.prompt_key)
    if row.messages is not None:
        read_columns.update(TEMPLATE_COLUMNS)
    unread: list[str] = []
    for column, value in raw.items():
        if value is not None and column not in read_columns:
            unread.append(column)
    return unread


def _join_conversation(
    prompt: str | Messages | None, messages: Messages, column: str, keys: ColumnFlags, origin: str
) -> Messages:
    """The conversation that ends with a response: the messages of the prompt, then those of the column.

    A column that repeats the prompt holds the whole conversation.

    Raises:
        UserError: the column repeats another prompt.
    """
    remedy = f"correct the row, or give --prompt_key the name of a column that is not there, to read {column!r} alone"
    if isinstance(prompt, list):
        beginning = messages[: len(prompt)]
        repeats_prompt = len(messages) > len(prompt) and _without_weights(beginning) == _without_weights(prompt)
        if not repeats_prompt and messages[0]["role"] in (prompt[-1]["role"], "system"):
            raise UserError(
                f"{origin}: {column!r} begins with other messages than {keys.prompt_key!r} holds "
                f"({_quoted(messages[0])}); {remedy}."
            )
        if not repeats_prompt:
            messages = [*prompt, *messages]
    elif prompt is not None and messages[0]["role"] == "assistant":
        messages = [{"role": "user", "content": prompt}, *messages]
    elif prompt is not None:
        user_messages = []
        for message in messages[:-1]:
            if message["role"] == "user":
                user_messages.append(message)
        user_texts = [message_text(message).strip() for message in user_messages]
        if prompt.strip() not in user_texts:
            raise UserError(
                f"{origin}: no message of the user in {column!r} says what column {keys.prompt_key!r} says "
                f"({prompt[:QUOTED]!r}); {remedy}."
            )
    return messages


def _check_reply(messages: Messages, column: str, keys: ColumnFlags, origin: str) -> None:
    """Raises UserError unless a conversation ends with a message of the assistant that answers others."""
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{origin}: the last message of {column!r} is of {messages[-1]['role']!r}; it is the response, so it must "
            "be the assistant's. Add it, or remove the row."
        )
    if len(messages) == 1:
        raise UserError(
            f"{origin}: {column!r} holds only the response; put the messages that it answers before it, or into column"
            f" {keys.prompt_key!r}."
        )


def _without_weights(messages: Sequence[dict[str, Any]]) -> Messages:
    """Messages as they are compared: weights do not change what they say."""
    stripped = []
    for message in messages:
        stripped.append({name: value for name, value in message.items() if name != WEIGHT})
    return stripped


def _quoted(message: dict[str, Any]) -> str:
    text = message_text(message)
    ellipsis = "…" if len(text) > QUOTED else ""
    return f"{message['role']}: {text[:QUOTED]!r}{ellipsis}"


def _published_row(name: str, raw: dict[str, Any], origin: str) -> Row | SkipReason:
    """A row of one of PUBLISHED_FORMATS. Raises UserError, which names the row, if a column holds something else."""
    _, parse = PUBLISHED_FORMATS[name]
    try:
        row = parse(raw, origin)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{origin}: not a row of the format {name} ({problem}); correct the row.") from error
    if isinstance(row, Row):
        for text in (row.prompt, row.chosen, row.rejected):
            if text is not None:
                check_text(text, f"a text of the format {name}", origin)
    return row


def _text_in(record: dict[str, Any], name: str) -> str:
    """The text of a field. Raises TypeError if it is none."""
    if not isinstance(record[name], str):
        raise TypeError(f"{name!r} must be text, not {kind_of(record[name])}")
    return str(record[name])


def tldr_row(raw: dict[str, Any], origin: str) -> Row | SkipReason:
    """A row of openai/summarize_from_feedback `comparisons`; skipped with neither a post nor an article."""
    prompt = tldr_prompt(raw["info"])
    if prompt is None:
        return NO_TEXT
    first, second = (_text_in(summary, "text") for summary in raw["summaries"])
    if raw["choice"] not in (0, 1):
        raise ValueError(f"'choice' must be 0 or 1, not {raw['choice']!r}")
    chosen, rejected = (second, first) if raw["choice"] else (first, second)
    return Row(prompt, None, chosen, rejected, raw, origin)


def tldr_prompt(info: dict[str, Any]) -> str | None:
    """Prompt of a TL;DR row.

    Args:
        info: its `info` column: texts post or article, and subreddit, each possibly None or absent.

    Returns:
        "POST\\nSubreddit: r/S\\n<post>\\nTL;DR: ", with ARTICLE for an article, and without the second line if
        there is no subreddit; None with neither post nor article.
    """
    for heading, name in (("POST\n", "post"), ("ARTICLE\n", "article")):
        if info.get(name) is not None:
            line = "" if info.get("subreddit") is None else f"Subreddit: r/{_text_in(info, 'subreddit')}\n"
            return f"{heading}{line}{_text_in(info, name)}\nTL;DR: "
    return None


def webgpt_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of openai/webgpt_comparisons; if the scores are equal, answer_0 counts as the better one.

    The columns tokens_0 and tokens_1 (thousands of GPT-2 ids of the same texts) are not kept in `extra`.
    """
    question = _text_in(raw["question"], "full_text")
    answers = [" " + without_citations(raw[column]) for column in ("answer_0", "answer_1")]
    better = 0 if raw["score_0"] >= raw["score_1"] else 1
    extra = {}
    for name, value in raw.items():
        if name not in ("tokens_0", "tokens_1"):
            extra[name] = value
    prompt = f" Human: {question} Assistant:"
    return Row(prompt, None, answers[better], answers[1 - better], extra, origin)


def without_citations(answer: str) -> str:
    """An answer without everything in brackets, square or round, and without the space before it."""
    for pattern in _CITATIONS:
        answer = pattern.sub("", answer)
    return answer


def apps_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of codeparrot/apps: a programming problem, and its first reference solution if it has one.

    The columns solutions (a list) and input_output (an object) are JSON texts, possibly empty. Without a solution,
    `no_response` says so.
    """
    problem = _text_in(raw, "question")
    if raw.get("starter_code"):
        problem += "\n" + _text_in(raw, "starter_code")
    solutions = _decode(raw["solutions"])
    solution = solutions[0] if solutions else None
    instruction = "Use Standard Input format"
    if _is_call_based(raw["input_output"]):
        instruction = "Use Call-Based format"
    prompt = f"\nQUESTION:\n{problem}\n{instruction}\nANSWER:\n"
    return Row(prompt, None, solution, None, raw, origin, NO_SOLUTION if solution is None else None)


def _is_call_based(input_output: Any) -> bool:
    """Whether the solution is a function that the tests call, rather than a program that reads standard input.

    Tests may be megabytes long: they are parsed only if they contain the word.
    """
    if isinstance(input_output, str) and "fn_name" not in input_output:
        return False
    tests = _decode(input_output)
    return isinstance(tests, dict) and bool(tests.get("fn_name"))


def _decode(value: Any) -> Any:
    """The content of a column of JSON text; None if it is empty. Integers stay text: Python limits their length."""
    if not isinstance(value, str):
        return value
    return json.loads(value, parse_int=str) if value.strip() else None


ParseRow = Callable[[dict[str, Any], str], Row | SkipReason]
# Format → the columns that identify it, and the function that parses such a row.
PUBLISHED_FORMATS: Mapping[str, tuple[Sequence[str], ParseRow]] = {
    "TL;DR comparison": (("info", "summaries", "choice"), tldr_row),
    "WebGPT comparison": (("question", "answer_0", "answer_1", "score_0", "score_1"), webgpt_row),
    "APPS problem": (("question", "solutions", "input_output"), apps_row),
}
