# SPDX-License-Identifier: Apache-2.0
"""Token ids of texts that continue others in a dialogue, as the tokenizer writes them within the whole text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from dschat.data.dummy_prefix import backend_without_prefix
from dschat.data.encoding import encode_parts, encode_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AddedTokens:
    """The added tokens of a tokenizer, at which it splits a text.

    Attributes:
        ids: their ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Reads the tokens and their lengths, of which there are few."""
        self._id_of_text: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            self._id_of_text[str(token)] = token_id
        self.ids = frozenset(self._id_of_text.values())
        self._lengths = sorted({len(text) for text in self._id_of_text if text}, reverse=True)

    def id_of(self, text: str) -> int:
        """The id of a token."""
        return self._id_of_text[text]

    def last_of(self, text: str) -> str | None:
        """The longest added token that a text ends with; None if there is none."""
        for length in self._lengths:
            if text[-length:] in self._id_of_text:
                return text[-length:]
        return None


def encode_continuations(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], texts_before: Sequence[str], added_tokens: AddedTokens
) -> list[list[int]]:
    """Ids of texts that continue other texts, as the tokenizer writes them within the whole text.

    Many tokenizers split a text at its added tokens and put the dummy prefix before each part, or drop the blanks
    after a token. So a text that follows an added token is encoded together with that token. Any other text gets no
    dummy prefix at its beginning.

    Args:
        tokenizer: tokenizer of the model.
        texts: texts to encode.
        texts_before: the text before each of them; only its last token matters.
        added_tokens: those of the tokenizer; to read them takes milliseconds if there are thousands.
    """
    last_tokens = [added_tokens.last_of(text) for text in texts_before]

    # Encode the texts that follow a token together with it, all at once.
    joined_texts = [token + text for text, token in zip(texts, last_tokens, strict=True) if token is not None]
    joined_ids = iter(encode_parts(tokenizer, joined_texts) if joined_texts else [])

    continuations = []
    for text, token in zip(texts, last_tokens, strict=True):
        ids = None
        if token is not None:
            ids = _ids_after(next(joined_ids), added_tokens.id_of(token))
        if ids is None:
            ids = _encode_within_text(tokenizer, text, added_tokens.ids)
        continuations.append(ids)
    return continuations


def _ids_after(ids: list[int], token_id: int) -> list[int] | None:
    """The ids after a token; None if it is missing, because a longer added token begins with its text."""
    return ids[ids.index(token_id) + 1 :] if token_id in ids else None


def _encode_within_text(tokenizer: PreTrainedTokenizerBase, text: str, added_ids: Collection[int]) -> list[int]:
    """Ids of a text that does not begin a segment: only what follows its first added token may get a dummy prefix."""
    bare = backend_without_prefix(tokenizer)
    if bare is None:
        (ids,) = encode_responses(tokenizer, [text])
        return ids
    encoding = bare.encode(text, add_special_tokens=False)
    for index, (token_id, (start, _)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
        if token_id in added_ids:
            (later_ids,) = encode_parts(tokenizer, [text[start:]])
            return [*encoding.ids[:index], *later_ids[later_ids.index(token_id) :]]
    return list(encoding.ids)
