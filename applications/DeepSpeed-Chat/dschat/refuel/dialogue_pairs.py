# SPDX-License-Identifier: Apache-2.0
"""Makes REFUEL's training pairs: from two dialogues with a common beginning to two tokenized replies to one state.

A row of dialogues has the columns FIRST and SECOND (messages), TURN (h, the turn whose replies differ) and LAST
(L ≥ h, the turn whose rewards are compared). Scored rows also have two lists of rewards, one reward for the end of
each turn. `dschat.refuel.token_pairs` reads the pairs for training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue, check_dialogue, encode_replies, encode_states, state
from dschat.data.turn_end import TurnEnd
from dschat.refuel.token_pairs import FAILED, NOT_SCORED, require_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Columns, named as in the repository of REFUEL's authors.
FIRST = "trajectory"
SECOND = "trajectory_sampled_h_from_sampled_len"
LAST = "sampled_len_from_5"
TURN = "sampled_h_from_sampled_len"
REWARD = "_reward"  # suffix of the column with a dialogue's rewards
FINISHED = "_finished"  # suffix of the column that says for each sampled reply whether it ended; ours alone

# Reasons why a pair is left out.
SAME_REPLY = "both replies are the same"
EMPTY_REPLY = "a reply is empty"
FIRST_TOO_LONG = "the first dialogue is too long"
SECOND_TOO_LONG = "the second dialogue is too long up to its turn"


@dataclass(frozen=True)
class DialoguePair:
    """Two dialogues of H turns each, which are equal up to the state of turn h."""

    first: Dialogue
    second: Dialogue
    turn: int  # h: the replies of this turn are compared
    last: int  # L, h ≤ L < H: the rewards at the end of this turn are compared
    first_rewards: list[float]  # reward at the end of each turn; empty before the dialogue is scored
    second_rewards: list[float]
    first_finished: list[bool]  # whether each reply ended; else it was cut
    second_finished: list[bool]
    origin: str  # file and row, for messages


@dataclass(frozen=True)
class _Reply:
    """The reply of turn h in one of the two dialogues."""

    dialogue: Dialogue
    ids: list[int]  # with the token that ends the turn, if it was not cut
    reward: float  # at the end of turn L


def read_dialogue_pair(raw: Any, origin: str, scored: bool) -> DialoguePair:
    """Parses and checks a row of dialogues.

    Args:
        raw: the row, column → value.
        origin: file and row, for messages.
        scored: the row must have rewards.

    Raises:
        UserError: a column is missing or is not a dialogue, or the two dialogues do not belong together; names row and
            column.
    """
    columns = [FIRST, SECOND, LAST, TURN]
    if scored:
        require_columns(raw, [*columns, FIRST + REWARD, SECOND + REWARD], origin, "rank")
    else:
        require_columns(raw, columns, origin, "generate")

    # The dialogues and their common beginning.
    first = check_dialogue(raw[FIRST], f"{origin}: {FIRST}", sampled=True)
    second = check_dialogue(raw[SECOND], f"{origin}: {SECOND}", sampled=True)
    turn = raw[TURN]
    last = raw[LAST]
    turns = len(first) // 2
    if len(first) % 2 or len(second) != len(first):
        raise UserError(f"{origin}: the dialogues must have the same number of turns, each with its reply.")
    are_integers = type(turn) is int and type(last) is int  # True is an instance of int
    if not are_integers or not 0 <= turn <= last < turns:
        raise UserError(
            f"{origin}: {TURN} is {turn!r} and {LAST} is {last!r}; they must be turns counted from 0, below {turns},"
            " and the first must not be later than the second."
        )
    if state(first, turn) != state(second, turn):
        raise UserError(f"{origin}: the dialogues differ before the reply of turn {turn}, counted from 0.")

    # The rewards, one for each turn.
    first_rewards: list[float] = []
    second_rewards: list[float] = []
    if scored:
        first_rewards = _read_rewards(raw, FIRST + REWARD, turns, origin)
        second_rewards = _read_rewards(raw, SECOND + REWARD, turns, origin)
    first_finished = _read_finished(raw, FIRST + FINISHED, turns, origin)
    second_finished = _read_finished(raw, SECOND + FINISHED, turns, origin)
    return DialoguePair(
        first, second, turn, last, first_rewards, second_rewards, first_finished, second_finished, origin
    )


def _read_rewards(raw: Mapping[str, Any], column: str, turns: int, origin: str) -> list[float]:
    """The rewards of a dialogue. Raises UserError unless they are a list with a finite number for each turn."""
    rewards = raw[column]
    if not isinstance(rewards, list | tuple) or len(rewards) != turns:
        raise UserError(f"{origin}: {column} must be a list with a reward for each of the {turns} turns.")
    for reward in rewards:
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{origin}: a reward must be a number, not {reward!r}; {FAILED:g} marks one that failed.")
    return list(map(float, rewards))


def _read_finished(raw: Mapping[str, Any], column: str, turns: int, origin: str) -> list[bool]:
    """Whether each reply of a dialogue ended; a row need not say it. Raises UserError for another value."""
    finished = raw.get(column)
    if finished is None:
        return [True] * turns
    is_list = isinstance(finished, list) and len(finished) == turns
    if not is_list or not all(isinstance(value, bool) for value in finished):
        raise UserError(f"{origin}: {column} must be a list with true or false for each of the {turns} turns.")
    return list(finished)


def tokenize_pairs(
    pairs: Sequence[DialoguePair], tokenizer: PreTrainedTokenizerBase, end: TurnEnd, total_length: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Tokenizes pairs of replies, padded on the right to `total_length`.

    The chosen reply is the one with the higher reward at the end of turn L; if the rewards are equal, the second. The
    mask is 1 on the tokens of the reply of turn h, including the token that ends the turn unless the reply was cut.

    Args:
        pairs: scored pairs.
        tokenizer: the policy's tokenizer, with a chat template.
        end: how the template ends a turn.
        total_length: maximum tokens of the whole first dialogue, and of both up to their replies of turn h.

    Returns:
        Rows with tokens, masks and rewards; reason → number of pairs left out.

    Raises:
        UserError: see `encode_states` and `encode_replies`.
    """
    left_out: Counter[str] = Counter()
    usable = []
    for pair in pairs:
        reason = _unusable(pair)
        if reason:
            left_out[reason] += 1
        else:
            usable.append(pair)
    rows = _tokenize_usable(usable, tokenizer, end, total_length, left_out)
    return rows, left_out


def _unusable(pair: DialoguePair) -> str:
    """Reason why a pair cannot be trained on, regardless of its length; empty if it can."""
    first_reply = pair.first[2 * pair.turn + 1]["content"]
    second_reply = pair.second[2 * pair.turn + 1]["content"]
    if FAILED in pair.first_rewards or FAILED in pair.second_rewards:
        return NOT_SCORED
    if first_reply == second_reply:
        return SAME_REPLY
    if not first_reply.strip() or not second_reply.strip():
        return EMPTY_REPLY
    return ""


def _tokenize_usable(
    pairs: Sequence[DialoguePair],
    tokenizer: PreTrainedTokenizerBase,
    end: TurnEnd,
    total_length: int,
    left_out: Counter[str],
) -> list[dict[str, Any]]:
    """Rows of the pairs that fit into `total_length`; counts the others in `left_out`."""
    origin = "a pair of dialogues"

    # The common states of turn h, and the two replies to each.
    states = [state(pair.first, pair.turn) for pair in pairs]
    state_ids = encode_states(tokenizer, states, origin)
    first_dialogues = [pair.first[: 2 * pair.turn + 2] for pair in pairs]
    second_dialogues = [pair.second[: 2 * pair.turn + 2] for pair in pairs]
    first_ids = encode_replies(tokenizer, first_dialogues, end, origin)
    second_ids = encode_replies(tokenizer, second_dialogues, end, origin)

    # The whole first dialogues, whose length is limited.
    last_state_ids = encode_states(tokenizer, [pair.first[:-1] for pair in pairs], origin)
    last_reply_ids = encode_replies(tokenizer, [pair.first for pair in pairs], end, origin)

    rows = []
    for index, pair in enumerate(pairs):
        first = _Reply(pair.first, first_ids[index], pair.first_rewards[pair.last])
        second = _Reply(pair.second, second_ids[index], pair.second_rewards[pair.last])
        # A reply that was cut did not end: the policy has not sampled the token that ends a turn.
        if not pair.first_finished[pair.turn]:
            first = replace(first, ids=first.ids[:-1])
        if not pair.second_finished[pair.turn]:
            second = replace(second, ids=second.ids[:-1])
        # A template that drops earlier thoughts can make the whole dialogue shorter than its beginning.
        whole_length = len(last_state_ids[index]) + len(last_reply_ids[index])
        if max(whole_length, len(state_ids[index]) + len(first.ids)) > total_length:
            left_out[FIRST_TOO_LONG] += 1
        elif len(state_ids[index]) + len(second.ids) > total_length:
            left_out[SECOND_TOO_LONG] += 1
        elif first.ids == second.ids:  # different texts whose tokens are equal after the chat template
            left_out[SAME_REPLY] += 1
        else:
            row = _pair_row(state_ids[index], first, second, pair.last, total_length, tokenizer.pad_token_id)
            rows.append(row)
    return rows


def _pair_row(
    state_ids: list[int], first: _Reply, second: _Reply, last: int, total_length: int, pad_id: int
) -> dict[str, Any]:
    """The row of a pair: for chosen and rejected reply the dialogue up to turn L, tokens, mask and reward."""
    chosen, rejected = (first, second) if first.reward > second.reward else (second, first)
    row: dict[str, Any] = {}
    for name, reply in (("chosen", chosen), ("reject", rejected)):
        padding = total_length - len(state_ids) - len(reply.ids)
        row[name] = reply.dialogue[: 2 * last + 2]
        row[f"{name}_token"] = [*state_ids, *reply.ids] + [pad_id] * padding
        row[f"{name}_mask"] = [0] * len(state_ids) + [1] * len(reply.ids) + [0] * padding
        row[f"{name}_reward"] = reply.reward
    return row
