# SPDX-License-Identifier: Apache-2.0
"""Two dialogues that share their beginning → two replies to one state as tokens, which REFUEL trains on.

A row of dialogues has the columns FIRST and SECOND (messages), TURN (h, where the second leaves the first) and LAST
(L ≥ h, whose end is scored); once scored, both dialogues also have a list of rewards, one for the end of each turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.dialogues import Dialogue, check_dialogue, encode_replies, encode_states, state
from dschat.data.encoding import TurnEnd
from dschat.data.examples import PreferenceExample
from dschat.data.loading import StepData
from dschat.data.rows import in_words
from dschat.data.sources import described, open_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST, SECOND = "trajectory", "trajectory_sampled_h_from_sampled_len"
LAST, TURN = "sampled_len_from_5", "sampled_h_from_sampled_len"
REWARD = "_reward"  # behind the name of a dialogue's column
FAILED = -99999.0  # the reward of what could not be scored
NOT_SCORED = "a reward is missing"
SAME_REPLY = "both replies are the same"
EMPTY_REPLY = "a reply is empty"
FIRST_TOO_LONG = "the first dialogue is too long"
SECOND_TOO_LONG = "the second dialogue is too long up to its turn"
CHUNK = 500  # pairs that are encoded together
FLAG = "--task.query_dataset"
TOO_LONG = "longer than --task.total_length"
COLUMNS = tuple(f"{name}_{part}" for name in ("chosen", "reject") for part in ("token", "mask", "reward"))


@dataclass(frozen=True)
class DialoguePair:
    """A row of dialogues."""

    first: Dialogue  # first and second: H turns each, the same up to the state of turn h
    second: Dialogue
    turn: int  # h, whose two replies are compared
    last: int  # L, h ≤ L < H: the turn whose end gives the rewards
    # Of the first and of the second, at the end of each turn; empty where they are not scored yet.
    rewards: tuple[list[float], list[float]]
    origin: str  # where the row stands


def read_dialogue_pair(raw: Any, origin: str, scored: bool) -> DialoguePair:
    """A row as it was read; a `scored` one must have rewards.

    Raises:
        UserError: a column is missing, a dialogue is none, or they do not belong together; names row and column.
    """
    columns = [FIRST, SECOND, LAST, TURN, *([FIRST + REWARD, SECOND + REWARD] if scored else [])]
    _require(raw, columns, origin, "rank.py" if scored else "generate.py")
    first, second = (check_dialogue(raw[name], f"{origin}: {name}", sampled=True) for name in (FIRST, SECOND))
    turn, last = raw[TURN], raw[LAST]
    turns = len(first) // 2
    if len(first) % 2 or len(second) != len(first):
        raise UserError(f"{origin}: the dialogues must have the same number of turns, each with its reply.")
    if not (isinstance(turn, int) and isinstance(last, int) and 0 <= turn <= last < turns):
        raise UserError(f"{origin}: {TURN} {turn!r} and {LAST} {last!r} must be turns, in this order, from 0.")
    if state(first, turn) != state(second, turn):
        raise UserError(f"{origin}: the dialogues differ before the reply of turn {turn}, counted from 0.")
    rewards = tuple([_number(x, origin) for x in raw[name + REWARD]] if scored else [] for name in (FIRST, SECOND))
    if scored and not all(len(numbers) == turns for numbers in rewards):
        raise UserError(f"{origin}: there must be a reward for each of the {turns} turns.")
    return DialoguePair(first, second, turn, last, (rewards[0], rewards[1]), origin)


def _require(
    raw: Any,
    columns: Sequence[str],
    origin: str,
    maker: str,
) -> None:
    missing = [name for name in columns if not isinstance(raw, dict) or raw.get(name) is None]
    if missing:
        raise UserError(f"{origin}: no column {', '.join(map(repr, missing))}; give a data set that {maker} makes.")


def _number(value: Any, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{origin}: a reward must be a number, not {value!r}; one that failed is {FAILED:g}.")
    return float(value)


def tokenize_pairs(
    pairs: Sequence[DialoguePair], tokenizer: PreTrainedTokenizerBase, end: TurnEnd, total_length: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows of tokens and masks, padded on the right to `total_length`, and reason → number of pairs left out.

    Chosen is the reply with the strictly higher reward at the end of turn L; of equal ones, the second. The mask is 1
    on the tokens of the reply of turn h, the one that ends the turn included, which is the last of a sequence.

    Args:
        pairs: with rewards.
        tokenizer: of the policy, with a chat template.
        end: of the template.
        total_length: most tokens of the whole first dialogue, and of the second up to its reply of turn h.

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
    """Why a pair is left out whatever its length; empty where it is not."""
    replies = [dialogue[2 * pair.turn + 1]["content"] for dialogue in (pair.first, pair.second)]
    if FAILED in pair.rewards[0] or FAILED in pair.rewards[1]:
        return NOT_SCORED
    if replies[0] == replies[1]:
        return SAME_REPLY
    return "" if all(reply.strip() for reply in replies) else EMPTY_REPLY


def _encoded(
    pairs: Sequence[DialoguePair],
    tokenizer: PreTrainedTokenizerBase,
    end: TurnEnd,
    total_length: int,
    left_out: Counter[str],
) -> list[dict[str, Any]]:
    states = partial(encode_states, tokenizer, origin="a pair of dialogues")
    replies = partial(encode_replies, tokenizer, end=end, origin="a pair of dialogues")
    shared = states([state(pair.first, pair.turn) for pair in pairs])
    first = replies([pair.first[: 2 * pair.turn + 2] for pair in pairs])
    second = replies([pair.second[: 2 * pair.turn + 2] for pair in pairs])
    before, after = states([pair.first[:-1] for pair in pairs]), replies([pair.first for pair in pairs])
    rows = []
    for n, pair in enumerate(pairs):
        if len(before[n]) + len(after[n]) > total_length:
            left_out[FIRST_TOO_LONG] += 1
        elif len(shared[n]) + len(second[n]) > total_length:
            left_out[SECOND_TOO_LONG] += 1
        elif first[n] == second[n]:  # texts that the template writes alike
            left_out[SAME_REPLY] += 1
        else:
            sides = [(pair.first, first[n], pair.rewards[0]), (pair.second, second[n], pair.rewards[1])]
            better, worse = sides if pair.rewards[0][pair.last] > pair.rewards[1][pair.last] else reversed(sides)
            row: dict[str, Any] = {}
            for name, (dialogue, reply, rewards) in (("chosen", better), ("reject", worse)):
                padding = total_length - len(shared[n]) - len(reply)
                row[name] = dialogue[: 2 * pair.last + 2]
                row[f"{name}_token"] = [*shared[n], *reply, *[tokenizer.pad_token_id] * padding]
                row[f"{name}_mask"] = [*[0] * len(shared[n]), *[1] * len(reply), *[0] * padding]
                row[f"{name}_reward"] = rewards[pair.last]
            rows.append(row)
    return rows


@dataclass(frozen=True, kw_only=True)
class RegressionExample(PreferenceExample):
    """Two replies to a state, of which the chosen one has the higher reward, or one as high."""

    chosen_reward: float  # both are rewards-to-go
    rejected_reward: float


def load_regression_data(
    names: Sequence[str],
    max_seq_len: int,
    vocabulary: int,
    start: int = 0,
    end: int = -1,
) -> StepData[RegressionExample]:
    """Reads what tokenize_masks.py wrote.

    Args:
        names: folders here, files, or data sets of the hub.
        max_seq_len: most tokens of state and reply together; longer pairs are left out.
        vocabulary: number of ids that the tokenizer has.
        start, end: training rows of all data sets together, from 0, the end excluded; −1 = all.

    Raises:
        UserError: a row is no such pair, or none is left.
    """
    train: list[RegressionExample] = []
    held_out: list[RegressionExample] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    dropped = {"train": Counter[str](), "eval": Counter[str]()}
    number = 0
    for name in names:
        raw = open_data(name, FLAG)
        before = number
        rows = []
        for row in raw.train:
            if number >= start and (end == -1 or number < end):
                rows.append(row)
            number += 1
        own = _examples(rows, max_seq_len, vocabulary, dropped["train"])
        eval_rows = list(raw.eval or ())
        own_eval = _examples(eval_rows, max_seq_len, vocabulary, dropped["eval"])
        train, held_out = train + own, held_out + own_eval
        sources.append(described(raw.name, own, own_eval, {}, (number - before, len(eval_rows)), hub=raw.hub))
        files += raw.files
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
    _require(raw, COLUMNS, origin, "tokenize_masks.py")
    prompt, chosen = _split(raw["chosen_token"], raw["chosen_mask"], origin)
    other, rejected = _split(raw["reject_token"], raw["reject_mask"], origin)
    if prompt != other:
        raise UserError(f"{origin}: the two sequences differ before their replies; both must answer the same state.")
    highest = max(max(prompt), max(chosen), max(rejected))
    if highest >= vocabulary:
        raise UserError(
            f"{origin}: token {highest} is none of the model's {vocabulary}: the pairs were made for another model. "
            "Make them with tokenize_masks.py and --model as --base_model is."
        )
    rewards = (raw["chosen_reward"], raw["reject_reward"])
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in rewards):
        raise UserError(f"{origin}: the rewards {rewards[0]!r} and {rewards[1]!r} must be numbers.")
    better, worse = map(float, rewards)
    return RegressionExample(prompt, chosen, rejected, chosen_reward=better, rejected_reward=worse)


def _split(
    tokens: list[int],
    mask: list[int],
    origin: str,
) -> tuple[list[int], list[int]]:
    """State and reply; raises UserError where the mask is not one run of ones behind at least one other token."""
    first = mask.index(1) if 1 in mask else 0
    count = sum(mask)
    if len(tokens) != len(mask) or not first or mask[first : first + count] != [1] * count:
        raise UserError(f"{origin}: a mask must be 1 on the tokens of one reply behind others, and 0 elsewhere.")
    return tokens[:first], tokens[first : first + count]
