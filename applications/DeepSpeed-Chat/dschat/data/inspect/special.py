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
class RowTokens:
    """What the token ids of a row show; a response that the row lacks is empty.

    Attributes:
        prompt: number of its tokens.
        response: tokens of the longer response, without the one that ends it.
        special: names of the special tokens inside the responses, each once a response.
        twice_bos: the prompt begins with BOS twice.
    """

    prompt: int
    response: int
    special: tuple[str, ...]
    twice_bos: bool


def row_tokens(
    tokenizer: PreTrainedTokenizerBase, end_id: int, rows: Sequence[Row], start: int = 0
) -> list[RowTokens]:
    """Rows as training encodes them; `start` is not used (see `dschat.data.parallel.encode_rows`)."""
    special, bos = ends_and_special(tokenizer, end_id), tokenizer.bos_token_id
    prompts = encode_prompts(tokenizer, rows)
    chosen = encode_responses(tokenizer, [row.chosen or "" for row in rows])
    rejected = encode_responses(tokenizer, [row.rejected or "" for row in rows])
    found = []
    for prompt, *responses in zip(prompts, chosen, rejected, strict=True):
        inside = tuple(special[number] for ids in responses for number in special.keys() & set(ids))
        twice = bos is not None and prompt[:2] == [bos, bos]
        found.append(RowTokens(len(prompt), max(map(len, responses)), inside, twice))
    return found


def ends_and_special(tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[int, str]:
    """Id → name of what nobody expects inside a response: special tokens, and the token that ends responses."""
    return {number: str(tokenizer.convert_ids_to_tokens(number)) for number in special_ids(tokenizer) | {end_id}}


def special_notes(
    rows: Sequence[Row], tokens: Sequence[RowTokens], tokenizer: PreTrainedTokenizerBase, end_id: int
) -> list[str]:
    """What somebody should know of the special tokens of these rows, a line each; none where all is well.

    Args:
        rows: of a source.
        tokens: of the same rows.
        tokenizer: of the model.
        end_id: the token that ends a response in training.
    """
    notes = []
    inside, places = Counter[str](), []
    for row, found in zip(rows, tokens, strict=True):
        inside.update(found.special)
        places += [row.origin] if found.special else []
    if inside:
        counted = ", ".join(f"{name} in {count}" for name, count in inside.most_common())
        notes.append(
            f"responses hold special tokens, written out in their texts and read as the tokens themselves: {counted} "
            f"({len(places)} rows, the first is {places[0]}); remove them from the texts, or write them otherwise"
        )
    if tokenizer.bos_token_id is not None:
        notes += _bos_notes(rows, tokens, tokenizer)
    other = other_turn_end(tokenizer, rows, end_id)
    return [*notes, *([other] if other else [])]


def _bos_notes(rows: Sequence[Row], tokens: Sequence[RowTokens], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes, name = [], str(tokenizer.bos_token)
    doubled = [row.origin for row, found in zip(rows, tokens, strict=True) if found.twice_bos]
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
