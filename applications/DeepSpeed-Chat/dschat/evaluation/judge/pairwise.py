# SPDX-License-Identifier: Apache-2.0
"""Judging pairs of responses by a language model, in both orders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from dschat.common.journal import Journal
from dschat.errors import UserError
from dschat.evaluation.judge.client import Ask, JudgeClient, Stopped, Unanswered
from dschat.evaluation.judge.rubrics import Rubric, answer_form, answer_schema, messages_of
from dschat.evaluation.judge.server import ItemRefused, Question, Reply
from dschat.evaluation.judge.verdicts import Reading, UnreadableAnswer, combined, in_terms_of_models, read_answer
from dschat.evaluation.pairs.comparisons import Comparison
from dschat.evaluation.pairs.responses import Pair

QUOTED = 2000  # characters of an unreadable answer that go into the repair request
HARMLESS = ("When is the library open?", "From nine to five, on weekdays.", "From nine to five.")


@dataclass(frozen=True)
class Setup:
    """What all pairs of a run share.

    Attributes:
        rubric: how to compare.
        rater: name of the judge model.
        model_a: name of the first model.
        model_b: name of the second.
        single_order: show every pair once, the sides by chance, instead of once in each order.
        seed: of that chance.
    """

    rubric: Rubric
    rater: str
    model_a: str
    model_b: str
    single_order: bool = False
    seed: int = 42


def orders_of(pair: Pair, setup: Setup) -> list[str]:
    """Whose responses are shown first, in turn: ["A", "B"], or one of them; [] for responses that are the same text.

    The chance of a single order follows from the seed and the texts: exchanging the models, or the rows of a file,
    changes nothing in what is shown.
    """
    texts = (pair.a.response, pair.b.response)
    if texts[0] == texts[1]:
        return []
    if not setup.single_order:
        return ["A", "B"]
    framed = "".join(f"{len(text)}:{text}" for text in (str(setup.seed), pair.prompt, *sorted(texts)))
    lesser_first = hashlib.sha256(framed.encode("utf-8", "replace")).digest()[0] % 2 == 0
    return ["A" if lesser_first == (texts[0] < texts[1]) else "B"]


def question_of(pair: Pair, first: str, rubric: Rubric) -> Question:
    """The question about a pair in one order.

    Args:
        pair: the two responses.
        first: "A" or "B": whose response is shown first.
        rubric: how to compare.
    """
    texts = (pair.a.response, pair.b.response) if first == "A" else (pair.b.response, pair.a.response)
    return Question(tuple(messages_of(rubric, pair.prompt, *texts)), answer_schema(rubric))


def control_question(rubric: Rubric) -> Question:
    """A question that no server has a reason to refuse: a short prompt and two responses."""
    return Question(tuple(messages_of(rubric, *HARMLESS)), answer_schema(rubric))


def judge_pair(pair: Pair, setup: Setup, ask: Ask) -> Comparison:
    """The verdict on one pair: a win only if the orders agree; the same text twice is a tie and not asked about.

    Args:
        pair: the two responses.
        setup: of the run.
        ask: gives the judge's reply to a question.
    """
    orders = [_judge_order(pair, first, setup.rubric, ask) for first in orders_of(pair, setup)]
    details: dict[str, Any] = {"orders": orders}
    if setup.rubric.separate:
        shared = [name for name in setup.rubric.criteria if orders and all(name in o["aspects"] for o in orders)]
        details["aspects"] = {name: combined([o["aspects"][name] for o in orders]) for name in shared}
    if pair.a.reward is not None and pair.b.reward is not None:
        details |= {"reward_a": pair.a.reward, "reward_b": pair.b.reward}
    return Comparison(
        id=pair.id,
        prompt=pair.prompt,
        response_a=pair.a.response,
        response_b=pair.b.response,
        verdict=combined([order["verdict"] for order in orders]) if orders else "tie",
        kind="judge",
        rater=setup.rater,
        model_a=setup.model_a,
        model_b=setup.model_b,
        dataset=setup.rubric.dataset,
        details=details,
    )


def judge_pairs(
    pairs: Sequence[Pair],
    setup: Setup,
    client: JudgeClient,
    journal: Journal,
    concurrency: int,
    progress: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Judges all pairs that the journal does not hold yet and writes the file, in the order of the pairs.

    Args:
        pairs: what to judge.
        setup: of the run.
        client: the judge.
        journal: of the file to write; every verdict is kept in it as soon as it is there.
        concurrency: pairs judged at the same time.
        progress: called after every pair that has its verdict.

    Returns:
        The rows of the file.

    Raises:
        UserError: the judge cannot go on, or gives no answer on some of the pairs; what is judged stays in the
            journal, and the message says so.
    """
    wanted = {pair.id: pair for pair in pairs}
    rows = {row["id"]: row for row in journal.rows if row.get("id") in wanted}
    for _ in rows:
        progress()
    failure: UserError | None = None
    left: list[tuple[Pair, Unanswered]] = []
    with ThreadPoolExecutor(concurrency) as pool:
        open_pairs = [pair for id, pair in wanted.items() if id not in rows]
        waiting = {pool.submit(judge_pair, pair, setup, client.ask): pair for pair in open_pairs}
        try:
            for done in as_completed(waiting):
                try:
                    row = done.result().to_row()
                except (Stopped, CancelledError):
                    continue
                except Unanswered as trouble:
                    left.append((waiting[done], trouble))
                    continue
                except UserError as error:
                    failure = failure or error
                    _cancel(waiting)
                    continue
                rows[row["id"]] = row
                journal.append([row])
                progress()
        except BaseException:  # also Ctrl-C: nothing more is sent, what is on its way is kept
            client.stop.set()
            _cancel(waiting)
            raise
    if failure or left:
        kept = f"{len(rows)} of {len(wanted)} pairs are judged and kept"
        raise UserError(_unfinished(failure, left, kept)) from failure
    journal.finish(ordered := [rows[pair.id] for pair in pairs])
    return ordered


def _unfinished(failure: UserError | None, left: Sequence[tuple[Pair, Unanswered]], kept: str) -> str:
    """Why there is no file yet, and what the same command will do."""
    if failure:
        return f"{str(failure).rstrip('.')}. {kept}; the same command goes on from there."
    pair, reason = left[0]
    return (
        f"{len(left)} pairs got no answer, among them {pair.a.origin}: {reason} {kept}; the same command asks "
        f"only for the {len(left)} that are left."
    )


def _cancel(waiting: Iterable[Future[Comparison]]) -> None:
    for future in waiting:
        future.cancel()


def _judge_order(pair: Pair, first: str, rubric: Rubric, ask: Ask) -> dict[str, Any]:
    """The verdict in one order; invalid if neither the answer nor its repair can be read."""
    question = question_of(pair, first, rubric)
    order: dict[str, Any] = {"first": first, "verdict": "invalid", "aspects": {}, "reason": "", "repaired": False}
    reply: Reply | None = None
    try:
        reply = ask(question)
        reading = _read(reply, rubric)
        if isinstance(reading, str):
            order |= {"repaired": True, "first_reply": reply.text or reply.refusal}
            reply = ask(_repair(question, reply, reading, rubric))
            reading = _read(reply, rubric)
    except ItemRefused as refusal:
        reading = str(refusal)
    if isinstance(reading, str):
        order["problem"] = reading
    else:
        order["verdict"] = in_terms_of_models(reading.verdict, first)
        order["aspects"] = {name: in_terms_of_models(place, first) for name, place in reading.aspects.items()}
        order["reason"] = reading.reason
    if reply is not None:
        order |= {"reply": reply.text or reply.refusal, "served_by": reply.model}
    return order


def _read(reply: Reply, rubric: Rubric) -> Reading | str:
    """The reading of a reply, or what is wrong with it."""
    if reply.refusal:
        return "the judge refused"
    try:
        return read_answer(reply.text, rubric.criteria if rubric.separate else ())
    except UnreadableAnswer as error:
        return str(error)


def _repair(question: Question, reply: Reply, problem: str, rubric: Rubric) -> Question:
    """The same question, the answer, and the wish for one that can be read."""
    wish = (
        f"Your answer cannot be read as a verdict: {problem}. Answer once more, briefly, with only this JSON object: "
        f"{answer_form(rubric)}"
    )
    said = (reply.text or reply.refusal)[:QUOTED].strip() or "(no answer)"
    added = ({"role": "assistant", "content": said}, {"role": "user", "content": wish})
    return Question((*question.messages, *added), question.schema)


def counts_of(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Rows per verdict: A, tie, B and invalid, in this order."""
    return {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("A", "tie", "B", "invalid")}
