# SPDX-License-Identifier: Apache-2.0
"""What a reply is in a chat template's text.

One contract says it, and a reply is the rest of the text:

    prompt (with the generation prompt) + reply + end of the turn = the conversation with the reply

Three forms of templates that break it are known:

- The generation prompt opens a thought (``<think>``) that written turns do not open (DeepSeek R1). The reply then
  follows the prompt without that tag.
- A thought in the content is left out, or follows a thought that the generation prompt has closed. The reply is then
  the content itself.
- Only a last question holds the system prompt (Mistral 7B v0.3). The reply is then read without system messages.

Every other template is refused with both texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response, encode_responses, prompt_text
from dschat.data.messages import DOCUMENTS, THOUGHT_END, TOOLS
from dschat.data.rows import ResponseColumn, Row
from dschat.models.templates import render_messages
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = [{"role": "user", "content": "a"}]
MARK = "QZXJ"  # a content that no chat template writes by itself
THOUGHT_START = "<think>"
OPENED = re.compile(r"(<[^<>|/\s][^<>|\s]*>\s*)?\Z")  # the opening tag that a text ends with
CONTEXT = 200  # characters before and after a difference of two texts that messages show


@dataclass(frozen=True)
class TurnEnd:
    """How a chat template writes an assistant's turn around its content, and ends it.

    Attributes:
        token_id: the token that ends the turn; EOS if the template writes none.
        token: the token as text.
        lead: the template's text between its generation prompt and the content.
        text: the template's text after the content.
        written: whether `text` holds the token.
    """

    token_id: int
    token: str
    lead: str
    text: str
    written: bool

    @property
    def tail(self) -> str:
        """The template's text between the content and the token that ends the turn; empty without a token."""
        tail, token, _ = self.text.partition(self.token)
        return tail if self.written and token else ""

    def without_end(self, turn: str) -> str:
        """A turn as the template wrote it, up to the token that ends it."""
        return turn.removesuffix(self.text.removeprefix(self.tail))

    def with_end(self, turn: str) -> str:
        """A turn as the template wrote it, with the token that ends it but without what follows the token."""
        if not self.written:
            return turn.removesuffix(self.text)
        body, token, rest = turn.rpartition(self.token)
        return body + token if token else rest


def turn_end(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> TurnEnd:
    """How the tokenizer's chat template writes and ends an assistant's turn.

    Args:
        tokenizer: with a chat template.
        arguments: further variables of the template.

    Raises:
        UserError: there is no chat template, it refuses a user's question, or no reply follows its generation prompt.
    """
    variables = dict(arguments or {})
    return _turn_end(tokenizer, Row(None, QUESTION, None, None, {}, "a user's question", template_arguments=variables))


def turn_end_of(tokenizer: PreTrainedTokenizerBase, row: Row, ends: dict[str, TurnEnd]) -> TurnEnd:
    """How the template writes and ends a turn with the variables, tools and documents of a row of messages.

    A template may refuse a plain dialogue, for instance one without a system prompt. Then a reply to the row's own
    messages is read. `ends` caches results by `template_form`.

    Raises:
        UserError: see `turn_end`; names the row.
    """
    form = template_form(row)
    if form not in ends:
        try:
            ends[form] = turn_end(tokenizer, row.template_arguments)
        except UserError:
            ends[form] = _turn_end(tokenizer, row)
    return ends[form]


def _turn_end(tokenizer: PreTrainedTokenizerBase, row: Row) -> TurnEnd:
    """How the template writes and ends a turn, read from a reply to a row's messages."""
    reply = {"role": "assistant", "content": MARK}
    prompt = prompt_text(tokenizer, row)
    written = _behind_prompt(tokenizer, row, reply, prompt)
    lead, mark, text = (written or "").partition(MARK)
    if not mark:
        raise _refusal(tokenizer, row, reply, prompt)
    written_end = _first_end_token(tokenizer, text)
    end_id = tokenizer.eos_token_id if written_end is None else written_end
    token = "" if end_id is None else str(tokenizer.convert_ids_to_tokens(end_id))
    return TurnEnd(end_id, token, lead, text, written=written_end is not None and token in text)


def template_form(row: Row) -> str:
    """A key that is equal for rows whose assistant's turns the chat template writes in one form.

    It holds the variables of a row, and whether the row has tools and documents: transformers may choose another of
    several templates for rows with tools, and templates branch on both.
    """
    variables = {name: value for name, value in row.template_arguments.items() if name not in (TOOLS, DOCUMENTS)}
    lists = [name for name in (TOOLS, DOCUMENTS) if row.template_arguments.get(name)]
    return repr((variables, lists))


def response_texts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    column: ResponseColumn,
    prompts: Sequence[str] | None = None,
) -> list[str]:
    """The chosen or the rejected responses of rows as texts, without the token that ends them.

    The response to a prompt of text is its own text. The response to messages is the chat template's text after its
    generation prompt, including tool calls and thoughts. A response that a row lacks is empty.

    Args:
        tokenizer: tokenizer of the model.
        rows: rows of the data.
        column: which response.
        prompts: the result of `prompt_text` for every row, if it is known.

    Raises:
        UserError: the template refuses a row, or does not write the reply behind its generation prompt.
    """
    ends: dict[str, TurnEnd] = {}
    texts = []
    for number, row in enumerate(rows):
        message = row.reply(column)
        if message is None or row.messages is None or tokenizer.chat_template is None:
            texts.append(getattr(row, column) or "")
            continue
        prompt = prompt_text(tokenizer, row) if prompts is None else prompts[number]
        texts.append(reply_text(tokenizer, row, message, prompt, turn_end_of(tokenizer, row, ends)))
    return texts


def reply_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, message: Mapping[str, Any], prompt: str, end: TurnEnd
) -> str:
    """The chat template's text after its generation prompt for a message of the assistant.

    Args:
        tokenizer: with the chat template.
        row: with the messages before.
        message: a message of the assistant.
        prompt: text of the row's messages, with the generation prompt.
        end: how the template writes a turn.

    Raises:
        UserError: the template refuses the message, or does not write it behind `prompt`; names the row.
    """
    written = _behind_prompt(tokenizer, row, message, prompt)
    content = str(message.get("content", ""))
    if "tool_calls" not in message and _lacks_thought(written or "", content):
        lead = "" if THOUGHT_END in end.lead else end.lead
        return lead + _without_tag(content, _opened_tag(prompt)) + end.tail
    if written is None:
        raise _refusal(tokenizer, row, message, prompt)
    return end.without_end(written)


def reply_contents(tokenizer: PreTrainedTokenizerBase, replies: Sequence[str]) -> list[str]:
    """Sampled replies, decoded without special tokens → contents that the chat template writes as these replies.

    The text that the template itself puts before and after a content, such as blanks or an empty thought, is removed.
    """
    if tokenizer.chat_template is None:
        return list(replies)
    try:
        end = turn_end(tokenizer)
    except UserError:  # a template that refuses a dialogue without a system prompt, for instance
        return list(replies)
    lead = decode_response(tokenizer, encode_responses(tokenizer, [end.lead])[0]) if end.lead else ""
    return [reply.removeprefix(lead).removesuffix(end.tail) for reply in replies]


def _behind_prompt(
    tokenizer: PreTrainedTokenizerBase, row: Row, message: Mapping[str, Any], prompt: str
) -> str | None:
    """The template's text for a message behind the row's prompt, with the end of the turn; None if it is not there."""
    messages = row.messages or []
    whole = render_messages(tokenizer, [*messages, message], False, row.origin, row.template_arguments)
    if whole.startswith(prompt):
        return whole.removeprefix(prompt)
    opened = _opened_tag(prompt)
    before_tag = prompt.removesuffix(opened)
    if opened and whole.startswith(before_tag):
        return _without_tag(whole.removeprefix(before_tag), opened)
    others = [other for other in messages if other["role"] != "system"]
    if len(others) == len(messages):
        return None
    without_system = replace(row, messages=others)
    return _behind_prompt(tokenizer, without_system, message, prompt_text(tokenizer, without_system))


def _lacks_thought(reply: str, content: str) -> bool:
    """Whether a reply lacks the thought of a content, blanks apart."""
    thought, mark, _ = content.rpartition(THOUGHT_END)
    thought = thought.lstrip().removeprefix(THOUGHT_START)
    return "".join((thought + mark).split()) not in "".join(reply.split())


def _opened_tag(prompt: str) -> str:
    """The opening tag, with blanks, at the end of a prompt; empty without one."""
    return "".join(OPENED.findall(prompt))


def _without_tag(text: str, opened: str) -> str:
    """A text without its opening tag if the prompt before it has opened that tag already."""
    tag = opened.rstrip()
    if not tag or not text.lstrip().startswith(tag):
        return text
    return text.lstrip().removeprefix(tag).removeprefix(opened.removeprefix(tag))


def _refusal(tokenizer: PreTrainedTokenizerBase, row: Row, message: Mapping[str, Any], prompt: str) -> UserError:
    """The error for a reply that does not follow the generation prompt."""
    messages = [*(row.messages or []), message]
    whole = render_messages(tokenizer, messages, False, row.origin, row.template_arguments)
    prompt_end, reply_end = where_texts_differ(prompt, whole)
    return UserError(
        f"{row.origin}: the chat template does not write a reply behind its generation prompt: the prompt is "
        f"{prompt_end!r}, and the conversation with the reply {reply_end!r}. Correct the template in the "
        "model's folder (chat_template.jinja). If the prompt closes a thought and the reply has one, remove "
        "enable_thinking: false from the row, or the thought."
    )


def where_texts_differ(first: str, second: str) -> tuple[str, str]:
    """Two texts around their first difference, for messages."""
    common_length = len(commonprefix([first, second]))
    start = max(0, common_length - CONTEXT)
    mark = "…" if start else ""
    stop = common_length + CONTEXT
    return mark + first[start:stop], mark + second[start:stop]


def _first_end_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The token that ends a turn in the template's text after a content; None without one.

    The first special token or, without any, the first added token that is not blank: `add_tokens` marks none as
    special, and some vocabularies hold runs of blanks as added tokens.
    """
    token_ids = encode_responses(tokenizer, [text])[0] if text else []
    added_ids = set()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if str(token).strip():
            added_ids.add(token_id)
    for end_ids in (special_ids(tokenizer), added_ids):
        for token_id in token_ids:
            if token_id in end_ids:
                return token_id
    return None
