# SPDX-License-Identifier: Apache-2.0
"""Scores from an HTTP server, and what happens when it fails. docs/rewards.md describes requests and answers.

- No answer within --reward_timeout, or a temporary status, is `NoAnswerYet`: the request is repeated for
  --reward_patience seconds.
- An answer without a number for each response is a `WrongAnswer`, of which MAX_WRONG_ANSWERS are accepted.
- Any other status is a final failure: the request is not repeated.

A final failure raises UserError, which ends the run. With --on_reward_error skip, the responses get NaN instead, and
`scoring/weighted.py: WeightedScores` excludes them. SIGTERM and Ctrl-C end all waiting. The flags are in
settings/rewards.py, their checks in settings/ppo.py.

Our own server, scoring/serve.py, answers with status 500 if its model fails, with null for a text that the model
cannot read, and not at all to an incomplete request.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2
from torch import Tensor

from dschat.base.errors import UserError
from dschat.base.progress import RepeatedLines
from dschat.base.secrets import secret_of
from dschat.base.servers import open_client
from dschat.run.stop import stopping_together
from dschat.scoring.segments import ResponseNumbers, is_finite
from dschat.scoring.source import ResponseTexts, Scores, with_segments
from dschat.scoring.waiting import TICK, pause, wait_for
from dschat.settings.rewards import REWARD_TOKEN
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

FLAG = "--reward_url"
MAX_WRONG_ANSWERS = 3  # per request; missing answers do not count
FIRST_WAIT = 0.5  # seconds before a request is repeated, doubled each time
MAX_WAIT = 10.0
TEMPORARY = (408, 425, 429)  # and all statuses from 500 on


class NoAnswerYet(Exception):
    """There is no answer yet, but there may be one later."""


class TooSlow(NoAnswerYet):
    """A request takes longer than --reward_timeout."""


class WrongAnswer(Exception):
    """The answer has no number for one of the responses."""


@dataclass(frozen=True)
class UrlSettings:
    """Settings of requests to a server."""

    url: str
    batch: int  # responses per request
    timeout: float  # seconds to wait for an answer
    patience: float  # seconds for which an unanswered request is repeated
    skips: bool  # responses without a score are left out of training; False: the run stops
    longest: float = math.inf  # seconds for all requests of a rollout, for which other processes wait


class UrlScores:
    """Scores of this rank's responses from a server, which need not be available all the time."""

    model: None = None  # the self-check has no model to compare

    def __init__(self, settings: UrlSettings) -> None:
        token = secret_of(REWARD_TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._settings = settings
        self._retries = RepeatedLines(logger.warning)
        self._client = open_client(settings.url, FLAG, settings.timeout, headers)

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """One number for each response, (B,) float32, or for its macro actions.

        Every rank must call it; ranks may send different numbers of requests.

        Raises:
            UserError: the server refuses a request, does not answer in time, or MAX_WRONG_ANSWERS answers are wrong.
            Stopped: soon after a signal.
        """
        numbers: list[ResponseNumbers] = []
        size = self._settings.batch
        patience = self._settings.patience
        end = time.monotonic() + self._settings.longest
        with stopping_together():
            for first in range(0, len(texts.responses), size):
                rows = range(first, min(first + size, len(texts.responses)))
                counts = [0] * len(rows)
                if texts.segments is not None:
                    counts = [len(texts.segments.lengths[row]) for row in rows]
                try:
                    numbers += self._request(_body(texts, rows), counts, patience, end)
                except UserError as error:
                    if not self._settings.skips:
                        raise
                    logger.warning("%s %d responses have no score.", error, len(rows))
                    numbers += [math.nan] * len(rows)
                    if isinstance(error.__cause__, NoAnswerYet):
                        patience = 0.0  # send each of the next requests only once
        return with_segments(numbers, texts, rollout.input_ids.device, f"{FLAG} {self._settings.url}")

    def _check_time(self, end: float) -> None:
        """Raises UserError if the time for a rollout's requests has passed."""
        settings = self._settings
        if time.monotonic() >= end:
            raise UserError(
                f"{FLAG} {settings.url}: the requests of a rollout were not all answered within {settings.longest:g}"
                " s, for which other processes wait: give the server more workers, or raise --reward_batch or"
                " --ddp_timeout."
            )

    def _request(self, body: str, counts: Sequence[int], patience: float, end: float) -> list[ResponseNumbers]:
        """Sends a request until it is answered, or has finally failed.

        Args:
            body: JSON of the request.
            counts: numbers of macro actions of each response, 0 without --segment_rewards.
            patience: seconds to repeat the request while there is no answer.
            end: when all requests of the rollout must be answered, as `time.monotonic` counts.
        """
        url = self._settings.url
        start = time.monotonic()
        tries = 0
        wrong_answers = 0
        wait = FIRST_WAIT
        self._check_time(end)
        while True:
            tries += 1
            timeout = min(self._settings.timeout, max(end - time.monotonic(), TICK))
            try:
                return _numbers(self._answer(body, timeout), counts, self._settings.skips)
            except NoAnswerYet as error:
                self._check_time(end)
                cause: Exception = error
                is_final = time.monotonic() + wait - start > patience
            except WrongAnswer as error:
                cause = error
                wrong_answers += 1
                is_final = wrong_answers >= MAX_WRONG_ANSWERS
            if is_final:
                remedy = "" if self._settings.skips else f" {_remedy(cause, any(counts))}"
                raise UserError(f"{FLAG} {url}: {cause}. The request was sent {tries} times.{remedy}") from cause
            if tries == 1:
                self._retries.add(f"{FLAG} {url}: {cause}. The request is repeated for up to {patience:g} s.")
            pause(min(wait, max(end - time.monotonic(), 0.0)))
            wait = min(2 * wait, MAX_WAIT)

    def _answer(self, body: str, timeout: float) -> httpx2.Response:
        """Sends a request once, and waits for the answer for a number of seconds.

        Raises:
            NoAnswerYet: there is no answer, or one that says that there may be another one later.
            UserError: the server refuses the request.
        """
        settings = self._settings
        headers = {"Content-Type": "application/json"}
        try:
            answer = wait_for(lambda: self._client.post(settings.url, content=body, headers=headers), timeout)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise TooSlow(f"no answer within {timeout:g} s (--reward_timeout)") from error
        except httpx2.HTTPError as error:
            raise NoAnswerYet(f"no answer: {error}") from error
        status = answer.status_code
        excerpt = _excerpt(answer.text)
        if status in TEMPORARY or status >= 500:
            raise NoAnswerYet(f"it answers {status}: {excerpt}")
        if status != 200:
            excerpt = answer.headers.get("location", excerpt)  # of a redirect, which is not followed
            raise UserError(
                f"{FLAG} {settings.url}: it refuses the request, {status}: {excerpt}. Check the address and its path, "
                "and the server's log."
            )
        return answer


def _remedy(cause: Exception, has_segments: bool) -> str:
    """What to do about a final failure."""
    if isinstance(cause, WrongAnswer):
        or_list = ", or a list with one for each of its segments" if has_segments else ""
        return f'It must answer {{"scores": [one finite number for each response{or_list}]}}, see docs/rewards.md.'
    if isinstance(cause, TooSlow):
        return (
            "If the server is up, lower --reward_batch or raise --reward_timeout; otherwise start it again (dschat"
            " serve). Then resume with --resume_from_checkpoint."
        )
    return (
        "Start the server again (dschat serve) and resume with --resume_from_checkpoint, or raise --reward_patience."
    )


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:200]


def _body(texts: ResponseTexts, rows: range) -> str:
    """The JSON of a request for some rows."""
    selected = slice(rows.start, rows.stop)
    messages = [row.messages for row in texts.rows[selected]]
    arguments = [row.template_arguments for row in texts.rows[selected]]
    body: dict[str, object] = {
        "prompts": texts.prompts[selected],
        "responses": texts.responses[selected],
        "finished": texts.finished[selected],
    }
    if any(message_list is not None for message_list in messages):
        body["messages"] = messages
    if any(arguments):
        body["template_arguments"] = arguments
    if texts.segments is not None:
        body["segments"] = texts.segments.texts[selected]
    return json.dumps(body)


def _numbers(answer: httpx2.Response, counts: Sequence[int], allows_missing: bool) -> list[ResponseNumbers]:
    """The scores of an answer.

    Args:
        answer: the server's answer to a request.
        counts: numbers of macro actions of each response, 0 without --segment_rewards.
        allows_missing: null and numbers that are not finite count as missing (NaN); False: they are an error.

    Raises:
        WrongAnswer: the answer has no number for one of the responses.
    """
    try:
        content = answer.json()
    except (ValueError, RecursionError) as error:  # RecursionError for deeply nested lists
        raise WrongAnswer(f"its answer is not JSON: {_excerpt(answer.text)!r}") from error
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise WrongAnswer('its answer has no list "scores"')
    if len(scores) != len(counts):
        raise WrongAnswer(f"it answers {len(scores)} scores for {len(counts)} responses")
    reason = f" ({_excerpt(str(content['error']))})" if content.get("error") else ""
    numbers: list[ResponseNumbers] = []
    missing = 0
    for index, (score, count) in enumerate(zip(scores, counts, strict=True)):
        if not count or not isinstance(score, list):
            response_numbers: ResponseNumbers = _number(score, index, allows_missing, reason)
        elif len(score) == count:
            response_numbers = [_number(number, index, allows_missing, reason) for number in score]
        else:
            raise WrongAnswer(f"score {index} of its answer has {len(score)} numbers for {count} segments")
        numbers.append(response_numbers)
        missing += not is_finite(response_numbers)
    if missing:
        logger.warning("%s: %d of %d responses have no score%s.", FLAG, missing, len(counts), reason)
    return numbers


def _number(score: object, index: int, allows_missing: bool, reason: str) -> float:
    """Reads one score of an answer, see `_numbers`. `index` and `reason` appear in the message of an error."""
    error = WrongAnswer(f"score {index} of its answer is {repr(score)[:200]}, not a finite number{reason}")
    if isinstance(score, bool) or not isinstance(score, int | float | None):
        raise error
    try:
        number = math.nan if score is None else float(score)
    except OverflowError as overflow:  # an integer with more than 308 digits
        raise error from overflow
    if not (allows_missing or math.isfinite(number)):
        raise error
    return number
