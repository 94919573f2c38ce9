# SPDX-License-Identifier: Apache-2.0
"""Simulated users of multi-turn rollouts: a model on a server, a model of our own, or somebody's function."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dschat.base.chat_servers import Endpoint, RequestRejected, Unanswered, complete, open_chat, with_retries
from dschat.base.errors import UserError
from dschat.base.reply_cache import Reply, ReplyCache, digest_of
from dschat.base.thoughts import without_thoughts
from dschat.base.user_function import call_function
from dschat.data.dialogues import Dialogue

if TYPE_CHECKING:
    from dschat.turns.dialogues import Assistant

logger = logging.getLogger(__name__)

MARK = "Question:"
# Models also write it in bold type: **Question:** or **Question**:. One that begins a line counts before any other,
# because a message may say "one more question:" itself.
MARK_PATTERN = re.compile(r"question(?:\**:\*+(?!\S)|\**:)", re.IGNORECASE)
LINE_PATTERN = re.compile(rf"^[\s*_#>]*{MARK_PATTERN.pattern}", re.IGNORECASE | re.MULTILINE)
INSTRUCTIONS = f"""Below is a conversation between a user and an assistant. You play the user.

{{dialogue}}

Write the user's next message. It must follow from the assistant's last answer: ask about something that is still open
or unclear, point out what seems wrong, or go one step further with the same task. Stay with the user's own goal, tone
and language, and do not answer in the assistant's place.

First give one or two sentences of justification: why would this user say that now? Then write "{MARK}" and behind it
the message itself, and nothing else."""


class Writer(Protocol):
    """Writes the user's message that each prompt asks for."""

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> Sequence[str | None]:
        """Messages in the order of the prompts, None if there is none; a seed per prompt decides the sampling."""


class SimulatedUser:
    """A model in the user's place, prompted with the dialogue and instructions."""

    def __init__(self, write: Writer) -> None:
        self._write = write

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> Sequence[str | None]:
        """See `dschat.turns.dialogues.User`."""
        return self._write([simulator_prompt(dialogue) for dialogue in dialogues], seeds)


def simulator_prompt(dialogue: Dialogue) -> str:
    """The prompt of the model that plays the user."""
    parts = []
    for message in dialogue:
        content = message["content"]
        if message["role"] == "assistant":
            content = without_thoughts(content).lstrip()
        parts.append(f"### {message['role']}: {content}")
    messages = "\n\n".join(parts)
    return INSTRUCTIONS.replace("{dialogue}", messages)


def question_of(text: str, is_complete: bool) -> str | None:
    """The user's message in a model's answer: what follows "Question:", or a whole answer without it.

    The last one that begins a line counts, or else the last one. Thoughts are no part of the message. None if it is
    empty, or if the answer was cut off before it.
    """
    if not LINE_PATTERN.match(text):  # a message may speak of the marks of thoughts
        text = without_thoughts(text)
    mark = LINE_PATTERN if LINE_PATTERN.search(text) else MARK_PATTERN
    *before, message = mark.split(text)
    if not before and not is_complete:
        return None
    message = message.strip()
    if message.count("**") % 2:  # the bold type began before the mark
        message = message.removesuffix("**").rstrip()
    return message or None


def has_message(reply: Reply) -> bool:
    """Whether a server's answer contains a user's message."""
    return question_of(reply.text, is_complete=not reply.flaw) is not None


class ModelWriter:
    """A local model, which answers prompts as an assistant."""

    def __init__(self, assistant: Assistant) -> None:
        self._assistant = assistant

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """See `Writer`."""
        dialogues: list[Dialogue] = [[{"role": "user", "content": prompt}] for prompt in prompts]
        replies = self._assistant(dialogues, seeds)
        messages: list[str | None] = []
        for reply in replies:
            # A small model may never end, and would answer the same with the same seed: a cut answer counts, too.
            messages.append(None if reply is None else question_of(reply.text, is_complete=True))
        return messages


class ServerWriter:
    """A model on an OpenAI-compatible server. Its answers are cached on disk, so that each is requested once."""

    def __init__(
        self, endpoint: Endpoint, temperature: float, concurrency: int, cache: Path, remedy: str = ""
    ) -> None:
        """Opens the client; sends nothing.

        Args:
            endpoint: the server and its model.
            temperature: temperature of sampling.
            concurrency: requests at the same time.
            cache: folder for the answers.
            remedy: what to do where the server does not answer, for messages.

        Raises:
            UserError: the address is invalid, or its proxy cannot be used.
        """
        self._endpoint = endpoint
        self._temperature = temperature
        self._concurrency = concurrency
        self._cache = ReplyCache(cache)
        self._remedy = remedy
        self._has_answered = False
        self._client = open_chat(endpoint)

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """See `Writer`.

        Raises:
            UserError: the server does not answer in its number of tries, or has rejected every request so far.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = []
            for prompt, seed in zip(prompts, seeds, strict=True):
                answers.append(pool.submit(self._ask, prompt, seed))
            try:
                replies = [answer.result() for answer in answers]
            except BaseException:
                pool.shutdown(cancel_futures=True)  # waits for requests that were sent
                raise
        # A server that has answered others rejects this dialogue, which may be too long for it.
        self._has_answered |= any(isinstance(reply, Reply) for reply in replies)
        return [self._message_of(reply) for reply in replies]

    def _ask(self, prompt: str, seed: int) -> Reply | RequestRejected:
        """The answer to a prompt, from the cache or the server, or why the server rejects the request."""
        endpoint = self._endpoint
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": endpoint.max_tokens,
            "temperature": self._temperature,
            "seed": seed & (2**31 - 1),
        }
        # Without the address, which may change when a run is resumed.
        digest = digest_of(body)
        reply = self._cache.get(digest, has_message)
        if reply is not None:
            return reply
        try:
            send = partial(complete, self._client, endpoint, body)
            reply = with_retries(send, endpoint).reply
        except Unanswered as error:
            problem = f"{endpoint.flags.url} {endpoint.base_url}: {error}. {self._remedy}"
            raise UserError(problem.rstrip()) from error
        except RequestRejected as error:
            return error
        return self._cache.put(digest, reply, has_message)

    def _message_of(self, reply: Reply | RequestRejected) -> str | None:
        """The user's message; None, with a warning, if there is none."""
        flag = f"{self._endpoint.flags.url} {self._endpoint.base_url}"
        if isinstance(reply, RequestRejected):
            if not self._has_answered:
                raise UserError(f"{flag}: it refuses the request: {reply}") from reply
            logger.warning("%s refuses one dialogue: %s", flag, reply)
            return None
        message = question_of(reply.text, is_complete=not reply.flaw)
        if message is None:
            reason = reply.flaw or reply.refusal or "the answer is empty"
            logger.warning("%s: no message of a user: %s", flag, reason)
        return message


class FunctionUser:
    """A user's function: dialogues, each a list of messages → the next user message of each."""

    def __init__(self, function: Callable[[list[Dialogue]], list[str]], flag: str) -> None:
        self._function = function
        self._flag = flag

    def __call__(
        self, dialogues: Sequence[Dialogue], numbers: Sequence[int], seeds: Sequence[int]
    ) -> list[str | None]:
        """See `dschat.turns.dialogues.User`. Raises UserError if the function fails or returns something else."""
        copies: list[Dialogue] = []
        for dialogue in dialogues:
            copies.append([dict(message) for message in dialogue])
        texts = call_function(self._function, self._flag, copies)
        is_list = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
        if not is_list or len(texts) != len(dialogues):
            raise UserError(
                f"{self._flag}: the function must return a list of texts, one for each of the {len(dialogues)} "
                f"dialogues it gets; it returned {reprlib.repr(texts)}."
            )
        return [text.strip() or None for text in texts]
