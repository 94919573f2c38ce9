# SPDX-License-Identifier: Apache-2.0
"""From a judge's answers to verdicts: JSON as asked for, JSON inside other text, or one clear line."""

from __future__ import annotations

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
    if len({place for place, _ in found}) > 1:
        raise UnreadableAnswer("it gives several verdicts that contradict each other")
    if found:
        return _reading(*found[-1], criteria)
    if objects:
        raise UnreadableAnswer("its JSON has no verdict")
    places = {place_of(line) for line in VERDICT_LINE.findall(text)} - {None}
    if not places and any(place in text.lower() for place in PLACES):
        places = {place_of(text)} - {None}
    if len(places) != 1:
        raise UnreadableAnswer("it gives several verdicts" if places else "it gives no verdict")
    return Reading(str(places.pop()))


def place_of(value: object) -> str | None:
    """first, second or tie, however it is spelled; None for anything else."""
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


def _own_verdict(value: Any) -> str | None:
    """The place that a value names, or the verdict in it where it is an object."""
    return place_of(value.get("verdict") if isinstance(value, dict) else value)


def _verdict_of(row: dict[str, Any]) -> str | None:
    keys = {key.lower().replace(" ", "_"): value for key, value in row.items()}
    found = (_own_verdict(keys.get(name)) for name in VERDICT_KEYS)
    return next((place for place in found if place is not None), None)


def _reading(place: str, row: dict[str, Any], criteria: Iterable[str]) -> Reading:
    given = {name: row[name] for name in criteria if name in row}
    verdicts = {name: _own_verdict(value) for name, value in given.items()}
    reasons = [f"{name}: {value['comparison']}" for name, value in given.items() if _has_comparison(value)]
    if _has_comparison(row):
        reasons.append(row["comparison"])
    aspects = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    return Reading(place, aspects, "\n".join(reasons))


def _has_comparison(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("comparison"), str)
