# SPDX-License-Identifier: Apache-2.0
"""From the columns of a data file to a `Row`: texts, lists of messages, the published data sets.

Two forms of preference data are read alike: `prompt` holds the messages that both responses answer (explicit), or
`chosen` and `rejected` repeat them (implicit). What both share is the prompt, the last message of each the response.

Prompts and responses of the published sets are those of the published runs, character by character: a reward model
that was trained on one form scores another one differently. HH-RLHF has the columns of `ColumnFlags`.
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
    TEMPLATE_COLUMNS,
    WEIGHT,
    Messages,
    check_messages,
    message_text,
    template_arguments,
    without_nulls,
)
from dschat.data.rows import Row, check_text, kind_of
from dschat.settings.common import ColumnFlags

CONVERSATION, TEXTS, MESSAGE_LISTS = "conversation", "prompt and responses", "prompt and responses as messages"
COMPLETION = "completion"  # read as the response where no column has that name
QUOTED = 60  # characters of a message in an error
PROMPT_MESSAGES = "prompt_messages"  # column of results: the messages of which a chat template made the prompt
NO_TEXT = "neither post nor article"  # why a TL;DR row is skipped
NO_SOLUTION = "no reference solution"  # why an APPS row has no response
# Citations: with the space before them, then without one.
_CITATIONS = (re.compile(r" [\(\[].*?[\)\]]"), re.compile(r"[\(\[].*?[\)\]]"))


def format_of(raw: dict[str, Any], keys: ColumnFlags) -> str:
    """Name of a row's format, by its columns: the first of PUBLISHED_FORMATS, ShareGPT, Alpaca, or one of those above.

    In all but the published ones a column that holds null counts as absent.
    """
    for name, (columns, _) in PUBLISHED_FORMATS.items():
        if all(column in raw for column in columns):
            return name
    response = response_column(raw, keys)
    if chat_formats.is_sharegpt(raw, keys, response):
        return SHAREGPT
    if any(isinstance(raw.get(column), list) for column in (keys.prompt_key, response, keys.rejected_key)):
        return MESSAGE_LISTS
    keys = chat_formats.sharegpt_keys(raw, keys)
    if chat_formats.is_alpaca(raw, keys):
        return ALPACA
    has_response = raw.get(response) is not None
    if raw.get(keys.messages_key) is not None and not (raw.get(keys.prompt_key) is not None and has_response):
        return CONVERSATION
    return TEXTS


def response_column(raw: dict[str, Any], keys: ColumnFlags) -> str:
    """Column of the preferred, or only, response: chosen, else response, else `completion` unless it was renamed."""
    if raw.get(keys.chosen_key) is not None:
        return keys.chosen_key
    if (
        keys.response_key == ColumnFlags.response_key
        and raw.get(keys.response_key) is None
        and raw.get(COMPLETION) is not None
    ):
        return COMPLETION
    return keys.response_key


def parse_row(
    raw: Any,
    keys: ColumnFlags,
    origin: str,
    fills_nulls: bool = False,
) -> Row | None:
    """Recognises the format of one row by its columns (see `format_of`); None for a TL;DR row without any text.

    Args:
        raw: what stands in the row's place.
        keys: the names of the columns.
        origin: where it stands, for messages.
        fills_nulls: see `RawSource`; nulls inside messages and tools are then absent fields at every depth.

    Raises:
        UserError: the row is not an object, lacks a column or holds a value of the wrong type; the message names
            `origin`, the column and the flag that renames it.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{origin}: {kind_of(raw)} instead of an object with columns; correct the row.")
    if fills_nulls and format_of(raw, keys) not in PUBLISHED_FORMATS:
        nested = {column: without_nulls(value) for column, value in raw.items() if isinstance(value, list | dict)}
        row = _parse_columns(raw | nested, keys, origin)
        row = row and replace(row, extra=raw)
    else:
        row = _parse_columns(raw, keys, origin)
    if row is None or row.prompt is None or not keys.apply_chat_template:
        return row
    columns = without_nulls(raw) if fills_nulls else raw
    arguments = template_arguments(columns, origin)
    return replace(row, prompt=None, messages=[{"role": "user", "content": row.prompt}], template_arguments=arguments)


def _parse_columns(
    raw: dict[str, Any],
    keys: ColumnFlags,
    origin: str,
) -> Row | None:
    """`parse_row` of an object, with the prompt as the row has it."""
    name = format_of(raw, keys)
    if name in PUBLISHED_FORMATS:
        return PUBLISHED_FORMATS[name][1](raw, origin)
    response = response_column(raw, keys)
    if name == SHAREGPT:
        row = _parse_columns(*chat_formats.from_sharegpt(raw, keys, response, origin), origin)
        return row and replace(row, extra=raw)
    if name == ALPACA:
        return chat_formats.alpaca_row(raw, keys, response, origin)
    keys = chat_formats.sharegpt_keys(raw, keys)
    if name == MESSAGE_LISTS:
        return message_lists_row(raw, keys, response, origin)
    chosen = _text(raw, response, "chosen" if response == keys.chosen_key else "response", origin)
    rejected = _text(raw, keys.rejected_key, "rejected", origin)
    if name == CONVERSATION:
        return messages_row(raw[keys.messages_key], keys, (chosen, rejected), raw, origin)
    prompt = _text(raw, keys.prompt_key, "prompt", origin)
    if prompt is None and keys.prompt_key in raw:
        raise UserError(f"{origin}: column {keys.prompt_key!r} is empty; fill it, or remove the row.")
    if prompt is None:
        raise UserError(
            f"{origin}: no column {keys.prompt_key!r} among {', '.join(map(repr, raw)) or 'none'}; name the prompt's "
            "column with --prompt_key, or a conversation's with --messages_key."
        )
    return Row(prompt, None, chosen, rejected, raw, origin)


def _text(
    raw: dict[str, Any],
    column: str,
    name: str,
    origin: str,
) -> str | None:
    """Text of the column that `--NAME_key` names; None where it is absent or null."""
    value = raw.get(column)
    if value is not None:
        remedy = f"correct the row, or name another column with --{name}_key"
        check_text(value, f"column {column!r}", origin, remedy)
    return value


def messages_row(
    messages: Any,
    keys: ColumnFlags,
    texts: tuple[str | None, str | None],
    raw: dict[str, Any],
    origin: str,
) -> Row:
    """A conversation in a column of its own: its last message is the response if the assistant wrote it.

    `texts` are the chosen and the rejected response of other columns.

    Raises:
        UserError: it is no list of messages, holds nothing but the response, or there are two responses.
    """
    chosen, rejected = texts
    checked = check_messages(messages, keys.messages_key, "--messages_key", origin)
    arguments = template_arguments(raw, origin)
    if checked[-1]["role"] != "assistant":
        return Row(None, checked, chosen, rejected, raw, origin, template_arguments=arguments)
    if chosen is not None:
        raise UserError(
            f"{origin}: two responses, the last message of {keys.messages_key!r} and another column; remove one of "
            "them, or name the right columns with --messages_key, --chosen_key and --response_key."
        )
    if len(checked) == 1:
        raise UserError(
            f"{origin}: {keys.messages_key!r} holds only the response; put at least one message before it."
        )
    text, message = _response(checked[-1])
    before = checked[:-1]
    return Row(None, before, text, rejected, raw, origin, chosen_message=message, template_arguments=arguments)


def message_lists_row(
    raw: dict[str, Any],
    keys: ColumnFlags,
    answered: str,
    origin: str,
) -> Row:
    """A row in which the prompt, the responses or both are lists of messages.

    `answered` is the column of the preferred, or only, response.

    Raises:
        UserError: a list is no conversation that ends with the assistant, one response is a text and the other a list,
            or the two are no answers to the same messages; names the row, the columns and what differs.
    """
    prompt: str | Messages | None = raw.get(keys.prompt_key)
    if isinstance(prompt, list):
        prompt = check_messages(prompt, keys.prompt_key, "--prompt_key", origin)
    elif prompt is not None:
        check_text(prompt, f"column {keys.prompt_key!r}", origin)
    arguments = template_arguments(raw, origin)
    responses = {column: raw[column] for column in (answered, keys.rejected_key) if raw.get(column) is not None}
    if len({type(value) for value in responses.values()}) > 1:
        kinds = " and ".join(f"{column!r} {kind_of(value)}" for column, value in responses.items())
        raise UserError(f"{origin}: {kinds}; give both as text or both as lists of messages.")
    if isinstance(prompt, list) and not any(isinstance(value, list) for value in responses.values()):
        if prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{origin}: the last message of {keys.prompt_key!r} is the assistant's, so there is nothing to "
                "answer; end the prompt with a message of the user, or name a whole conversation's column with "
                "--messages_key."
            )
        for column, text in responses.items():
            check_text(text, f"column {column!r}", origin)
        chosen, rejected = responses.get(answered), responses.get(keys.rejected_key)
        return Row(None, prompt, chosen, rejected, raw, origin, template_arguments=arguments)
    flags = {keys.chosen_key: "--chosen_key", keys.rejected_key: "--rejected_key"}
    whole = {}
    for column, value in responses.items():
        messages = check_messages(value, column, flags.get(column, "--response_key"), origin)
        whole[column] = _whole(prompt, messages, column, keys, origin)
    _check_same_prompt(whole, origin)
    last = {column: _response(messages[-1]) for column, messages in whole.items()}
    chosen, chosen_message = last.get(answered, (None, None))
    rejected, rejected_message = last.get(keys.rejected_key, (None, None))
    return Row(
        None, next(iter(whole.values()))[:-1], chosen, rejected, raw, origin,
        chosen_message=chosen_message, rejected_message=rejected_message, template_arguments=arguments,
    )  # fmt: skip


def _response(
    message: dict[str, Any],
) -> tuple[str, dict[str, Any] | None]:
    """The text of a response, and the whole message where it has more fields than role and content."""
    is_plain_text = message.keys() == {"role", "content"}
    return message.get("content", ""), None if is_plain_text else message


def unread_columns(row: Row, keys: ColumnFlags) -> list[str]:
    """Columns of a row that hold something and of which neither its texts nor what its chat template reads are made.

    Of the published formats none counts.
    """
    raw = row.extra
    name, response = format_of(raw, keys), response_column(raw, keys)
    own_keys = chat_formats.sharegpt_keys(raw, keys)
    columns = {
        TEXTS: (keys.prompt_key, response, keys.rejected_key),
        MESSAGE_LISTS: (keys.prompt_key, response, keys.rejected_key),
        CONVERSATION: (own_keys.messages_key, response, keys.rejected_key),
        SHAREGPT: chat_formats.read_columns(SHAREGPT, raw, keys, response),
        ALPACA: chat_formats.read_columns(ALPACA, raw, keys, response),
    }.get(name)
    if columns is None:
        return []
    of_template = TEMPLATE_COLUMNS if row.messages is not None else ()
    read = {*columns, *of_template}
    return [column for column, value in raw.items() if value is not None and column not in read]


def _whole(
    prompt: str | Messages | None,
    messages: Messages,
    column: str,
    keys: ColumnFlags,
    origin: str,
) -> Messages:
    """The conversation that ends with a response: the prompt's messages, unless the column repeats them, and its own.

    Raises:
        UserError: the column repeats another prompt, ends with somebody else's message, or holds the response alone.
    """
    if isinstance(prompt, list):
        repeats = len(messages) > len(prompt) and _said(messages[: len(prompt)]) == _said(prompt)
        if not repeats and messages[0]["role"] in (prompt[-1]["role"], "system"):
            other = f"{column!r} begins with other messages than {keys.prompt_key!r} holds ({_quoted(messages[0])})"
            raise UserError(f"{origin}: {other}; {_without_prompt(column)}.")
        messages = messages if repeats else [*prompt, *messages]
    elif prompt is not None and messages[0]["role"] == "assistant":
        messages = [{"role": "user", "content": prompt}, *messages]
    elif prompt is not None:
        asked = [message_text(message) for message in messages[:-1] if message["role"] == "user"]
        if not any(text.strip() == prompt.strip() for text in asked):
            other = f"no message of the user in {column!r} says what column {keys.prompt_key!r} says"
            raise UserError(f"{origin}: {other} ({prompt[:QUOTED]!r}); {_without_prompt(column)}.")
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
    return messages


def _without_prompt(column: str) -> str:
    return f"correct the row, or give --prompt_key the name of a column that is not there, to read {column!r} alone"


def _check_same_prompt(whole: dict[str, Messages], origin: str) -> None:
    """Both conversations must be the same up to their last messages."""
    if len(whole) < 2:
        return
    (first, one), (second, other) = whole.items()
    for number, pair in enumerate(zip(one[:-1], other[:-1], strict=False), start=1):
        left, right = _said(pair)
        if left != right:
            raise UserError(
                f"{origin}: {first!r} and {second!r} differ in message {number} already ({_quoted(pair[0])} and "
                f"{_quoted(pair[1])}); only their last messages, the responses, may differ. Correct or remove the row."
            )
    if len(one) != len(other):
        raise UserError(
            f"{origin}: {first!r} comes to {len(one)} messages, {second!r} to {len(other)}; both must be the same up "
            "to their last message, the response. Correct or remove the row."
        )


def _said(
    messages: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Messages without their weights, which do not change what they say."""
    return [{name: value for name, value in message.items() if name != WEIGHT} for message in messages]


def _quoted(message: dict[str, Any]) -> str:
    text = message_text(message)
    return f"{message['role']}: {text[:QUOTED]!r}{'…' if len(text) > QUOTED else ''}"


def tldr_row(raw: dict[str, Any], origin: str) -> Row | None:
    """A row of openai/summarize_from_feedback `comparisons`; None with neither a Reddit post nor a CNN/DM article."""
    info, summaries, choice = raw["info"], raw["summaries"], raw["choice"]
    _check(isinstance(info, dict), "info", "an object", info, origin)
    if not (isinstance(summaries, list) and len(summaries) == 2 and all(isinstance(s, dict) for s in summaries)):
        raise UserError(f"{origin}: column 'summaries' must hold two objects with a text; correct the row.")
    if not isinstance(choice, int) or choice not in (0, 1):
        raise UserError(f"{origin}: column 'choice' must be 0 or 1, not {choice!r}; correct the row.")
    for name in ("post", "article", "subreddit"):
        if info.get(name) is not None:
            check_text(info[name], f"'info.{name}'", origin)
    for number, summary in enumerate(summaries):
        check_text(summary.get("text"), f"'summaries[{number}].text'", origin)
    prompt = tldr_prompt(info)
    if prompt is None:
        return None
    return Row(prompt, None, summaries[choice]["text"], summaries[1 - choice]["text"], raw, origin)


def tldr_prompt(info: dict[str, Any]) -> str | None:
    """Prompt of a TL;DR row.

    Args:
        info: its `info` column: texts post or article, and subreddit, each possibly None or absent.

    Returns:
        "POST\\nSubreddit: r/S\\n<post>\\nTL;DR: ", with ARTICLE for an article, without the second line
        where there is no subreddit; None with neither post nor article.
    """
    for head, name in (("POST\n", "post"), ("ARTICLE\n", "article")):
        if info.get(name) is not None:
            subreddit = info.get("subreddit")
            line = "" if subreddit is None else f"Subreddit: r/{subreddit}\n"
            return f"{head}{line}{info[name]}\nTL;DR: "
    return None


def webgpt_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of openai/webgpt_comparisons; where the scores are equal, answer_0 counts as the better one.

    The columns tokens_0 and tokens_1 (thousands of GPT-2 ids a row, the same texts once more) are not kept in `extra`.
    """
    question = raw["question"]
    _check(isinstance(question, dict), "question", "an object", question, origin)
    check_text(question.get("full_text"), "'question.full_text'", origin)
    for column in ("answer_0", "answer_1"):
        check_text(raw[column], f"column {column!r}", origin)
    for column in ("score_0", "score_1"):
        is_number = isinstance(raw[column], int | float) and not isinstance(raw[column], bool)
        _check(is_number, column, "a number", raw[column], origin)
    answers = [" " + without_citations(raw[column]) for column in ("answer_0", "answer_1")]
    better = 0 if raw["score_0"] >= raw["score_1"] else 1
    extra = {name: value for name, value in raw.items() if name not in ("tokens_0", "tokens_1")}
    prompt = f" Human: {question['full_text']} Assistant:"
    return Row(prompt, None, answers[better], answers[1 - better], extra, origin)


def without_citations(answer: str) -> str:
    """An answer without everything in brackets, square or round, and without the space before it."""
    for pattern in _CITATIONS:
        answer = pattern.sub("", answer)
    return answer


def apps_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of codeparrot/apps: a programming problem, and its first reference solution where it has one.

    The columns solutions (a list) and input_output (an object) are JSON texts, possibly empty. Where there is no
    solution, the row says so in `no_response`.
    """
    check_text(raw["question"], "column 'question'", origin)
    starter = raw.get("starter_code") or ""
    check_text(starter, "column 'starter_code'", origin)
    solutions = _decode(raw["solutions"], "solutions", origin) or []
    _check(isinstance(solutions, list), "solutions", "a JSON list", solutions, origin)
    solution = solutions[0] if solutions else None
    if solution is not None:
        check_text(solution, "the first of 'solutions'", origin)
    form = "Use Call-Based format" if _is_call_based(raw["input_output"], origin) else "Use Standard Input format"
    problem = f"{raw['question']}\n{starter}" if starter else raw["question"]
    prompt = f"\nQUESTION:\n{problem}\n{form}\nANSWER:\n"
    return Row(prompt, None, solution, None, raw, origin, None if solution is not None else NO_SOLUTION)


def _is_call_based(input_output: Any, origin: str) -> bool:
    """Whether the solution is a function that the tests call, rather than a program that reads standard input.

    Tests are megabytes long: those without the word are not parsed.
    """
    if isinstance(input_output, str) and "fn_name" not in input_output:
        return False
    tests = _decode(input_output, "input_output", origin)
    return isinstance(tests, dict) and bool(tests.get("fn_name"))


def _decode(value: Any, column: str, origin: str) -> Any:
    """What a column of JSON text holds; None where it is empty. Integers stay text: Python limits their length."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: column {column!r} holds no valid JSON ({error}); correct the row.") from error


def _check(
    is_right: bool,
    column: str,
    wanted: str,
    value: Any,
    origin: str,
) -> None:
    """Raises UserError, which names the row, unless a column holds what it should."""
    if not is_right:
        raise UserError(f"{origin}: column {column!r} must hold {wanted}, not {kind_of(value)}; correct the row.")


# Format → the columns it is recognised by, and what makes a `Row` of such a row.
PUBLISHED_FORMATS: Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any], str], Row | None]]] = {
    "TL;DR comparison": (("info", "summaries", "choice"), tldr_row),
    "WebGPT comparison": (("question", "answer_0", "answer_1", "score_0", "score_1"), webgpt_row),
    "APPS problem": (("question", "solutions", "input_output"), apps_row),
}
