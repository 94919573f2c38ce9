# SPDX-License-Identifier: Apache-2.0
"""Votes in a browser: a Gradio page on this machine's loopback address, which loads nothing from other hosts.

The browser holds no state that matters. Each vote comes with the rater's name and the item that was shown, and undo
with the vote that was the last; the session decides whether they still apply. So two tabs, a double click, a reload
and a new server on the same port do no harm.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dschat.base.display import for_reading
from dschat.base.errors import UserError
from dschat.base.web_page import HOST, Component, check_address, import_gradio, launch
from dschat.evaluation.vote.sessions import LONGEST_NAME, HumanSession, RaterView, Study, guidelines, rater_name

FOLDER = Path(__file__).parent  # folder with human.html, human.css and human.js
TITLE = "Which response is better?"
BUTTONS = (("1", "A is better"), ("2", "B is better"), ("3", "Equal"), ("4", "Pass"), ("u", "Undo"))
LONGEST_COMMENT = 2000  # characters
# Scripts in the browser. The address holds the rater's name, so that a reload returns to the same session.
RATER_FROM_ADDRESS = "() => [new URL(location.href).searchParams.get('rater') || '']"
RATER_INTO_ADDRESS = """(name) => {
    const address = new URL(location.href);
    address.searchParams.set('rater', name);
    history.replaceState(null, '', address);
    return [name];
}"""
TO_THE_TOP = "() => { window.scrollTo(0, 0); }"
Parts = dict[str, Component]  # the components of `build` that a screen changes, by name
NOT_COUNTED = "That vote did not count: the item had your vote already, from another tab or a second click."
UNDONE = "Taken back. This was your last vote."
NOT_UNDONE = "Nothing was taken back: you have voted in another tab since."
# Characters that mean something to HTML, to JavaScript's and Handlebars' templates or to Gradio's placeholders.
SPECIAL = str.maketrans({char: f"&#{ord(char)};" for char in "&<>\"'`${}@\\"})


@dataclass(frozen=True)
class Screen:
    """A new state of the page.

    Attributes:
        view: item and progress; None leaves everything as it is, but for the note.
        rater: whose screen it is.
        note: message above the item.
        comment: content of the comment box.
    """

    view: RaterView | None
    rater: str = ""
    note: str = ""
    comment: str = ""


class Screens:
    """The screens of all raters; may be called by several threads. They raise UserError where nothing was done."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._sessions: dict[str, HumanSession] = {}
        self._lock = threading.Lock()

    def enter(self, rater: str) -> Screen:
        """The first screen of a rater."""
        session = self._session(rater)
        return Screen(session.view(), session.rater)

    def reload(self, rater: str) -> Screen:
        """The screen of a page that is opened: of the rater in its address; without one the form stays."""
        return self.enter(rater) if rater else Screen(None)

    def vote(self, choice: str, rater: str, item_id: str, comment: str) -> Screen:
        """The screen after a vote, one of CHOICES, on the item that was shown."""
        session = self._session(rater)
        saved = session.vote(item_id, choice, comment)
        return Screen(session.view(), rater, "" if saved else NOT_COUNTED)

    def undo(self, rater: str, last: str) -> Screen:
        """The screen after undoing the vote that was the last on the screen before; its comment is in the box."""
        session = self._session(rater)
        taken = session.undo(last)
        if taken is None:
            return Screen(session.view(), rater, NOT_UNDONE)
        comment = str(taken.details.get("comment") or "")
        return Screen(session.view(taken.id), rater, UNDONE, comment)

    def _session(self, rater: str) -> HumanSession:
        """The session of a rater, shared by all tabs."""
        name = rater_name(rater).casefold()
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = self._study.session(rater)
            return self._sessions[name]


def answer(screen_of: Callable[..., Screen], *inputs: str) -> Screen:
    """The screen of a method of `Screens`; if it fails, everything stays as it is and the note says why."""
    try:
        return screen_of(*inputs)
    except UserError as error:
        return Screen(None, note=str(error))


def serve(study: Study, rater: str, port: int | None) -> tuple[Any, str]:
    """Serve the page.

    Args:
        study: what is voted on.
        rater: name in the form at the start.
        port: port to listen on; None or 0 for the first free one from 7860.

    Returns:
        Gradio's object, whose server ends with the process or with `close()`, and the address.

    Raises:
        UserError: Gradio is not installed, or the port is taken.
    """
    if port is not None:
        check_address(HOST, port)
    page = build(study, rater)
    css = (FOLDER / "human.css").read_text(encoding="utf-8")
    js = (FOLDER / "human.js").read_text(encoding="utf-8")
    return page, launch(page, css, js, port)


def build(study: Study, rater: str) -> Any:
    """The page as Gradio Blocks: a form for the name, the ballot, or the end; only one of them is visible.

    Hidden boxes hold the rater, the item and the last vote, which the browser sends with a vote.
    """
    gr = import_gradio("--web")
    html = partial(gr.HTML, js_on_load=None)
    instructions = page_html().guidelines(guidelines(study.dataset))
    parts: Parts = {}
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        with gr.Column(elem_id="human-entry") as parts["entry"]:
            html(f"<h1>{TITLE}</h1>")
            html(instructions)
            name = gr.Textbox(rater, label="Your name", max_length=LONGEST_NAME, elem_id="human-name", autofocus=True)
            start = gr.Button("Start", variant="primary", elem_id="human-start")
        parts["progress"] = html(visible=False)
        parts["note"] = html(visible=False)
        with gr.Column(visible=False) as parts["ballot"]:
            with gr.Accordion("Guidelines (?)", open=False, elem_id="human-guidelines"):
                html(instructions)
            parts["item_text"] = html()
            with gr.Column(elem_id="human-bar"):
                parts["comment"] = gr.Textbox(
                    placeholder="Comment (optional), saved with your vote. Esc: back to the keys",
                    show_label=False,
                    container=False,
                    max_lines=4,
                    max_length=LONGEST_COMMENT,
                    elem_id="human-comment",
                )
                keys: list[tuple[str, Component]] = []
                with gr.Row(elem_id="human-keys"):
                    for key, label in BUTTONS:
                        keys.append((key, _button(gr, key, label)))
        with gr.Column(visible=False, elem_id="human-end") as parts["end"]:
            parts["thanks"] = html()
            keys.append(("u", _button(gr, "u", "Undo the last vote")))
        for kind in ("rater", "item", "last"):
            parts[kind] = gr.Textbox(visible="hidden", elem_id=f"human-{kind}")
        screens = Screens(study)
        _connect(gr, blocks, parts, screens, (name, start), keys)
    return blocks


def _button(gr: Any, key: str, label: str) -> Component:
    """A button for a key, which the style sheet shows beside the label."""
    variant = "primary" if key in "12" else "secondary"
    return gr.Button(label, variant=variant, elem_classes=["human-key", f"human-key-{key}"], min_width=120)


def _connect(
    gr: Any,
    blocks: Any,
    parts: Parts,
    screens: Screens,
    form: tuple[Component, Component],
    keys: list[tuple[str, Component]],
) -> None:
    """Connect the events of the page, of the form and of the buttons to their screens."""
    common: dict[str, Any] = {
        "outputs": list(parts.values()),
        "queue": False,
        "show_progress": "hidden",
        "api_visibility": "private",
    }

    def updating(screen_of: Callable[..., Screen]) -> Callable[..., dict[Component, Any]]:
        return lambda *inputs: _updates(gr, parts, answer(screen_of, *inputs))

    # The page is opened, or the form is sent.
    blocks.load(updating(screens.reload), inputs=parts["rater"], js=RATER_FROM_ADDRESS, **common)
    name, start = form
    for event in (start.click, name.submit):
        event(updating(screens.enter), inputs=name, js=RATER_INTO_ADDRESS, **common)

    # A button of the ballot is pressed.
    for key, button in keys:
        screen_of: Callable[..., Screen] = partial(screens.vote, key)
        inputs = [parts["rater"], parts["item"], parts["comment"]]
        if key == "u":
            screen_of = screens.undo
            inputs = [parts["rater"], parts["last"]]
        click = button.click(updating(screen_of), inputs=inputs, **common)
        click.then(None, js=TO_THE_TOP)


def _updates(gr: Any, parts: Parts, screen: Screen) -> dict[Component, Any]:
    """The values that a screen gives to components."""
    view = screen.view
    note = page_html().note(screen.note)
    values = {"note": gr.update(value=note, visible=bool(screen.note))}
    if view is not None:
        values |= {
            "entry": gr.update(visible=False),
            "progress": gr.update(value=page_html().progress(view, screen.rater), visible=True),
            "ballot": gr.update(visible=view.item is not None),
            "item_text": page_html().item(view),
            "comment": screen.comment,
            "end": gr.update(visible=view.item is None),
            "thanks": page_html().done(view),
            "rater": screen.rater,
            "item": view.item.pair.id if view.item else "",
            "last": view.last or "",
        }
    updates = {}
    for kind, value in values.items():
        updates[parts[kind]] = value
    return updates


@cache
def page_html() -> Any:
    """The macros of human.html, which make HTML; all texts in them are `escaped`."""

    def safe(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escaped(str(value)))

    loader = FileSystemLoader(FOLDER)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=safe
    )
    environment.filters["for_reading"] = for_reading
    return environment.get_template("human.html").module


def escaped(text: str) -> str:
    """HTML that shows a text character for character."""
    return text.translate(SPECIAL)
