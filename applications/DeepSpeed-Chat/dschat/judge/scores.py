# SPDX-License-Identifier: Apache-2.0
"""Scores of step 3 from a judge model (--reward_judge): each response graded, or the responses to a prompt ranked.

Questions go through `JudgeClient`: answers that can be read are cached, so that no text is asked about twice and a
resumed run repeats nothing; requests that fail are repeated, and their cost has a limit. An answer that cannot be read
is asked for once more. What has no answer then ends the run, or, with --on_reward_error skip, has no score. All ranks
end alike, and none waits for the judge longer than the others wait for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dschat.base.chat_servers import Unanswered
from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash
from dschat.base.reply_cache import Reply
from dschat.data.messages import dialogue_text, quoted_dialogue
from dschat.judge.answers import UnreadableAnswer, ask_until_read
from dschat.judge.client import AskingRound, JudgeClient
from dschat.judge.costs import LimitReached
from dschat.judge.grading import (
    MOST_POINTS,
    Answer,
    JudgedTexts,
    answer_form,
    answer_keys,
    centred_ranks,
    grading_question,
    read_answer,
    weighted_points,
)
from dschat.judge.questions import JudgingStopped, TextRefused, material_code
from dschat.judge.rubrics import Rubric
from dschat.run.distributed import gather_objects
from dschat.run.stop import stopping_together
from dschat.scoring.source import ResponseTexts, Scores
from dschat.scoring.waiting import run_in_threads
from dschat.settings.rewards import JUDGED
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

FLAG = "--reward_judge"
Failure = UserError | Unanswered | UnreadableAnswer | TextRefused | JudgingStopped


@dataclass(frozen=True)
class JudgeSettings:
    """Settings of scores from a judge.

    Attributes:
        rubric: what is asked.
        concurrency: requests of this process at the same time.
        patience: seconds after which the questions of a rollout that have no answer yet get none; infinite if there is
            one process alone, for which no other waits.
        skips: responses without an answer have no score; otherwise the run stops.
    """

    rubric: Rubric
    concurrency: int
    patience: float
    skips: bool


class JudgeScores:
    """Scores of this rank's responses from a judge model."""

    model: None = None  # the self-check has no model to compare

    def __init__(self, client: JudgeClient, settings: JudgeSettings) -> None:
        """Takes what asks the judge, and the settings."""
        self._client = client
        self._settings = settings
        self._reported_cost = client.cost  # US dollars that metrics of earlier rollouts hold

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        """One number for each response, (B,) float32, and its points on each criterion, which are parts of it.

        Every rank must call it; numbers of requests may differ between ranks.

        Raises:
            UserError: the judge does not answer, or cannot be understood, unless such responses are skipped; or its
                cost has reached the limit.
            Stopped: soon after a signal.
        """
        ranks = self._settings.rubric.ranks
        groups = judged_groups(rollout, texts, ranks)
        questions = list(dict.fromkeys(group.texts for group in groups if group.texts.responses))
        cached_before = self._client.cached
        with stopping_together():
            answers, failures = self._answers(questions)
        self._report(failures, len(questions))
        score = self._ranked if ranks else self._graded
        scores = score(groups, answers, len(texts.responses))

        measured = {"judge/cached": (float(self._client.cached - cached_before), float(len(questions)))}
        if self._client.has_prices:
            # Requests that an earlier rollout gave up, and that were answered since, are paid for, too.
            cost = self._client.cost
            measured["judge/cost"] = (cost - self._reported_cost, float(len(texts.responses)))
            self._reported_cost = cost
        device = rollout.input_ids.device
        parts = {name: numbers.to(device) for name, numbers in scores.parts.items()}
        return Scores(scores.values.to(device), measured=measured, parts=parts)

    def _answers(self, questions: Sequence[JudgedTexts]) -> tuple[dict[JudgedTexts, Answer], list[Failure]]:
        """Answers by question, and why the other questions have none."""
        asking = self._client.new_round()
        settings = self._settings
        judge = partial(self._judge, asking=asking)
        results = run_in_threads(judge, questions, settings.concurrency, asking.stop, settings.patience)
        answers: dict[JudgedTexts, Answer] = {}
        failures: list[Failure] = []
        for number, texts in enumerate(questions):
            result = results.get(number)
            if result is None:
                failures.append(
                    Unanswered(
                        f"{len(questions)} questions were not all answered within {settings.patience:g} s, for which"
                        " other processes wait: raise --judge_concurrency or --ddp_timeout"
                    )
                )
            elif isinstance(result, Exception):
                failures.append(result)
            else:
                answers[texts] = result
        return answers, failures

    def _report(self, failures: Sequence[Failure], asked: int) -> None:
        """Logs why questions have no answer; raises UserError on all ranks if it ends the run on one of them."""
        for problem in gather_objects(self._problem(failures, asked)):
            if problem is not None:
                raise UserError(problem)

    def _problem(self, failures: Sequence[Failure], asked: int) -> str | None:
        """Why the run must end; None if it continues without the answers that are missing, which are logged."""
        if not failures:
            return None
        cause = min(failures, key=_precedence)
        text = f"{FLAG}: {str(cause).rstrip('.')}"
        if isinstance(cause, LimitReached):
            return f"{text}. Raise the limit and resume with --resume_from_checkpoint."
        if not self._settings.skips:
            return (
                f"{text}. {len(failures)} of {asked} questions of this rollout have no answer, the others are cached:"
                " resume with --resume_from_checkpoint, or leave such responses out with --on_reward_error skip."
            )
        logger.warning("%s. %d of %d questions have no answer.", text, len(failures), asked)
        return None

    def _judge(self, texts: JudgedTexts, asking: AskingRound) -> Answer | Failure:
        """The answer to a question, or to its repetition; or why there is none."""
        rubric = self._settings.rubric
        question = grading_question(rubric, texts)
        keys = answer_keys(rubric, len(texts.responses))
        lowest, highest = (1, len(keys)) if rubric.ranks else (0, MOST_POINTS)
        read = partial(read_answer, keys=keys, lowest=lowest, highest=highest)
        is_usable = partial(can_be_read, read=read)
        ask = partial(self._client.ask, is_usable=is_usable, asking=asking)
        keep = partial(self._client.keep, is_usable=is_usable)
        wanted = "a ranking" if rubric.ranks else "points"
        try:
            answer, _ = ask_until_read(question, ask, keep, read, wanted, answer_form(rubric, keys))
        except UnreadableAnswer as problem:
            return UnreadableAnswer(f"an answer of the judge cannot be read, nor its repetition: {problem}")
        except (UserError, Unanswered, TextRefused, JudgingStopped) as failure:
            return failure
        return answer

    def _graded(self, groups: Sequence[JudgedGroup], answers: Mapping[JudgedTexts, Answer], count: int) -> Scores:
        """Scores of `count` responses, with the points on each criterion from 0 to 1; NaN without an answer."""
        rubric = self._settings.rubric
        values = torch.full((count,), math.nan)
        points = {name: torch.full_like(values, math.nan) for name in rubric.criteria}
        for group in groups:
            answer = answers.get(group.texts)
            if answer is None:
                continue
            (row,) = group.rows
            values[row] = weighted_points(answer, rubric.weights)
            for name, numbers in points.items():
                numbers[row] = answer[name] / MOST_POINTS
        return Scores(values, parts={f"{JUDGED}{name}": numbers for name, numbers in points.items()})

    def _ranked(self, groups: Sequence[JudgedGroup], answers: Mapping[JudgedTexts, Answer], count: int) -> Scores:
        """Scores of `count` responses, ranked within their groups; NaN without an answer."""
        values = torch.full((count,), math.nan)
        for group in groups:
            ranking = [1.0] * len(group.rows)  # of equal responses, which are not asked about
            if group.texts.responses:
                answer = answers.get(group.texts)
                if answer is None:
                    continue
                place_by_text = dict(zip(group.texts.responses, answer.values(), strict=True))
                ranking = [place_by_text[text] for text in group.responses]
            for row, score in zip(group.rows, centred_ranks(ranking), strict=True):
                values[row] = score
        return Scores(values)


def _precedence(failure: Failure) -> int:
    """Sort key of failures: first what ended the asking, last that it was ended, which the others explain."""
    if isinstance(failure, LimitReached):
        return 0
    if isinstance(failure, UserError):
        return 1
    return 3 if isinstance(failure, JudgingStopped) else 2


def can_be_read(reply: Reply, read: Callable[[Reply], Answer]) -> bool:
    """Whether a function reads an answer; answers to the question are then worth caching."""
    try:
        read(reply)
    except UnreadableAnswer:
        return False
    return True


# -- what is asked about


@dataclass(frozen=True)
class JudgedGroup:
    """Responses that one question is about.

    Attributes:
        rows: their numbers in the rollout.
        responses: their texts.
        texts: what the question shows; without responses there is nothing to ask.
    """

    rows: tuple[int, ...]
    responses: tuple[str, ...]
    texts: JudgedTexts


def judged_groups(rollout: Rollout, texts: ResponseTexts, ranks: bool) -> list[JudgedGroup]:
    """The questions of a rollout: one for each response, or with `ranks` one for the responses to each prompt.

    Responses of equal text are shown once. The order in which they are shown follows from a hash of all of them: the
    same responses make the same question, and no response can choose its place. Episodes whose environment failed are
    not asked about.
    """
    rows = list(range(len(texts.responses)))
    if texts.episodes is not None:
        failed = texts.episodes.failed.tolist()
        rows = [row for row in rows if not failed[row]]
    rows_of_groups = _groups_of_prompts(rollout, rows) if ranks else [[row] for row in rows]
    groups: list[JudgedGroup] = []
    for group_rows in rows_of_groups:
        prompt = _prompt_text(texts, group_rows[0])
        responses = [_response_text(texts, row) for row in group_rows]
        shown = shuffled(responses)
        if ranks and len(shown) == 1:
            shown = ()
        judged = JudgedTexts(prompt, shown, texts.episodes is not None)
        groups.append(JudgedGroup(tuple(group_rows), tuple(responses), judged))
    return groups


def shuffled(responses: Sequence[str]) -> tuple[str, ...]:
    """The different texts among some responses, in an order that depends on all of them and not on their order."""
    texts = sorted(set(responses))
    code = material_code(texts)
    return tuple(sorted(texts, key=lambda text: content_hash(code + text)))


def _groups_of_prompts(rollout: Rollout, rows: Sequence[int]) -> list[list[int]]:
    """Rows by prompt: the responses to a prompt follow each other, and are numbered from 0."""
    assert rollout.sample_index is not None  # sampled rollouts have it
    prompt_numbers = (rollout.sample_index == 0).cumsum(0).tolist()
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(prompt_numbers[row], []).append(row)
    return list(groups.values())


def _prompt_text(texts: ResponseTexts, row: int) -> str:
    """The prompt for the judge: messages after their roles, or the text of the prompt."""
    messages = texts.rows[row].messages
    return texts.prompts[row] if messages is None else dialogue_text(messages)


def _response_text(texts: ResponseTexts, row: int) -> str:
    """The response for the judge: its text, or the messages of both sides after the prompt."""
    if texts.episodes is None:
        return texts.responses[row]
    prompt_messages = texts.rows[row].messages or []
    return quoted_dialogue(texts.episodes.messages[row][len(prompt_messages) :])
