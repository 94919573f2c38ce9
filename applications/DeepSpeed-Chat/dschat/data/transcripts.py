# SPDX-License-Identifier: Apache-2.0
"""Preferences with an implicit prompt: `chosen` and `rejected` are whole dialogues, what they share is the prompt.

Texts have the form of Anthropic's HH-RLHF, "\\n\\nHuman: …\\n\\nAssistant: …". Each side must be the shared turns and
one reply of the assistant. Anything else is skipped, for one of the reasons below.
"""

import re
from typing import Any

from dschat.data.messages import ASSISTANT, Messages, conversation_row, messages_of_text
from dschat.data.rows import Row, SkipReason

EQUAL = "chosen and rejected are equal"
NO_PROMPT = "chosen and rejected share no prompt"
ONE_INSIDE = "one dialogue is the beginning of the other"
PART_EARLIER = "chosen and rejected differ in more than the last turn"
NOT_A_REPLY = "a dialogue does not end with the assistant"
NO_BEGINNING = "a dialogue does not begin with Human:, and cannot be messages"

TURN = re.compile(r"(?=\n\n(?:Human|Assistant):)")  # the place where a turn begins


def shared_turns(chosen: Messages, rejected: Messages) -> int | SkipReason:
    """Number of turns that two dialogues share before the last turn of each, which is the assistant's.

    Returns:
        That number, at least 1; or why the two are no comparison of replies.
    """
    shared = 0
    for first, second in zip(chosen, rejected, strict=False):
        if first != second:
            break
        shared += 1
    if shared == len(chosen) == len(rejected):
        return EQUAL
    if not shared:
        return NO_PROMPT
    if shared in (len(chosen), len(rejected)):
        return ONE_INSIDE
    if max(len(chosen), len(rejected)) > shared + 1:
        return PART_EARLIER
    if not chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
        return NOT_A_REPLY
    return shared


def transcripts_row(
    chosen: str, rejected: str, raw: dict[str, Any], origin: str, as_messages: bool
) -> Row | SkipReason:
    """A row of two dialogues as text.

    The prompt ends in "\\n\\nAssistant:", and the replies begin with what follows, usually a space.

    Args:
        chosen, rejected: the dialogues.
        raw: all columns.
        origin: see `Row`.
        as_messages: make the prompt messages and strip the replies, for a chat template (`--apply_chat_template`).

    Returns:
        The row, or why it is skipped.
    """
    chosen_turns = _turns(chosen)
    rejected_turns = _turns(rejected)
    shared = shared_turns(chosen_turns, rejected_turns)
    if isinstance(shared, str):
        return shared
    prompt = "".join(turn["content"] for turn in chosen_turns[:shared]) + ASSISTANT
    replies = [turns[-1]["content"].removeprefix(ASSISTANT) for turns in (chosen_turns, rejected_turns)]
    if not as_messages:
        return Row(prompt, None, replies[0], replies[1], raw, origin)
    messages = messages_of_text(prompt)
    if messages is None:
        return NO_BEGINNING
    return conversation_row(messages, replies[0].strip(), replies[1].strip(), raw, origin)


def _turns(text: str) -> Messages:
    """The turns of a text, each with the words that announce it. Text before the first turn counts as one."""
    turns = []
    for piece in TURN.split(text):
        if piece:
            turns.append({"role": "assistant" if piece.startswith(ASSISTANT) else "user", "content": piece})
    return turns
