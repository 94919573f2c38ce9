# SPDX-License-Identifier: Apache-2.0
"""Conversations as token ids with the turns of the assistant marked, for training on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.data.encoding import (
    TurnEnd,
    encode_prompt_texts,
    encode_responses,
    prompt_text,
    template_variables,
    turn_end_of,
)
from dschat.data.messages import WEIGHT
from dschat.data.rows import Row
from dschat.models.templates import render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MarkedPrompt:
    """What comes before a response: ids, and of each whether it belongs to an earlier turn of the assistant."""

    ids: list[int]
    targets: list[bool]


def encode_turns(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[MarkedPrompt]:
    """Prompts of n rows, with the earlier turns of the assistant marked, each up to the token that ends it.

    The text is what the chat template writes. Each turn of the assistant, and what stands between two of them, is
    encoded alone, as it is when the turn is sampled. Where the template ends a turn with no special token, no token is
    added: the text of the turn is marked. Turns of weight 0 are not marked, nor is one that begins the conversation.
    Rows without such turns are encoded as `encode_prompts` does.

    Raises:
        UserError: see `dschat.data.encoding.prompt_text`; or the template writes a turn otherwise once others follow.
    """
    known_ends: dict[str, TurnEnd] = {}
    ends = [_end_of(tokenizer, row, known_ends) if _earlier_turns(row) else None for row in rows]
    cuts = [
        _cuts(tokenizer, row, end) if end else [prompt_text(tokenizer, row)]
        for row, end in zip(rows, ends, strict=True)
    ]
    heads = encode_prompt_texts(tokenizer, [texts[0] for texts in cuts])
    pieces = iter(encode_responses(tokenizer, [text for texts in cuts for text in texts[1:]]))
    marked = []
    for row, end, head, texts in zip(rows, ends, heads, cuts, strict=True):
        is_trained = [(row.messages or [])[place].get(WEIGHT) != 0 for place in _earlier_turns(row)]
        ids, targets = list(head), [False] * len(head)
        for number in range(1, len(texts)):
            piece = next(pieces)
            if end is None or number % 2 == 0 or not is_trained[number // 2]:
                length = 0
            else:
                length = end.length(piece)
            ids += piece
            targets += [True] * length + [False] * (len(piece) - length)
        marked.append(MarkedPrompt(ids, targets))
    return marked


def _end_of(tokenizer: PreTrainedTokenizerBase, row: Row, known_ends: dict[str, TurnEnd]) -> TurnEnd:
    """As `turn_end_of`; asked for once for rows with the same variables of the template."""
    variables = repr(template_variables(row))
    if variables not in known_ends:
        known_ends[variables] = turn_end_of(tokenizer, row)
    return known_ends[variables]


def _cuts(tokenizer: PreTrainedTokenizerBase, row: Row, end: TurnEnd) -> list[str]:
    """A prompt's text in pieces: up to the first turn of the assistant, that turn, up to the next one, and so on."""
    whole = prompt_text(tokenizer, row)
    messages = row.messages or []
    places = [0]
    for number in _earlier_turns(row):
        before = render_messages(tokenizer, messages[:number], True, row.origin, row.template_arguments)
        after = render_messages(tokenizer, messages[: number + 1], False, row.origin, row.template_arguments)
        closings = [text for text in end.closings(after) if whole.startswith(text)]
        if not (closings and whole.startswith(before) and len(before) <= len(closings[0])):
            raise UserError(
                f"{row.origin}: the chat template writes message {number + 1}, of the assistant, otherwise once "
                "others follow, so that its tokens cannot be told: give --train_on last, or a template that writes "
                "earlier turns the same way."
            )
        turn = closings[0][len(before) :]
        written = len(turn) if end.written else len(turn.removesuffix(end.text))
        places += [len(before), len(before) + written]
    return [whole[start:stop] for start, stop in pairwise([*places, len(whole)])]


def _earlier_turns(row: Row) -> list[int]:
    """Places of the assistant's messages before the response that answer something."""
    return [place for place, message in enumerate(row.messages or []) if place and message["role"] == "assistant"]
