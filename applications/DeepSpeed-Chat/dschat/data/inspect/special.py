# SPDX-License-Identifier: Apache-2.0
"""Special tokens where they surprise: inside responses, BOS twice, turns and responses that end differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.data.dialogues import other_turn_end
from dschat.data.encoding import encode_prompts, encode_responses, prompt_text, puts_bos, special_ids
from dschat.data.formats.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedRows:
    """Token ids of rows; those of a response that a row lacks are empty."""

    prompts: list[list[int]]
    chosen: list[list[int]]
    rejected: list[list[int]]


def encode_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> EncodedRows:
    """As training encodes them, without the token that ends a response."""
    return EncodedRows(
        encode_prompts(tokenizer, rows),
        encode_responses(tokenizer, [row.chosen or "" for row in rows]),
        encode_responses(tokenizer, [row.rejected or "" for row in rows]),
    )


def special_inside(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_id: int) -> list[str]:
    """The special tokens among the ids of a response, and the one that ends responses, by name, each once."""
    special = special_ids(tokenizer) | {end_id}
    return [str(tokenizer.convert_ids_to_tokens(number)) for number in dict.fromkeys(ids) if number in special]


def special_notes(
    rows: Sequence[Row], encoded: EncodedRows, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> list[str]:
    """What somebody should know of the special tokens of these rows, a line each; none where all is well.

    Args:
        rows: of a source.
        encoded: the same rows.
        tokenizer: of the model.
        end_id: the token that ends a response in training.
    """
    notes = []
    inside, places = Counter[str](), []
    for row, *responses in zip(rows, encoded.chosen, encoded.rejected, strict=True):
        found = [name for ids in responses for name in special_inside(tokenizer, ids, end_id)]
        inside.update(found)
        places += [row.origin] if found else []
    if inside:
        counted = ", ".join(f"{name} in {count}" for name, count in inside.most_common())
        notes.append(
            f"responses hold special tokens, written out in their texts and read as the tokens themselves: {counted} "
            f"({len(places)} rows, the first is {places[0]}); remove them from the texts, or write them otherwise"
        )
    if tokenizer.bos_token_id is not None:
        notes += _bos_notes(rows, encoded.prompts, tokenizer)
    other = other_turn_end(tokenizer, rows, end_id)
    return [*notes, *([other] if other else [])]


def _bos_notes(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes, bos, name = [], tokenizer.bos_token_id, str(tokenizer.bos_token)
    doubled = [row.origin for row, ids in zip(rows, prompts, strict=True) if list(ids[:2]) == [bos, bos]]
    if doubled:
        notes.append(
            f"{len(doubled)} prompts begin with {name} twice (the first is {doubled[0]}): the chat template puts one, "
            "or the tokenizer, and the text brings another; remove it from the texts"
        )
    if not puts_bos(tokenizer):
        return notes
    texts = (prompt_text(tokenizer, row) for row in rows)
    own = [row.origin for row, text in zip(rows, texts, strict=True) if text.startswith(name)]
    if own:
        notes.append(
            f"{len(own)} prompts bring their own {name}, from the text or the chat template (the first is {own[0]}): "
            "the tokenizer's is not put before it"
        )
    return notes
