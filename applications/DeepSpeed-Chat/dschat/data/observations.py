# SPDX-License-Identifier: Apache-2.0
"""Messages of an environment as token ids that continue an episode: sampled ids are never encoded again.

What the template writes between a reply and the next one is the difference of two renderings, with a placeholder in
the reply's place:

    … <assistant>QZXJ<end>                                    the conversation with a reply
    … <assistant>QZXJ<end><user>Too low.<end><assistant>      and with the messages that follow it

The ids of "<user>Too low.<end><assistant>" are appended to those of the episode. That is right only for templates that
write earlier turns as they wrote them at first; `check_template` refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import AddedTokens, encode_continuations, encode_prompt_texts
from dschat.data.turn_end import MARK, THOUGHT_END, TurnEnd, turn_end
from dschat.models.templates import Message, render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORIGIN = "--environment"  # origin of the messages that are tried at the start
SYSTEM = {"role": "system", "content": "s"}
QUESTION = {"role": "user", "content": "a"}
ANSWER = "KVWQ"  # content of an environment's message, which a template is to write
REPLIES = ("b", f"<think>\nc\n{THOUGHT_END}\n\nb")  # without and with a thought


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
            UserError: there is no chat template, or it cannot be used, see `check_template`.
        """
        if tokenizer.chat_template is None:
            raise UserError(
                "--environment needs a chat template, and the policy's tokenizer has none: use a model whose folder"
                " holds chat_template.jinja."
            )
        self._tokenizer = tokenizer
        self._added_tokens = AddedTokens(tokenizer)
        self._end = turn_end(tokenizer, arguments)
        self._roles = tuple(roles)
        check_template(tokenizer, arguments, roles)

    @property
    def end(self) -> TurnEnd:
        """How the template ends a turn."""
        return self._end

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
            UserError: the template refuses the messages, or writes the turn differently once others follow; or a
                message has another role than those that the template was tried with.
        """
        for message in new_messages:
            if message["role"] not in self._roles:
                raise UserError(
                    f"{origin}: step returned a message of the role {message['role']!r}; add it to the class's `roles`"
                    f" ({', '.join(self._roles)}), with which the chat template is tried at the start."
                )
        replied = [*messages, {"role": "assistant", "content": MARK}]
        prompt = render_messages(self._tokenizer, messages, True, origin, arguments)
        before = render_messages(self._tokenizer, replied, False, origin, arguments)
        after = render_messages(self._tokenizer, [*replied, *new_messages], True, origin, arguments)
        if not (before.startswith(prompt) and after.startswith(before)):
            raise UserError(f"{origin}: {_REWRITES}")
        opening, _, _ = before.rpartition(MARK)
        text = after[len(opening) + len(MARK) :]
        text_before = ""
        if has_end and self._end.written:
            _, text_before, text = text.partition(self._end.token)
        (ids,) = encode_continuations(self._tokenizer, [text], [text_before], self._added_tokens)
        return ids


def check_template(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None, roles: Sequence[str]
) -> None:
    """Checks that a chat template is prefix-preserving: it writes one turn more behind the text that is there.

    It is tried without and, where the template accepts one, with a leading system message: some templates write it
    into the last question only.

    Args:
        tokenizer: with a chat template.
        arguments: further variables of the template.
        roles: roles of the messages that may follow a reply.

    Raises:
        UserError: the template does not write a reply behind its generation prompt, or writes it differently once
            other messages follow, a thought in a reply is tried, too; or it leaves out messages of a role.
    """
    _check_beginning(tokenizer, [QUESTION], arguments, roles)
    beginning = [SYSTEM, QUESTION]
    try:
        render_messages(tokenizer, beginning, True, ORIGIN, arguments)
    except UserError:  # no system messages, then
        return
    _check_beginning(tokenizer, beginning, arguments, roles)


def _check_beginning(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    arguments: Mapping[str, Any] | None,
    roles: Sequence[str],
) -> None:
    """`check_template` for episodes that begin with these messages."""
    prompt = render_messages(tokenizer, messages, True, ORIGIN, arguments)
    for reply in REPLIES:
        replied = [*messages, {"role": "assistant", "content": reply}]
        text = render_messages(tokenizer, replied, False, ORIGIN, arguments)
        if not text.startswith(prompt):
            raise UserError(f"{ORIGIN}: {_REWRITES}")
        for role in roles:
            answered = [*replied, {"role": role, "content": ANSWER}]
            whole = render_messages(tokenizer, answered, True, ORIGIN, arguments)
            if not whole.startswith(text):
                raise UserError(f"{ORIGIN}: {_REWRITES}")
            if ANSWER not in whole:
                raise UserError(
                    f"{ORIGIN}: messages of the role {role!r}, which the class names in `roles`, are not in what the"
                    " chat template writes, so that the policy would not read them. Use a role that it writes, such as"
                    " user, or put a chat_template.jinja into the model's folder that writes this one."
                )


_REWRITES = (
    "the chat template writes what is there differently once a reply or other messages follow (many leave out earlier"
    " thoughts, some write the system prompt into the last question only), so that an episode would not be what the"
    " policy has read and sampled. Put a chat_template.jinja into the model's folder that writes earlier turns,"
    " thoughts included, as they were; or train on every turn as a row of its own."
)
