# SPDX-License-Identifier: Apache-2.0
"""Judging pairs of responses by a language model, in both orders and several at a time."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.common.chat_servers import Reply, Unanswered
from dschat.common.journal import Journal
from dschat.errors import UserError
from dschat.evaluation.judge.question import Question, Stopped, TextRefused
from dschat.evaluation.judge.rubrics import Rubric, answer_form, answer_schema, messages_of
from dschat.evaluation.judge.verdicts import Reading, UnreadableAnswer, in_terms_of_models, read_answer
from dschat.evaluation.pairs.comparisons import Comparison, Side, combined, compared
from dschat.evaluation.pairs.responses import Pair

if TYPE_CHECKING:
    from dschat.evaluation.judge.client import JudgeClient  # which needs the openai library

QUOTED = 2000  # characters of an unreadable answer that go into the repair request
HARMLESS = ("When is the library open?", "From nine to five, on weekdays.", "From nine to five.")

Ask = Callable[[Question], Reply]


@dataclass(frozen=True)
class Setup:
    """What all pairs of a run share."""

    rubric: Rubric  # how to compare
    rater: str  # name of the judge model
    models: tuple[str, str]  # names of the first and the second
    single_order: bool  # show every pair once, the sides by chance, instead of once in each order
    seed: int  # of that chance


def questions_of(pair: Pair, setup: Setup) -> dict[Side, Question]:
    """Whose response is shown first → the question: one per order, none about responses that are the same text.

    The chance of a single order follows from the seed and the texts: exchanging the models, or the rows of a file,
    changes nothing in what is shown.
    """
    a, b = pair.a.response, pair.b.response
    if a == b:
        return {}
    questions: dict[Side, Question] = {
        "A": _question(setup.rubric, pair.prompt, a, b),
        "B": _question(setup.rubric, pair.prompt, b, a),
    }
    if setup.single_order:
        framed = "".join(f"{len(text)}:{text}" for text in (str(setup.seed), pair.prompt, *sorted((a, b))))
        lesser_first = hashlib.sha256(framed.encode("utf-8", "replace")).digest()[0] % 2 == 0
        del questions["B" if lesser_first == (a < b) else "A"]
    return questions


def control_question(rubric: Rubric) -> Question:
    """A question that no server has a reason to refuse: a short prompt and two responses."""
    return _question(rubric, *HARMLESS)


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


def judge_pairs(
    pairs: Sequence[Pair],
    setup: Setup,
    client: "JudgeClient",
    journal: Journal,
    concurrency: int,
    progress: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Judges the pairs that the journal does not hold yet, several at a time; writes and returns the rows of all.

    A verdict is in the journal as soon as it is there; `progress` is called with the number of new ones. Raises
    UserError, which says what is kept, where the judge cannot go on or gives no answer on some of the pairs.
    """
    wanted = {pair.id: pair for pair in pairs}
    rows = {row["id"]: row for row in journal.rows if row.get("id") in wanted}
    progress(len(rows))
    failures: list[UserError] = []
    unanswered: list[tuple[Pair, Unanswered]] = []
    with ThreadPoolExecutor(concurrency) as pool:
        left = [pair for id, pair in wanted.items() if id not in rows]
        waiting = {pool.submit(judge_pair, pair, setup, client.ask): pair for pair in left}
        try:
            for done in as_completed(waiting):
                try:
                    row = done.result().to_row()
                except Stopped:
                    continue
                except Unanswered as error:
                    unanswered.append((waiting[done], error))
                except UserError as error:  # the client sends nothing after it
                    failures.append(error)
                else:
                    rows[row["id"]] = row
                    journal.append([row])
                    progress(1)
        except BaseException:  # also Ctrl-C: nothing more is sent, what is on its way is kept in the cache
            client.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    kept = f"{len(rows)} of {len(wanted)} pairs are judged and kept"
    if failures:
        raise UserError(f"{str(failures[0]).rstrip('.')}. {kept}; the same command goes on from there.")
    if unanswered:
        pair, trouble = unanswered[0]
        reason = f"{len(unanswered)} pairs got no answer, among them {pair.a.origin}: {str(trouble).rstrip('.')}"
        raise UserError(f"{reason}. {kept}; the same command asks only for the {len(unanswered)} that are left.")
    journal.finish(ordered := [rows[pair.id] for pair in pairs])
    return ordered


def _judge_order(question: Question, first: Side, rubric: Rubric, ask: Ask) -> dict[str, Any]:
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


def _question(rubric: Rubric, prompt: str, first: str, second: str) -> Question:
    return Question(tuple(messages_of(rubric, prompt, first, second)), answer_schema(rubric))


def _repair(question: Question, reply: Reply, problem: UnreadableAnswer, rubric: Rubric) -> Question:
    """The same question, the answer, and the wish for one that can be read."""
    wish = (
        f"Your answer cannot be read as a verdict: {problem}. Answer once more, briefly, with only this JSON object: "
        f"{answer_form(rubric)}"
    )
    said = (reply.text or reply.refusal)[:QUOTED].strip() or "(no answer)"
    added = ({"role": "assistant", "content": said}, {"role": "user", "content": wish})
    return Question((*question.messages, *added), question.schema)
