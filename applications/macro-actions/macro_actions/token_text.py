# SPDX-License-Identifier: Apache-2.0
"""What sampled ids say, and which characters each of them wrote, without encoding anything again.

The bytes of every id are known from the tokenizer's own pieces: byte-level BPE writes bytes as letters, SentencePiece
writes a blank as ▁ and bytes as <0xNN>. For other tokenizers the text is decoded a few ids at a time.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCE_PIECE = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


@dataclass(frozen=True)
class TokenText:
    """The text of n ids."""

    text: str  # what they say; bytes that are no UTF-8 as U+FFFD
    # Per id its (start, end) in characters: from the character that holds its first byte to the first character that
    # begins after its last byte. An id without text has an empty span; inside a character's bytes it has that
    # character's.
    spans: tuple[tuple[int, int], ...]


class TokenReader:
    """Reads ids of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        unknown = set() if tokenizer.unk_token_id == tokenizer.eos_token_id else {tokenizer.unk_token_id}
        self.special_ids: Collection[int] = frozenset(tokenizer.all_special_ids) - unknown
        self._tokenizer = tokenizer
        self._silent = frozenset(tokenizer.all_special_ids)
        self._piece_bytes = _piece_reader(tokenizer)
        self._visible: Collection[int] = ()
        if self._piece_bytes is None:
            self._visible = frozenset(tokenizer.get_vocab().values()) - self._silent
        self._known: dict[int, bytes] = {}

    def __call__(self, ids: Sequence[int]) -> TokenText:
        """The text of ids and the characters of each."""
        if self._piece_bytes is None:
            return _decode_step_by_step(self._tokenizer, ids, self._visible)
        for token in set(ids).difference(self._known):
            self._known[token] = self._bytes_of(token)
        pieces = [self._known[token] for token in ids]
        content = b"".join(pieces)
        lasts = list(accumulate(map(len, pieces)))
        firsts = [0, *lasts[:-1]]
        if content.isascii():  # a byte is a character
            return TokenText(content.decode("ascii"), tuple(zip(firsts, lasts, strict=False)))
        text, offsets = _decode(content)
        spans = (_characters(offsets, first, last) for first, last in zip(firsts, lasts, strict=False))
        return TokenText(text, tuple(spans))

    def _bytes_of(self, token: int) -> bytes:
        piece = None if token in self._silent else self._tokenizer.convert_ids_to_tokens([token])[0]
        assert self._piece_bytes is not None
        return self._piece_bytes(piece) if piece else b""


def texts_of_macro_actions(
    reader: Callable[[Sequence[int]], TokenText],
    decode: Callable[[Sequence[int]], str],
    response: str,
    ids: Sequence[int],
    lengths: Sequence[int],
) -> list[str]:
    """Cuts the text of a response into those of its macro actions, of so many tokens each.

    A character that a macro action begins and the next one ends belongs to the next; the last one has the rest. The
    reader knows the characters of each token; where its text is another one, every prefix is decoded.
    """
    places, read = [0], reader(ids)
    for end in list(accumulate(lengths))[:-1]:
        if read.text == response:
            said = read.spans[end][0]
        else:
            said = len(decode(ids[:end]).rstrip("\ufffd"))
        places.append(min(max(said, places[-1]), len(response)))
    return [response[a:b] for a, b in zip(places, [*places[1:], len(response)], strict=True)]


def _characters(offsets: list[int], first: int, last: int) -> tuple[int, int]:
    """Bytes [first, last) as characters, given the byte where each character starts (and where the text ends)."""
    start = max(bisect_right(offsets, first) - 1, 0)
    return start, bisect_left(offsets, last)


def _decode(content: bytes) -> tuple[str, list[int]]:
    """UTF-8 → text and the byte offset of each of its characters, with the length at the end."""
    parts: list[str] = []
    offsets: list[int] = []
    position = 0
    while position < len(content):
        try:
            good, bad = content[position:].decode("utf-8"), 0
            stop = len(content)
        except UnicodeDecodeError as error:
            stop, bad = position + error.start, error.end - error.start
            good = content[position:stop].decode("utf-8")
        parts.append(good)
        offsets += [place for place in range(position, stop) if content[place] & 0xC0 != 0x80]  # where one begins
        if bad:
            parts.append("\ufffd")
            offsets.append(stop)
        position = stop + bad
    return "".join(parts), [*offsets, len(content)]


def _piece_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """A function piece → bytes for the tokenizer's kind of decoder; None where the kind is unknown."""
    if not tokenizer.is_fast:
        return None
    parts = _decoder_parts(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        table = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return lambda piece: _byte_level(piece, table)
    blanks = [part for part in parts if part["type"] in ("Metaspace", "Replace")]
    if not kinds or not kinds <= _SENTENCE_PIECE or len(blanks) != 1 or _replaced(blanks[0]) is None:
        return None
    blank = _replaced(blanks[0]) or ""
    has_bytes = "ByteFallback" in kinds
    return lambda piece: _sentence_piece(piece, blank, has_bytes)


Json = dict[str, Any]  # type: ignore[explicit-any]  # an object of a tokenizer's JSON


def _decoder_parts(decoder: Json | None) -> list[Json]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for child in decoder["decoders"] for part in _decoder_parts(child)]
    return [decoder]


def _replaced(part: Json) -> str | None:
    """The letter that stands for a blank; None if the part replaces something else."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    return part["pattern"].get("String") if part["content"] == " " else None


def _byte_level(piece: str, table: dict[str, int]) -> bytes:
    """GPT-2's way: each letter of a piece stands for a byte."""
    if all(letter in table for letter in piece):
        return bytes(table[letter] for letter in piece)
    return piece.encode("utf-8")  # an added token stands for itself


def _sentence_piece(piece: str, blank: str, has_bytes: bool) -> bytes:
    found = _BYTE.fullmatch(piece) if has_bytes else None
    return bytes([int(found[1], 16)]) if found else piece.replace(blank, " ").encode("utf-8")


def _decode_step_by_step(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], visible: Collection[int]
) -> TokenText:
    """For decoders of any kind: what an id adds is what decoding one id more adds.

    Ids that write a character together share what they wrote. Ids that are not visible say nothing.
    """

    def decode(part: Sequence[int]) -> str:
        shown = [token for token in part if token in visible]
        return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text = ""
    spans: list[tuple[int, int]] = []
    window = done = 0  # ids before the window are not decoded again, those before `done` have their spans
    opened: int | None = None  # the first id of a character that is not complete yet
    for end in range(1, len(ids) + 1):
        start = len(text)
        spans.append((start, start))
        if ids[end - 1] not in visible and end < len(ids):
            continue
        if opened is None:
            opened = end - 1
        before, now = decode(ids[window:done]), decode(ids[window:end])
        complete = len(now) > len(before) and not now.endswith("\ufffd")
        if complete or end == len(ids):
            text += now[len(before) :]
            spans[opened:] = [(start, len(text))] * (end - opened)
            window, done, opened = done, end, None
    return TokenText(text, tuple(spans))
