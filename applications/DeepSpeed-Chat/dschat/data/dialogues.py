# SPDX-License-Identifier: Apache-2.0
"""Dialogues: messages that alternate between user and assistant, and dialogues of the data that a policy can replay.

Turns are counted from 0. The state of turn h is everything up to and including the user's message of that turn,
``messages[: 2 * h + 1]``; the reply of turn h is the assistant's message after it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.examples import DropReason, collect_examples
from dschat.data.messages import messages_of_text
from dschat.data.rows import Row, check_text, kind_of
from dschat.data.turn_end import TurnEnd, response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, str]  # role (user or assistant) and content
Dialogue = list[Message]
ROLES = ("user", "assistant")
MALFORMED = "user and assistant do not alternate, or a turn is empty"
TOO_MANY_TURNS = "too many turns"
PROMPT_TOO_LONG = "a user's message too long"
REPLY_TOO_LONG = "a reply too long"
TOO_LONG = "dialogue too long"
STAND_IN = "x"  # text of replies whose tokens are counted otherwise


def check_dialogue(messages: Any, origin: str, sampled: bool = False) -> Dialogue:
    """Messages with only role and content.

    Args:
        messages: messages as read from a file.
        origin: where they come from, for messages: "file.jsonl:12".
        sampled: whether a policy generated the replies, so that one may be empty.

    Raises:
        UserError: they do not begin with the user and alternate, or a turn is empty; names the row and the message.
    """
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else kind_of(messages)
        raise UserError(
            f"{origin}: a dialogue must be a list of messages with role and content, not {kind}; correct the row."
        )
    dialogue = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        expected = ROLES[number % 2]
        if role != expected:
            raise UserError(
                f"{origin}: message {number + 1} has the role {role!r} instead of {expected!r}: roles must"
                " alternate, beginning with the user; correct or remove the row."
            )
        content = message.get("content")
        check_text(content, f"message {number + 1}", origin)
        if not content.strip() and not (sampled and role == "assistant"):
            raise UserError(f"{origin}: message {number + 1} ({role}) is empty; correct or remove the row.")
        dialogue.append({"role": expected, "content": content})
    return dialogue


def num_turns(dialogue: Dialogue) -> int:
    """Turns that have begun: the number of user messages."""
    return (len(dialogue) + 1) // 2


def state(dialogue: Dialogue, turn: int) -> Dialogue:
    """The messages that the assistant answers in a turn, counted from 0."""
    return dialogue[: 2 * turn + 1]


def encode_states(tokenizer: PreTrainedTokenizerBase, states: Sequence[Dialogue], origin: str) -> list[list[int]]:
    """Token ids of states, which end with a user's message, up to where the reply begins.

    Raises:
        UserError: see `dschat.data.encoding.prompt_text`; its message begins with `origin`.
    """
    rows = [Row(None, messages, None, None, {}, origin) for messages in states]
    return encode_prompts(tokenizer, rows)


def encode_replies(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Dialogue], end: TurnEnd, origin: str
) -> list[list[int]]:
    """Token ids of the last reply of dialogues, as the template writes it, with the token that ends the turn.

    The ids of the state followed by these are the ids of the dialogue. State and reply are encoded separately, as they
    are when the reply is sampled. Messages of errors begin with `origin`.
    """
    rows = []
    for *state, reply in dialogues:
        rows.append(Row(None, state, reply["content"], None, {}, origin))
    replies = encode_responses(tokenizer, response_texts(tokenizer, rows, "chosen"))
    return [[*reply, end.token_id] for reply in replies]


@dataclass(frozen=True)
class DialogueLimits:
    """Maximum sizes of dialogues."""

    turns: int
    prompt_tokens: int  # tokens of a user's message
    reply_tokens: int
    total_tokens: int  # tokens of the dialogue as the chat template writes it, each reply counted with reply_tokens


@dataclass(frozen=True)
class DialogueExample:
    """A dialogue of the data."""

    messages: Dialogue  # the last reply may be missing
    length: int  # maximum tokens of the dialogue when all replies are sampled
    row: Row = field(repr=False)  # row of the data
    index: int  # number of the row in the list that the examples were made from

    @property
    def num_turns(self) -> int:
        """H, the number of user messages."""
        return num_turns(self.messages)

    def __len__(self) -> int:
        """Maximum tokens of the dialogue when all replies are sampled."""
        return self.length


def dialogue_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, limits: DialogueLimits, held_out: bool = False
) -> tuple[list[DialogueExample], Counter[str]]:
    """Dialogues within the limits, in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: rows without messages, or none is left.
    """
    complaints: list[UserError] = []

    def make_dialogue(index: int, row: Row) -> DialogueExample | DropReason:
        try:
            messages = _messages_of(row)
        except UserError as error:
            complaints.append(error)
            return MALFORMED
        length = _length(messages, row, tokenizer, limits)
        if isinstance(length, str):
            return length
        return DialogueExample(messages, length, row, index)

    results = list(map(make_dialogue, range(len(rows)), rows))
    if complaints:
        if len(complaints) == len(rows) and not held_out:
            raise complaints[0]
        logger.warning("the first row that is left out: %s", complaints[0])
    limit_flags = (
        f"--max_turns {limits.turns}, --max_prompt_seq_len {limits.prompt_tokens}, --max_answer_seq_len "
        f"{limits.reply_tokens}, --max_seq_len {limits.total_tokens}"
    )
    return collect_examples(rows, results, limit_flags, held_out)


def _messages_of(row: Row) -> Dialogue:
    """The dialogue of a row, with the row's response as the last reply."""
    messages = row.messages
    if messages is None:
        messages = messages_of_text(row.prompt or "")
    if messages is None:
        raise UserError(
            f"{row.origin}: the row holds no messages, but one text as a prompt; give rows with a list of messages, "
            "name their column with --messages_key, or read each prompt as a first message with --apply_chat_template."
        )
    if row.chosen is not None:
        messages = [*messages, {"role": "assistant", "content": row.chosen}]
    return check_dialogue(messages, row.origin)


def _length(
    messages: Dialogue, row: Row, tokenizer: PreTrainedTokenizerBase, limits: DialogueLimits
) -> int | DropReason:
    """Maximum tokens of a dialogue when all replies are sampled, or why it is left out."""
    turns = num_turns(messages)
    if turns > limits.turns:
        return TOO_MANY_TURNS
    contents = [message["content"] for message in messages]
    lengths = [len(ids) for ids in encode_responses(tokenizer, contents)]
    if max(lengths[0::2]) > limits.prompt_tokens:
        return PROMPT_TOO_LONG
    if max(lengths[1::2], default=0) > limits.reply_tokens:
        return REPLY_TOO_LONG
    # Every reply counts as `reply_tokens`. Those of the data are replaced first, because a template may drop a part of
    # them (blanks, thoughts), which could not be told from the rest of the text.
    replaced: Dialogue = []
    for message in state(messages, turns - 1):
        is_reply = message["role"] == "assistant"
        replaced.append({**message, "content": STAND_IN} if is_reply else message)
    (last_state,) = encode_states(tokenizer, [replaced], row.origin)
    (stand_in_ids,) = encode_responses(tokenizer, [STAND_IN])
    total = len(last_state) - (turns - 1) * len(stand_in_ids) + turns * limits.reply_tokens
    if total > limits.total_tokens:
        return TOO_LONG
    return total
