# SPDX-License-Identifier: Apache-2.0
"""Conversations as token ids with the turns of the assistant marked, for training on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import AddedTokens, encode_continuations, encode_prompt_texts, encode_responses, prompt_text
from dschat.data.messages import WEIGHT, is_unwritten
from dschat.data.rows import Row
from dschat.data.turn_end import TurnEnd, template_form, turn_end_of
from dschat.models.templates import render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MarkedPrompt:
    """The tokens before a response, with the earlier turns of the assistant marked."""

    ids: list[int]
    targets: list[bool]  # whether a token belongs to an earlier turn that is trained on


def encode_turns(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[MarkedPrompt]:
    """Encodes the prompts of rows and marks the earlier turns of the assistant, each up to the token that ends it.

    The text is the chat template's. Each turn of the assistant is encoded alone, as it is when it is sampled, and the
    text between two turns as the tokenizer encodes it behind the first of them. If the template ends a turn without a
    special token, no token is added, and the text of the turn is marked. Turns of weight 0 are not marked, nor is a
    turn that begins the conversation, nor one of which the template writes nothing though it holds tool calls, for
    instance: it would teach the model to end at once. Rows without earlier turns are encoded as by `encode_prompts`.

    Raises:
        UserError: see `dschat.data.encoding.prompt_text`; or the template writes a turn differently once others
            follow.
    """
    # Cut every prompt into pieces of text: before the first turn, that turn, the text up to the next turn, …
    ends: list[TurnEnd | None] = []
    pieces_of_rows: list[list[str]] = []
    end_by_form: dict[str, TurnEnd] = {}
    added_tokens = AddedTokens(tokenizer)
    for row in rows:
        whole = prompt_text(tokenizer, row)
        if not _earlier_turns(row):
            ends.append(None)
            pieces_of_rows.append([whole])
            continue
        form = template_form(row)
        if form not in end_by_form:
            end_by_form[form] = turn_end_of(tokenizer, row)
        ends.append(end_by_form[form])
        pieces_of_rows.append(_cut_at_turns(tokenizer, row, whole, end_by_form[form], added_tokens))

    # Encode the pieces of one kind at once; only the first one of a prompt gets BOS.
    first_ids = encode_prompt_texts(tokenizer, [pieces[0] for pieces in pieces_of_rows])
    turns = list(chain.from_iterable(pieces[1::2] for pieces in pieces_of_rows))
    texts_after_turns = list(chain.from_iterable(pieces[2::2] for pieces in pieces_of_rows))
    turn_ids = iter(encode_responses(tokenizer, turns))
    ids_after_turns = iter(encode_continuations(tokenizer, texts_after_turns, turns, added_tokens))

    # Join the pieces of every prompt and mark the turns, which are its pieces 1, 3, 5, …
    prompts = []
    for row, end, ids, pieces in zip(rows, ends, first_ids, pieces_of_rows, strict=True):
        turn_messages = [(row.messages or [])[index] for index in _earlier_turns(row)]
        prompt_ids = list(ids)
        targets = [False] * len(ids)
        for number in range(1, len(pieces)):
            is_turn = number % 2 == 1
            piece_ids = next(turn_ids if is_turn else ids_after_turns)
            num_targets = 0
            if end is not None and is_turn and _is_trained(turn_messages[number // 2], pieces[number], end):
                num_targets = end.length(piece_ids)
            prompt_ids += piece_ids
            targets += [True] * num_targets + [False] * (len(piece_ids) - num_targets)
        prompts.append(MarkedPrompt(prompt_ids, targets))
    return prompts


def _is_trained(message: Mapping[str, Any], turn: str, end: TurnEnd) -> bool:
    """Whether an earlier turn is trained on; `turn` is its text, up to the next message."""
    written = turn.partition(end.token)[0] if end.written else turn
    return message.get(WEIGHT) != 0 and not is_unwritten(message, written)


def _cut_at_turns(
    tokenizer: PreTrainedTokenizerBase, row: Row, whole: str, end: TurnEnd, added_tokens: AddedTokens
) -> list[str]:
    """A prompt's text in pieces: up to the first turn of the assistant, that turn, up to the next one, and so on.

    A turn ends with the token that ends it; blanks that the template writes after the token belong to the next piece.
    """
    messages = row.messages or []
    cuts = [0]
    for number in _earlier_turns(row):
        before = render_messages(tokenizer, messages[:number], True, row.origin, row.template_arguments)
        after = render_messages(tokenizer, messages[: number + 1], False, row.origin, row.template_arguments)
        closings = [text for text in end.closings(after) if whole.startswith(text)]
        is_unchanged = bool(closings) and whole.startswith(before)
        if not is_unchanged or len(before) > len(closings[0]):
            raise UserError(
                f"{row.origin}: the chat template writes message {number + 1}, of the assistant, differently once "
                "others follow, so that its tokens are not known: give --train_on last, or a template that writes "
                "earlier turns the same way."
            )
        turn = closings[0][len(before) :]
        if not end.written:
            turn = turn.removesuffix(end.text)
        turn = _up_to_end_token(turn, end, added_tokens)
        cuts += [len(before), len(before) + len(turn)]
    return [whole[start:stop] for start, stop in pairwise([*cuts, len(whole)])]


def _up_to_end_token(turn: str, end: TurnEnd, added_tokens: AddedTokens) -> str:
    """A turn without the text after the token that ends it: the usual one, or another added token before blanks."""
    if end.written and end.token in turn:
        body, token, _ = turn.rpartition(end.token)
        return body + token
    text = turn.rstrip()
    return turn if added_tokens.last_of(text) is None else text


def _earlier_turns(row: Row) -> list[int]:
    """Indices of the assistant's messages before the response, without one that begins the conversation."""
    messages = row.messages or []
    indices: list[int] = []
    for index in range(1, len(messages)):
        if messages[index]["role"] == "assistant":
            indices.append(index)
    return indices
