# SPDX-License-Identifier: Apache-2.0
"""From a judge's answers to verdicts: JSON as asked for, JSON inside other text, or one clear line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat.evaluation.judge.rubrics import PLACES
from dschat.evaluation.pairs.comparisons import Verdict, mirrored

VERDICT_KEYS = ("verdict", "overall_verdict", "final_verdict", "overall", "winner")
SPOKEN = {
    **dict.fromkeys(("first", "1", "1st", "a"), "first"),
    **dict.fromkeys(("second", "2", "2nd", "b"), "second"),
    **dict.fromkeys(("tie", "a tie", "tied", "draw", "a draw", "equal", "both equal", "both", "neither"), "tie"),
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
    """What an answer says.

    Attributes:
        verdict: first, second or tie.
        aspects: the same per criterion, where the answer gives it.
        reason: the comparison in words; empty where the answer gives none.
    """

    verdict: str
    aspects: dict[str, str] = field(default_factory=dict)
    reason: str = ""


def read_answer(text: str, criteria: Iterable[str]) -> Reading:
    """Reads a judge's answer.

    Args:
        text: the answer: the JSON object asked for, alone, fenced or inside other text; or text with one line such as
            "Verdict: first"; or the verdict alone.
        criteria: names of the criteria that have verdicts of their own.

    Raises:
        UnreadableAnswer: there is no verdict, the JSON is broken, or several verdicts contradict each other.
    """
    text = _without_thoughts(text)
    if not text.strip():
        raise UnreadableAnswer("it is empty")
    objects = list(_objects(text))
    found = [(place, row) for row in objects if (place := _verdict_of(row)) is not None]
    if found:
        if len({place for place, _ in found}) > 1:
            raise UnreadableAnswer("it gives several verdicts that contradict each other")
        place, row = found[-1]
        return _reading(place, row, criteria)
    if objects:
        raise UnreadableAnswer("its JSON has no verdict")
    places = {place_of(line) for line in VERDICT_LINE.findall(text)} - {None}
    if not places and any(place in text.lower() for place in PLACES):
        places = {place_of(text)} - {None}
    if len(places) != 1:
        raise UnreadableAnswer("it gives several verdicts" if places else "it gives no verdict")
    return Reading(str(places.pop()))


def place_of(value: Any) -> str | None:
    """first, second or tie, however it is spelled; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > 60:
        return None
    words = re.sub(r"[^a-z0-9]+", " ", str(value).lower()).split()
    return SPOKEN.get(" ".join(word for word in words if word not in FILLERS))


def in_terms_of_models(place: str, first: str) -> Verdict:
    """The verdict of an order.

    Args:
        place: first, second or tie.
        first: "A" or "B": whose response was shown first.
    """
    if place == "tie":
        return "tie"
    return first if place == "first" else mirrored(first)  # type: ignore[return-value]


def combined(verdicts: Sequence[str]) -> Verdict:
    """One verdict from those of both orders.

    A model wins only if it wins in every order. Opposite verdicts, and a win beside a tie, are a tie. One that could
    not be read makes the whole invalid.

    Args:
        verdicts: A, B, tie or invalid, one per order.
    """
    if "invalid" in verdicts:
        return "invalid"
    return verdicts[0] if len(set(verdicts)) == 1 else "tie"  # type: ignore[return-value]


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
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    start = OBJECT_START.search(text)
    while start:
        try:
            value, end = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            raise UnreadableAnswer("its JSON is broken or cut off") from error
        yield value
        start = OBJECT_START.search(text, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _verdict_of(row: dict[str, Any]) -> str | None:
    keys = {key.lower().replace(" ", "_"): value for key, value in row.items()}
    for name in VERDICT_KEYS:
        value = keys.get(name)
        place = place_of(value.get("verdict") if isinstance(value, dict) else value)
        if place is not None:
            return place
    return None


def _reading(place: str, row: dict[str, Any], criteria: Iterable[str]) -> Reading:
    aspects, reasons = {}, []
    for name in criteria:
        value = row.get(name)
        aspect = place_of(value.get("verdict") if isinstance(value, dict) else value)
        if aspect is not None:
            aspects[name] = aspect
        if isinstance(value, dict) and isinstance(value.get("comparison"), str):
            reasons.append(f"{name}: {value['comparison']}")
    if isinstance(row.get("comparison"), str):
        reasons.append(row["comparison"])
    return Reading(place, aspects, "\n".join(reasons))
