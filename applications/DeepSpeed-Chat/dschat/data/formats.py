# SPDX-License-Identifier: Apache-2.0
"""From the columns of a data file to a `Row`: preference and response columns, conversations, TL;DR comparisons."""

from dataclasses import dataclass, field
from typing import Any

from dschat.errors import UserError

NO_TEXT = "neither post nor article"  # why a TL;DR row is skipped
TLDR_COLUMNS = ("info", "summaries", "choice")


@dataclass(frozen=True)
class DataKeys:
    """Column names. Field `x` is what the flag `--x_key` sets."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    response: str = "response"
    messages: str = "messages"


@dataclass(frozen=True)
class Row:
    """One row of data. Exactly one of `prompt` and `messages` is set.

    Attributes:
        prompt: prompt text, used as is.
        messages: the conversation before the response, each with role and content; for the chat template.
        chosen: preferred (or only) response text; None if the row has none.
        rejected: the other response text; None if the row has none.
        extra: the row as it was read, given to reward functions.
        origin: where the row stands, for messages: "file.jsonl:12" or "file.parquet row 12".
    """

    prompt: str | None
    messages: list[dict[str, Any]] | None
    chosen: str | None
    rejected: str | None
    extra: dict[str, Any] = field(repr=False)
    origin: str


def parse_row(raw: Any, keys: DataKeys, origin: str) -> Row | None:
    """Recognises the format of one row by its columns; a column that holds null counts as absent.

    In this order: info, summaries and choice (TL;DR comparisons); a prompt with a response; messages; a prompt alone.

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
        raise UserError(f"{origin}: {_kind(raw)} instead of an object with columns; correct the row.")
    if all(column in raw for column in TLDR_COLUMNS):
        return _tldr_row(raw, origin)
    prompt = _column(raw, keys.prompt, "prompt_key", origin)
    chosen = _column(raw, keys.chosen, "chosen_key", origin)
    if chosen is None:
        chosen = _column(raw, keys.response, "response_key", origin)
    rejected = _column(raw, keys.rejected, "rejected_key", origin)
    if raw.get(keys.messages) is not None and (prompt is None or chosen is None):
        return _messages_row(raw, keys, chosen, rejected, origin)
    if prompt is None:
        raise UserError(
            f"{origin}: no column {keys.prompt!r} among {_names(raw)}; name the prompt's column with --prompt_key, "
            "or a conversation's with --messages_key."
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
            _check_text(
                message.get(name), f"{name} of message {number} in {keys.messages!r}", "correct the row", origin
            )
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


def _tldr_row(raw: dict[str, Any], origin: str) -> Row | None:
    """A row of openai/summarize_from_feedback `comparisons`, a Reddit post or a CNN/DM article."""
    info, summaries, choice = (raw[column] for column in TLDR_COLUMNS)
    remedy = "correct the row"
    if not isinstance(info, dict):
        raise UserError(f"{origin}: column 'info' must hold an object, not {_kind(info)}; {remedy}.")
    if not (isinstance(summaries, list) and len(summaries) == 2 and all(isinstance(s, dict) for s in summaries)):
        raise UserError(f"{origin}: column 'summaries' must hold two objects with a text; {remedy}.")
    if not isinstance(choice, int) or choice not in (0, 1):
        raise UserError(f"{origin}: column 'choice' must be 0 or 1, not {choice!r}; {remedy}.")
    for name in ("post", "article", "subreddit"):
        if info.get(name) is not None:
            _check_text(info[name], f"'info.{name}'", remedy, origin)
    for number, summary in enumerate(summaries):
        _check_text(summary.get("text"), f"'summaries[{number}].text'", remedy, origin)
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


def _column(raw: dict[str, Any], key: str, flag: str, origin: str) -> str | None:
    """Text of a column; None where it is absent or null."""
    value = raw.get(key)
    if value is not None:
        _check_text(value, f"column {key!r}", f"correct the row, or name another column with --{flag}", origin)
    return value


def _check_text(value: Any, what: str, remedy: str, origin: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{origin}: {what} must be text, not {_kind(value)}; {remedy}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{origin}: {what} holds half of a character (a lone surrogate) at position {error.start}; {remedy}."
        ) from error


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _names(raw: dict[str, Any]) -> str:
    return ", ".join(map(repr, raw)) or "none"
