# SPDX-License-Identifier: Apache-2.0
"""Event handlers of the page: each returns new values of components.

Every text from users and models is escaped.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape

from dschat.base.display import EMPTY, visible
from dschat.base.errors import UserError
from dschat.base.web_page import Component
from dschat.demo.models import find_models, select_model
from dschat.demo.session import Chat, MakePrompt, SamplingChoice, Session, ShownAnswer, summary_prompt
from dschat.evaluation.macro_actions import legend_html, macro_spans

UPDATE_INTERVAL = 0.05  # seconds between two drafts that are sent to the browser
# Characters with a meaning in JavaScript's and Handlebars' templates or in Gradio's placeholders.
TEMPLATES = str.maketrans({char: f"&#{ord(char)};" for char in "`${}@\\"})
LEGEND = legend_html(numbers=False)

Answers = list[ShownAnswer]  # one per side
Update = dict[Component, object]  # new values of components


class Stops:
    """Stops the answers that are being generated for a browser."""

    def __init__(self) -> None:
        self._events: dict[str, set[threading.Event]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def answering(self, browser: str | None) -> Iterator[threading.Event]:
        """The event that stops an answer to a browser; it is set at the end."""
        event = threading.Event()
        name = browser or ""
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
    """The changing components of the page, and the handlers of its events."""

    gr: Component
    session: Session
    stops: Stops = field(default_factory=Stops)
    folders: list[Component] = field(default_factory=list)
    choosers: list[Component] = field(default_factory=list)
    statuses: list[Component] = field(default_factory=list)
    answers: list[Component] = field(default_factory=list)  # a chat, or a text, for each side
    panel: dict[str, Component] = field(default_factory=dict)  # sampling settings by name
    form: list[Component] = field(default_factory=list)  # boxes of a post
    source: Component = field(init=False)  # where the sampling settings come from
    note: Component = field(init=False)  # why the last event failed
    state: Component = field(init=False)  # the `Chat`; on the chat's page alone, as `message`
    message: Component = field(init=False)  # box of the next message

    def find(self, side: int, path: str) -> Update:
        """Handler of the button "Load run": lists the models of a run."""
        try:
            models = find_models(path)
        except UserError as error:
            return {self.statuses[side]: status_html(str(error), failed=True)}
        choices = [(model.name, model.path) for model in models]
        selected = select_model(models, path)
        count = len(models)
        status = f"{count} model{'' if count == 1 else 's'} found; choose one, then Load model."
        return {
            self.choosers[side]: self.gr.update(choices=choices, value=selected.path),
            self.statuses[side]: status_html(status),
        }

    def load(self, side: int, path: str | None) -> Iterator[Update]:
        """Handler of the button "Load model"."""
        if not path:
            yield {self.statuses[side]: status_html("choose a run folder first, then Load run.", failed=True)}
            return
        yield {self.statuses[side]: status_html(f"Loading {path} …")}
        try:
            status = self.session.load(side, path)
        except UserError as error:
            yield {self.statuses[side]: status_html(f"{error} {self._still_loaded(side)}", failed=True)}
            return
        yield {self.statuses[side]: status_html(status)}

    def load_sampling(self, path: str | None) -> Update:
        """Handler of "Load from run": fills the panel with the sampling settings of the run or the model."""
        choice, source = self.session.choice(path or None)
        values: Update = {}
        for name, component in self.panel.items():
            values[component] = getattr(choice, name)
        maximum = max(2.0, choice.temperature)
        values[self.panel["temperature"]] = self.gr.update(value=choice.temperature, maximum=maximum)
        minimum = min(0.01, choice.top_p)
        values[self.panel["top_p"]] = self.gr.update(value=choice.top_p, minimum=minimum)
        values[self.source] = status_html(f"{source[0].upper()}{source[1:]}.")
        return values

    def chat(
        self, conversation: Chat, message: str, draw_actions: bool, *panel: float, browser: str
    ) -> Iterator[Update]:
        """Handler of "Submit" in a chat: yields the growing answer of each side."""
        state = self.state
        box = self.message
        note = self.note
        is_first = True
        for answers in self._drafts(partial(conversation.prompt, message), panel, browser):
            if isinstance(answers, str):  # the message stays, to be sent again
                update = self.show(conversation, draw_actions) | {state: conversation}
                if is_first:
                    update[box] = message
                    update[note] = status_html(answers, failed=True)
                else:  # the next message may be in the box
                    update[note] = status_html(f"{answers} The message was: {message}", failed=True)
                yield update
                return
            grown = conversation.with_turn(message, answers)
            update = self.show(grown, draw_actions) | {state: grown}
            if is_first:  # the next message may be typed meanwhile
                update |= {box: "", note: ""}
            is_first = False
            yield update

    def summary(
        self, subreddit: str, title: str, post: str, draw_actions: bool, *panel: float, browser: str
    ) -> Iterator[Update]:
        """Handler of "Submit" for a post: yields the growing summary of each side."""
        note = self.note
        for answers in self._drafts(lambda side, model: summary_prompt(subreddit, title, post), panel, browser):
            if isinstance(answers, str):
                yield {note: status_html(answers, failed=True)}
                return
            update: Update = {note: ""}
            for component, answer in zip(self.answers, answers, strict=True):
                update[component] = summary_html(answer, draw_actions)
            yield update

    def show(self, conversation: Chat, draw_actions: bool) -> Update:
        """The messages of every side, with or without macro actions."""
        update: Update = {}
        for side, chat in enumerate(self.answers):
            update[chat] = self.messages(conversation, side, draw_actions)
        return update

    def messages(self, conversation: Chat, side: int, draw_actions: bool) -> list[Component]:
        """The messages of a side in Gradio's form."""
        messages: list[Component] = []
        for turn in conversation.turns:
            answer = turn.answers[side]
            content = []
            if not (draw_actions and answer.tokens):
                content.append(text_html(answer.text.strip()) or _placeholder(answer))
            if answer.done is not None:
                content.append(self.gr.HTML(answer_html(answer, draw_actions), js_on_load=None))
            messages.append({"role": "user", "content": text_html(turn.message)})
            messages.append({"role": "assistant", "content": content})
        return messages

    def cleared(self) -> Update:
        """Handler of "Clear": forgets the conversation or the post."""
        if self.session.task == "summary":
            return dict.fromkeys([*self.answers, *self.form, self.note], "")
        update: Update = {chat: [] for chat in self.answers}
        update[self.state] = self.session.new_chat()
        update[self.message] = ""
        update[self.note] = ""
        return update

    def _drafts(self, make_prompt: MakePrompt, panel: Sequence[float], browser: str) -> Iterator[Answers | str]:
        """Yields the growing answers no faster than a browser can follow, or the words of an error."""
        settings = dict(zip(self.panel, panel, strict=True))
        if None in settings.values():
            yield "a box of the sampling panel is empty: fill it in."
            return
        choice = SamplingChoice.of(settings, bool(settings["do_sample"]))
        with self.stops.answering(browser) as stop:
            try:
                last_sent = 0.0
                unsent: Answers | None = None
                for answers in self.session.answer(make_prompt, choice, stop):
                    unsent = answers
                    if time.monotonic() - last_sent >= UPDATE_INTERVAL:
                        yield answers
                        last_sent = time.monotonic()
                        unsent = None
                if unsent is not None:
                    yield unsent
            except UserError as error:
                yield str(error)

    def _still_loaded(self, side: int) -> str:
        """The model of a side after loading another has failed."""
        status = self.session.status(side)
        return f"Still there: {status}" if status.startswith("Loaded") else status


def _placeholder(answer: ShownAnswer) -> str:
    """Shown for an answer without text."""
    return EMPTY if answer.done else "…"


def text_html(text: str) -> str:
    """An escaped text for Gradio's chat, which renders some HTML even without Markdown."""
    return escape(visible(text), quote=False)


def status_html(text: str, failed: bool = False) -> str:
    """A status line, which screen readers read aloud."""
    css_class = "demo-status demo-failed" if failed else "demo-status"
    return f'<p class="{css_class}" role="status">{_escape_templates(escape(visible(text)))}</p>'


def answer_html(answer: ShownAnswer, draw_actions: bool) -> str:
    """The caption of a finished answer, after its macro actions if they are wanted.

    Args:
        answer: done.
        draw_actions: show the macro actions, which contain the whole text of the answer.
    """
    if not (draw_actions and answer.tokens):
        return _escape_templates(f'<p class="demo-caption">{escape(answer.caption)}</p>')
    count = answer.tokens[-1].macro_action + 1
    caption = f"{answer.caption} · {count} macro action{'' if count == 1 else 's'}"
    return _escape_templates(f'{macro_spans(answer.tokens)}<p class="demo-caption">{escape(caption)}</p>')


def summary_html(answer: ShownAnswer, draw_actions: bool) -> str:
    """A summary so far."""
    html = ""
    if not (draw_actions and answer.tokens):
        text = escape(visible(answer.text).strip() or _placeholder(answer))
        html = f'<pre class="demo-text" dir="auto">{_escape_templates(text)}</pre>'
    if answer.done:
        html += answer_html(answer, draw_actions)
    return html


def _escape_templates(html: str) -> str:
    return html.translate(TEMPLATES)
