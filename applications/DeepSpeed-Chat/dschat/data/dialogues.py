# SPDX-License-Identifier: Apache-2.0
"""Dialogues: messages that alternate between user and assistant, and how a chat template writes states and replies.

Turns are counted from 0. The state of turn h is everything up to and with the user's message of that turn,
``messages[: 2 * h + 1]``; the reply of turn h is the assistant's message behind it.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.data.encoding import encode_prompts, encode_responses, prompt_text, special_ids
from dschat.data.formats.rows import Row, check_text, kind_of
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, str]  # role (user or assistant) and content
Dialogue = list[Message]
ROLES = ("user", "assistant")
SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # in the prompts of HH-RLHF
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def check_dialogue(messages: Any, origin: str, sampled: bool = False) -> Dialogue:
    """The messages with nothing but role and content.

    Args:
        messages: as read from a file.
        origin: where they stand, for messages: "file.jsonl:12".
        sampled: a policy wrote the replies, so that one may be empty.

    Raises:
        UserError: they do not begin with the user and alternate, or a turn is empty; names the place and the message.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{origin}: a dialogue must be a list of messages with role and content, not {kind_of(messages)}"
            f"{' without one' if messages == [] else ''}; correct the row."
        )
    dialogue = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        expected = ROLES[number % 2]
        if role != expected:
            raise UserError(
                f"{origin}: message {number + 1} is of {role!r} where {expected!r} is next: roles must alternate,"
                " beginning with the user; correct or remove the row."
            )
        content = message.get("content")
        check_text(content, f"message {number + 1}", origin)
        if not content.strip() and not (sampled and role == "assistant"):
            raise UserError(f"{origin}: message {number + 1} ({role}) is empty; correct or remove the row.")
        dialogue.append({"role": expected, "content": content})
    return dialogue


def messages_of_text(prompt: str) -> Dialogue | None:
    """A prompt of HH-RLHF as messages: speakers stand behind blank lines, the last one is to reply. None for others.

    Example: "\\n\\nHuman: Hi.\\n\\nAssistant: Hello.\\n\\nHuman: Bye.\\n\\nAssistant:" has three messages.
    """
    pieces = SPEAKER.split(prompt)
    if pieces[0].strip() or len(pieces) < 3 or pieces[-2] != "Assistant" or pieces[-1].strip():
        return None
    said = zip(pieces[1:-2:2], pieces[2:-2:2], strict=True)
    return [{"role": ROLES[speaker == "Assistant"], "content": text.strip()} for speaker, text in said]


def num_turns(dialogue: Dialogue) -> int:
    """Turns that have begun: the number of user messages."""
    return (len(dialogue) + 1) // 2


def state(dialogue: Dialogue, turn: int) -> Dialogue:
    """What the assistant answers in a turn, counted from 0."""
    return dialogue[: 2 * turn + 1]


@dataclass(frozen=True)
class TurnEnd:
    """How a chat template ends an assistant's turn.

    Attributes:
        token_id: the token that ends it; where the template writes none, EOS.
        text: what the template writes behind the reply.
        written: whether `text` holds that token.
    """

    token_id: int
    text: str
    written: bool


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """How the tokenizer's chat template ends an assistant's turn.

    Raises:
        UserError: there is no chat template, it refuses a dialogue, or a reply does not follow its generation prompt.
    """
    before, whole = (render(tokenizer, PROBE[:length], "the chat template") for length in (1, 2))
    reply = whole.removeprefix(before)
    if not whole.startswith(before) or not reply.lstrip().startswith("b"):
        raise UserError(
            "the tokenizer's chat template does not write a reply behind its generation prompt "
            f"({before[-40:]!r}, then {whole[-40:]!r}), so that a reply's tokens cannot be told; correct the template."
        )
    text = reply.lstrip().removeprefix("b")
    ids = encode_responses(tokenizer, [text])[0] if text else []
    special = special_ids(tokenizer)
    ends = [i for i in ids if i in special]
    return TurnEnd(ends[0] if ends else tokenizer.eos_token_id, text, bool(ends))


def other_turn_end(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], end_id: int) -> str | None:
    """Says so where the chat template ends earlier turns with another token than the one that ends a response.

    Args:
        tokenizer: of the model.
        rows: only those with messages go through the template.
        end_id: ends a response in training: EOS, or --end_of_conversation_token.

    Returns:
        What differs, and the flag that mends it; None where nothing does, or no row holds messages.
    """
    if tokenizer.chat_template is None or all(row.messages is None for row in rows):
        return None
    try:
        end = turn_end(tokenizer)
    except UserError:  # a template that writes no plain dialogue has no end to compare
        return None
    if not end.written or end.token_id == end_id:
        return None
    written, other = (str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in (end.token_id, end_id))
    return (
        f"the chat template ends the assistant's turns with {written}, but in training a response ends with {other}: "
        f"earlier turns and responses end differently. --end_of_conversation_token {shlex.quote(written)} ends both "
        "with the template's"
    )


def warn_of_turn_end(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], end_id: int) -> None:
    """Warns of what `other_turn_end` finds."""
    found = other_turn_end(tokenizer, rows, end_id)
    if found is not None:
        logger.warning("%s", found)


def encode_states(tokenizer: PreTrainedTokenizerBase, states: Sequence[Dialogue], origin: str) -> list[list[int]]:
    """Token ids of n states, which end with a user's message, up to the place where the reply begins.

    Raises:
        UserError: see `dschat.data.encoding.prompt_text`; its message begins with `origin`.
    """
    return encode_prompts(tokenizer, [_row(messages, origin) for messages in states])


def encode_replies(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Dialogue], end: TurnEnd, origin: str
) -> list[list[int]]:
    """Token ids of the last reply of n dialogues, as the template writes it, with the token that ends the turn.

    After the ids of its state these are the ids of the dialogue up to there. The texts are encoded apart, as they are
    when the reply is sampled.

    Args:
        tokenizer: with a chat template.
        dialogues: each ends with a reply.
        end: of the template.
        origin: where they are from, for messages.
    """
    texts = []
    for messages in dialogues:
        before, whole = render(tokenizer, messages[:-1], origin), render(tokenizer, messages, origin)
        if not whole.startswith(before):
            raise UserError(
                f"{origin}: the chat template writes turn {num_turns(messages)} otherwise once it is answered, so its "
                "reply cannot be told from its state; use a template that writes earlier turns the same way."
            )
        text = whole.removeprefix(before)
        texts.append(text if end.written else text.removesuffix(end.text))
    replies = []
    for ids in encode_responses(tokenizer, texts):
        if end.written:  # behind it, a template may write a line break
            ids = ids[: len(ids) - ids[::-1].index(end.token_id)]
        replies.append(ids if end.written else [*ids, end.token_id])
    return replies


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], origin: str) -> str:
    """Messages as text; up to the place of the reply where the last one is not the assistant's."""
    if messages[-1]["role"] != "assistant":
        return prompt_text(tokenizer, _row(messages, origin))
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError as error:
        raise UserError(f"{origin}: the tokenizer's chat template refuses the messages ({error}).") from error


def _row(messages: list[dict[str, Any]], origin: str) -> Row:
    return Row(None, list(messages), None, None, {}, origin)
