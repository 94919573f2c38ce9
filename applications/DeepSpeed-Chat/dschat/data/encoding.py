# SPDX-License-Identifier: Apache-2.0
"""Text → token ids, and back, the same way in training, generation and scoring.

    ids = [BOS] + enc(prompt) + enc(response) + [EOS]

Each part is encoded alone, without special tokens: encoding them together would merge tokens across the border.
Some tokenizers put a space (the dummy prefix) before every text; a response continues a text, so it gets none.
Conversations are written by the chat template: see `dschat.data.turn_end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.data.dummy_prefix import backend_without_prefix
from dschat.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000  # texts per call of the tokenizer; bounds the memory of its offsets


@dataclass(frozen=True)
class MarkedPrompt:
    """The tokens before a response, with the earlier turns of the assistant marked."""

    ids: list[int]
    targets: Sequence[bool]  # whether a token belongs to an earlier turn that is trained on


def prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The prompt as one text; a conversation is written by the chat template, up to the assistant's turn.

    Raises:
        UserError: there is no chat template for a conversation, or it refuses the conversation; names the row.
    """
    if row.messages is None:
        return row.prompt or ""
    from dschat.models.templates import render_messages

    return render_messages(tokenizer, row.messages, True, row.origin, row.template_arguments)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[list[int]]:
    """Prompt ids of rows, see `encode_prompt_texts`.

    Raises:
        UserError: see `prompt_text`.
    """
    return encode_prompt_texts(tokenizer, [prompt_text(tokenizer, row) for row in rows])


def encode_prompt_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Prompt ids of texts: BOS if the tokenizer itself puts one before a text, then the prompt.

    A saved model therefore reads a text the same way in plain transformers. A prompt or chat template that begins with
    BOS does not get a second one.
    """
    prompts = encode_parts(tokenizer, texts)
    if puts_bos(tokenizer):
        for ids in prompts:
            if ids[:1] != [tokenizer.bos_token_id]:
                ids.insert(0, tokenizer.bos_token_id)
    return prompts


def puts_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts BOS before a plain text: Llama's does; GPT-2's has a BOS token, but does not."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def encode_responses(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Response ids of texts, without BOS, EOS and dummy prefix.

    After the ids of a prompt they decode to exactly the response's text, if the tokenizer can represent it.
    """
    bare = backend_without_prefix(tokenizer)
    if bare is None:
        return encode_parts(tokenizer, texts)
    responses = []
    for chunk in _chunks(texts):
        for encoding in bare.encode_batch_fast(chunk, add_special_tokens=False):
            responses.append(encoding.ids)
    return responses


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of response ids without special tokens; the inverse of `encode_responses`.

    A plain `tokenizer.decode` of the response alone would drop its first space if the tokenizer has a dummy prefix.
    """
    bare = backend_without_prefix(tokenizer)
    if bare is not None:
        return bare.decode(list(ids), skip_special_tokens=True)
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def decode_sampled(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], finished: bool) -> str:
    """Text of a sampled response without the token that ended it, which need not be a special one."""
    return decode_response(tokenizer, ids[:-1] if finished else ids)


def encode_parts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts as the tokenizer itself encodes them, without special tokens."""
    encoded: list[list[int]] = []
    for chunk in _chunks(texts):
        encoded += tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
    return encoded


def _chunks(texts: Sequence[str]) -> list[list[str]]:
    starts = range(0, len(texts), CHUNK)
    return [list(texts[start : start + CHUNK]) for start in starts]
