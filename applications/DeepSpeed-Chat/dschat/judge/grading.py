# SPDX-License-Identifier: Apache-2.0
"""Responses graded or ranked by a rubric of --reward_judge: questions, their answers, and scores from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dschat.base.reply_cache import Reply
from dschat.base.thoughts import without_thoughts
from dschat.judge.answers import UnreadableAnswer, json_objects
from dschat.judge.questions import JudgeQuestion, object_schema, question_about
from dschat.judge.rubrics import REASON, Rubric

MOST_POINTS = 10
POINTS = (
    "Give whole numbers from 0 to {most}: 0 where it fails entirely, {most} where nothing could be better. Use the"
    " whole scale. Length by itself is neither good nor bad."
)
PLACES = (
    "Give each of the {count} its place in the ranking, 1 for the best; what is equally good shares a place. The order"
    " in which they are shown is chance and says nothing. Length by itself is neither good nor bad."
)
EPISODE = (
    "What follows the {prompt} is a conversation: every line that somebody wrote in it begins with a bar. Judge what"
    " the assistant wrote, from the first to the last reply, and not the others."
)

Answer = Mapping[str, float]  # key of an answer → points or place


@dataclass(frozen=True)
class JudgedTexts:
    """What a question shows.

    Attributes:
        prompt: prompt of all responses.
        responses: one to be graded, or several to be ranked.
        is_episode: the responses are conversations of several turns.
    """

    prompt: str
    responses: tuple[str, ...]
    is_episode: bool = False


def grading_question(rubric: Rubric, texts: JudgedTexts) -> JudgeQuestion:
    """The question about one response, or about the ranking of several."""
    rules: list[str] = []
    if texts.is_episode:
        rules.append(EPISODE.format(prompt=rubric.prompt_name))
    if rubric.ranks:
        rules.append(PLACES.format(count=len(texts.responses)))
    else:
        rules.append(POINTS.format(most=MOST_POINTS))
    keys = answer_keys(rubric, len(texts.responses))
    names = keys if rubric.ranks else [rubric.response_name]
    material = {rubric.prompt_name: texts.prompt}
    material |= dict(zip(names, texts.responses, strict=True))
    return question_about(material, rubric, rules, answer_form(rubric, keys), _answer_schema(rubric, keys))


def answer_keys(rubric: Rubric, count: int) -> list[str]:
    """Keys of the numbers in an answer: criteria, or the names of `count` responses that are ranked."""
    if not rubric.ranks:
        return list(rubric.graded)
    return [f"{rubric.response_name}-{number}" for number in range(1, count + 1)]


def answer_form(rubric: Rubric, keys: Sequence[str]) -> str:
    """The JSON object that an answer should be, as a pattern for the judge to read."""
    number = "place" if rubric.ranks else f"0 to {MOST_POINTS}"
    numbers = ", ".join(f'"{key}": {number}' for key in keys)
    return f'{{"{REASON}": "one or two sentences", {numbers}}}'


def _answer_schema(rubric: Rubric, keys: Sequence[str]) -> dict[str, object]:
    """JSON schema of an answer, in the subset that servers with structured output take."""
    allowed = range(1, len(keys) + 1) if rubric.ranks else range(MOST_POINTS + 1)
    number = {"type": "integer", "enum": list(allowed)}
    return object_schema({REASON: {"type": "string"}, **dict.fromkeys(keys, number)})


# -- answers


def read_answer(reply: Reply, keys: Sequence[str], lowest: float, highest: float) -> dict[str, float]:
    """The numbers of an answer, by their keys.

    Args:
        reply: the judge's.
        keys: each of which must have a number.
        lowest, highest: bounds of the numbers.

    Raises:
        UnreadableAnswer: a number is missing or out of range, the JSON is broken, or two objects contradict.
    """
    if reply.refusal:
        raise UnreadableAnswer("the judge refused")
    answers: list[dict[str, float]] = []
    objects, _ = json_objects(without_thoughts(reply.text))
    for row in objects:
        if any(key in row for key in keys):
            answers.append(_numbers_of(row, keys, lowest, highest))
    if not answers:
        empty = "" if reply.text.strip() else "is empty and "
        raise UnreadableAnswer(f"it {empty}has no JSON object with {', '.join(keys)}")
    if any(answer != answers[0] for answer in answers):
        raise UnreadableAnswer("it gives several answers that contradict each other")
    return answers[0]


def _numbers_of(row: Mapping[str, object], keys: Sequence[str], lowest: float, highest: float) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key in keys:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            shown = "missing" if key not in row else f"{value!r:.40}"
            raise UnreadableAnswer(f"{key} is {shown}, not a number from {lowest:g} to {highest:g}")
        numbers[key] = float(value)
    return numbers


# -- scores


def weighted_points(points: Answer, weights: Mapping[str, float]) -> float:
    """The score of a response, from 0 to 1: Σ weight · points / (10 · Σ weight); one number counts by itself.

    Example: 8 and 2 points with the weights 3 and 1 give (24 + 2) / 40 = .65.
    """
    total = 0.0
    total_weight = 0.0
    for name, number in points.items():
        weight = weights.get(name, 1.0)
        total += weight * number
        total_weight += weight
    return total / (MOST_POINTS * total_weight)


def centred_ranks(places: Sequence[float]) -> list[float]:
    """Scores of ranked responses: the share of the others that each one beats, counting half of ties, less a half.

    The scores of a group add up to 0, and lie between −½ and ½ whatever its size. They are the mid-ranks, centred and
    divided by K − 1.

    Example: the places 1, 3, 2 give .5, −.5, 0; the places 1, 2, 2 give .5, −.25, −.25.

    Args:
        places: K of them, 1 for the best; equal ones share a place. A single response has the score 0.
    """
    others = len(places) - 1
    if others == 0:
        return [0.0]
    scores = []
    for place in places:
        worse = sum(other > place for other in places)
        equal = sum(other == place for other in places) - 1
        scores.append((worse + equal / 2) / others - 0.5)
    return scores
