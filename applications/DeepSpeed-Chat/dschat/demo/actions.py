# SPDX-License-Identifier: Apache-2.0
"""What the page answers to its events: new values of its components."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from dschat.common.display import EMPTY, Component
from dschat.demo.chats import Conversation, Stops
from dschat.demo.checkpoints import chosen, find_checkpoints
from dschat.demo.markup import answer_html, status_html, summary_html, text_html
from dschat.demo.prompts import summary_prompt
from dschat.demo.session import Choice, MakePrompt, Reply, Session
from dschat.errors import UserError

PAUSE = 0.05  # seconds between two drafts that are sent to the browser

Update = dict[Component, object]  # new values of components


@dataclass
class Actions:
    """The components of the page that change, and what events make of them."""

    gr: Component
    session: Session
    stops: Stops = field(default_factory=Stops)
    folders: list[Component] = field(default_factory=list)
    choosers: list[Component] = field(default_factory=list)
    statuses: list[Component] = field(default_factory=list)
    answers: list[Component] = field(default_factory=list)  # a chat, or a text, of each side
    panel: dict[str, Component] = field(default_factory=dict)
    parts: dict[str, Component] = field(default_factory=dict)
    form: list[Component] = field(default_factory=list)  # boxes of a post

    def find(self, side: int, place: str) -> Update:
        """Load run: the checkpoints of a run, and how it draws."""
        try:
            found = find_checkpoints(place)
        except UserError as error:
            return {self.statuses[side]: status_html(str(error), failed=True)}
        choices, own = [(one.name, one.path) for one in found], chosen(found, place)
        count = f"{len(found)} model{'' if len(found) == 1 else 's'} found; choose one, then Load model."
        return {
            self.choosers[side]: self.gr.update(choices=choices, value=own.path),
            self.statuses[side]: status_html(count),
        }

    def load(self, side: int, path: str | None) -> Iterator[Update]:
        """Load model."""
        if not path:
            yield {self.statuses[side]: status_html("choose a run folder first, then Load run.", failed=True)}
            return
        yield {self.statuses[side]: status_html(f"Loading {path} …")}
        try:
            status = self.session.load(side, path)
        except UserError as error:
            yield {self.statuses[side]: status_html(f"{error} {self._left(side)}", failed=True)}
            return
        yield {self.statuses[side]: status_html(status)}

    def own_choice(self, path: str | None) -> Update:
        """Load from run: the panel as the run, or the model, draws."""
        choice, words = self.session.choice(path or None)
        values: Update = {component: getattr(choice, name) for name, component in self.panel.items()}
        hottest = max(2.0, choice.temperature)
        values[self.panel["temperature"]] = self.gr.update(value=choice.temperature, maximum=hottest)
        return values | {self.parts["source"]: status_html(f"{words[0].upper()}{words[1:]}.")}

    def chat(
        self, conversation: Conversation, message: str, draw: bool, *panel: float, browser: str
    ) -> Iterator[Update]:
        """Submit: the answers of all sides, growing."""
        sent: Update = {self.parts["message"]: "", self.parts["note"]: ""}
        for replies in self._drafts(partial(conversation.prompt, message), panel, browser):
            if isinstance(replies, str):  # the message stays, to be sent again
                failed = {self.parts["note"]: status_html(replies, failed=True), self.parts["message"]: message}
                yield self.drawn(conversation, draw) | {self.parts["state"]: conversation} | failed
                return
            grown = conversation.with_turn(message, replies)
            yield self.drawn(grown, draw) | {self.parts["state"]: grown} | sent
            sent = {}  # the next message may be typed meanwhile

    def summary(
        self, subreddit: str, title: str, post: str, draw: bool, *panel: float, browser: str
    ) -> Iterator[Update]:
        """Submit: a summary of each side, growing."""
        for replies in self._drafts(lambda side, model: summary_prompt(subreddit, title, post), panel, browser):
            if isinstance(replies, str):
                yield {self.parts["note"]: status_html(replies, failed=True)}
                return
            texts = [summary_html(reply, draw) for reply in replies]
            yield dict(zip(self.answers, texts, strict=True)) | {self.parts["note"]: ""}

    def drawn(self, conversation: Conversation, draw: bool) -> Update:
        """Every side's messages, with or without macro actions."""
        return {chat: self.shown(conversation, side, draw) for side, chat in enumerate(self.answers)}

    def shown(self, conversation: Conversation, side: int, draw: bool) -> list[Component]:
        """A side's messages as Gradio takes them."""
        messages = []
        for turn in conversation.turns:
            reply = turn.replies[side]
            text = text_html(reply.text.strip()) or (EMPTY if reply.done else "…")
            content = [] if draw and reply.tokens else [text]
            if reply.done is not None:
                content.append(self.gr.HTML(answer_html(reply, draw), js_on_load=None))
            messages += [
                {"role": "user", "content": text_html(turn.message)},
                {"role": "assistant", "content": content},
            ]
        return messages

    def cleared(self) -> Update:
        """Clear: nothing was said."""
        if self.session.task == "summary":
            return dict.fromkeys([*self.answers, *self.form, self.parts["note"]], "")
        empty: Update = {chat: [] for chat in self.answers}
        return empty | {self.parts["state"]: Conversation(), self.parts["message"]: "", self.parts["note"]: ""}

    def _drafts(self, make_prompt: MakePrompt, panel: Sequence[float], browser: str) -> Iterator[list[Reply] | str]:
        """The replies, growing, not oftener than a browser can follow; or an error's words."""
        values = dict(zip(self.panel, panel, strict=True))
        if None in values.values():
            yield "a box of the sampling panel is empty: fill it in."
            return
        choice = Choice.of(values, bool(values["do_sample"]))
        with self.stops.answering(browser) as stop:
            try:
                sent, last = 0.0, None
                for replies in self.session.answer(make_prompt, choice, stop):
                    last = replies
                    if time.monotonic() - sent >= PAUSE:
                        yield replies
                        sent, last = time.monotonic(), None
                if last is not None:
                    yield last
            except UserError as error:
                yield str(error)

    def _left(self, side: int) -> str:
        """What is loaded after loading failed."""
        status = self.session.status(side)
        return f"Still there: {status}" if status.startswith("Loaded") else status
