# SPDX-License-Identifier: Apache-2.0
"""Text → token ids, and back, the same way in training, generation and scoring.

    ids = [BOS] + enc(prompt) + enc(response) + [EOS]

Each part is encoded alone, without special tokens: encoding them together would merge tokens across the border.
Some tokenizers put a space (the dummy prefix) before every text; a response continues a text, so it gets none.
Tokenizers may be fast or slow. Conversations are what the chat template writes; `TurnEnd` is how it ends a turn.
"""

from __future__ import annotations

import json
import logging
import shlex
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dschat.data.rows import Row
from dschat.data.templates import render_messages
from dschat.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK = 1000  # texts per call of the tokenizer; bounds the memory of its offsets
SENTINELS = ("\n", "=", "|", "¤")  # texts to put before a response where the dummy prefix cannot be switched off
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}  # → key of a Sequence
# tokenizer → (its length then, its backend without dummy prefix; None if it has no such prefix)
_BARE: weakref.WeakKeyDictionary[Any, tuple[int, Tokenizer | None]] = weakref.WeakKeyDictionary()
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The prompt as one text: as is, or a conversation put through the chat template, up to the assistant's turn.

    Raises:
        UserError: a conversation and no chat template, or one that refuses it; the message names the row.
    """
    if row.messages is None:
        return row.prompt or ""
    return render_messages(tokenizer, row.messages, True, row.origin)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], origin: str) -> str:
    """Messages as text; up to the place of the reply where the last one is not the assistant's."""
    return render_messages(tokenizer, messages, messages[-1]["role"] != "assistant", origin)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[list[int]]:
    """Prompt ids of n rows: BOS where the tokenizer itself puts one before a text, then the prompt.

    So a saved model reads a text the same way in plain transformers. A prompt or chat template that begins with BOS
    does not get a second one.

    Raises:
        UserError: see `prompt_text`.
    """
    encoded = _encode(tokenizer, [prompt_text(tokenizer, row) for row in rows])
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


def encode_responses(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
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


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
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


def _without_prefix(node: dict[str, Any] | None, sequence_key: str) -> dict[str, Any] | None:
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
    """How a chat template ends an assistant's turn."""

    token_id: int  # the token that ends it; where the template writes none, EOS
    text: str  # what the template writes behind the reply
    written: bool  # whether `text` holds that token

    def length(self, ids: list[int]) -> int:
        """Tokens of a turn with the one that ends it, behind which a template may write a line break."""
        return len(ids) - ids[::-1].index(self.token_id) if self.written and self.token_id in ids else len(ids)


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
    """What differs, and the flag that mends it, where the chat template ends earlier turns with another token.

    With another than `end_id`, that is, which ends a response in training. None also where no row holds messages.
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


@dataclass(frozen=True)
class MarkedPrompt:
    """What comes before a response: ids, and of each whether it belongs to an earlier turn of the assistant."""

    ids: list[int]
    targets: list[bool]


def encode_turns(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[MarkedPrompt]:
    """Prompts of n rows, with the earlier turns of the assistant marked, each up to the token that ends it.

    The text is what the chat template writes. Each turn of the assistant, and what stands between two of them, is
    encoded alone, as it is when the turn is sampled. Where the template ends a turn with no special token, no token is
    added: the text of the turn is marked. Rows without such turns are encoded as `encode_prompts` does.

    Raises:
        UserError: see `dschat.data.encoding.prompt_text`; or the template writes a turn otherwise once others follow.
    """
    end = turn_end(tokenizer) if any(_earlier_turns(row) for row in rows) else None
    cuts = [_cuts(tokenizer, row, end) if end else [prompt_text(tokenizer, row)] for row in rows]
    heads = encode_prompts(
        tokenizer, [Row(texts[0], None, None, None, {}, row.origin) for row, texts in zip(rows, cuts, strict=True)]
    )
    pieces = iter(encode_responses(tokenizer, [text for texts in cuts for text in texts[1:]]))
    marked = []
    for head, texts in zip(heads, cuts, strict=True):
        ids, targets = list(head), [False] * len(head)
        for number in range(1, len(texts)):
            piece = next(pieces)
            length = end.length(piece) if number % 2 and end else 0
            ids += piece
            targets += [True] * length + [False] * (len(piece) - length)
        marked.append(MarkedPrompt(ids, targets))
    return marked


def _cuts(tokenizer: PreTrainedTokenizerBase, row: Row, end: TurnEnd) -> list[str]:
    """A prompt's text in pieces: up to the first turn of the assistant, that turn, up to the next one, and so on."""
    whole = prompt_text(tokenizer, row)
    messages = row.messages or []
    places = [0]
    for number in _earlier_turns(row):
        before = render(tokenizer, messages[:number], row.origin)
        after = render(tokenizer, messages[: number + 1], row.origin)
        if not (whole.startswith(before) and whole.startswith(after) and len(before) <= len(after)):
            raise UserError(
                f"{row.origin}: the chat template writes message {number + 1}, of the assistant, otherwise once "
                "others follow, so that its tokens cannot be told: give --train_on last, or a template that writes "
                "earlier turns the same way."
            )
        said = after[len(before) :]
        written = len(said) if end.written else len(said.removesuffix(end.text))
        places += [len(before), len(before) + written]
    return [whole[start:stop] for start, stop in pairwise([*places, len(whole)])]


def _earlier_turns(row: Row) -> list[int]:
    """Places of the assistant's messages before the response."""
    return [place for place, message in enumerate(row.messages or []) if message["role"] == "assistant"]
