# SPDX-License-Identifier: Apache-2.0
"""Dialogues of two policies, compared after each turn: pairs of the dialogues so far, and win rates by turn."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows
from dschat.base.statistics import WinRates, win_rates
from dschat.data.dialogues import ROLES, check_dialogue
from dschat.data.messages import quoted_lines
from dschat.evaluation.responses import Pair, Response, comparison_of, numbers_of, pair_id

logger = logging.getLogger(__name__)

REMEDY = "both files must hold the same dialogues, begun by the same messages; roll both out on the same prompts"


@dataclass(frozen=True)
class Dialogue:
    """A dialogue between a user, who begins, and a policy, which has the last word."""

    number: int  # the same in both files
    texts: tuple[str, ...]  # texts of the user and the assistant in turn
    scores: Sequence[float] | None  # scores of the dialogue at the end of each turn; None if the row has none
    origin: str  # "file:line"

    @property
    def turns(self) -> int:
        """Number of replies of the assistant."""
        return len(self.texts) // 2

    def after_opening(self, turn: int) -> str:
        """Messages after the first one, up to the assistant's reply in a turn.

        Every line of a message begins with a bar, so that no message can pose as another one.
        """
        blocks = []
        for index, text in enumerate(self.texts[1 : 2 * turn], start=1):
            blocks.append(f"{ROLES[index % 2].capitalize()}, turn {index // 2 + 1}:\n{quoted_lines(text)}")
        return "\n\n".join(blocks)


def read_dialogues(path: Path, flag: str) -> dict[int, Dialogue]:
    """Read a file of dialogues: number → dialogue, in the order of the file.

    Raises:
        UserError: the file cannot be read, or a row is not a finished dialogue or repeats a number; names the
            file and the line.
    """
    dialogues: dict[int, Dialogue] = {}
    for origin, row in read_rows(path, flag):
        number = row.get("number")
        if not _is_whole_number(number):
            raise UserError(f"{origin}: column 'number' must hold the dialogue's number, not {number!r}.")
        if number in dialogues:
            earlier = dialogues[number].origin
            raise UserError(
                f"{origin}: number {number} occurs twice (also in {earlier}); give each dialogue another number."
            )
        texts = _texts_of(row, origin)
        turns = len(texts) // 2
        scores = None
        if row.get("scores") is not None:
            scores = numbers_of(row, "scores", origin, f"{turns} numbers, one per turn.", turns)
        dialogues[number] = Dialogue(number, texts, scores, origin)
    return dialogues


def _is_whole_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts_of(row: dict[str, Any], origin: str) -> tuple[str, ...]:
    messages = row.get("messages")
    messages = check_dialogue(row.get("trajectory") if messages is None else messages, origin, sampled=True)
    if len(messages) % 2:
        raise UserError(
            f"{origin}: the last message, {len(messages)}, is the user's; the assistant must have the last word."
        )
    return tuple(message["content"] for message in messages)


def turn_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Pair the dialogues of two files at every turn that both have, in the order of the first file.

    The prompt is the first message, a response the messages after it up to that turn, its reward the score of that
    turn. Pairs have the columns `number` and `turn`.

    Raises:
        UserError: a dialogue is in one of the files only, or begins differently in them.
    """
    dialogues_a = read_dialogues(path_a, flag_a)
    dialogues_b = read_dialogues(path_b, flag_b)
    unpaired = [dialogue for number, dialogue in dialogues_a.items() if number not in dialogues_b]
    unpaired += [dialogue for number, dialogue in dialogues_b.items() if number not in dialogues_a]
    if unpaired:
        first = f"{unpaired[0].origin} (number {unpaired[0].number})"
        raise UserError(f"{len(unpaired)} dialogues are in one file only, the first is {first}: {REMEDY}.")

    unequal = []
    pairs = []
    for number, a in dialogues_a.items():
        b = dialogues_b[number]
        if a.texts[0] != b.texts[0]:
            raise UserError(f"{a.origin} and {b.origin} (number {number}) begin with different messages: {REMEDY}.")
        if a.turns != b.turns:
            unequal.append(f"{a.origin} ({a.turns} turns, {b.turns} in the other file)")
        for turn in range(1, min(a.turns, b.turns) + 1):
            pairs.append(_pair(a, b, turn))
    if unequal:
        logger.warning(
            "%d of %d dialogues are longer in one file, the first is %s: "
            "they are compared at the turns that both have",
            len(unequal),
            len(dialogues_a),
            unequal[0],
        )
    return pairs


def _pair(a: Dialogue, b: Dialogue, turn: int) -> Pair:
    response_a = _response_at(a, turn)
    response_b = _response_at(b, turn)
    key = f"{a.number}:{turn}:{a.texts[0]}"  # several dialogues may have the same texts
    return Pair(
        pair_id(key, response_a.response, response_b.response),
        a.texts[0],
        response_a,
        response_b,
        {"number": a.number, "turn": turn},
    )


def _response_at(dialogue: Dialogue, turn: int) -> Response:
    score = None if dialogue.scores is None else dialogue.scores[turn - 1]
    return Response(dialogue.texts[0], dialogue.after_opening(turn), score, dialogue.origin, {})


@dataclass(frozen=True)
class TurnRates:
    """Win rates by turn from one rater's verdicts on two policies' dialogues."""

    models: tuple[str, str]  # names of the first and the second policy
    rater: str
    turns: dict[int, WinRates]  # turn, from 1 → rates of the first policy
    overall: WinRates  # over all turns

    @property
    def title(self) -> str:
        """Names of the policies and of the rater."""
        return f"{self.models[0]} against {self.models[1]}, {self.rater}"


def rates_by_turn(rows: Iterable[tuple[str, dict[str, Any]]]) -> TurnRates:
    """Win rates of the verdicts of one file, each row with its origin "file:line".

    Raises:
        UserError: a row is not a verdict at a turn, or compares other policies than the first row.
    """
    verdicts = []
    compared: set[tuple[str, str, str]] = set()
    for origin, row in rows:
        number = row.get("number")
        turn = row.get("turn")
        if not _is_whole_number(number) or not _is_whole_number(turn) or turn < 1:
            raise UserError(f"{origin}: no number and turn; give files that `dschat judge-turns` wrote.")
        comparison = comparison_of(row, origin)
        compared.add((comparison.model_a, comparison.model_b, comparison.rater))
        if len(compared) > 1:
            raise UserError(f"{origin}: it compares other policies, or by another judge, than the rows before it.")
        verdicts.append({"turn": turn, "number": number, "verdict": comparison.verdict})
    if not verdicts:
        raise UserError("The file holds no verdict; give one that `dschat judge-turns` has finished.")

    model_a, model_b, rater = compared.pop()
    table = pd.DataFrame(verdicts)
    turns = {}
    for turn in sorted(table["turn"].unique().tolist()):
        at_turn = table[table["turn"] == turn]
        turns[turn] = _dialogue_rates(at_turn)
    overall = _dialogue_rates(table.sort_values("turn", kind="stable"))
    return TurnRates((model_a, model_b), rater, turns, overall)


def _dialogue_rates(verdicts: pd.DataFrame) -> WinRates:
    return win_rates(verdicts["verdict"], verdicts["number"])
