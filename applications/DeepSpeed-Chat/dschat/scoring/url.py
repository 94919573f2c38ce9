# SPDX-License-Identifier: Apache-2.0
"""Scores from a server elsewhere, and what a run does when it fails. docs/rewards.md has the request and its answer.

No answer within --reward_timeout, or a status that may pass, is `NoAnswerYet`: the request is sent again for
--reward_patience seconds. An answer without a number for each response is a `WrongAnswer`, of which three are enough.
Any other status refuses the request for good. What is not mended raises UserError and ends the run; with
--on_reward_error skip those responses are NaN instead, and `scoring/source.py: WeightedScores` leaves them out. A
signal ends all waiting. The flags are in settings/rewards.py, their checks in settings/ppo.py.

Our own server, scoring/serve.py, answers status 500 where its model fails, null for a text that the model cannot read,
and nothing to a request that was cut.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from torch import Tensor

from dschat.base.errors import UserError
from dschat.run.stop import raise_if_stopped_here, stopping_together
from dschat.scoring.segments import Numbers, is_finite
from dschat.scoring.source import ResponseTexts, Scores, with_segments
from dschat.settings.rewards import REWARD_TOKEN
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

T = TypeVar("T")
FLAG = "--reward_url"
TRIES = 3  # wrong answers to a request; those that never came are not counted
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0  # seconds before a request is repeated: doubled each time, up to the longest
TEMPORARY = (408, 425, 429)  # and all statuses from 500 on
TICK = 0.1  # seconds between two looks whether a signal has come


class NoAnswerYet(Exception):
    """There is no answer now; there may be one later."""


class WrongAnswer(Exception):
    """The answer does not hold a number for each response."""


@dataclass(frozen=True)
class UrlSettings:
    """How a server is asked."""

    url: str
    batch: int  # responses of a request
    timeout: float  # seconds to wait for an answer
    patience: float  # seconds to go on asking while there is none
    skips: bool  # responses that get no number are left out; else the run stops


class UrlScores:
    """What a server says of this rank's own rows; it need not be there all the time."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, settings: UrlSettings) -> None:
        token = os.environ.get(REWARD_TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._settings, self._client = settings, httpx2.Client(headers=headers, timeout=settings.timeout)

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """One number for each response, (B,) float32, or for its macro actions. Every rank must call it; each may ask
        equally or not.

        Raises:
            UserError: the server refuses, answers wrongly or not at all, to the last.
            Stopped: soon after a signal.
        """
        numbers: list[Numbers] = []
        finished, size, given_up = rollout.finished.tolist(), self._settings.batch, False
        with stopping_together():
            for first in range(0, len(texts.responses), size):
                rows = range(first, min(first + size, len(texts.responses)))
                try:
                    counts = [0 if texts.segments is None else len(texts.segments.lengths[n]) for n in rows]
                    numbers += self._asked(_body(texts, finished, rows), counts, 0 if given_up else None)
                except UserError as error:
                    if not self._settings.skips:
                        raise
                    logger.warning("%s %d responses have no score.", error, len(rows))
                    numbers += [math.nan] * len(rows)
                    # The next requests are sent once, rather than waited for as long again.
                    given_up = given_up or isinstance(error.__cause__, NoAnswerYet)
        return with_segments(numbers, texts, rollout.input_ids.device, f"{FLAG} {self._settings.url}")

    def _asked(self, body: str, counts: Sequence[int], patience: float | None) -> list[Numbers]:
        """Asks until there is an answer, or no hope of one, for responses of so many macro actions."""
        url, begun = self._settings.url, time.monotonic()
        patience = self._settings.patience if patience is None else patience
        tries, wrong, wait = 0, 0, FIRST_WAIT
        while True:
            tries += 1
            try:
                return _numbers(self._answer(body), counts, self._settings.skips)
            except NoAnswerYet as error:
                cause: Exception = error
                is_last = time.monotonic() + wait - begun > patience
                remedy = (
                    "Start the server again (dschat serve) and go on with --resume_from_checkpoint, "
                    "or raise --reward_patience."
                )
                if any(counts):
                    remedy += " Macro actions are many texts: lower --reward_batch, or raise --reward_timeout."
            except WrongAnswer as error:
                wrong += 1
                cause, is_last = error, wrong >= TRIES
                each = ", or a list with one for each of its segments" if any(counts) else ""
                remedy = (
                    f'It must answer {{"scores": [one finite number for each response{each}]}}, see docs/rewards.md.'
                )
            if is_last:
                remedy = "" if self._settings.skips else f" {remedy}"
                raise UserError(f"{FLAG} {url}: {cause}. Asked {tries} times.{remedy}") from cause
            if tries == 1:
                logger.warning("%s %s: %s. It is asked again, for up to %g s.", FLAG, url, cause, patience)
            pause(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _answer(self, body: str) -> httpx2.Response:
        """Raises NoAnswerYet, or UserError where the server refuses such requests."""
        settings = self._settings
        headers = {"Content-Type": "application/json"}
        try:
            answer = wait_for(lambda: self._client.post(settings.url, content=body, headers=headers), settings.timeout)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise NoAnswerYet(f"no answer within {settings.timeout:g} s (--reward_timeout)") from error
        except httpx2.HTTPError as error:
            raise NoAnswerYet(f"no answer: {error}") from error
        except httpx2.InvalidURL as error:
            raise UserError(f"{FLAG} {settings.url} is no address: {error}.") from error
        said = " ".join(answer.text.split())[:200]
        if answer.status_code in TEMPORARY or answer.status_code >= 500:
            raise NoAnswerYet(f"it answers {answer.status_code}: {said}")
        if answer.status_code != 200:
            raise UserError(
                f"{FLAG} {settings.url}: it refuses the request, {answer.status_code}: {said}. Check the address and "
                "its path, and what its log says."
            )
        return answer


def _body(texts: ResponseTexts, finished: list[bool], rows: range) -> str:
    body: dict[str, object] = {
        "prompts": [texts.prompts[n] for n in rows],
        "responses": [texts.responses[n] for n in rows],
        "finished": [finished[n] for n in rows],
    }
    if any(texts.rows[n].messages is not None for n in rows):
        body["messages"] = [texts.rows[n].messages for n in rows]
    if any(texts.rows[n].template_arguments for n in rows):
        body["template_arguments"] = [texts.rows[n].template_arguments for n in rows]
    if texts.segments is not None:
        body["segments"] = [texts.segments.texts[n] for n in rows]
    return json.dumps(body)


def _numbers(answer: httpx2.Response, counts: Sequence[int], may_lack: bool) -> list[Numbers]:
    """The scores of an answer for responses of so many macro actions, 0 where these were not sent; with `may_lack`,
    NaN where it holds null or a number that is not finite.
    """
    try:
        content = answer.json()
    except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
        raise WrongAnswer(f"its answer is no JSON: {' '.join(answer.text.split())[:200]!r}") from error
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise WrongAnswer('its answer has no list "scores"')
    if len(scores) != len(counts):
        raise WrongAnswer(f"it answers {len(scores)} scores for {len(counts)} responses")
    why = f" ({' '.join(str(content['error']).split())[:200]})" if content.get("error") else ""
    numbers = [
        _of_response(score, count, place, may_lack, why)
        for place, (score, count) in enumerate(zip(scores, counts, strict=True))
    ]
    if missing := [number for number in numbers if not is_finite(number)]:
        logger.warning("%s: %d of %d responses have no score%s.", FLAG, len(missing), len(counts), why)
    return numbers


def _of_response(score: object, count: int, place: int, may_lack: bool, why: str) -> Numbers:
    """One number, or a list of one for each macro action, if these were sent."""
    if not count or not isinstance(score, list):
        return _number(score, place, may_lack, why)
    if len(score) != count:
        raise WrongAnswer(f"score {place} of its answer has {len(score)} numbers for {count} segments")
    return [_number(number, place, may_lack, why) for number in score]


def _number(score: object, place: int, may_lack: bool, why: str) -> float:
    wrong = WrongAnswer(f"score {place} of its answer is {repr(score)[:200]}, not a finite number{why}")
    if isinstance(score, bool) or not isinstance(score, int | float | None):
        raise wrong
    try:
        number = math.nan if score is None else float(score)
    except OverflowError as error:  # an integer of more than 308 digits
        raise wrong from error
    if not (may_lack or math.isfinite(number)):
        raise wrong
    return number


def pause(seconds: float) -> None:
    """Lets time pass; raises Stopped soon after a signal. Inside `dschat.run.stop.stopping_together`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_stopped_here()
        time.sleep(min(TICK, left))


def wait_for(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns, or raises, in a thread of its own that is left behind if it takes too long.

    Inside `dschat.run.stop.stopping_together`.

    Raises:
        TimeoutError: there is no result after so many seconds.
        Stopped: soon after a signal.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        raise_if_stopped_here()
        thread.join(TICK)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
