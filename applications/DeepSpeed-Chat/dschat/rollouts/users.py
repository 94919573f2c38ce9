# SPDX-License-Identifier: Apache-2.0
"""Simulated users of multi-turn rollouts: a model on a server, a model of our own, or somebody's function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from dschat.base.errors import UserError
from dschat.base.user_function import call_function
from dschat.data.dialogues import Dialogue
from dschat.rollouts.chat_servers import (
    Endpoint,
    FormRefused,
    Reply,
    ReplyCache,
    Unanswered,
    complete,
    digest_of,
    open_client,
    with_retries,
)
from dschat.rollouts.dialogues import Assistant

logger = logging.getLogger(__name__)

MARK = "Question:"
INSTRUCTIONS = f"""Below is a conversation between a user and an assistant. You play the user.

{{dialogue}}

Write the user's next message. It must follow from the assistant's last answer: ask about something that is still open
or unclear, point out what seems wrong, or go one step further with the same task. Stay with the user's own goal, tone
and language, and do not answer in the assistant's place.

First give one or two sentences of justification: why would this user say that now? Then write "{MARK}" and behind it
the message itself, and nothing else."""


class Writer(Protocol):
    """Writes a text for each prompt."""

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> Sequence[str | None]:
        """Texts in the order of the prompts; None where there is none. The seeds are of the draws."""


class SimulatedUser:
    """A model in the user's place: it is shown the dialogue and told what to do."""

    def __init__(self, write: Writer) -> None:
        self._write = write

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> list[str | None]:
        texts = self._write([simulator_prompt(dialogue) for dialogue in dialogues], seeds)
        return [question_of(text or "") or None for text in texts]


def simulator_prompt(dialogue: Dialogue) -> str:
    """What the model that plays the user is told."""
    shown = "\n\n".join(f"### {message['role']}: {message['content']}" for message in dialogue)
    return INSTRUCTIONS.replace("{dialogue}", shown)


def question_of(text: str) -> str:
    """What the user says: all behind the last "Question:", or the whole text where there is none."""
    return text.rpartition(MARK)[2].strip()


def says_something(reply: Reply) -> bool:
    """Whether an answer holds a user's message: it was not cut off before, and says more than nothing."""
    return bool(question_of(reply.text)) and (MARK in reply.text or not reply.flaw)


class ModelWriter:
    """A model of our own, which answers prompts as an assistant."""

    def __init__(self, assistant: Assistant) -> None:
        self._assistant = assistant

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        replies = self._assistant([[{"role": "user", "content": prompt}] for prompt in prompts], seeds)
        return [None if reply is None else reply.text for reply in replies]


class ServerWriter:
    """A model on an OpenAI-compatible server. Answers are kept on the disk, so that none is asked for twice."""

    def __init__(self, endpoint: Endpoint, temperature: float, concurrency: int, cache: Path) -> None:
        """Opens the client, for so many requests at the same time; nothing is sent. The folder `cache` keeps answers.

        Raises UserError: the openai library is missing, or the address is none.
        """
        self._endpoint, self._temperature, self._concurrency = endpoint, temperature, concurrency
        self._cache, self._answered = ReplyCache(cache, says_something), False
        self._client = open_client(endpoint)

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """See `Writer`. Raises UserError where the server does not answer, whose tries are used up."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            waiting = [pool.submit(self._ask, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            try:
                return [answer.result() for answer in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, prompt: str, seed: int) -> str | None:
        endpoint = self._endpoint
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": endpoint.max_tokens,
            "temperature": self._temperature,
            "seed": seed & (2**31 - 1),
        }
        digest = digest_of(body)
        reply = self._cache.get(digest)
        if reply is None:
            reply = self._send(body)
            if reply is None:
                return None
            self._cache.put(digest, reply)
        self._answered = True
        if says_something(reply):
            return reply.text
        why = reply.flaw or reply.refusal or "the answer is empty"
        logger.warning("%s: no message of a user: %s", endpoint.flags.url, why)
        return None

    def _send(self, body: dict[str, object]) -> Reply | None:
        """The server's answer; None where it refuses this text though it has answered others."""
        flag = f"{self._endpoint.flags.url} {self._endpoint.base_url}"
        try:
            send = partial(complete, self._client, self._endpoint, body)
            return with_retries(send, self._endpoint.tries).reply
        except Unanswered as error:
            raise UserError(
                f"{flag}: no answer in {self._endpoint.tries} tries: {error}. What is finished is kept: give the same "
                "command again to go on."
            ) from error
        except FormRefused as error:
            if not self._answered:
                raise UserError(f"{flag}: it refuses the request: {error}") from error
            logger.warning("%s refuses one dialogue: %s", flag, error)
            return None


class FunctionUser:
    """Somebody's own function: dialogues, each a list of messages → the user's next message of each."""

    def __init__(self, function: Callable[[list[Dialogue]], list[str]], flag: str) -> None:
        self._function, self._flag = function, flag

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> list[str | None]:
        """See `dschat.rollouts.dialogues.User`. Raises UserError where the function fails or returns other things."""
        given = [[dict(message) for message in dialogue] for dialogue in dialogues]
        found: object = call_function(self._function, self._flag, given)
        texts = found if isinstance(found, list | tuple) else [found]
        if len(texts) != len(dialogues) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{self._flag}: the function must return a list of texts, one for each of the {len(dialogues)} "
                f"dialogues it gets; it returned {type(found).__name__} of {len(texts)}."
            )
        return [str(text).strip() or None for text in texts]
