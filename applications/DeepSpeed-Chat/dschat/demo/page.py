# SPDX-License-Identifier: Apache-2.0
"""The page: choosers of run and checkpoint, a chat or a form of posts, and the panel of sampling."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from typing import Any

from dschat.base.display import Component, gradio, launch
from dschat.base.errors import UserError
from dschat.demo.actions import LEGEND, Actions, Update, status_html
from dschat.demo.models import find_checkpoints
from dschat.demo.options import PASSWORD
from dschat.demo.session import CHAT_EXAMPLE, SUMMARY_EXAMPLE, Chat, Session
from dschat.lab.macro_actions import STYLE

TITLES = {"chat": "Chat", "summary": "Summaries"}
NAMES = ("Model", "Other model")
UNDER_AND_ABOVE = (400, 600)  # pixels of the page that the chats of one or two models leave to the rest
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def serve(session: Session) -> tuple[Component, str]:
    """Opens the page; returns Gradio's object, whose server ends with the process or with `close()`, and the address.

    Raises:
        UserError: Gradio is not installed, or the address cannot be listened on.
    """
    options = session.options
    page = build(session)
    style = (resources.files("dschat.demo") / "demo.css").read_text(encoding="utf-8")
    password = os.environ.get(PASSWORD)
    return page, launch(page, f"{STYLE}\n{style}", port=options.demo.port, host=options.demo.host, password=password)


def build(session: Session) -> Component:
    """The page as Gradio Blocks."""
    task = session.task
    gr = gradio(f"dschat demo {task}")
    actions = Actions(gr, session)
    with gr.Blocks(title=TITLES[task], analytics_enabled=False, fill_width=True) as blocks:
        for side in range(session.options.demo.sides):
            _add_chooser(gr, actions, side)
        with gr.Row(elem_id="demo-main"):
            with gr.Column(scale=5, min_width=480):
                inputs = _add_chat(gr, actions) if task == "chat" else _add_form(gr, actions)
                buttons = _add_buttons(gr)
                actions.parts["note"] = _html(gr, elem_id="demo-note")
                if task == "summary":
                    _add_summaries(gr, actions)
                legend = _html(gr, LEGEND, elem_id="demo-legend", visible=session.options.demo.sides == 2)
            with gr.Column(scale=1, min_width=220, elem_id="demo-panel"):
                draw = _add_panel(gr, actions)
                draw.change(lambda drawn: gr.update(visible=drawn), inputs=draw, outputs=legend, queue=False, **QUIET)
                if task == "chat":
                    again = [actions.parts["state"], draw]
                    draw.change(actions.drawn, inputs=again, outputs=actions.answers, queue=False, **QUIET)
        _connect(gr, actions, inputs, draw, buttons)
        blocks.unload(_stopping(gr, actions))
    return blocks


def _add_chooser(gr: Any, actions: Actions, side: int) -> None:
    """Where a model is chosen: run folder and checkpoint, and what is loaded."""
    session, key = actions.session, ("model", "other")[side]
    place = (session.options.demo.model, session.options.demo.other)[side] or ""
    try:
        found = [(one.name, one.path) for one in find_checkpoints(place)] if place else []
    except UserError:
        found = []
    with gr.Row(equal_height=True, elem_classes="demo-chooser"):
        name = NAMES[side] if session.options.demo.sides == 2 else "Model"
        folder = gr.Textbox(
            place, label=f"{name}: run folder", placeholder="runs/…/step3-ppo", elem_id=f"demo-{key}-run", scale=4
        )
        find = gr.Button("Load run", elem_id=f"demo-{key}-find", min_width=120, scale=0)
        chooser = gr.Dropdown(
            found, value=session.path(side), label="Checkpoint", elem_id=f"demo-{key}-checkpoint", scale=4
        )
        load = gr.Button("Load model", variant="primary", elem_id=f"demo-{key}-load", min_width=130, scale=0)
    status = _html(gr, status_html(session.status(side)), elem_id=f"demo-{key}-status")
    for kept, component in ((actions.folders, folder), (actions.choosers, chooser), (actions.statuses, status)):
        kept.append(component)
    for event in (find.click, folder.submit):
        event(partial(actions.find, side), inputs=folder, outputs=[chooser, status], **QUIET)
    load.click(_generator(partial(actions.load, side)), inputs=chooser, outputs=status, **QUIET)


def _add_chat(gr: Any, actions: Actions) -> list[Component]:
    """The conversations, side by side, and the box of the next message; returns what an answer reads."""
    sides = actions.session.options.demo.sides
    with gr.Row():
        for side in range(sides):
            with gr.Column(min_width=240):
                if sides == 2:
                    _html(gr, f"<h2>{NAMES[side]}</h2>")
                chat = gr.Chatbot(
                    show_label=False,
                    elem_id=f"demo-chat-{side}",
                    height=f"max(260px, 100vh - {UNDER_AND_ABOVE[sides - 1]}px)",
                    render_markdown=False,
                    allow_tags=False,
                    feedback_options=None,
                    buttons=[],
                    placeholder="Nothing said yet.",
                )
            actions.answers.append(chat)
    message = gr.Textbox(
        label="Message",
        lines=1,
        max_lines=6,
        elem_id="demo-message",
        placeholder="Enter sends, Shift+Enter breaks the line",
    )
    actions.parts |= {"message": message, "state": gr.State(Chat())}
    return [actions.parts["state"], message]


def _add_form(gr: Any, actions: Actions) -> list[Component]:
    """The boxes of a post; returns what an answer reads."""
    with gr.Row():
        subreddit = gr.Textbox(label="Subreddit", placeholder="AskReddit", elem_id="demo-subreddit")
        title = gr.Textbox(label="Title (optional; the published data have none)", elem_id="demo-title")
    post = gr.Textbox(label="Post", lines=8, max_lines=8, elem_id="demo-post")
    actions.form = [subreddit, title, post]
    return list(actions.form)


def _add_summaries(gr: Any, actions: Actions) -> None:
    """Where the summaries stand, side by side."""
    with gr.Row():
        for side in range(actions.session.options.demo.sides):
            with gr.Column(min_width=240):
                name = NAMES[side] if actions.session.options.demo.sides == 2 else "TL;DR"
                _html(gr, f"<h2>{name}</h2>")
                actions.answers.append(_html(gr, elem_id=f"demo-summary-{side}"))


def _add_buttons(gr: Any) -> dict[str, Component]:
    with gr.Row(elem_id="demo-buttons"):
        return {
            "submit": gr.Button("Submit", variant="primary", elem_id="demo-submit", min_width=100),
            "stop": gr.Button("Stop", variant="stop", interactive=False, elem_id="demo-stop", min_width=100),
            "example": gr.Button("Load example", elem_id="demo-example", min_width=100),
            "clear": gr.Button("Clear", elem_id="demo-clear", min_width=100),
        }


def _add_panel(gr: Any, actions: Actions) -> Component:
    """The panel of sampling; returns the box that says whether macro actions are drawn."""
    choice, _ = actions.session.choice(actions.session.path(0))
    actions.panel = {
        "do_sample": gr.Checkbox(choice.do_sample, label="Sample (off: greedy)", elem_id="demo-do-sample"),
        "temperature": gr.Slider(
            0,
            max(2.0, choice.temperature),
            choice.temperature,
            step=0.05,
            label="Temperature",
            elem_id="demo-temperature",
        ),
        "top_k": gr.Number(choice.top_k, label="Top-k (0: all)", precision=0, minimum=0, elem_id="demo-top-k"),
        "top_p": gr.Slider(0.01, 1, choice.top_p, step=0.01, label="Top-p", elem_id="demo-top-p"),
        "max_new_tokens": gr.Number(
            choice.max_new_tokens, label="Max new tokens", precision=0, minimum=1, elem_id="demo-max-new-tokens"
        ),
    }
    own = gr.Button("Load from run", elem_id="demo-own", size="sm")
    actions.parts["source"] = _html(gr, elem_id="demo-source")
    outputs = [*actions.panel.values(), actions.parts["source"]]
    own.click(actions.own_choice, inputs=actions.choosers[0], outputs=outputs, **QUIET)
    drawn = actions.session.options.demo.sides == 2
    return gr.Checkbox(drawn, label="Draw macro actions", elem_id="demo-draw")


def _connect(
    gr: Any, actions: Actions, inputs: list[Component], draw: Component, buttons: dict[str, Component]
) -> None:
    """Binds the events of the chat or the form."""
    answer = actions.chat if actions.session.task == "chat" else actions.summary
    parts = actions.parts
    note = parts["note"]
    busy = {"submit": False, "stop": True, "example": False, "clear": False}

    def set_busy(now: bool) -> Update:
        return {buttons[name]: gr.update(interactive=value is now) for name, value in busy.items()}

    changed = [*actions.answers, note, *([parts["state"], parts["message"]] if actions.session.task == "chat" else [])]
    starts = [buttons["submit"].click]
    if actions.session.task == "chat":
        starts.append(parts["message"].submit)
    for start in starts:
        asked = start(partial(set_busy, True), outputs=list(buttons.values()), queue=False, **QUIET)
        asked = asked.then(
            _answering(gr, answer),
            inputs=[*inputs, draw, *actions.panel.values()],
            outputs=changed,
            concurrency_limit=None,  # the session has its own lock; one who waits can be stopped
            **QUIET,
        )
        asked.then(partial(set_busy, False), outputs=list(buttons.values()), queue=False, **QUIET)
    buttons["stop"].click(_stopping(gr, actions), queue=False, **QUIET)
    examples = (
        [(parts["message"], CHAT_EXAMPLE)]
        if actions.session.task == "chat"
        else list(zip(actions.form, SUMMARY_EXAMPLE, strict=True))
    )
    buttons["example"].click(lambda: dict(examples), outputs=[box for box, _ in examples], queue=False, **QUIET)
    cleared = [*changed, *actions.form]
    buttons["clear"].click(actions.cleared, outputs=cleared, queue=False, **QUIET)


def _answering(gr: Any, answer: Callable[..., Iterator[Update]]) -> Callable[..., Iterator[Update]]:
    """A generator that Gradio gives the browser's name to, by the annotation of its first parameter."""

    def call(request: Any, *sent: object) -> Iterator[Update]:
        yield from answer(*sent, browser=request.session_hash)

    call.__annotations__["request"] = gr.Request
    return call


def _stopping(gr: Any, actions: Actions) -> Callable[..., None]:
    def call(request: Any) -> None:
        actions.stops.stop(request.session_hash)

    call.__annotations__["request"] = gr.Request
    return call


def _generator(answer: Callable[..., Iterator[Update]]) -> Callable[..., Iterator[Update]]:
    """A function that Gradio sees to be a generator, which it does not of a `partial`."""

    def call(*sent: object) -> Iterator[Update]:
        yield from answer(*sent)

    return call


def _html(gr: Any, text: str = "", **options: object) -> Component:
    return gr.HTML(text, js_on_load=None, **options)
