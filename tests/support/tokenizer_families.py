# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of every kind that a policy may have, with the bytes that each of their ids stands for."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = (
    "The quick brown fox jumped over the lazy dog.",
    'Yes! "She (or he) said so," they [all] wrote. Why?  Two blanks; and so on ...',
    "日本語のテキスト。次の文！ 한국어 텍스트",
    "the 👨‍👩‍👧‍👦 saw 🦊🏽 and 🇯🇵",
    "Le cafe\u0301 d'A\u0301lvaro, na\u00efve",
    "no\u00a0break, ideographic\u3000space",
    "one line\r\nanother\r\n\r\nlast",
    "\tdef f(x):\n\t\treturn x",
    "zero\u200bwidth \u200b \ufeff",
    "\ufffd and \ufffd\ufffd.",
    " \t\n \u3000",
    "",
    "x",
    "  two blanks first",
    "ends with a blank ",
    "\n",
    "First. Second!\nThird? Fourth",
    "without an end",
)
SPECIAL = ("<pad>", "<bos>", "<eos>")
ADDED = ("<|code|>", "カタ", "two words")
TURN = "<|turn|>"
MIXED = (b"x\xe6", b"\x97\xa5 a", b"\xe3\x80", b"\x80 b", b" \xe2\x80", b"\x9c", b"\xf0\x9f", b"\xa6\x8a.", b"\xc2")


@dataclass(frozen=True)
class Family:
    """A tokenizer and what its ids stand for.

    Attributes:
        tokenizer: of transformers.
        content: bytes of every id; special ids and the three after the last have none.
        prefix: what the tokenizer puts in front of a text.
    """

    tokenizer: Any
    content: dict[int, bytes]
    prefix: Callable[[str], str]

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """What ids stand for."""
        return b"".join(self.content[token] for token in ids)


def _finished(
    backend: Tokenizer, byte_of: Callable[[str], bytes], prefix: Callable[[str], str], **special: Any
) -> Family:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", **special
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.add_special_tokens({"extra_special_tokens": [TURN]})
    silent = {*SPECIAL, TURN, *special.values()}
    content = {}
    for piece, token in tokenizer.get_vocab().items():
        content[token] = b"" if piece in silent else piece.encode() if piece in ADDED else byte_of(piece)
    content |= {len(tokenizer) + i: b"" for i in range(3)}
    return Family(tokenizer, content, prefix)


@cache
def byte_level() -> Family:
    """As GPT-2's and Llama 3's; some of its pieces hold one character and a half."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of = bytes_to_unicode()
    byte_of = {letter: byte for byte, letter in letter_of.items()}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(letter_of.values()),
            show_progress=False,
        ),
    )
    pieces = ["".join(letter_of[byte] for byte in content) for content in MIXED]
    backend = _with_pieces(backend, pieces)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _finished(backend, lambda piece: bytes(byte_of[letter] for letter in piece), lambda text: "")


@cache
def unknown_decoder() -> Family:
    """Byte-level pieces under a decoder of a kind that is not looked into."""
    family = byte_level()
    backend = Tokenizer.from_str(family.tokenizer.backend_tokenizer.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "extra_special_tokens": [TURN]}
    return Family(PreTrainedTokenizerFast(tokenizer_object=backend, **special), family.content, family.prefix)


@cache
def unigram() -> Family:
    """As T5's: a blank is written ▁, and one is put in front of a text."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = [*SPECIAL, "<unk>"]
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return _finished(
        backend,
        lambda piece: piece.encode().replace(b"\xe2\x96\x81", b"\x20"),
        lambda text: "" if text[:1] in ("", " ") else " ",
        unk_token="<unk>",
    )


def _byte_fallback(prefixed: bool) -> Family:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "日", "本語", "。▁"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefixed else blanks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return _finished(
        backend,
        lambda piece: bytes_of.get(piece, piece.encode().replace(b"\xe2\x96\x81", b"\x20")),
        lambda text: " " if prefixed and text else "",
        unk_token="<unk>",
    )


@cache
def byte_fallback() -> Family:
    """As Gemma's: characters without a piece are written as bytes <0xNN>."""
    return _byte_fallback(prefixed=False)


@cache
def byte_fallback_prefixed() -> Family:
    """As Llama 2's: so, with a blank in front of a text."""
    return _byte_fallback(prefixed=True)


@cache
def word_piece() -> Family:
    """As BERT's: what goes on with a word begins with ##, blanks are not kept."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    special = [*SPECIAL, "<unk>"]
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    return _finished(backend, str.encode, lambda text: "", unk_token="<unk>")


def _with_pieces(backend: Tokenizer, pieces: Sequence[str]) -> Tokenizer:
    """A BPE with further pieces, which no merge leads to."""
    model = json.loads(backend.to_str())["model"]
    names = dict.fromkeys([*sorted(model["vocab"], key=model["vocab"].get), *pieces])
    vocab = {piece: number for number, piece in enumerate(names)}
    return Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]]))


FAMILIES = {
    "byte-level": byte_level,
    "unigram": unigram,
    "byte-fallback": byte_fallback,
    "byte-fallback, prefix": byte_fallback_prefixed,
}
KINDS = {**FAMILIES, "unknown decoder": unknown_decoder, "word pieces": word_piece}  # with those decoded step by step
