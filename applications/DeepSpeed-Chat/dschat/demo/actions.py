# SPDX-License-Identifier: Apache-2.0
"""What the page answers to its events: new values of its components.

Every text that is not ours is escaped.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape

from dschat.base.display import EMPTY, Component, visible
from dschat.base.errors import UserError
from dschat.demo.models import chosen, find_checkpoints
from dschat.demo.session import Chat, MakePrompt, SamplingChoice, Session, ShownAnswer, summary_prompt
from dschat.lab.macro_actions import legend_html, macro_spans

PAUSE = 0.05  # seconds between two drafts that are sent to the browser
# Characters that mean something to JavaScript's and Handlebars' templates or to Gradio's placeholders.
TEMPLATES = str.maketrans({char: f"&#{ord(char)};" for char in "`${}@\\"})
LEGEND = legend_html(numbers=False)

Answers = list[ShownAnswer]  # of all sides
Update = dict[Component, object]  # new values of components


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

    def chat(self, conversation: Chat, message: str, draw: bool, *panel: float, browser: str) -> Iterator[Update]:
        """Submit: the answers of all sides, growing."""
        sent: Update = {self.parts["message"]: "", self.parts["note"]: ""}
        for answers in self._drafts(partial(conversation.prompt, message), panel, browser):
            if isinstance(answers, str):  # the message stays, to be sent again
                failed = {self.parts["note"]: status_html(answers, failed=True), self.parts["message"]: message}
                yield self.drawn(conversation, draw) | {self.parts["state"]: conversation} | failed
                return
            grown = conversation.with_turn(message, answers)
            yield self.drawn(grown, draw) | {self.parts["state"]: grown} | sent
            sent = {}  # the next message may be typed meanwhile

    def summary(
        self, subreddit: str, title: str, post: str, draw: bool, *panel: float, browser: str
    ) -> Iterator[Update]:
        """Submit: a summary of each side, growing."""
        for answers in self._drafts(lambda side, model: summary_prompt(subreddit, title, post), panel, browser):
            if isinstance(answers, str):
                yield {self.parts["note"]: status_html(answers, failed=True)}
                return
            texts = [summary_html(answer, draw) for answer in answers]
            yield dict(zip(self.answers, texts, strict=True)) | {self.parts["note"]: ""}

    def drawn(self, conversation: Chat, draw: bool) -> Update:
        """Every side's messages, with or without macro actions."""
        return {chat: self.shown(conversation, side, draw) for side, chat in enumerate(self.answers)}

    def shown(self, conversation: Chat, side: int, draw: bool) -> list[Component]:
        """A side's messages as Gradio takes them."""
        messages = []
        for turn in conversation.turns:
            answer = turn.answers[side]
            text = text_html(answer.text.strip()) or (EMPTY if answer.done else "…")
            content = [] if draw and answer.tokens else [text]
            if answer.done is not None:
                content.append(self.gr.HTML(answer_html(answer, draw), js_on_load=None))
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
        return empty | {self.parts["state"]: Chat(), self.parts["message"]: "", self.parts["note"]: ""}

    def _drafts(self, make_prompt: MakePrompt, panel: Sequence[float], browser: str) -> Iterator[Answers | str]:
        """The answers, growing, not oftener than a browser can follow; or an error's words."""
        values = dict(zip(self.panel, panel, strict=True))
        if None in values.values():
            yield "a box of the sampling panel is empty: fill it in."
            return
        choice = SamplingChoice.of(values, bool(values["do_sample"]))
        with self.stops.answering(browser) as stop:
            try:
                sent, last = 0.0, None
                for answers in self.session.answer(make_prompt, choice, stop):
                    last = answers
                    if time.monotonic() - sent >= PAUSE:
                        yield answers
                        sent, last = time.monotonic(), None
                if last is not None:
                    yield last
            except UserError as error:
                yield str(error)

    def _left(self, side: int) -> str:
        """What is loaded after loading failed."""
        status = self.session.status(side)
        return f"Still there: {status}" if status.startswith("Loaded") else status


def text_html(text: str) -> str:
    """A text as it stands, for Gradio's chat, which lets some HTML through even where Markdown is off."""
    return escape(visible(text), quote=False)


def status_html(text: str, failed: bool = False) -> str:
    """A status line, read aloud by screen readers."""
    kind = "demo-status demo-failed" if failed else "demo-status"
    return f'<p class="{kind}" role="status">{_safe(escape(visible(text)))}</p>'


def answer_html(answer: ShownAnswer, draw: bool) -> str:
    """A whole answer's caption; if wanted, below the answer with its macro actions.

    Args:
        answer: done.
        draw: show the macro actions, which say all that the answer says.
    """
    if not (draw and answer.tokens):
        return _safe(f'<p class="demo-caption">{escape(answer.caption)}</p>')
    count = answer.tokens[-1].macro_action + 1
    caption = f"{answer.caption} · {count} macro action{'' if count == 1 else 's'}"
    return _safe(f'{macro_spans(answer.tokens)}<p class="demo-caption">{escape(caption)}</p>')


def summary_html(answer: ShownAnswer, draw: bool) -> str:
    """An answer by itself, as far as it is there."""
    text = _safe(escape(visible(answer.text).strip() or (EMPTY if answer.done else "…")))
    plain = "" if draw and answer.tokens else f'<pre class="demo-text" dir="auto">{text}</pre>'
    return plain + (answer_html(answer, draw) if answer.done else "")


def _safe(html: str) -> str:
    return html.translate(TEMPLATES)
