# SPDX-License-Identifier: Apache-2.0
"""Dialogues of two policies, compared as they stand after each turn: pairs and win rates."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows
from dschat.base.statistics import WinRates, win_rates
from dschat.data.dialogues import ROLES, check_dialogue
from dschat.lab.responses import Pair, Response, comparison_of, numbers_of, pair_id

logger = logging.getLogger(__name__)

REMEDY = "both files must hold the same dialogues, begun by the same messages; roll both out on the same prompts"
# Gao et al. 2024 (arXiv 2410.04612): win rates against the initial policy, Llama-3-8B-it, in per cent at turns 1 to 5,
# in dialogues that begin with prompts of this set.
PUBLISHED_ON = ("ultrainteract", "ultrainteract_pair", "openbmb/ultrainteract_pair")
Published = Mapping[str, Sequence[float]]  # policy → rate at each turn
PUBLISHED = {
    "Llama-3.1-70B-it": (70.4, 66.4, 61.0, 53.0, 55.4),
    "REFUEL, iteration 1": (54.6, 53.6, 57.8, 56.2, 59.4),
    "REFUEL, iteration 2": (55.2, 53.4, 58.8, 57.2, 58.6),
}


@dataclass(frozen=True)
class Dialogue:
    """A dialogue of a policy with a user, which the user begins and the policy ends."""

    number: int  # the same in both files
    texts: tuple[str, ...]  # of the user and the assistant by turns
    scores: Sequence[float] | None  # of the dialogue at the end of each turn; None where the row has none
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

    Raises UserError, with file and line, where that cannot be read, is no finished dialogue or repeats a number.
    """
    found: dict[int, Dialogue] = {}
    for origin, row in read_rows(path, flag):
        number = row.get("number")
        if isinstance(number, bool) or not isinstance(number, int):
            raise UserError(f"{origin}: column 'number' must hold the dialogue's number, not {number!r}.")
        if number in found:
            raise UserError(f"{origin}: number {number} is that of {found[number].origin}; number each dialogue once.")
        texts = _texts_of(row, origin)
        form = f"{len(texts) // 2} numbers, one per turn."
        unscored = row.get("scores") is None
        scores = None if unscored else numbers_of(row, "scores", origin, form, len(texts) // 2)
        found[number] = Dialogue(number, texts, scores, origin)
    return found


def turn_pairs(path_a: Path, flag_a: str, path_b: Path, flag_b: str) -> list[Pair]:
    """Every dialogue at every turn that it has in both files, in the order of the first; columns `number`, `turn`.

    The prompt is the first message, a response what follows it up to that turn, its reward the score of that turn.
    Raises UserError where a dialogue is in one of the files only, or begins differently in them.
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
    def side(dialogue: Dialogue) -> Response:
        score = None if dialogue.scores is None else dialogue.scores[turn - 1]
        return Response(dialogue.texts[0], dialogue.after_opening(turn), score, dialogue.origin, {})

    first, second = side(a), side(b)
    place = f"{a.number}:{turn}:{a.texts[0]}"  # the same texts may occur in several dialogues
    id = pair_id(place, first.response, second.response)
    return Pair(id, a.texts[0], first, second, {"number": a.number, "turn": turn})


def _texts_of(row: dict[str, Any], origin: str) -> tuple[str, ...]:
    messages = check_dialogue(row.get("messages", row.get("trajectory")), origin, sampled=True)
    if len(messages) % 2:
        raise UserError(
            f"{origin}: the last message, {len(messages)}, is the user's; the assistant must have the last word."
        )
    return tuple(message["content"] for message in messages)


@dataclass(frozen=True)
class TurnRates:
    """One rater's verdicts on two policies' dialogues."""

    models: tuple[str, str]  # names of the first and the second
    rater: str
    turns: dict[int, WinRates]  # turn, from 1 → rates of the first policy
    overall: WinRates  # over all turns

    @property
    def title(self) -> str:
        """Who is compared, by whom."""
        return f"{self.models[0]} against {self.models[1]}, {self.rater}"


def rates_by_turn(rows: Iterable[tuple[str, dict[str, Any]]]) -> TurnRates:
    """The win rates of the verdicts of one file, each with its place "file:line".

    Raises UserError where a row is no verdict at a turn, or compares other policies than the first one.
    """
    verdicts: dict[int, list[tuple[int, str]]] = {}
    title: tuple[tuple[str, str], str] | None = None
    for origin, row in rows:
        number, turn = row.get("number"), row.get("turn")
        if not isinstance(number, int) or not isinstance(turn, int) or turn < 1:
            raise UserError(f"{origin}: no number and turn; give files that evaluation/winrate_by_turn.py wrote.")
        one = comparison_of(row, origin)
        compared = ((one.model_a, one.model_b), one.rater)
        title = title or compared
        if title != compared:
            raise UserError(f"{origin}: it compares other policies, or by another judge, than the rows before it.")
        verdicts.setdefault(turn, []).append((number, one.verdict))
    if title is None:
        raise UserError("There is no verdict.")
    everything = [each for turn in sorted(verdicts) for each in verdicts[turn]]
    return TurnRates(*title, {turn: _rates(verdicts[turn]) for turn in sorted(verdicts)}, _rates(everything))


def published_rates(dataset: str) -> Published:
    """The rates that are published on dialogues which begin with prompts of a set, if there are any."""
    return PUBLISHED if dataset.lower() in PUBLISHED_ON else {}


def published_mean(rates: Sequence[float]) -> float:
    """Over the turns."""
    return sum(rates) / len(rates)


def _rates(verdicts: Sequence[tuple[int, str]]) -> WinRates:
    numbers, given = zip(*verdicts, strict=True)
    return win_rates(given, numbers)
