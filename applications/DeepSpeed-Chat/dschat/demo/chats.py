# SPDX-License-Identifier: Apache-2.0
"""What a browser has of a demo: its conversation, and how to stop the answer that it waits for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dschat.demo.models import Opened
from dschat.demo.prompts import Prompt, chat_prompt
from dschat.demo.session import Reply


@dataclass(frozen=True)
class Turn:
    """A message and every model's answer to it."""

    message: str
    replies: tuple[Reply, ...]


@dataclass(frozen=True)
class Conversation:
    """The turns so far. Each model goes on from its own answers."""

    turns: tuple[Turn, ...] = ()

    def prompt(self, message: str, side: int, model: Opened) -> Prompt:
        """What a model is asked next; raises UserError for an empty message."""
        earlier = [(turn.message, turn.replies[side].text) for turn in self.turns]
        return chat_prompt(model.tokenizer, earlier, message)

    def with_turn(self, message: str, replies: list[Reply]) -> "Conversation":
        """The same with one turn more."""
        return replace(self, turns=(*self.turns, Turn(message, tuple(replies))))


class Stops:
    """How the answers that are being drawn are stopped, by whose they are."""

    def __init__(self) -> None:
        self._events: dict[str, set[threading.Event]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def answering(self, browser: str | None) -> Iterator[threading.Event]:
        """The event that stops an answer to a browser; it is set at the end."""
        event, name = threading.Event(), browser or ""
        with self._lock:
            self._events.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            event.set()
            with self._lock:
                self._events[name].discard(event)
                if not self._events[name]:
                    del self._events[name]

    def stop(self, browser: str | None) -> None:
        """Stops every answer to a browser."""
        with self._lock:
            for event in self._events.get(browser or "", ()):
                event.set()
