# SPDX-License-Identifier: Apache-2.0
"""Messages of an environment as token ids that continue an episode: sampled ids are never written or encoded again.

The template writes the conversation with a placeholder in the reply's place. What stands behind it continues the
episode:

    … <assistant>QZXJ<end><user>Too low.<end><assistant>

What stands before it is not read: a template may drop the thoughts of earlier turns, or write them otherwise. The text
behind the placeholder must hold the new messages and nothing of older ones; `check_template` refuses other templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.continuations import AddedTokens, encode_continuations
from dschat.data.encoding import encode_prompt_texts
from dschat.data.turn_end import MARK, TurnEnd, turn_end
from dschat.models.templates import Message, render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORIGIN = "--environment"  # origin of the messages that are tried at the start
ANSWER = "KVWQ"  # content of an environment's message, which a template is to write
OLD_TEXTS = ("a", "c")  # contents of the messages before the reply, with which the text behind it must be the same


class ConversationEncoder:
    """Encodes the beginning of an episode, and what follows each reply."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None, roles: Sequence[str]
    ) -> None:
        """Reads how the chat template writes turns, and checks that it can be used for episodes.

        Args:
            tokenizer: the policy's.
            arguments: further variables of the template, such as `tools`.
            roles: roles of the environment's messages.

        Raises:
            UserError: the chat template cannot be used, see `check_template`.
        """
        self._tokenizer = tokenizer
        self._added_tokens = AddedTokens(tokenizer)
        self._roles = tuple(roles)
        self.end = check_template(tokenizer, arguments, roles)

    def prompt(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None, origin: str
    ) -> tuple[list[int], str]:
        """Ids and text of a conversation up to the policy's first reply.

        Args:
            messages: messages of the conversation.
            arguments: further variables of the template.
            origin: origin of the row, for messages.

        Raises:
            UserError: the template refuses the messages.
        """
        text = render_messages(self._tokenizer, messages, True, origin, arguments)
        (ids,) = encode_prompt_texts(self._tokenizer, [text])
        return ids, text

    def following(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        has_end: bool,
        arguments: Mapping[str, Any] | None,
        origin: str,
    ) -> list[int]:
        """Ids that follow a reply, up to where the next reply begins.

        Args:
            messages: those before the reply.
            new_messages: those after it.
            has_end: whether the reply's sampled ids end with a token that ends a turn. The template's own is left out
                then; otherwise the ids begin with it.
            arguments: further variables of the template.
            origin: origin of the row, for messages.

        Raises:
            UserError: the template refuses the messages, or leaves out the reply; or a message has another role than
                those that the template was tried with.
        """
        for message in new_messages:
            if message["role"] not in self._roles:
                raise UserError(
                    f"{origin}: step returned a message of the role {message['role']!r}; add it to the class's `roles`"
                    f" ({', '.join(self._roles)}), with which the chat template is tried at the start."
                )
        text = _text_behind_reply(self._tokenizer, messages, new_messages, arguments, origin)
        text_before = ""
        if has_end and self.end.written:
            _, text_before, text = text.partition(self.end.token)
        (ids,) = encode_continuations(self._tokenizer, [text], [text_before], self._added_tokens)
        return ids


def _text_behind_reply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    arguments: Mapping[str, Any] | None,
    origin: str,
) -> str:
    """What the template writes behind the content of a reply that new messages follow, up to the next reply.

    Raises:
        UserError: the template refuses the messages, or does not write the reply exactly once.
    """
    reply = {"role": "assistant", "content": MARK}
    whole = render_messages(tokenizer, [*messages, reply, *new_messages], True, origin, arguments)
    before, mark, behind = whole.partition(MARK)
    if not mark or MARK in behind:
        raise UserError(
            f"{origin}: the chat template does not write a reply that other messages follow, but {before[-200:]!r}, so"
            f" that what follows it is not known. {REMEDY}"
        )
    return behind


def check_template(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None, roles: Sequence[str]
) -> TurnEnd:
    """Checks that new messages can be told from old ones in what a chat template writes.

    It is tried without and, where the template accepts one, with a leading system message: some templates write it
    into the last question.

    Args:
        tokenizer: the policy's.
        arguments: further variables of the template.
        roles: roles of the messages that may follow a reply.

    Returns:
        How the template ends a turn.

    Raises:
        UserError: there is no template; or it leaves out a reply or messages of a role, or writes older messages
            behind a reply.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "--environment needs a chat template, and the policy's tokenizer has none: use a model whose folder"
            " holds chat_template.jinja."
        )
    end = turn_end(tokenizer, arguments)
    for role in roles:
        new_messages = [{"role": role, "content": ANSWER}]
        texts = []
        for old in OLD_TEXTS:
            question = {"role": "user", "content": old}
            texts.append(_text_behind_reply(tokenizer, [question], new_messages, arguments, ORIGIN))
            with_system = [{"role": "system", "content": old}, question]
            try:
                texts.append(_text_behind_reply(tokenizer, with_system, new_messages, arguments, ORIGIN))
            except UserError:  # the template takes no system messages
                continue
        if ANSWER not in texts[0]:
            raise UserError(
                f"{ORIGIN}: messages of the role {role!r}, which the class names in `roles`, are not in what the"
                " chat template writes, so that the policy would not read them. Use a role that it writes, such as"
                " user, or put a chat_template.jinja into the model's folder that writes this one."
            )
        other_texts = [text for text in texts if text != texts[0]]
        if other_texts:
            raise UserError(
                f"{ORIGIN}: the chat template writes older messages behind a reply, such as the system prompt into the"
                f" last question: {texts[0]!r} and {other_texts[0]!r}, so that the policy would read them again."
                f" {REMEDY}"
            )
        if end.written and end.token not in texts[0].partition(ANSWER)[0]:
            raise UserError(
                f"{ORIGIN}: the chat template ends a reply with {end.token} only if no other message follows"
                f" ({texts[0]!r}). {REMEDY}"
            )
    return end


REMEDY = (
    "Put a chat_template.jinja into the model's folder that writes every message once, and turns in the same way"
    " wherever they are; or train on every turn as a row of its own."
)
