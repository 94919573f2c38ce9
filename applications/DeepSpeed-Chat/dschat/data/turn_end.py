# SPDX-License-Identifier: Apache-2.0
"""How a chat template writes an assistant's turn around its content, and ends it; what a reply is in its words."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response, encode_responses, prompt_text
from dschat.data.messages import DOCUMENTS, TEMPLATE_VARIABLES, TOOLS
from dschat.data.rows import Row
from dschat.models.templates import TemplateRefusal, apply_template, render_messages
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
THOUGHT_END = "</think>"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of messages that hold a thought
TAG = r"<[^<>\s]+>"
OPENED = re.compile(r"(<[^<>|/\s][^<>|\s]*>\s*)?\Z")  # the opening tag that a text ends with
PROBES = 8  # cases of a kind that are tried
MARK = "QZXJ"  # a content that no chat template writes by itself


@dataclass(frozen=True)
class TurnEnd:
    """How a chat template writes an assistant's turn around its content, and ends it."""

    token_id: int  # the token that ends the turn; EOS if the template writes none
    text: str  # the template's text after the content
    written: bool  # whether `text` holds the token
    token: str  # the token as text
    lead: str  # the template's text between its generation prompt and the content
    plain_lead: str  # `lead` without special tokens
    prefill: str  # end of the generation prompt with which a written turn does not begin, for instance "<think>\n"
    replaced: str  # a written turn's text in place of the prefill; a reply after the prefill does not have it
    opened: str  # the tag, with blanks, at the end of the generation prompt; empty without one

    def length(self, ids: list[int]) -> int:
        """Tokens of a turn, up to and including the one that ends it; a template may write a line break after it."""
        if not self.written or self.token_id not in ids:
            return len(ids)
        num_tokens_after = ids[::-1].index(self.token_id)
        return len(ids) - num_tokens_after

    @property
    def tail(self) -> str:
        """The template's text between the content and the token that ends the turn; empty without a token."""
        if not self.written:
            return ""
        tail, _, _ = self.text.partition(self.token)
        return tail

    def without_end(self, turn: str) -> str:
        """A turn as the template wrote it, up to the token that ends it."""
        if not self.written:
            return turn.removesuffix(self.text)
        return turn.removesuffix(self.text.removeprefix(self.tail))

    def closings(self, text: str) -> list[str]:
        """Forms that a text up to the end of a turn may have once other messages follow, the longest first.

        The text as it is, or up to the token that ends the turn: a template may write EOS only after the last turn.
        """
        body = self.without_end(text)
        if self.written and body != text:
            return [text, f"{body}{self.token}"]
        return [text]

    def behind_prompt(self, text: str) -> str:
        """A text without its opening tag if the generation prompt ends with that tag already."""
        prompt_end = self.prefill if self.prefill.strip() else self.opened
        tag = prompt_end.strip()
        if not tag or not text.lstrip().startswith(tag):
            return text
        blanks = prompt_end[len(prompt_end.rstrip()) :]
        return text.lstrip().removeprefix(tag).removeprefix(blanks)

    def around(self, content: str) -> str:
        """A turn's text after the generation prompt, without the token that ends it."""
        content = self.behind_prompt(content)
        if THOUGHT_END in self.lead and THOUGHT_END in content:  # the thought of the content takes the lead's place
            return content + self.tail
        return self.lead + content + self.tail

    def content_of(self, reply: str) -> str:
        """The content of a reply that was sampled behind the generation prompt and decoded without special tokens."""
        return reply.removeprefix(self.plain_lead).removesuffix(self.tail)


def turn_end(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] | None = None,
    messages: Sequence[Mapping[str, Any]] = PROBE[:1],
) -> TurnEnd:
    """How the tokenizer's chat template writes and ends an assistant's turn.

    It is read from a reply to `messages`, which follows the template's generation prompt. `arguments`: additional
    variables of the template.

    Raises:
        UserError: there is no chat template, it refuses a dialogue, or a reply does not follow its generation prompt.
    """
    # Render a dialogue with a marked reply, and find the reply after the generation prompt.
    dialogue = [*messages, {"role": "assistant", "content": MARK}]
    origin = "the chat template"
    question = render_messages(tokenizer, messages, False, origin, arguments)
    prompt = render_messages(tokenizer, messages, True, origin, arguments)
    whole = render_messages(tokenizer, dialogue, False, origin, arguments)
    opening = _common_opening(tokenizer, prompt, whole)
    has_header = len(opening) > len(question) and opening.startswith(question)
    mark_start = whole.find(MARK, len(opening))
    if mark_start < 0 or not (opening == prompt or has_header):
        raise UserError(
            "the tokenizer's chat template does not write a reply after its generation prompt "
            f"({prompt[-40:]!r}, then {whole[-40:]!r}), so that a reply's tokens are not known; correct the template."
        )
    lead = whole[len(opening) : mark_start]
    text = whole[mark_start + len(MARK) :]
    prefill = prompt[len(opening) :]

    written_end = _first_end_token(tokenizer, text)
    end_id = tokenizer.eos_token_id if written_end is None else written_end
    token = "" if end_id is None else str(tokenizer.convert_ids_to_tokens(end_id))

    # A written turn has the lead in place of the prefill, if the generation prompt ends with one.
    replaced = ""
    if prefill.strip():
        replaced = lead
        lead = ""
    return TurnEnd(
        token_id=end_id,
        text=text,
        written=written_end is not None and token in text,
        token=token,
        lead=lead,
        plain_lead=decode_response(tokenizer, encode_responses(tokenizer, [lead])[0]) if lead else "",
        prefill=prefill,
        replaced=replaced,
        opened="".join(OPENED.findall(prompt)),
    )


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


def _common_opening(tokenizer: PreTrainedTokenizerBase, prompt: str, whole: str) -> str:
    """The common beginning of two texts in whole added tokens and tags: "<think>" and "</think>" share nothing."""
    added_tokens = sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
    unit = re.compile("|".join([*map(re.escape, added_tokens), TAG]))
    common_length = len(commonprefix([prompt, whole]))
    length = common_length
    for text in (prompt, whole):
        for match in unit.finditer(text):
            if match.start() < common_length < match.end():  # the texts differ inside this token or tag
                length = min(length, match.start())
    return prompt[:length]


def response_texts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    column: Literal["chosen", "rejected"],
    prompts: Sequence[str] | None = None,
) -> list[str]:
    """The chosen or the rejected responses of rows as texts, without the token that ends them.

    The response to a prompt of text is its own text. The response to messages is the chat template's text after its
    generation prompt, including tool calls and thoughts: see `reply_text`. A response that a row lacks is empty.

    Args:
        tokenizer: tokenizer of the model.
        rows: rows of the data.
        column: which response.
        prompts: the result of `prompt_text` for every row, if it is known.

    Raises:
        UserError: see `prompt_text`.
    """
    ends: dict[str, TurnEnd] = {}
    texts = []
    for number, row in enumerate(rows):
        message = row.reply(column)
        if message is None or row.messages is None or tokenizer.chat_template is None:
            texts.append(getattr(row, column) or "")
            continue
        prompt = prompt_text(tokenizer, row) if prompts is None else prompts[number]
        texts.append(reply_text(tokenizer, row, message, prompt, _end_of_turns(tokenizer, row, ends)))
    return texts


def template_variables(row: Row) -> dict[str, Any]:
    """The variables that a row gives to its chat template, without tools and documents."""
    arguments = row.template_arguments.items()
    variables: dict[str, Any] = {}
    for name, value in arguments:
        if name not in (TOOLS, DOCUMENTS):
            variables[name] = value
    return variables


def template_form(row: Row) -> str:
    """A key that is equal for rows whose assistant's turns the chat template writes in one form.

    It holds the variables of a row, and whether the row has tools and documents: transformers may choose another of
    several templates for rows with tools, and templates branch on both.
    """
    lists = [name for name in (TOOLS, DOCUMENTS) if row.template_arguments.get(name)]
    return repr((template_variables(row), lists))


def template_cases(rows: Iterable[Row]) -> list[tuple[str, Mapping[str, Any]]]:
    """A condition in words, for notes, and the template's arguments, for the first row of every form of turns.

    At most PROBES cases. The first is the template without arguments, whose condition is empty.
    """
    first_rows: dict[str, Row] = {}
    for row in rows:
        if row.template_arguments:
            first_rows.setdefault(template_form(row), row)
    cases: list[tuple[str, Mapping[str, Any]]] = [("", {})]
    for row in islice(first_rows.values(), PROBES - 1):
        conditions = []
        variables = template_variables(row)
        if variables:
            variables_text = json.dumps(variables, ensure_ascii=False, default=str)
            conditions.append(f"{TEMPLATE_VARIABLES} {variables_text}")
        for name in (TOOLS, DOCUMENTS):
            if row.template_arguments.get(name):
                conditions.append(f"the {name} of {row.origin}")
        condition = f"with {' and '.join(conditions)}, " if conditions else ""
        cases.append((condition, row.template_arguments))
    return cases


def reply_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, message: Mapping[str, Any], prompt: str, end: TurnEnd | None
) -> str:
    """The chat template's text after its generation prompt for a message of the assistant.

    It is the difference of two renderings, with and without the message, up to the token that ends the turn. A
    template may drop a part of the content (thoughts before "</think>"), or write no reply after its generation
    prompt (one that ends with "<think>"). Then the response is the content itself, between the texts that the template
    puts around a content.

    Args:
        tokenizer: with the chat template.
        row: with the messages before.
        message: a message of the assistant.
        prompt: text of the row's messages, with the generation prompt.
        end: how the template writes a turn; None if it is not known.

    Raises:
        UserError: the template refuses the message; names the row.
    """
    messages = [*(row.messages or []), message]
    whole = render_messages(tokenizer, messages, False, row.origin, row.template_arguments)
    content = str(message.get("content", ""))
    begun = _begun_turn(tokenizer, row, whole, prompt, end)
    if begun is not None:
        opening, reply = begun
        reply = _turn_body(tokenizer, reply, end, "" if "tool_calls" in message else content)
        if is_written(content, reply) or "tool_calls" in message:
            return reply
        bare = render_messages(tokenizer, row.messages or [], False, row.origin, row.template_arguments)
        if opening.startswith(bare) and _is_written_across(content, opening[len(bare) :], reply):
            return reply
    elif "tool_calls" in message and has_thought(message):
        return reply_text(tokenizer, row, _without_thought(message), prompt, end)
    return content if end is None else end.around(content)


def has_thought(message: Mapping[str, Any]) -> bool:
    """Whether a message holds a thought, in a separate field or in its content."""
    if any(message.get(name) for name in THOUGHTS):
        return True
    return THOUGHT_END in str(message.get("content", ""))


def _without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its thought, to follow a generation prompt that holds a closed one."""
    plain = {}
    for name, value in message.items():
        if name not in THOUGHTS:
            plain[name] = value
    if "content" in plain:
        plain["content"] = str(plain["content"]).rpartition(THOUGHT_END)[2].lstrip()
    return plain


def _begun_turn(
    tokenizer: PreTrainedTokenizerBase, row: Row, whole: str, prompt: str, end: TurnEnd | None
) -> tuple[str, str] | None:
    """A conversation's text in two parts: up to the generation prompt, and the assistant's message after it.

    A template may write earlier messages differently once the assistant's follows: Mistral's writes a system prompt
    only if the user's message is the last. Then the first part ends where a plain content would begin. None if even
    that is not known.
    """
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    if end is None:
        return None
    opening = prompt.removesuffix(end.prefill)
    if not (end.prefill and whole.startswith(opening)):
        try:
            messages = [*(row.messages or []), {"role": "assistant", "content": MARK}]
            marked = apply_template(tokenizer, messages, False, row.template_arguments)
        except TemplateRefusal:
            return None
        before_mark, mark, _ = marked.rpartition(MARK)
        opening = before_mark.removesuffix(end.lead or end.replaced) if mark else ""
    if not opening or not whole.startswith(opening):
        return None
    reply = whole[len(opening) :].removeprefix(end.replaced)
    if end.prefill.strip():
        reply = end.behind_prompt(reply)
    return opening, reply


def is_written(content: str, text: str) -> bool:
    """Whether a text holds a content, blanks apart: templates trim it, or write blanks around its parts."""
    return content in text or _without_blanks(content) in _without_blanks(text)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _is_written_across(content: str, before: str, reply: str) -> bool:
    """Whether a reply continues a content that begins before it: with "<think>" in the generation prompt."""
    content = _without_blanks(content)
    before = _without_blanks(before)
    start = (before + _without_blanks(reply)).rfind(content)
    return start >= 0 and start + len(content) > len(before)


def reply_contents(tokenizer: PreTrainedTokenizerBase, replies: Sequence[str]) -> list[str]:
    """Sampled replies, decoded without special tokens → contents that the chat template writes as these replies.

    The text that the template itself puts before and after a content, such as blanks or an empty thought, is removed.
    """
    if tokenizer.chat_template is None:
        return list(replies)
    end = _turn_end_or_none(tokenizer, {})
    if end is None:
        return list(replies)
    return [end.content_of(reply) for reply in replies]


def _turn_body(tokenizer: PreTrainedTokenizerBase, turn: str, end: TurnEnd | None, content: str) -> str:
    """A turn as the template wrote it, up to the token that ends it: the usual one or another special token.

    A special token does not end the turn if the content itself ends with it.
    """
    if end is not None:
        body = end.without_end(turn)
        if body != turn or content and body.rstrip().endswith(content.rstrip()):
            return body
    body, _ = _without_special_end(tokenizer, turn)
    return body


def _without_special_end(tokenizer: PreTrainedTokenizerBase, turn: str) -> tuple[str, str]:
    """A turn without its last special token and the blanks after it; and that token, "" without one.

    A token that closes another one of the turn is a part of the turn: "<|calls_end|>" after "<|calls_begin|>".
    """
    text = turn.rstrip()
    for token in map(str, tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))):
        if not text.endswith(token):
            continue
        openings = {token.replace("end", "begin"), token.replace("end", "start"), token.replace("/", "")}
        openings.discard(token)
        if not any(opening in text for opening in openings):
            return text.removesuffix(token), token
    return turn, ""


def other_call_ends(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Counter[str]:
    """Special tokens with which the template ends tool calls but not texts → number of responses.

    In training all responses end with one token instead.
    """
    counts: Counter[str] = Counter()
    ends: dict[str, TurnEnd] = {}
    for row in rows:
        for message in (row.reply("chosen"), row.reply("rejected")):
            if message is None or "tool_calls" not in message:
                continue
            end = _end_of_turns(tokenizer, row, ends)
            messages = [*(row.messages or []), message]
            try:
                turn = apply_template(tokenizer, messages, False, row.template_arguments)
            except TemplateRefusal:  # reported elsewhere
                continue
            _, token = _without_special_end(tokenizer, turn)
            if end is not None and token and end.without_end(turn) == turn:
                counts[token] += 1
    return counts


def turn_end_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> TurnEnd:
    """How the template writes and ends an assistant's turn with the variables, tools and documents of a row.

    A template may refuse a plain dialogue, for instance one without a system prompt. Then a reply to the row's own
    messages is read.

    Raises:
        UserError: see `turn_end`; the one for the plain dialogue.
    """
    try:
        return turn_end(tokenizer, row.template_arguments)
    except UserError:
        if row.messages is None:
            raise
        end = _turn_end_or_none(tokenizer, row.template_arguments, row.messages)
        if end is None:
            raise
        return end


def _end_of_turns(tokenizer: PreTrainedTokenizerBase, row: Row, ends: dict[str, TurnEnd]) -> TurnEnd | None:
    """The result of `turn_end_of`, or None if that is not known; `ends` caches it by `template_form`."""
    key = template_form(row)
    if key not in ends:
        try:
            ends[key] = turn_end_of(tokenizer, row)
        except UserError:
            return None
    return ends[key]


def _turn_end_or_none(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = PROBE[:1]
) -> TurnEnd | None:
    try:
        return turn_end(tokenizer, arguments, messages)
    except UserError:  # a template that refuses a dialogue without a system prompt, for instance
        return None


def other_turn_end(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], end_id: int) -> str | None:
    """A note if the chat template ends earlier turns with another token than responses in training, with the remedy.

    `end_id`: the token that ends a response in training. None also if no row holds messages.
    """
    conversations = [row for row in rows if row.messages is not None]
    if tokenizer.chat_template is None or not conversations:
        return None
    training_token = str(tokenizer.convert_ids_to_tokens(end_id))
    for condition, arguments in template_cases(conversations):
        end = _turn_end_or_none(tokenizer, arguments)
        if end is not None and end.written and end.token_id != end_id:
            return (
                f"{condition}the chat template ends the assistant's turns with {end.token}, but in training a "
                f"response ends with {training_token}: earlier turns and responses end differently. "
                f"--end_of_conversation_token {shlex.quote(end.token)} ends both with the template's"
            )
    return None
