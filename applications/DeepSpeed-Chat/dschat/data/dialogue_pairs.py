# SPDX-License-Identifier: Apache-2.0
"""Two dialogues that share their beginning → two replies to one state as tokens, which REFUEL trains on.

A row of dialogues has the columns FIRST and SECOND (messages), TURN (h, where the second dialogue departs from the
first) and LAST (L ≥ h, the turn whose end is scored). Scored dialogues also have a list of rewards, one for the end of
each turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue, check_dialogue, encode_replies, encode_states, state
from dschat.data.examples import PreferenceExample
from dschat.data.loading import StepData
from dschat.data.rows import in_words
from dschat.data.sources import described, open_data
from dschat.data.turn_end import TurnEnd

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Columns of the repository of REFUEL's authors.
FIRST = "trajectory"
SECOND = "trajectory_sampled_h_from_sampled_len"
LAST = "sampled_len_from_5"
TURN = "sampled_h_from_sampled_len"
REWARD = "_reward"  # suffix of the column with a dialogue's rewards
TOKEN_COLUMNS = (
    "chosen_token",
    "chosen_mask",
    "chosen_reward",
    "reject_token",
    "reject_mask",
    "reject_reward",
)
FAILED = -99999.0  # reward of a dialogue that could not be scored
NOT_SCORED = "a reward is missing"
SAME_REPLY = "both replies are the same"
EMPTY_REPLY = "a reply is empty"
FIRST_TOO_LONG = "the first dialogue is too long"
SECOND_TOO_LONG = "the second dialogue is too long up to its turn"
CHUNK = 500  # pairs that are encoded together
FLAG = "--task.query_dataset"
TOO_LONG = "longer than --task.total_length"


@dataclass(frozen=True)
class DialoguePair:
    """A row of dialogues, which have H turns each and are equal up to the state of turn h."""

    first: Dialogue
    second: Dialogue
    turn: int  # h, whose two replies are compared
    last: int  # L, h ≤ L < H: the turn whose end gives the rewards
    first_rewards: list[float]  # at the end of each turn; empty before they are scored
    second_rewards: list[float]
    origin: str  # where the row comes from, for messages


def read_dialogue_pair(raw: Any, origin: str, scored: bool) -> DialoguePair:
    """Parses a row of dialogues; a `scored` row must have rewards.

    Raises:
        UserError: a column is missing, is no dialogue, or the two dialogues do not belong together; names row and
            column.
    """
    columns = [FIRST, SECOND, LAST, TURN]
    if scored:
        _require(raw, [*columns, FIRST + REWARD, SECOND + REWARD], origin, "rank.py")
    else:
        _require(raw, columns, origin, "generate.py")
    first = check_dialogue(raw[FIRST], f"{origin}: {FIRST}", sampled=True)
    second = check_dialogue(raw[SECOND], f"{origin}: {SECOND}", sampled=True)
    turn = raw[TURN]
    last = raw[LAST]
    turns = len(first) // 2
    if len(first) % 2 or len(second) != len(first):
        raise UserError(f"{origin}: the dialogues must have the same number of turns, each with its reply.")
    are_numbers = isinstance(turn, int) and isinstance(last, int)
    if not are_numbers or not 0 <= turn <= last < turns:
        raise UserError(f"{origin}: {TURN} {turn!r} and {LAST} {last!r} must be turns, in this order, from 0.")
    if state(first, turn) != state(second, turn):
        raise UserError(f"{origin}: the dialogues differ before the reply of turn {turn}, counted from 0.")
    first_rewards: list[float] = []
    second_rewards: list[float] = []
    if scored:
        first_rewards = [_number(value, origin) for value in raw[FIRST + REWARD]]
        second_rewards = [_number(value, origin) for value in raw[SECOND + REWARD]]
        if len(first_rewards) != turns or len(second_rewards) != turns:
            raise UserError(f"{origin}: there must be a reward for each of the {turns} turns.")
    return DialoguePair(first, second, turn, last, first_rewards, second_rewards, origin)


def _require(
    raw: Any,
    columns: Sequence[str],
    origin: str,
    maker: str,
) -> None:
    present = raw if isinstance(raw, dict) else {}
    missing = [name for name in columns if present.get(name) is None]
    if missing:
        raise UserError(f"{origin}: no column {', '.join(map(repr, missing))}; give a data set that {maker} makes.")


def _number(value: Any, origin: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise UserError(f"{origin}: a reward must be a number, not {value!r}; one that failed is {FAILED:g}.")
    return float(value)


def tokenize_pairs(
    pairs: Sequence[DialoguePair], tokenizer: PreTrainedTokenizerBase, end: TurnEnd, total_length: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows of tokens and masks, padded on the right to `total_length`, and reason → number of pairs left out.

    The reply with the strictly higher reward at the end of turn L is chosen; of equal ones, the second. The mask is 1
    on the tokens of the reply of turn h, including the one that ends the turn, which is the last of a sequence.

    Args:
        pairs: with rewards.
        tokenizer: of the policy, with a chat template.
        end: how the template ends a turn.
        total_length: maximum tokens of the whole first dialogue, and of the second up to its reply of turn h.

    Raises:
        UserError: see `encode_states` and `encode_replies`.
    """
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for start in range(0, len(pairs), CHUNK):
        usable = []
        for pair in pairs[start : start + CHUNK]:
            reason = _unusable(pair)
            if reason:
                left_out[reason] += 1
            else:
                usable.append(pair)
        rows += _encoded(usable, tokenizer, end, total_length, left_out)
    return rows, left_out


def _unusable(pair: DialoguePair) -> str:
    """Why a pair is left out whatever its length; empty if it is not."""
    first_reply = pair.first[2 * pair.turn + 1]["content"]
    second_reply = pair.second[2 * pair.turn + 1]["content"]
    if FAILED in pair.first_rewards or FAILED in pair.second_rewards:
        return NOT_SCORED
    if first_reply == second_reply:
        return SAME_REPLY
    if not first_reply.strip() or not second_reply.strip():
        return EMPTY_REPLY
    return ""


def _encoded(
    pairs: Sequence[DialoguePair],
    tokenizer: PreTrainedTokenizerBase,
    end: TurnEnd,
    total_length: int,
    left_out: Counter[str],
) -> list[dict[str, Any]]:
    """Rows of the pairs that fit; the others are counted in `left_out`."""
    origin = "a pair of dialogues"

    # Ids of the shared state of turn h, of its two replies, and of the whole first dialogue.
    states = []
    first_parts = []
    second_parts = []
    whole_states = []
    whole_dialogues = []
    for pair in pairs:
        after_reply = 2 * pair.turn + 2
        states.append(state(pair.first, pair.turn))
        first_parts.append(pair.first[:after_reply])
        second_parts.append(pair.second[:after_reply])
        whole_states.append(pair.first[:-1])
        whole_dialogues.append(pair.first)
    shared_states = encode_states(tokenizer, states, origin)
    first_replies = encode_replies(tokenizer, first_parts, end, origin)
    second_replies = encode_replies(tokenizer, second_parts, end, origin)
    last_states = encode_states(tokenizer, whole_states, origin)
    last_replies = encode_replies(tokenizer, whole_dialogues, end, origin)

    rows = []
    for index, pair in enumerate(pairs):
        shared = shared_states[index]
        first = _Reply(pair.first, first_replies[index], pair.first_rewards[pair.last])
        second = _Reply(pair.second, second_replies[index], pair.second_rewards[pair.last])
        if len(last_states[index]) + len(last_replies[index]) > total_length:
            left_out[FIRST_TOO_LONG] += 1
        elif len(shared) + len(second.ids) > total_length:
            left_out[SECOND_TOO_LONG] += 1
        elif first.ids == second.ids:  # different texts that the template writes alike
            left_out[SAME_REPLY] += 1
        else:
            chosen, rejected = (first, second) if first.reward > second.reward else (second, first)
            row: dict[str, Any] = {}
            for name, reply in (("chosen", chosen), ("reject", rejected)):
                padding = total_length - len(shared) - len(reply.ids)
                row[name] = reply.dialogue[: 2 * pair.last + 2]
                row[f"{name}_token"] = [*shared, *reply.ids] + [tokenizer.pad_token_id] * padding
                row[f"{name}_mask"] = [0] * len(shared) + [1] * len(reply.ids) + [0] * padding
                row[f"{name}_reward"] = reply.reward
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Reply:
    """The reply of turn h in one of two dialogues."""

    dialogue: Dialogue
    ids: list[int]
    reward: float  # at the end of turn L


@dataclass(frozen=True, kw_only=True)
class RegressionExample(PreferenceExample):
    """Two replies to a state with their rewards-to-go; that of the chosen reply is at least as high."""

    chosen_reward: float
    rejected_reward: float


def load_regression_data(
    names: Sequence[str],
    max_seq_len: int,
    vocabulary: int,
    start: int = 0,
    end: int = -1,
) -> StepData[RegressionExample]:
    """Reads the pairs that tokenize_masks.py wrote.

    Args:
        names: local folders or files, or data sets of the hub.
        max_seq_len: maximum tokens of state and reply together; longer pairs are left out.
        vocabulary: number of ids that the tokenizer has.
        start, end: range of training rows over all data sets together, from 0, without the end; −1 = to the last.

    Raises:
        UserError: a row is not such a pair, or no pair is left.
    """
    train: list[RegressionExample] = []
    held_out: list[RegressionExample] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    dropped = {"train": Counter[str](), "eval": Counter[str]()}
    number = 0
    for name in names:
        raw = open_data(name, FLAG)
        first_number = number
        rows = []
        for row in raw.train:
            if number >= start and (end == -1 or number < end):
                rows.append(row)
            number += 1
        eval_rows = list(raw.eval or ())
        source_train = _examples(rows, max_seq_len, vocabulary, dropped["train"])
        source_eval = _examples(eval_rows, max_seq_len, vocabulary, dropped["eval"])
        train += source_train
        held_out += source_eval
        files += raw.files
        num_rows = (number - first_number, len(eval_rows))
        sources.append(described(raw.name, source_train, source_eval, {}, num_rows, hub=raw.hub))
    if not train:
        reasons = in_words(dropped["train"])
        raise UserError(
            f"{FLAG} {' '.join(names)}: no training pair is left of {number} ({reasons or 'none in that range'}). "
            "Give a larger --task.total_length, another range of --start_idx and --end_idx, or other data."
        )
    return StepData(train, held_out, sources, tuple(files), dropped)


def _examples(
    rows: Iterable[tuple[str, Any]],
    max_seq_len: int,
    vocabulary: int,
    dropped: Counter[str],
) -> list[RegressionExample]:
    examples = []
    for origin, raw in rows:
        example = _example(raw, origin, vocabulary)
        if FAILED in (example.chosen_reward, example.rejected_reward):
            dropped[NOT_SCORED] += 1
        elif len(example) > max_seq_len:
            dropped[TOO_LONG] += 1
        else:
            examples.append(example)
    return examples


def _example(raw: Any, origin: str, vocabulary: int) -> RegressionExample:
    _require(raw, TOKEN_COLUMNS, origin, "tokenize_masks.py")
    prompt, chosen = _split(raw["chosen_token"], raw["chosen_mask"], origin)
    rejected_prompt, rejected = _split(raw["reject_token"], raw["reject_mask"], origin)
    if prompt != rejected_prompt:
        raise UserError(f"{origin}: the two sequences differ before their replies; both must answer the same state.")
    highest = max(max(prompt), max(chosen), max(rejected))
    if highest >= vocabulary:
        raise UserError(
            f"{origin}: token {highest} is none of the model's {vocabulary}: the pairs were made for another model. "
            "Make them with tokenize_masks.py and --model as --base_model is."
        )
    chosen_reward = raw["chosen_reward"]
    rejected_reward = raw["reject_reward"]
    for reward in (chosen_reward, rejected_reward):
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{origin}: the rewards {chosen_reward!r} and {rejected_reward!r} must be numbers.")
    return RegressionExample(
        prompt,
        chosen,
        rejected,
        chosen_reward=float(chosen_reward),
        rejected_reward=float(rejected_reward),
    )


def _split(
    tokens: list[int],
    mask: list[int],
    origin: str,
) -> tuple[list[int], list[int]]:
    """State and reply. Raises UserError unless the mask is one run of ones after at least one other token."""
    start = mask.index(1) if 1 in mask else 0
    stop = start + sum(mask)
    if len(tokens) != len(mask) or start == 0 or mask[start:stop] != [1] * sum(mask):
        raise UserError(f"{origin}: a mask must be 1 on the tokens of one reply after other tokens, and 0 elsewhere.")
    return tokens[:start], tokens[start:stop]
