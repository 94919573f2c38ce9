# SPDX-License-Identifier: Apache-2.0
"""Judging of pairs of responses, in both orders and several at a time, and reading of a judge's answers.

An answer is JSON as asked for, JSON inside other text, or one clear line.
"""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dschat.base.chat_servers import Unanswered
from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.progress import progress
from dschat.base.reply_cache import Reply
from dschat.base.thoughts import without_thoughts
from dschat.evaluation.responses import Comparison, Pair, Side, Verdict, combined, compared, mirrored
from dschat.judge.answers import Ask, Keep, UnreadableAnswer, ask_until_read, json_objects
from dschat.judge.published_rubrics import PLACES, answer_form, question_of
from dschat.judge.questions import JudgeQuestion, JudgingStopped, TextRefused
from dschat.judge.rubrics import VERDICT_KEYS, Rubric

if TYPE_CHECKING:
    from dschat.judge.client import JudgeClient

# Spellings of the three verdicts, without the words in FILLERS.
SPELLINGS = {
    "first": ("first", "1", "1st", "a"),
    "second": ("second", "2", "2nd", "b"),
    "tie": ("tie", "a tie", "tied", "draw", "a draw", "equal", "both equal", "both", "neither"),
}
FILLERS = frozenset("the is are one response summary reply answer option better best wins winner preferred".split())
VERDICT_LINE = re.compile(
    r"^[ \t>*_#-]*(?:(?:the|my|final|overall) +)*(?:verdict|winner|preference|decision|choice)\b[ *_\"']*"
    r"(?::|=|\bis\b)(.+)$",
    re.IGNORECASE | re.MULTILINE,
)
PLACE = re.compile(r"\b(?:first|second|tie)\b")
MARKUP = re.compile(r"<[^<>]*>|[`*_#>-]")  # around a verdict
CONTRADICTION = "it gives several verdicts that contradict each other"
MAX_VERDICT_LENGTH = 60  # characters; longer text is not a verdict


@dataclass(frozen=True)
class Reading:
    """Content of an answer. Verdicts are first, second or tie."""

    verdict: str
    aspects: dict[str, str] = field(default_factory=dict)  # criterion → verdict, where the answer gives it
    reason: str = ""  # the comparison in words, where there is one


def read_answer(text: str, criteria: Iterable[str]) -> Reading:
    """Read a judge's answer, with the verdicts on some criteria where it gives them.

    The answer is the JSON object asked for, alone, fenced or inside other text; or text whose last line is one such as
    "Verdict: first"; or the verdict alone.

    Raises:
        UnreadableAnswer: there is no verdict, the JSON is broken, or several verdicts contradict each other.
    """
    text = without_thoughts(text)
    objects, texts = json_objects(text)
    readings = []
    for row in objects:
        verdict = _verdict_of(row)
        if verdict is not None:
            readings.append(_reading(verdict, row, criteria))
    if readings:
        verdicts = {reading.verdict for reading in readings}
        mentioned = set(map(_mentioned, VERDICT_LINE.findall("\n".join(texts))))
        if len(verdicts | mentioned - {None}) > 1:
            raise UnreadableAnswer(CONTRADICTION)
        return readings[-1]

    verdicts = set() if objects else _verdicts_in(text)
    if len(verdicts) != 1:
        empty = "" if text.strip() else "is empty and "
        raise UnreadableAnswer("it gives several verdicts" if verdicts else f"it {empty}gives no verdict")
    return Reading(verdicts.pop())


def _verdicts_in(text: str) -> set[str]:
    """The verdicts of text without JSON, if its last line is one or it is a verdict as a whole; else none."""
    matches = list(VERDICT_LINE.finditer(text))
    if not matches:
        lines = [text] if any(word in text.lower() for word in PLACES) else []
        return set(filter(None, map(place_of, lines)))
    lines = [match[1] for match in matches]
    has_words_behind = re.search(r"\w", MARKUP.sub("", text[matches[-1].end() :]))
    if has_words_behind or place_of(lines[-1]) is None:
        return set()  # what follows a verdict may take it back
    return set(filter(None, map(place_of, lines)))


def place_of(value: object) -> str | None:
    """Verdict first, second or tie in any spelling, also in an object that holds it; None for anything else."""
    if isinstance(value, dict):
        value = value.get("verdict")
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > MAX_VERDICT_LENGTH:
        return None
    words = re.sub(r"[^a-z0-9]+", " ", str(value).lower()).split()
    spelling = " ".join(word for word in words if word not in FILLERS)
    for verdict, spellings in SPELLINGS.items():
        if spelling in spellings:
            return verdict
    return None


def _mentioned(value: object) -> str | None:
    """The verdict that a value says, or names first in more words; None also for words that name all of them."""
    verdict = place_of(value)
    if verdict is None and isinstance(value, str):
        names = PLACE.findall(value.lower())
        if names and len(set(names)) < len(SPELLINGS):
            return str(names[0])
    return verdict


def in_terms_of_models(verdict: str, first: Side) -> Verdict:
    """Verdict in terms of the models from first, second or tie; `first` is the model whose response came first."""
    if verdict == "tie":
        return "tie"
    return first if verdict == "first" else mirrored(first)


def _verdict_of(row: dict[str, Any]) -> str | None:
    """The verdict of an object; None without a key for one. Raises UnreadableAnswer if these say none or several."""
    values = {}
    for key, value in row.items():
        values[key.lower().replace(" ", "_")] = value
    verdict: str | None = None
    mentioned: set[str | None] = set()
    for key in VERDICT_KEYS:
        value = values.get(key)
        if verdict is None:
            verdict = place_of(value)
        if not isinstance(value, int):  # which may be a rating
            mentioned.add(_mentioned(value))
    if mentioned - {None, verdict}:
        raise UnreadableAnswer(CONTRADICTION if verdict else "it gives no verdict of first, second or tie")
    return verdict


def _reading(verdict: str, row: dict[str, Any], criteria: Iterable[str]) -> Reading:
    aspects = {}
    reasons = []
    for name in criteria:
        aspect = place_of(row.get(name))
        if aspect is not None:
            aspects[name] = aspect
        if isinstance(row.get(name), dict) and isinstance(row[name].get("comparison"), str):
            reasons.append(f"{name}: {row[name]['comparison']}")
    if isinstance(row.get("comparison"), str):
        reasons.append(row["comparison"])
    return Reading(verdict, aspects, "\n".join(reasons))


@dataclass(frozen=True)
class Setup:
    """Settings that all pairs of a run share."""

    rubric: Rubric  # how to compare
    dataset: str  # name in results
    rater: str  # name of the judge model
    models: tuple[str, str]  # names of the first and the second
    single_order: bool  # show every pair once, in a random order, instead of once in each order
    seed: int  # seed of the random order


def questions_of(pair: Pair, setup: Setup) -> dict[Side, JudgeQuestion]:
    """Questions about a pair by the model whose response is shown first: one per order, none about equal responses.

    A single order is random, by the seed and the texts: exchanging the models, or the rows of a file, changes nothing
    in what is shown.
    """
    a = pair.a.response
    b = pair.b.response
    if a == b:
        return {}
    questions: dict[Side, JudgeQuestion] = {
        "A": question_of(setup.rubric, pair.prompt, a, b),
        "B": question_of(setup.rubric, pair.prompt, b, a),
    }
    if setup.single_order:
        texts = (str(setup.seed), pair.prompt, *sorted((a, b)))
        framed = "".join(f"{len(text)}:{text}" for text in texts)
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


def judge_pair(pair: Pair, setup: Setup, ask: Ask, keep: Keep) -> Comparison:
    """Judge one pair: a model wins only if the orders agree; equal responses are a tie and not asked about."""
    rubric = setup.rubric
    questions = questions_of(pair, setup)
    orders = [_judge_order(question, first, rubric, ask, keep) for first, question in questions.items()]
    details: dict[str, Any] = {"orders": orders}
    aspects = _combined_aspects(orders, rubric.criteria if rubric.separate else ())
    if aspects:
        details["aspects"] = aspects
    verdict = combined([order["verdict"] for order in orders]) if orders else "tie"
    return compared(pair, verdict, "judge", setup.rater, setup.models, setup.dataset, details)


def _combined_aspects(orders: Sequence[dict[str, Any]], criteria: Iterable[str]) -> dict[str, Verdict]:
    """Verdicts on the criteria that the judge mentioned in every order."""
    aspects = {}
    for name in criteria:
        verdicts = []
        for order in orders:
            if name in order.get("aspects", {}):
                verdicts.append(order["aspects"][name])
        if verdicts and len(verdicts) == len(orders):
            aspects[name] = combined(verdicts)
    return aspects


def judge_pairs(pairs: Sequence[Pair], setup: Setup, client: "JudgeClient", concurrency: int) -> list[dict[str, Any]]:
    """Judge pairs, several at a time; returns their rows in the order of the pairs.

    Every answer is in the client's cache as soon as it is there, so that the same command asks for the others alone.

    Raises:
        UserError: the judge cannot continue, or gives no answer on some of the pairs; says how many are judged.
    """
    pair_by_id = {pair.id: pair for pair in pairs}
    rows: dict[str, dict[str, Any]] = {}
    failures: list[UserError] = []
    unanswered: list[tuple[Pair, Unanswered]] = []
    with progress(len(pair_by_id), "judged", unit="pair") as bar, ThreadPoolExecutor(concurrency) as pool:
        ask = partial(client.ask, is_usable=has_verdict)
        keep = partial(client.keep, is_usable=has_verdict)
        waiting = {}
        for pair in pair_by_id.values():
            waiting[pool.submit(judge_pair, pair, setup, ask, keep)] = pair
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
            pool.shutdown(cancel_futures=True)
            raise

    # Invalid answers are not in the cache.
    judged = sum(row["verdict"] != "invalid" for row in rows.values())
    state = f"{judged} of {len(pair_by_id)} pairs are judged and kept"
    if failures:
        raise UserError(f"{str(failures[0]).rstrip('.')}. {state}; the same command continues from there.")
    if unanswered:
        pair, trouble = unanswered[0]
        reason = f"{len(unanswered)} pairs got no answer, among them {pair.a.origin}: {str(trouble).rstrip('.')}"
        raise UserError(f"{reason}. {state}; the same command asks only for the {len(unanswered)} that are left.")
    return [rows[pair.id] for pair in pairs]


def _judge_order(question: JudgeQuestion, first: Side, rubric: Rubric, ask: Ask, keep: Keep) -> dict[str, Any]:
    """Judge in one order; the verdict is invalid if neither the answer nor its repetition can be read."""
    order: dict[str, Any] = {"first": first, "verdict": "invalid", "reason": "", "repaired": False}
    read = partial(_read, criteria=rubric.criteria if rubric.separate else ())
    replies: Sequence[Reply] = ()
    try:
        reading, replies = ask_until_read(question, ask, keep, read, "a verdict", answer_form(rubric))
    except UnreadableAnswer as problem:
        order["problem"] = str(problem)
        replies = problem.replies
    except TextRefused as problem:
        order["problem"] = str(problem)
    else:
        order["verdict"] = in_terms_of_models(reading.verdict, first)
        for name, aspect in reading.aspects.items():  # without any, no object, since Parquet holds no empty ones
            order.setdefault("aspects", {})[name] = in_terms_of_models(aspect, first)
        order["reason"] = reading.reason
    if len(replies) > 1:
        order["repaired"] = True
        order["first_reply"] = replies[0].text or replies[0].refusal
    if replies:
        order["reply"] = replies[-1].text or replies[-1].refusal
        order["served_by"] = replies[-1].model
    return order


def _read(reply: Reply, criteria: Iterable[str] = ()) -> Reading:
    if reply.refusal:
        raise UnreadableAnswer("the judge refused")
    return read_answer(reply.text, criteria)
