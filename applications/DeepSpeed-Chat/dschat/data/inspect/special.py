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


def ends_and_special(tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[int, str]:
    """Id → name of what nobody expects inside a response: special tokens, and the token that ends responses."""
    return {number: str(tokenizer.convert_ids_to_tokens(number)) for number in special_ids(tokenizer) | {end_id}}


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
    special = ends_and_special(tokenizer, end_id)
    inside, places = Counter[str](), []
    for row, *responses in zip(rows, encoded.chosen, encoded.rejected, strict=True):
        found = [special[number] for ids in responses for number in special.keys() & set(ids)]
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
            f"prompts that begin with {name} twice: {len(doubled)} (the first is {doubled[0]}); the chat template "
            "puts one, or the tokenizer, and the text brings another; remove it from the texts"
        )
    if not puts_bos(tokenizer):
        return notes
    own = [row.origin for row in rows if row.prompt is not None and row.prompt.startswith(name)]
    if own:
        notes.append(
            f"prompts whose text begins with {name}: {len(own)} (the first is {own[0]}); the tokenizer's is not put "
            "before it"
        )
    talk = next((row for row in rows if row.messages is not None), None)
    if talk is not None and prompt_text(tokenizer, talk).startswith(name):
        notes.append(f"the chat template begins with {name}; the tokenizer's is not put before it")
    return notes
