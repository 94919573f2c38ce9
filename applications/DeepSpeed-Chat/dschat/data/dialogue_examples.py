# SPDX-License-Identifier: Apache-2.0
"""Rows → dialogues whose user a policy can talk to again, with a count of what was dropped and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dschat.data.dialogues import Dialogue, check_dialogue, encode_states, messages_of_text, num_turns, state
from dschat.data.encoding import encode_responses
from dschat.data.examples import refuse_none_left
from dschat.data.formats.rows import Row
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MALFORMED = "user and assistant do not alternate, or a turn is empty"
TOO_MANY_TURNS = "too many turns"
PROMPT_TOO_LONG = "a user's message too long"
REPLY_TOO_LONG = "a reply too long"
TOO_LONG = "dialogue too long"


@dataclass(frozen=True)
class DialogueLimits:
    """Sizes of a dialogue that is kept."""

    turns: int
    prompt_tokens: int  # of a user's message
    reply_tokens: int
    total_tokens: int  # of the whole as the chat template writes it, each reply counted with reply_tokens


@dataclass(frozen=True)
class DialogueExample:
    """A dialogue of the data.

    Attributes:
        messages: of user and assistant in turn; the last reply may be missing.
        length: tokens that it can come to when replies are drawn anew.
        row: the data row.
        index: number of the row in the list that the examples were made from.
    """

    messages: Dialogue
    length: int
    row: Row = field(repr=False)
    index: int

    @property
    def num_turns(self) -> int:
        """H, the number of user messages."""
        return num_turns(self.messages)

    def __len__(self) -> int:
        """Tokens that it can come to."""
        return self.length


def dialogue_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, limits: DialogueLimits, held_out: bool = False
) -> tuple[list[DialogueExample], Counter[str]]:
    """Dialogues within the limits, in the order of the rows; and reason → number of rows dropped.

    Args:
        rows: of messages.
        tokenizer: the policy's, with a chat template.
        limits: of a dialogue.
        held_out: an evaluation may have none.

    Raises:
        UserError: rows without messages, or none is left.
    """
    examples: list[DialogueExample] = []
    dropped: Counter[str] = Counter()
    complaint: UserError | None = None
    for index, row in enumerate(rows):
        try:
            messages = _messages_of(row)
        except UserError as error:
            dropped[MALFORMED] += 1
            complaint = complaint or error
            continue
        if num_turns(messages) > limits.turns:
            dropped[TOO_MANY_TURNS] += 1
            continue
        reason, length = _measured(messages, row, tokenizer, limits)
        if reason is not None:
            dropped[reason] += 1
        else:
            examples.append(DialogueExample(messages, length, row, index))
    if complaint is not None:
        if not examples and not held_out and dropped[MALFORMED] == len(rows):
            raise complaint
        logger.warning("the first row that is left out: %s", complaint)
    named = (
        f"--max_turns {limits.turns}, --max_prompt_seq_len {limits.prompt_tokens}, --max_answer_seq_len "
        f"{limits.reply_tokens}, --max_seq_len {limits.total_tokens}"
    )
    refuse_none_left(rows, examples, dropped, named, held_out)
    return examples, dropped


def _messages_of(row: Row) -> Dialogue:
    """The dialogue of a row: its last reply is kept as the row's response."""
    messages = messages_of_text(row.prompt or "") if row.messages is None else row.messages
    if messages is None:
        raise UserError(
            f"{row.origin}: the row holds no messages, but one text as a prompt; give rows with a list of messages, "
            "or name their column with --messages_key."
        )
    replies = [] if row.chosen is None else [{"role": "assistant", "content": row.chosen}]
    return check_dialogue([*messages, *replies], row.origin)


def _measured(
    messages: Dialogue, row: Row, tokenizer: PreTrainedTokenizerBase, limits: DialogueLimits
) -> tuple[str | None, int]:
    """Why a dialogue must go, if it must, and the tokens that it can come to."""
    lengths = [len(ids) for ids in encode_responses(tokenizer, [message["content"] for message in messages])]
    turns = num_turns(messages)
    if max(lengths[0::2]) > limits.prompt_tokens:
        return PROMPT_TOO_LONG, 0
    if max(lengths[1::2], default=0) > limits.reply_tokens:
        return REPLY_TOO_LONG, 0
    (last,) = encode_states(tokenizer, [state(messages, turns - 1)], row.origin)
    earlier = sum(lengths[1 : 2 * turns - 1 : 2])  # of the replies in that state
    total = len(last) - earlier + turns * limits.reply_tokens
    return (TOO_LONG if total > limits.total_tokens else None), total
