# SPDX-License-Identifier: Apache-2.0
"""Conversations as token ids with the turns of the assistant marked, for training on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.continuations import AddedTokens, encode_continuations
from dschat.data.encoding import MarkedPrompt, encode_prompt_texts, encode_responses
from dschat.data.messages import WEIGHT, is_unwritten
from dschat.data.rows import Row
from dschat.data.turn_end import TurnEnd, turn_end_of
from dschat.models.templates import render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], prompts: Sequence[str]
) -> list[MarkedPrompt]:
    """Encodes the prompts of rows, and marks the earlier turns of the assistant up to the tokens that end them.

    The text is the chat template's. Each turn of the assistant is encoded alone, as it is when it is sampled, and the
    text between two turns as the tokenizer encodes it behind the first of them. If the template ends a turn without a
    special token, no token is added, and the text of the turn is marked. Turns of weight 0 are not marked, nor is a
    turn that begins the conversation, nor one of which the template writes nothing though it holds tool calls, for
    instance: it would teach the model to end at once. Rows without earlier
    turns are encoded as by `encode_prompts`. `prompts` are the rows' texts.

    Raises:
        UserError: the template writes a turn differently once others follow.
    """
    # Cut every prompt into pieces of text: before the first turn, that turn, the text up to the next turn, …
    ends: dict[str, TurnEnd] = {}
    added_tokens = AddedTokens(tokenizer)
    pieces_of_rows: list[list[str]] = []
    for row, prompt in zip(rows, prompts, strict=True):
        pieces_of_rows.append(_cut_at_turns(tokenizer, row, prompt, ends, added_tokens))

    # Encode the pieces of one kind at once; only the first one of a prompt gets BOS.
    first_ids = encode_prompt_texts(tokenizer, [pieces[0] for pieces in pieces_of_rows])
    turns = list(chain.from_iterable(pieces[1::2] for pieces in pieces_of_rows))
    texts_after_turns = list(chain.from_iterable(pieces[2::2] for pieces in pieces_of_rows))
    turn_ids = iter(encode_responses(tokenizer, turns))
    ids_after_turns = iter(encode_continuations(tokenizer, texts_after_turns, turns, added_tokens))

    # Join the pieces of every prompt and mark the turns, which are its pieces 1, 3, 5, …
    marked_prompts = []
    for row, ids, pieces in zip(rows, first_ids, pieces_of_rows, strict=True):
        prompt_ids = list(ids)
        targets = [False] * len(ids)
        for message_number, turn in zip(_earlier_turns(row), pieces[1::2], strict=True):
            piece_ids = next(turn_ids)
            is_trained = _is_trained((row.messages or [])[message_number], turn, added_tokens)
            later_ids = next(ids_after_turns)
            prompt_ids += [*piece_ids, *later_ids]
            targets += [is_trained] * len(piece_ids) + [False] * len(later_ids)
        marked_prompts.append(MarkedPrompt(prompt_ids, targets))
    return marked_prompts


def _is_trained(message: Mapping[str, Any], turn: str, added_tokens: AddedTokens) -> bool:
    """Whether an earlier turn is trained on; `turn` is its text, with the token that ends it."""
    written = turn.removesuffix(added_tokens.last_of(turn) or "")
    return message.get(WEIGHT) != 0 and not is_unwritten(message, written)


def _cut_at_turns(
    tokenizer: PreTrainedTokenizerBase, row: Row, whole: str, ends: dict[str, TurnEnd], added_tokens: AddedTokens
) -> list[str]:
    """A whole prompt in pieces: up to the first turn of the assistant, that turn, up to the next one, and so on.

    A turn ends with the token that ends it; what the template writes after the token belongs to the next piece.
    """
    messages = row.messages or []
    cuts = [0]
    for number in _earlier_turns(row):
        before = render_messages(tokenizer, messages[:number], True, row.origin, row.template_arguments)
        after = render_messages(tokenizer, messages[: number + 1], False, row.origin, row.template_arguments)
        turn = _with_end(after.removeprefix(before), turn_end_of(tokenizer, row, ends), added_tokens)
        if not (after.startswith(before) and whole.startswith(before + turn)):
            raise UserError(
                f"{row.origin}: the chat template writes message {number + 1}, of the assistant, differently once "
                "others follow, so that its tokens are not known: give --train_on last, or a template that writes "
                "earlier turns the same way."
            )
        cuts += [len(before), len(before) + len(turn)]
    return [whole[start:stop] for start, stop in pairwise([*cuts, len(whole)])]


def _with_end(turn: str, end: TurnEnd, added_tokens: AddedTokens) -> str:
    """A turn with the token that ends it: the usual one, or another added token before blanks."""
    turn = end.with_end(turn)
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
