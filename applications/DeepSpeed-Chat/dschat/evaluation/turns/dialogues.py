# SPDX-License-Identifier: Apache-2.0
"""Files of finished dialogues, and the pairs that two policies' dialogues make at every turn."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.jsonl import read_rows
from dschat.data.dialogues import ROLES, check_dialogue
from dschat.errors import UserError
from dschat.evaluation.pairs.responses import Pair, Response, number_of, pair_id

logger = logging.getLogger(__name__)

REMEDY = "both files must hold the same dialogues, begun by the same messages; roll both out on the same prompts"


@dataclass(frozen=True)
class Dialogue:
    """A dialogue of a policy with a user, which the user begins and the policy ends."""

    number: int  # the same in both files
    texts: tuple[str, ...]  # of the user and the assistant by turns
    scores: tuple[float, ...] | None  # of the dialogue at the end of each turn; None where the row has none
    origin: str  # "file:line"

    @property
    def turns(self) -> int:
        """Replies of the assistant."""
        return len(self.texts) // 2

    def after_opening(self, turn: int) -> str:
        """What follows the first message, up to the assistant's reply in a turn.

        Every line of a message begins with a bar, so that no message can pose as another one.
        """
        blocks = []
        for place, text in enumerate(self.texts[1 : 2 * turn], start=1):
            quoted = "\n".join(f"| {line}" for line in text.splitlines())
            blocks.append(f"{ROLES[place % 2].capitalize()}, turn {place // 2 + 1}:\n{quoted}")
        return "\n\n".join(blocks)


def read_dialogues(path: Path, flag: str) -> dict[int, Dialogue]:
    """number → dialogue, in the order of the file.

    Raises:
        UserError: the file cannot be read, or a row is no finished dialogue or repeats a number; names file and line.
    """
    found: dict[int, Dialogue] = {}
    for origin, row in read_rows(path, flag):
        number = row.get("number")
        if isinstance(number, bool) or not isinstance(number, int):
            raise UserError(f"{origin}: column 'number' must hold the dialogue's number, not {number!r}.")
        if number in found:
            raise UserError(f"{origin}: number {number} is that of {found[number].origin}; number each dialogue once.")
        texts = _texts_of(row, origin)
        found[number] = Dialogue(number, texts, _scores_of(row, len(texts) // 2, origin), origin)
    return found


def turn_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Every dialogue at every turn that it has in both files, in the order of the first; columns `number`, `turn`.

    The prompt is the first message, a response what follows it up to that turn, its reward the score of that turn.

    Raises:
        UserError: a dialogue is in one of the files only, or begins differently in them.
    """
    first, second = read_dialogues(path_a, flag_a), read_dialogues(path_b, flag_b)
    alone = [one for mine, other in ((first, second), (second, first)) for n, one in mine.items() if n not in other]
    if alone:
        which = f"{alone[0].origin} (number {alone[0].number})"
        raise UserError(f"{len(alone)} dialogues are in one file only, the first is {which}: {REMEDY}.")
    unequal, pairs = [], []
    for number, a in first.items():
        b = second[number]
        if a.texts[0] != b.texts[0]:
            raise UserError(f"{a.origin} and {b.origin} (number {number}) begin with different messages: {REMEDY}.")
        if a.turns != b.turns:
            unequal.append(a)
        pairs += [_pair(a, b, turn) for turn in range(1, min(a.turns, b.turns) + 1)]
    if unequal:
        lengths = f"{unequal[0].turns} turns, {second[unequal[0].number].turns} in the other file"
        logger.warning(
            "%d of %d dialogues are longer in one file, the first is %s (%s): they are compared at the turns that "
            "both have",
            *(len(unequal), len(first), unequal[0].origin, lengths),
        )
    return pairs


def _pair(a: Dialogue, b: Dialogue, turn: int) -> Pair:
    first, second = _side(a, turn), _side(b, turn)
    place = f"{a.number}:{turn}:{a.texts[0]}"  # the same texts may occur in several dialogues
    id = pair_id(place, first.response, second.response)
    return Pair(id, a.texts[0], first, second, {"number": a.number, "turn": turn})


def _side(dialogue: Dialogue, turn: int) -> Response:
    score = None if dialogue.scores is None else dialogue.scores[turn - 1]
    return Response(dialogue.texts[0], dialogue.after_opening(turn), score, dialogue.origin, {})


def _texts_of(row: dict[str, Any], origin: str) -> tuple[str, ...]:
    messages = check_dialogue(row.get("messages", row.get("trajectory")), origin, sampled=True)
    if len(messages) % 2:
        raise UserError(
            f"{origin}: the last message, {len(messages)}, is the user's; the assistant must have the last word."
        )
    return tuple(message["content"] for message in messages)


def _scores_of(row: dict[str, Any], turns: int, origin: str) -> tuple[float, ...] | None:
    values = row.get("scores")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != turns:
        raise UserError(f"{origin}: column 'scores' must be a list of {turns} numbers, one per turn.")
    numbers = [number_of({"scores": value}, "scores", origin) for value in values]
    if None in numbers:
        raise UserError(f"{origin}: column 'scores' must be a list of {turns} numbers, one per turn.")
    return tuple(number for number in numbers if number is not None)


def check_scored(pairs: Sequence[Pair], flag: str) -> None:
    """Raises UserError where a side has no score."""
    for pair in pairs:
        for side in (pair.a, pair.b):
            if side.reward is None:
                raise UserError(f"{flag}: {side.origin} has no column 'scores'; add one number per turn.")
