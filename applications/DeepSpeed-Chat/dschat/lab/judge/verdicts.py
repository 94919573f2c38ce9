# SPDX-License-Identifier: Apache-2.0
"""Judging pairs of responses, in both orders and several at a time; what a judge's answers say.

An answer is JSON as asked for, JSON inside other text, or one clear line.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.progress import progress
from dschat.lab.judge.rubrics import (
    PLACES,
    VERDICT_KEYS,
    JudgeQuestion,
    JudgingStopped,
    Rubric,
    TextRefused,
    answer_form,
    question_of,
    without_repeats,
)
from dschat.lab.responses import Comparison, Pair, Side, Verdict, combined, compared, mirrored
from dschat.rollouts.chat_servers import Reply, Unanswered

if TYPE_CHECKING:
    from dschat.lab.judge.client import JudgeClient  # which needs the openai library

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
QUOTED = 2000  # characters of an unreadable answer that go into the repair request
Ask = Callable[[JudgeQuestion], Reply]


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
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats)
    start = OBJECT_START.search(text)
    while start:
        try:
            value, end = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            raise UnreadableAnswer("its JSON is broken or cut off") from error
        yield value
        start = OBJECT_START.search(text, end)


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


@dataclass(frozen=True)
class Setup:
    """What all pairs of a run share."""

    rubric: Rubric  # how to compare
    rater: str  # name of the judge model
    models: tuple[str, str]  # names of the first and the second
    single_order: bool  # show every pair once, the sides by chance, instead of once in each order
    seed: int  # of that chance


def questions_of(pair: Pair, setup: Setup) -> dict[Side, JudgeQuestion]:
    """Whose response is shown first → the question: one per order, none about responses that are the same text.

    The chance of a single order follows from the seed and the texts: exchanging the models, or the rows of a file,
    changes nothing in what is shown.
    """
    a, b = pair.a.response, pair.b.response
    if a == b:
        return {}
    questions: dict[Side, JudgeQuestion] = {
        "A": question_of(setup.rubric, pair.prompt, a, b),
        "B": question_of(setup.rubric, pair.prompt, b, a),
    }
    if setup.single_order:
        framed = "".join(f"{len(text)}:{text}" for text in (str(setup.seed), pair.prompt, *sorted((a, b))))
        lesser_first = int(content_hash(framed)[:2], 16) % 2 == 0
        del questions["B" if lesser_first == (a < b) else "A"]
    return questions


def has_verdict(reply: Reply) -> bool:
    """Whether an answer can be read as a verdict."""
    try:
        _read(reply)
    except UnreadableAnswer:
        return False
    return True


def judge_pair(pair: Pair, setup: Setup, ask: Ask) -> Comparison:
    """The verdict on one pair: a win only if the orders agree; the same text twice is a tie and not asked about."""
    rubric = setup.rubric
    orders = [_judge_order(question, first, rubric, ask) for first, question in questions_of(pair, setup).items()]
    details: dict[str, Any] = {"orders": orders}
    if rubric.separate:
        shared = [name for name in rubric.criteria if orders and all(name in order["aspects"] for order in orders)]
        details["aspects"] = {name: combined([order["aspects"][name] for order in orders]) for name in shared}
    if pair.a.reward is not None and pair.b.reward is not None:
        details |= {"reward_a": pair.a.reward, "reward_b": pair.b.reward}
    verdict = combined([order["verdict"] for order in orders]) if orders else "tie"
    return compared(pair, verdict, "judge", setup.rater, setup.models, rubric.dataset, details)


def judge_pairs(pairs: Sequence[Pair], setup: Setup, client: "JudgeClient", concurrency: int) -> list[dict[str, Any]]:
    """Judge pairs, several at a time; returns their rows in the order of the pairs.

    Every answer is in the client's cache as soon as it is there, so that the same command asks for the others alone.

    Raises:
        UserError: the judge cannot go on, or gives no answer on some of the pairs; says how many are judged.
    """
    pair_by_id = {pair.id: pair for pair in pairs}
    rows: dict[str, dict[str, Any]] = {}
    failures: list[UserError] = []
    unanswered: list[tuple[Pair, Unanswered]] = []
    with progress(len(pair_by_id), "judged", unit="pair") as bar, ThreadPoolExecutor(concurrency) as pool:
        waiting = {pool.submit(judge_pair, pair, setup, client.ask): pair for pair in pair_by_id.values()}
        try:
            for done in as_completed(waiting):
                try:
                    row = done.result().to_row()
                except JudgingStopped:
                    continue
                except Unanswered as error:
                    unanswered.append((waiting[done], error))
                except UserError as error:  # the client sends nothing after it
                    failures.append(error)
                else:
                    rows[row["id"]] = row
                    bar.update(1)
        except BaseException:  # also Ctrl-C: nothing more is sent, and answers that still come are cached
            client.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    # Invalid answers are not in the cache.
    judged = sum(row["verdict"] != "invalid" for row in rows.values())
    state = f"{judged} of {len(pair_by_id)} pairs are judged and kept"
    if failures:
        raise UserError(f"{str(failures[0]).rstrip('.')}. {state}; the same command goes on from there.")
    if unanswered:
        pair, trouble = unanswered[0]
        reason = f"{len(unanswered)} pairs got no answer, among them {pair.a.origin}: {str(trouble).rstrip('.')}"
        raise UserError(f"{reason}. {state}; the same command asks only for the {len(unanswered)} that are left.")
    return [rows[pair.id] for pair in pairs]


def _judge_order(question: JudgeQuestion, first: Side, rubric: Rubric, ask: Ask) -> dict[str, Any]:
    """The verdict in one order; invalid if neither the answer nor its repair can be read."""
    order: dict[str, Any] = {"first": first, "verdict": "invalid", "aspects": {}, "reason": "", "repaired": False}
    reply, criteria = None, rubric.criteria if rubric.separate else ()
    try:
        reply = ask(question)
        try:
            reading = _read(reply, criteria)
        except UnreadableAnswer as problem:
            order |= {"repaired": True, "first_reply": reply.text or reply.refusal}
            reply = ask(_repair(question, reply, problem, rubric))
            reading = _read(reply, criteria)
    except (UnreadableAnswer, TextRefused) as problem:
        order["problem"] = f"{problem}; {reply.flaw}" if reply is not None and reply.flaw else str(problem)
    else:
        order["verdict"] = in_terms_of_models(reading.verdict, first)
        order["aspects"] = {name: in_terms_of_models(place, first) for name, place in reading.aspects.items()}
        order["reason"] = reading.reason
    if reply is not None:
        order |= {"reply": reply.text or reply.refusal, "served_by": reply.model}
    return order


def _read(reply: Reply, criteria: Iterable[str] = ()) -> Reading:
    if reply.refusal:
        raise UnreadableAnswer("the judge refused")
    return read_answer(reply.text, criteria)


def _repair(question: JudgeQuestion, reply: Reply, problem: UnreadableAnswer, rubric: Rubric) -> JudgeQuestion:
    """The same question, the answer, and the wish for one that can be read."""
    wish = (
        f"Your answer cannot be read as a verdict: {problem}. Answer once more, briefly, with only this JSON object: "
        f"{answer_form(rubric)}"
    )
    said = (reply.text or reply.refusal)[:QUOTED].strip() or "(no answer)"
    added = ({"role": "assistant", "content": said}, {"role": "user", "content": wish})
    return JudgeQuestion((*question.messages, *added), question.schema)
