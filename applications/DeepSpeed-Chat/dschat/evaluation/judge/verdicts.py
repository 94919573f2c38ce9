# SPDX-License-Identifier: Apache-2.0
"""From a judge's answers to verdicts: JSON as asked for, JSON inside other text, or one clear line."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dschat.evaluation.judge.rubrics import PLACES
from dschat.evaluation.pairs.comparisons import Side, Verdict, mirrored

VERDICT_KEYS = ("verdict", "overall_verdict", "final_verdict", "overall", "winner")
# How judges spell the three verdicts, without the words in FILLERS.
SPELLINGS = {
    "first": ("first", "1", "1st", "a"),
    "second": ("second", "2", "2nd", "b"),
    "tie": ("tie", "a tie", "tied", "draw", "a draw", "equal", "both equal", "both", "neither"),
}
FILLERS = frozenset("the is are one response summary reply answer option better best wins winner preferred".split())
VERDICT_LINE = re.compile(
    r"^[\s>*_#-]*(?:(?:the|my|final|overall) +)*(?:verdict|winner|preference|decision|choice)\b[ *_\"']*"
    r"(?::|=|\bis\b)(.+)$",
    re.IGNORECASE | re.MULTILINE,
)
OBJECT_START = re.compile(r"\{\s*\"")


class UnreadableAnswer(ValueError):
    """An answer that gives no verdict, or more than one. The message says which."""


@dataclass(frozen=True)
class Reading:
    """What an answer says. Verdicts are first, second or tie."""

    verdict: str
    aspects: dict[str, str] = field(default_factory=dict)  # criterion → verdict, where the answer gives it
    reason: str = ""  # the comparison in words, where there is one


def read_answer(text: str, criteria: Iterable[str]) -> Reading:
    """Reads a judge's answer, with the verdicts on some criteria where it gives them.

    The answer is the JSON object asked for, alone, fenced or inside other text; or text with one line such as
    "Verdict: first"; or the verdict alone.

    Raises:
        UnreadableAnswer: there is no verdict, the JSON is broken, or several verdicts contradict each other.
    """
    text = _without_thoughts(text)
    objects = list(_objects(text))
    found = [(place, row) for row in objects if (place := _verdict_of(row)) is not None]
    if found:
        if len({place for place, _ in found}) > 1:
            raise UnreadableAnswer("it gives several verdicts that contradict each other")
        return _reading(*found[-1], criteria)
    places = {place_of(line) for line in VERDICT_LINE.findall(text)} - {None}
    if not places and any(place in text.lower() for place in PLACES):
        places = {place_of(text)} - {None}
    if objects or len(places) != 1:
        empty = "" if text.strip() else "is empty and "
        raise UnreadableAnswer("it gives several verdicts" if places else f"it {empty}gives no verdict")
    return Reading(str(places.pop()))


def place_of(value: object) -> str | None:
    """first, second or tie, however it is spelled, also in an object that holds it; None for anything else."""
    if isinstance(value, dict):
        value = value.get("verdict")
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > 60:
        return None
    words = re.sub(r"[^a-z0-9]+", " ", str(value).lower()).split()
    spoken = " ".join(word for word in words if word not in FILLERS)
    return next((place for place, spellings in SPELLINGS.items() if spoken in spellings), None)


def in_terms_of_models(place: str, first: Side) -> Verdict:
    """The verdict first, second or tie where the response of the model `first` was shown first."""
    if place == "tie":
        return "tie"
    return first if place == "first" else mirrored(first)


def _without_thoughts(text: str) -> str:
    """What a model that thinks aloud says after it; a JSON object may hold the marks in its own text."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in a text. What begins like one and is none is not searched for smaller ones."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
    start = OBJECT_START.search(text)
    while start:
        try:
            value, end = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            raise UnreadableAnswer("its JSON is broken or cut off") from error
        yield value
        start = OBJECT_START.search(text, end)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _verdict_of(row: dict[str, Any]) -> str | None:
    keys = {key.lower().replace(" ", "_"): value for key, value in row.items()}
    found = (place_of(keys.get(name)) for name in VERDICT_KEYS)
    return next((place for place in found if place is not None), None)


def _reading(place: str, row: dict[str, Any], criteria: Iterable[str]) -> Reading:
    aspects, reasons = {}, []
    for name in criteria:
        aspect, part = place_of(row.get(name)), row.get(name)
        if aspect is not None:
            aspects[name] = aspect
        if isinstance(part, dict) and isinstance(part.get("comparison"), str):
            reasons.append(f"{name}: {part['comparison']}")
    if isinstance(row.get("comparison"), str):
        reasons.append(row["comparison"])
    return Reading(place, aspects, "\n".join(reasons))
