# SPDX-License-Identifier: Apache-2.0
"""The text of sampled ids, and which characters each of them wrote. Nothing is encoded again.

The bytes of every id are known from the tokenizer's own pieces: byte-level BPE writes bytes as letters, SentencePiece
writes a blank as ▁ and bytes as <0xNN>. For other tokenizers the text is decoded a few ids at a time.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]  # type: ignore[explicit-any]  # an object of a tokenizer's JSON

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Types of decoders that a SentencePiece tokenizer combines.
_SENTENCE_PIECE = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
_REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 decode to


@dataclass(frozen=True)
class TokenText:
    """The text of n ids.

    Attributes:
        text: the decoded ids; bytes that are no UTF-8 as U+FFFD.
        spans: (start, end) in characters for each id: from the character that holds its first byte to the first
            character that begins after its last byte. An id whose bytes lie inside one character has the span of that
            character, and so has an id without text between its bytes: no cut falls inside the character. Elsewhere
            the span of an id without text is empty.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, including tokens that only the vocabulary marks as special."""
    added_tokens = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {number for number, token in added_tokens.items() if token.special}


class TokenReader:
    """Reads ids of one tokenizer.

    Attributes:
        end_ids: ids of the special tokens that end a response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = frozenset(special_ids(tokenizer))  # these write no text

        # The token for unknown text ends nothing, unless it is EOS, too, as in GPT-2.
        self.end_ids: Collection[int] = self._silent_ids
        if tokenizer.unk_token_id != tokenizer.eos_token_id:
            self.end_ids = self._silent_ids - {tokenizer.unk_token_id}

        # Bytes of ids, if the tokenizer's pieces tell them; otherwise ids that write text are decoded.
        self._bytes_by_id: dict[int, bytes] = {}
        self._piece_to_bytes = _piece_reader(tokenizer)
        self._visible_ids: Collection[int] = ()
        if self._piece_to_bytes is None:
            self._visible_ids = frozenset(tokenizer.get_vocab().values()) - self._silent_ids

    def __call__(self, ids: Sequence[int]) -> TokenText:
        """Text of the ids, and the characters of each."""
        if self._piece_to_bytes is None:
            return _decode_step_by_step(self._tokenizer, ids, self._visible_ids)
        for token in set(ids).difference(self._bytes_by_id):
            self._bytes_by_id[token] = self._bytes_of(token, self._piece_to_bytes)

        # The bytes of all ids, and where those of each id begin and end.
        pieces = [self._bytes_by_id[token] for token in ids]
        content = b"".join(pieces)
        byte_spans = tuple(pairwise(accumulate(map(len, pieces), initial=0)))
        if content.isascii():  # a byte is a character
            return TokenText(content.decode("ascii"), byte_spans)

        # From bytes to characters.
        text, offsets = _decode(content)
        spans = []
        for start, end in byte_spans:
            character_with_start = bisect_right(offsets, start) - 1
            spans.append((character_with_start, bisect_left(offsets, end)))
        return TokenText(text, tuple(spans))

    def _bytes_of(self, token: int, piece_to_bytes: Callable[[str], bytes]) -> bytes:
        """Bytes that an id writes; none for a special id and for one that the vocabulary lacks."""
        if token in self._silent_ids:
            return b""
        piece = self._tokenizer.convert_ids_to_tokens([token])[0]
        return piece_to_bytes(piece) if piece else b""


def texts_of_macro_actions(
    reader: Callable[[Sequence[int]], TokenText],
    decode: Callable[[Sequence[int]], str],
    response: str,
    ids: Sequence[int],
    lengths: Sequence[int],
) -> list[str]:
    """Cut the text of a response into the texts of its macro actions.

    A character that one macro action begins and the next one ends belongs to the next; the last macro action has the
    remaining text. Example: "a €." as six ids of one byte each, then EOS; lengths 3 3 1 cut inside €: "a ", "€.", "".

    Args:
        reader: knows the characters of each id. Where its text differs from the response, prefixes are decoded
            instead, one for each macro action.
        decode: ids → text.
        response: the decoded response.
        ids: its ids.
        lengths: lengths of the macro actions, in tokens; none for a response without ids.

    Returns:
        One text per macro action; joined they are the response.
    """
    if not lengths:
        return []
    token_text = reader(ids)
    knows_characters = token_text.text == response
    cuts = [0]
    ends = list(accumulate(lengths))
    for end in ends[:-1]:
        if knows_characters:
            cut = token_text.spans[end][0]
        else:
            cut = len(decode(ids[:end]).rstrip(_REPLACEMENT))
        cut = max(cut, cuts[-1])
        cuts.append(min(cut, len(response)))
    cuts.append(len(response))
    return [response[start:end] for start, end in pairwise(cuts)]


def _decode(content: bytes) -> tuple[str, list[int]]:
    """Decode UTF-8; each run of invalid bytes becomes U+FFFD, as in Python's own decoder with errors="replace".

    Returns:
        The text, and the offset in bytes of each of its characters, followed by the number of bytes.
    """
    parts: list[str] = []
    offsets: list[int] = []
    position = 0
    while position < len(content):
        # The valid bytes from here on end at `stop`; `invalid` bytes follow.
        try:
            valid_text = content[position:].decode("utf-8")
            stop = len(content)
            invalid = 0
        except UnicodeDecodeError as error:
            stop = position + error.start
            invalid = error.end - error.start
            valid_text = content[position:stop].decode("utf-8")
        parts.append(valid_text)
        for character in valid_text:
            offsets.append(position)
            position += len(character.encode("utf-8"))
        if invalid:
            parts.append(_REPLACEMENT)
            offsets.append(stop)
        position = stop + invalid
    return "".join(parts), [*offsets, len(content)]


def _piece_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """Function from a piece of the vocabulary to its bytes; ``None`` if the tokenizer's decoder is of another kind."""
    if not tokenizer.is_fast:
        return None
    parts = _decoder_parts(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return lambda piece: _byte_level(piece, byte_of_letter)

    blank_parts = [part for part in parts if part["type"] in ("Metaspace", "Replace")]
    if not kinds or not kinds <= _SENTENCE_PIECE or len(blank_parts) != 1:
        return None
    blank = _blank_letter(blank_parts[0])
    if blank is None:
        return None
    has_bytes = "ByteFallback" in kinds
    return lambda piece: _sentence_piece(piece, blank, has_bytes)


def _decoder_parts(decoder: Json | None) -> list[Json]:
    """The decoders of a sequence, nested as they may be, as one list."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    parts = []
    for child in decoder["decoders"]:
        parts.extend(_decoder_parts(child))
    return parts


def _blank_letter(part: Json) -> str | None:
    """The letter that a decoder turns into a blank; ``None`` if it replaces something else."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    if part["content"] != " ":
        return None
    letter: str | None = part["pattern"].get("String")
    return letter


def _byte_level(piece: str, byte_of_letter: dict[str, int]) -> bytes:
    """Bytes of a piece in GPT-2's notation, one letter per byte. An added token is written as it is."""
    if all(letter in byte_of_letter for letter in piece):
        return bytes(byte_of_letter[letter] for letter in piece)
    return piece.encode("utf-8")


def _sentence_piece(piece: str, blank: str, has_bytes: bool) -> bytes:
    """Bytes of a piece in SentencePiece's notation."""
    byte = _BYTE.fullmatch(piece) if has_bytes else None
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(blank, " ").encode("utf-8")


def _decode_step_by_step(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], visible_ids: Collection[int]
) -> TokenText:
    """Text for decoders of any kind: an id writes what decoding adds when the id is appended.

    Ids that write a character together share its span. Ids that are not visible write nothing.
    """

    def decode(part: Sequence[int]) -> str:
        shown = [token for token in part if token in visible_ids]
        return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text = ""
    spans: list[tuple[int, int]] = []
    window = 0  # ids before it are not decoded again
    done = 0  # ids before it have their spans
    pending: int | None = None  # the first id of a character that is not complete yet
    for end in range(1, len(ids) + 1):
        start = len(text)
        spans.append((start, start))
        is_last = end == len(ids)
        if ids[end - 1] not in visible_ids and not is_last:
            continue
        if pending is None:
            pending = end - 1
        text_before = decode(ids[window:done])
        text_after = decode(ids[window:end])
        complete = len(text_after) > len(text_before) and not text_after.endswith(_REPLACEMENT)
        if complete or is_last:
            text += text_after[len(text_before) :]
            spans[pending:] = [(start, len(text))] * (end - pending)
            window = done
            done = end
            pending = None
    return TokenText(text, tuple(spans))
