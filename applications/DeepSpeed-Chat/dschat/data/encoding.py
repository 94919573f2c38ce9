# SPDX-License-Identifier: Apache-2.0
"""Text → token ids, and back, the same way in training, generation and scoring.

    ids = [BOS] + enc(prompt) + enc(response) + [EOS]

Each part is encoded alone, without special tokens: encoding them together would merge tokens across the border.
Some tokenizers put a space (the dummy prefix) before every text; a response continues a text, so it gets none.
Tokenizers may be fast or slow. Conversations are what the chat template writes; `TurnEnd` is how it ends a turn.
"""

from __future__ import annotations

import json
import re
import shlex
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.errors import UserError
from dschat.data.messages import DOCUMENTS, TOOLS
from dschat.data.rows import Row
from dschat.models.templates import TemplateRefusal, apply_template, render_messages

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000  # texts per call of the tokenizer; bounds the memory of its offsets
SENTINELS = ("\n", "=", "|", "¤")  # texts to put before a response where the dummy prefix cannot be switched off
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}  # → key of a Sequence
# tokenizer → (its length then, its backend without dummy prefix; None if it has no such prefix)
_BARE: weakref.WeakKeyDictionary[Any, tuple[int, Tokenizer | None]] = weakref.WeakKeyDictionary()
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
THOUGHT_END = "</think>"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of messages that hold a thought
TAG = r"<[^<>\s]+>"
OPENED = re.compile(r"(<[^<>|/\s][^<>|\s]*>\s*)?\Z")  # the tag that a text ends with
MARK = "QZXJ"  # a content that no chat template writes by itself


def prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The prompt as one text: as is, or a conversation put through the chat template, up to the assistant's turn.

    Raises:
        UserError: a conversation and no chat template, or one that refuses it; the message names the row.
    """
    if row.messages is None:
        return row.prompt or ""
    return render_messages(tokenizer, row.messages, True, row.origin, row.template_arguments)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    origin: str,
) -> str:
    """Messages as text; up to the place of the reply where the last one is not the assistant's."""
    return render_messages(tokenizer, messages, messages[-1]["role"] != "assistant", origin)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
) -> list[list[int]]:
    """Prompt ids of n rows: see `encode_prompt_texts`.

    Raises:
        UserError: see `prompt_text`.
    """
    return encode_prompt_texts(tokenizer, [prompt_text(tokenizer, row) for row in rows])


def encode_prompt_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
) -> list[list[int]]:
    """Prompt ids of n texts: BOS where the tokenizer itself puts one before a text, then the prompt.

    So a saved model reads a text the same way in plain transformers. A prompt or chat template that begins with BOS
    does not get a second one.
    """
    encoded = _encode(tokenizer, texts)
    if not puts_bos(tokenizer):
        return encoded
    bos = tokenizer.bos_token_id
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]


def puts_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts BOS before a plain text: Llama's does; GPT-2's has a BOS token, but does not."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, those included that only a vocabulary marks as such."""
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {number for number, token in added if token.special}


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
) -> list[list[int]]:
    """Response ids of n texts, without BOS, EOS and dummy prefix.

    After the ids of a prompt they decode to exactly the response's text, if the tokenizer can represent it.
    """
    if not tokenizer.is_fast:
        return [_encode_slow(tokenizer, text) for text in texts]
    bare = _bare_backend(tokenizer)
    if bare is None:
        return _encode(tokenizer, texts)
    return [
        encoding.ids
        for chunk in _chunks(texts)
        for encoding in bare.encode_batch_fast(chunk, add_special_tokens=False)
    ]


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of response ids, special tokens left out; the inverse of `encode_responses`.

    A plain `tokenizer.decode` of the response alone drops its first space where the tokenizer has a dummy prefix.
    """
    bare = _bare_backend(tokenizer) if tokenizer.is_fast else None
    if bare is not None:
        return bare.decode(list(ids), skip_special_tokens=True)
    if tokenizer.is_fast or not _slow_prefix(tokenizer):
        return _decode(tokenizer, ids)
    for sentinel in SENTINELS:
        head = _encode(tokenizer, [sentinel])[0]
        text = _decode(tokenizer, [*head, *ids])
        if text.startswith(sentinel):
            return text.removeprefix(sentinel)
    return _decode(tokenizer, ids)


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
) -> list[list[int]]:
    return [
        ids
        for chunk in _chunks(texts)
        for ids in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
    ]


def _chunks(texts: Sequence[str]) -> list[list[str]]:
    return [list(texts[start : start + CHUNK]) for start in range(0, len(texts), CHUNK)]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _bare_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Copy of a fast tokenizer's backend without dummy prefix, made once; None if there is no such prefix."""
    size = len(tokenizer)
    if tokenizer not in _BARE or _BARE[tokenizer][0] != size:
        _BARE[tokenizer] = size, _make_bare(tokenizer.backend_tokenizer)
    return _BARE[tokenizer][1]


def _make_bare(backend: Tokenizer) -> Tokenizer | None:
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    edited = {part: _without_prefix(state.get(part), key) for part, key in PARTS.items()}
    if all(edited[part] == state.get(part) for part in PARTS):
        return None
    bare = Tokenizer.from_str(json.dumps(state | edited | {"truncation": None, "padding": None}))
    bare.encode_special_tokens = backend.encode_special_tokens
    return bare


def _without_prefix(
    node: dict[str, Any] | None,
    sequence_key: str,
) -> dict[str, Any] | None:
    """One part of a backend's JSON without what adds a prefix, or, in a decoder, removes it."""
    if node is None:
        return None
    kind = node["type"]
    if kind == "Sequence":
        parts = [_without_prefix(part, sequence_key) for part in node[sequence_key]]
        kept = [part for part in parts if part is not None]
        return node | {sequence_key: kept} if kept else None
    if kind == "Metaspace":
        return node | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and sequence_key == PARTS["pre_tokenizer"]:
        return node | {"add_prefix_space": False}
    if kind == "Prepend" or (kind == "Strip" and sequence_key == PARTS["decoder"] and node["content"] == " "):
        return None
    return node


def _slow_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a slow tokenizer puts a dummy prefix before a text."""
    tokens = tokenizer.convert_ids_to_tokens(_encode(tokenizer, ["a"])[0])
    return bool(tokens) and tokens[0].startswith("▁")


def _encode_slow(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Response ids from a slow tokenizer: what follows a sentinel that keeps its own ids before the text."""
    ids = _encode(tokenizer, [text])[0]
    if not text or not _slow_prefix(tokenizer):
        return ids
    for sentinel in SENTINELS:
        head, whole = _encode(tokenizer, [sentinel, sentinel + text])
        if whole[: len(head)] == head and _decode(tokenizer, head) == sentinel:
            return whole[len(head) :]
    return ids


@dataclass(frozen=True)
class TurnEnd:
    """How a chat template writes an assistant's turn around its content, and ends it."""

    token_id: int  # the token that ends it; where the template writes none, EOS
    text: str  # what the template writes behind the content
    written: bool  # whether `text` holds that token
    token: str  # the token as text
    lead: str  # what the template writes between its generation prompt and the content
    plain_lead: str  # the same without special tokens
    # What the generation prompt ends with and a written turn does not begin with, for instance "<think>\n".
    prefill: str
    replaced: str  # what a written turn has in the place of the prefill, which a reply behind the prefill leaves out
    opened: str  # the tag that the generation prompt ends with, blanks behind it included; empty where there is none

    def length(self, ids: list[int]) -> int:
        """Tokens of a turn with the one that ends it, behind which a template may write a line break."""
        return len(ids) - ids[::-1].index(self.token_id) if self.written and self.token_id in ids else len(ids)

    @property
    def tail(self) -> str:
        """What the template writes between the content and the token that ends the turn; nothing without a token."""
        return self.text.partition(self.token)[0] if self.written else ""

    def without_end(self, turn: str) -> str:
        """A turn as the template wrote it, up to the token that ends it."""
        if not self.written:
            return turn.removesuffix(self.text)
        return turn.removesuffix(self.text.removeprefix(self.tail))

    def closings(self, text: str) -> list[str]:
        """Forms that a text up to the end of a turn may have once further messages follow, the longest first.

        As it is, or up to the token that ends the turn: a template may write EOS behind the last turn alone.
        """
        body = self.without_end(text)
        return [text, f"{body}{self.token}"] if self.written and body != text else [text]

    def behind_prompt(self, text: str) -> str:
        """A text without the tag that it begins with, where the generation prompt ends with that tag already."""
        begun = self.prefill if self.prefill.strip() else self.opened
        mark = begun.strip()
        if not mark or not text.lstrip().startswith(mark):
            return text
        blank = begun[len(begun.rstrip()) :]
        return text.lstrip().removeprefix(mark).removeprefix(blank)

    def around(self, content: str) -> str:
        """The text behind the generation prompt of a turn with a content, without the token that ends it."""
        content = self.behind_prompt(content)
        has_thought = THOUGHT_END in self.lead and THOUGHT_END in content
        return f"{'' if has_thought else self.lead}{content}{self.tail}"

    def content_of(self, reply: str) -> str:
        """The content of a reply that was sampled behind the generation prompt and decoded without special tokens."""
        return reply.removeprefix(self.plain_lead).removesuffix(self.tail)


def turn_end(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] | None = None,
    messages: Sequence[Mapping[str, Any]] = PROBE[:1],
) -> TurnEnd:
    """How the tokenizer's chat template writes and ends an assistant's turn.

    It is read off a reply to `messages`: what the template writes behind its generation prompt. `arguments` are
    further variables of the template.

    Raises:
        UserError: there is no chat template, it refuses a dialogue, or a reply does not follow its generation prompt.
    """
    dialogue = [*messages, {"role": "assistant", "content": MARK}]
    origin = "the chat template"
    question = render_messages(tokenizer, messages, False, origin, arguments)
    before = render_messages(tokenizer, messages, True, origin, arguments)
    whole = render_messages(tokenizer, dialogue, False, origin, arguments)
    opening = _common_opening(tokenizer, before, whole)
    has_header = len(opening) > len(question) and opening.startswith(question)
    place = whole.find(MARK, len(opening))
    if place < 0 or not (opening == before or has_header):
        raise UserError(
            "the tokenizer's chat template does not write a reply behind its generation prompt "
            f"({before[-40:]!r}, then {whole[-40:]!r}), so that a reply's tokens cannot be told; correct the template."
        )
    lead, text = whole[len(opening) : place], whole[place + len(MARK) :]
    prefill = before[len(opening) :]
    is_other_branch = bool(prefill.strip())
    ids = encode_responses(tokenizer, [text])[0] if text else []
    special = special_ids(tokenizer)
    ends = [i for i in ids if i in special]
    end_id = ends[0] if ends else tokenizer.eos_token_id
    token = str(tokenizer.convert_ids_to_tokens(end_id)) if end_id is not None else ""
    return TurnEnd(
        token_id=end_id,
        text=text,
        written=bool(ends) and token in text,
        token=token,
        lead="" if is_other_branch else lead,
        plain_lead="" if is_other_branch else decode_response(tokenizer, encode_responses(tokenizer, [lead])[0]),
        prefill=prefill,
        replaced=lead if is_other_branch else "",
        opened="".join(OPENED.findall(before)),
    )


def _common_opening(tokenizer: PreTrainedTokenizerBase, before: str, whole: str) -> str:
    """What two texts begin with, in whole added tokens and tags: "<think>" and "</think>" share nothing."""
    added = sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
    pieces = re.compile("|".join([*map(re.escape, added), TAG]))
    length = len(commonprefix([before, whole]))
    spans = [match.span() for text in (before, whole) for match in pieces.finditer(text)]
    return before[: min([length, *[start for start, stop in spans if start < length < stop]])]


def response_texts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    column: Literal["chosen", "rejected"],
    prompts: Sequence[str] | None = None,
) -> list[str]:
    """The chosen or the rejected responses of n rows as texts, without the token that ends them.

    Behind a prompt of text the response is its own text. Behind messages it is what the chat template writes behind
    its generation prompt, tool calls and thoughts included: see `reply_text`. A response that a row lacks is empty.

    Args:
        prompts: what `prompt_text` makes of the rows, where that is known.

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
    """The variables that a row gives to its chat template beside tools and documents."""
    return {name: value for name, value in row.template_arguments.items() if name not in (TOOLS, DOCUMENTS)}


def reply_text(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    message: Mapping[str, Any],
    prompt: str,
    end: TurnEnd | None,
) -> str:
    """What the chat template writes behind its generation prompt for an assistant's message.

    It is the difference of two renderings, with and without the message, up to the token that ends the turn. A
    template may lose a part of the content (thoughts before "</think>"), or write no reply behind its generation
    prompt (one that ends with "<think>"). Then the content itself is the response, in what the template puts around
    one.

    Args:
        row: with the messages before.
        message: of the assistant.
        prompt: text of the row's messages, with the generation prompt.
        end: how the template writes a turn; None where it cannot be told.

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
    """Whether a message brings a thought, in a field of its own or in its content."""
    return any(message.get(name) for name in THOUGHTS) or THOUGHT_END in str(message.get("content", ""))


def _without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as a generation prompt that has closed its thought goes on: without one."""
    plain = {name: value for name, value in message.items() if name not in THOUGHTS}
    if "content" in plain:
        plain["content"] = str(plain["content"]).rpartition(THOUGHT_END)[2].lstrip()
    return plain


def _begun_turn(
    tokenizer: PreTrainedTokenizerBase, row: Row, whole: str, prompt: str, end: TurnEnd | None
) -> tuple[str, str] | None:
    """A conversation's text in two: up to the generation prompt, and what the assistant's message adds to it.

    A template may write the messages before otherwise once the assistant's follows: Mistral's writes a system prompt
    only where the user's message is the last. Then they end where a plain content would begin. None where even that
    cannot be told.
    """
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    if end is None:
        return None
    opening = prompt.removesuffix(end.prefill)
    if not (end.prefill and whole.startswith(opening)):
        try:
            marked = apply_template(
                tokenizer,
                [*(row.messages or []), {"role": "assistant", "content": MARK}],
                False,
                row.template_arguments,
            )
        except TemplateRefusal:
            return None
        opening = marked[: max(0, marked.rfind(MARK))].removesuffix(end.lead or end.replaced)
    if opening and whole.startswith(opening):
        reply = whole[len(opening) :].removeprefix(end.replaced)
        return opening, end.behind_prompt(reply) if end.prefill.strip() else reply
    return None


def is_written(content: str, text: str) -> bool:
    """Whether a text holds a content, blanks apart: templates trim it, or write blanks around its parts."""
    return content in text or "".join(content.split()) in "".join(text.split())


def _is_written_across(content: str, before: str, reply: str) -> bool:
    """Whether a reply goes on with a content whose beginning stands before it: "<think>" in the generation prompt."""
    content, before, reply = ("".join(text.split()) for text in (content, before, reply))
    start = (before + reply).rfind(content)
    return start >= 0 and start + len(content) > len(before)


def reply_contents(tokenizer: PreTrainedTokenizerBase, replies: Sequence[str]) -> list[str]:
    """Sampled replies, decoded without special tokens → contents that the chat template writes as these replies.

    Without what the template itself puts before and behind a content: blanks, an empty thought.
    """
    end = _turn_end_or_none(tokenizer, {}) if tokenizer.chat_template is not None else None
    return list(replies) if end is None else [end.content_of(reply) for reply in replies]


def _turn_body(
    tokenizer: PreTrainedTokenizerBase,
    turn: str,
    end: TurnEnd | None,
    content: str,
) -> str:
    """A turn as the template wrote it, up to the token that ends it: its usual one or another special token.

    A special token is no end where the content itself ends with it.
    """
    if end is not None:
        body = end.without_end(turn)
        if body != turn or content and body.rstrip().endswith(content.rstrip()):
            return body
    return _without_special_end(tokenizer, turn)[0]


def _without_special_end(tokenizer: PreTrainedTokenizerBase, turn: str) -> tuple[str, str]:
    """A turn without the special token that it ends with and the blanks behind that; and the token, "" without one.

    A token that closes what another one opened in the turn is a part of it: "<|calls_end|>" behind "<|calls_begin|>".
    """
    text = turn.rstrip()
    for token in map(str, tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))):
        openings = (token.replace("end", "begin"), token.replace("end", "start"), token.replace("/", ""))
        if text.endswith(token) and not any(name != token and name in text for name in openings):
            return text.removesuffix(token), token
    return turn, ""


def other_call_ends(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Counter[str]:
    """Special tokens with which the template ends responses of tool calls, other than a text's → how many responses.

    A response in training ends with the one token of all responses instead.
    """
    counts: Counter[str] = Counter()
    ends: dict[str, TurnEnd] = {}
    for row in rows:
        for message in (row.reply("chosen"), row.reply("rejected")):
            if message is None or "tool_calls" not in message:
                continue
            end = _end_of_turns(tokenizer, row, ends)
            try:
                turn = apply_template(tokenizer, [*(row.messages or []), message], False, row.template_arguments)
            except TemplateRefusal:  # an error elsewhere
                continue
            token = _without_special_end(tokenizer, turn)[1]
            if end is not None and token and end.without_end(turn) == turn:
                counts[token] += 1
    return counts


def turn_end_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> TurnEnd:
    """How the template writes and ends an assistant's turn with the variables of a row.

    A template may refuse a plain dialogue, one without a system prompt for instance. Then it is read off a reply to
    the row's own messages.

    Raises:
        UserError: see `turn_end`; the one for the plain dialogue.
    """
    try:
        return turn_end(tokenizer, template_variables(row))
    except UserError:
        if row.messages is None:
            raise
        end = _turn_end_or_none(tokenizer, row.template_arguments, row.messages)
        if end is None:
            raise
        return end


def _end_of_turns(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    ends: dict[str, TurnEnd],
) -> TurnEnd | None:
    """As `turn_end_of`; None where it cannot be told. `ends` holds what is known, by the variables of rows."""
    key = repr(template_variables(row))
    if key not in ends:
        try:
            ends[key] = turn_end_of(tokenizer, row)
        except UserError:
            return None
    return ends[key]


def _turn_end_or_none(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]] = PROBE[:1],
) -> TurnEnd | None:
    try:
        return turn_end(tokenizer, arguments, messages)
    except UserError:  # a template that refuses a dialogue without a system prompt, for instance
        return None


def other_turn_end(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int,
) -> str | None:
    """What differs, and the flag that mends it, where the chat template ends earlier turns with another token.

    With another than `end_id`, that is, which ends a response in training. None also where no row holds messages.
    """
    if tokenizer.chat_template is None or all(row.messages is None for row in rows):
        return None
    end = _turn_end_or_none(tokenizer, {})
    if end is None or not end.written or end.token_id == end_id:
        return None
    written, other = (str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in (end.token_id, end_id))
    return (
        f"the chat template ends the assistant's turns with {written}, but in training a response ends with {other}: "
        f"earlier turns and responses end differently. --end_of_conversation_token {shlex.quote(written)} ends both "
        "with the template's"
    )
