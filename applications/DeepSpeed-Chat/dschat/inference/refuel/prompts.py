# SPDX-License-Identifier: Apache-2.0
"""The first messages of users: one for each dialogue, none of them twice."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.data.dialogues import Message, check_dialogue, encode_states
from dschat.data.rows import check_text
from dschat.data.sources import open_data
from dschat.errors import UserError

FLAG = "--prompts"
USERS = ("user", "human")  # what data sets call them
CHUNK = 1000  # messages that are encoded together


def first_messages(name: str, tokenizer: PreTrainedTokenizerBase, most: int) -> tuple[list[Message], int]:
    """The first message of each dialogue, and how many others were the same.

    Two are the same where the policy's chat template makes the same tokens of them.

    Args:
        name: data set, see `dschat.data.sources.open_data`.
        tokenizer: of the policy, with a chat template.
        most: messages to take, 0 = all.

    Raises:
        UserError: there is no such data set, or a row has no message to begin with; names the row.
    """
    found: list[Message] = []
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for chunk in _chunks(name):
        states = encode_states(tokenizer, [[message] for message in chunk], f"{FLAG} {name}")
        for message, ids in zip(chunk, map(tuple, states), strict=True):
            if most and len(found) == most:
                return found, repeated
            repeated += ids in seen
            if ids not in seen:
                found.append(message)
                seen.add(ids)
    return found, repeated


def _chunks(name: str) -> Iterator[list[Message]]:
    chunk: list[Message] = []
    for origin, raw in open_data(name, FLAG).train:
        chunk.append(_first(raw, origin))
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _first(raw: Any, origin: str) -> Message:
    """What the user of a row says first, with role and content."""
    columns: dict[str, Any] = raw if isinstance(raw, dict) else {}
    content: Any
    if columns.get("messages") is not None:
        return check_dialogue(columns["messages"], origin)[0]
    trajectory = columns.get("trajectory")
    if isinstance(trajectory, list) and trajectory and isinstance(trajectory[0], dict):
        message = trajectory[0]
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role not in USERS:
            raise UserError(
                f"{origin}: the trajectory begins with {role!r}, not with a user; correct or remove the row."
            )
    elif columns.get("prompt") is not None:
        content = columns["prompt"]
    else:
        names = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{origin}: no column 'messages', 'trajectory' or 'prompt' among {names}.")
    check_text(content, "the first message", origin)
    if not content.strip():
        raise UserError(f"{origin}: the first message is empty; correct or remove the row.")
    return {"role": "user", "content": content}
