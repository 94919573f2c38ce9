# SPDX-License-Identifier: Apache-2.0
"""The page: choosers of run and checkpoint, a chat or a form for posts, and the sampling panel."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any

from dschat.base.errors import UserError
from dschat.base.web_page import Component, gradio, launch
from dschat.demo.actions import LEGEND, Actions, Update, status_html
from dschat.demo.models import find_models
from dschat.demo.options import PASSWORD
from dschat.demo.session import CHAT_EXAMPLE, SUMMARY_EXAMPLE, Session
from dschat.evaluation.macro_actions import STYLE

TITLES = {"chat": "Chat", "summary": "Summaries"}
MODEL_LABELS = ("Model", "Other model")
HEIGHT_BESIDE_CHAT = (400, 600)  # pixels of everything on the page but the chat, with one model and with two
QUIET_EVENT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
UNQUEUED_EVENT: dict[str, Any] = {"queue": False, **QUIET_EVENT}


def serve(session: Session) -> tuple[Component, str]:
    """Opens the page; returns Gradio's object and the address. Its server ends with the process or with `close()`.

    Raises:
        UserError: Gradio is not installed, or the address cannot be listened on.
    """
    options = session.options
    page = build(session)
    style = (resources.files("dschat.demo") / "demo.css").read_text(encoding="utf-8")
    password = os.environ.get(PASSWORD)
    demo = options.demo
    address = launch(page, f"{STYLE}\n{style}", port=demo.port, host=demo.host, password=password)
    return page, address


def build(session: Session) -> Component:
    """The page as Gradio Blocks."""
    task = session.task
    sides = session.options.demo.sides
    gr = gradio(f"dschat demo {task}")
    actions = Actions(gr, session)
    with gr.Blocks(title=TITLES[task], analytics_enabled=False, fill_width=True) as blocks:
        for side in range(sides):
            _add_chooser(gr, actions, side)
        with gr.Row(elem_id="demo-main"):
            with gr.Column(scale=5, min_width=480):
                inputs = _add_chat(gr, actions) if task == "chat" else _add_form(gr, actions)
                buttons = _add_buttons(gr)
                actions.note = _html(gr, elem_id="demo-note")
                if task == "summary":
                    _add_summaries(gr, actions)
                legend = _html(gr, LEGEND, elem_id="demo-legend", visible=sides == 2)
            with gr.Column(scale=1, min_width=220, elem_id="demo-panel"):
                draw_box = _add_panel(gr, actions)
        _connect_draw_box(gr, actions, draw_box, legend)
        _connect(gr, actions, inputs, draw_box, buttons)
        blocks.unload(_make_stop_handler(gr, actions))
    return blocks


def _add_chooser(gr: Any, actions: Actions, side: int) -> None:
    """Adds the boxes that choose a model by its run folder and its name there, and its status line."""
    session = actions.session
    demo = session.options.demo
    key = ("model", "other")[side]
    path = (demo.model if side == 0 else demo.other) or ""
    choices = []
    if path:
        with suppress(UserError):  # the box starts without choices
            choices = [(model.name, model.path) for model in find_models(path)]

    with gr.Row(equal_height=True, elem_classes="demo-chooser"):
        name = MODEL_LABELS[side] if demo.sides == 2 else "Model"
        folder = gr.Textbox(
            path, label=f"{name}: run folder", placeholder="runs/…/step3-ppo", elem_id=f"demo-{key}-run", scale=4
        )
        find = gr.Button("Load run", elem_id=f"demo-{key}-find", min_width=120, scale=0)
        chooser = gr.Dropdown(
            choices, value=session.path(side), label="Checkpoint", elem_id=f"demo-{key}-checkpoint", scale=4
        )
        load = gr.Button("Load model", variant="primary", elem_id=f"demo-{key}-load", min_width=130, scale=0)
    status = _html(gr, status_html(session.status(side)), elem_id=f"demo-{key}-status")
    actions.folders.append(folder)
    actions.choosers.append(chooser)
    actions.statuses.append(status)

    find_handler = partial(actions.find, side)
    for event in (find.click, folder.submit):
        event(find_handler, inputs=folder, outputs=[chooser, status], **QUIET_EVENT)
    load_handler = _as_generator(partial(actions.load, side))
    load.click(load_handler, inputs=chooser, outputs=status, **QUIET_EVENT)


def _add_chat(gr: Any, actions: Actions) -> list[Component]:
    """Adds the conversations, side by side, and the box of the next message; returns the inputs of an answer."""
    sides = actions.session.options.demo.sides
    with gr.Row():
        for side in range(sides):
            with gr.Column(min_width=240):
                if sides == 2:
                    _html(gr, f"<h2>{MODEL_LABELS[side]}</h2>")
                chat = gr.Chatbot(
                    show_label=False,
                    elem_id=f"demo-chat-{side}",
                    height=f"max(260px, 100vh - {HEIGHT_BESIDE_CHAT[sides - 1]}px)",
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
    actions.message = message
    actions.state = gr.State(actions.session.new_chat())
    return [actions.state, message]


def _add_form(gr: Any, actions: Actions) -> list[Component]:
    """Adds the boxes of a post; returns the inputs of an answer."""
    with gr.Row():
        subreddit = gr.Textbox(label="Subreddit", placeholder="AskReddit", elem_id="demo-subreddit")
        title = gr.Textbox(label="Title (optional; the published data have none)", elem_id="demo-title")
    post = gr.Textbox(label="Post", lines=8, max_lines=8, elem_id="demo-post")
    actions.form = [subreddit, title, post]
    return list(actions.form)


def _add_summaries(gr: Any, actions: Actions) -> None:
    """Adds the summaries, side by side."""
    sides = actions.session.options.demo.sides
    with gr.Row():
        for side in range(sides):
            with gr.Column(min_width=240):
                name = MODEL_LABELS[side] if sides == 2 else "TL;DR"
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
    """Adds the sampling panel; returns the box that turns the drawing of macro actions on."""
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
        "top_p": gr.Slider(min(0.01, choice.top_p), 1, choice.top_p, step=0.01, label="Top-p", elem_id="demo-top-p"),
        "max_new_tokens": gr.Number(
            choice.max_new_tokens, label="Max new tokens", precision=0, minimum=1, elem_id="demo-max-new-tokens"
        ),
    }
    load = gr.Button("Load from run", elem_id="demo-own", size="sm")
    actions.source = _html(gr, elem_id="demo-source")
    outputs = [*actions.panel.values(), actions.source]
    load.click(actions.load_sampling, inputs=actions.choosers[0], outputs=outputs, **QUIET_EVENT)
    compares_models = actions.session.options.demo.sides == 2
    return gr.Checkbox(compares_models, label="Draw macro actions", elem_id="demo-draw")


def _connect_draw_box(gr: Any, actions: Actions, draw_box: Component, legend: Component) -> None:
    """Shows or hides the legend, and the macro actions of answers that are there already."""
    draw_box.change(lambda is_on: gr.update(visible=is_on), inputs=draw_box, outputs=legend, **UNQUEUED_EVENT)
    if actions.session.task == "chat":
        inputs = [actions.state, draw_box]
        draw_box.change(actions.show, inputs=inputs, outputs=actions.answers, **UNQUEUED_EVENT)


def _connect(
    gr: Any, actions: Actions, inputs: list[Component], draw_box: Component, buttons: dict[str, Component]
) -> None:
    """Binds the events of the chat or the form."""
    is_chat = actions.session.task == "chat"
    changed = [*actions.answers, actions.note]
    submits = [buttons["submit"].click]
    if is_chat:
        changed += [actions.state, actions.message]
        submits.append(actions.message.submit)

    def set_busy(is_busy: bool) -> Update:
        updates: Update = {}
        for name, button in buttons.items():
            updates[button] = gr.update(interactive=is_busy if name == "stop" else not is_busy)
        return updates

    # Submit: lock the buttons, answer, unlock them.
    all_buttons = list(buttons.values())
    # One event for the button and the box, so that a message cannot be sent while an answer grows.
    submitted = gr.on(submits, partial(set_busy, True), outputs=all_buttons, **UNQUEUED_EVENT)
    answering = submitted.then(
        _make_answer_handler(gr, actions.chat if is_chat else actions.summary),
        inputs=[*inputs, draw_box, *actions.panel.values()],
        outputs=changed,
        concurrency_limit=None,  # the session has its own lock, and a waiting answer can be stopped
        **QUIET_EVENT,
    )
    answering.then(partial(set_busy, False), outputs=all_buttons, **UNQUEUED_EVENT)
    buttons["stop"].click(_make_stop_handler(gr, actions), **UNQUEUED_EVENT)

    if is_chat:
        example: Update = {actions.message: CHAT_EXAMPLE}
    else:
        example = dict(zip(actions.form, SUMMARY_EXAMPLE, strict=True))
    buttons["example"].click(lambda: example, outputs=list(example), **UNQUEUED_EVENT)
    cleared = [*changed, *actions.form]
    buttons["clear"].click(actions.cleared, outputs=cleared, **UNQUEUED_EVENT)


def _make_answer_handler(gr: Any, answer: Callable[..., Iterator[Update]]) -> Callable[..., Iterator[Update]]:
    """A generator with the browser's name; Gradio knows the request parameter by its annotation."""

    def handle(request: Any, *values: object) -> Iterator[Update]:
        yield from answer(*values, browser=request.session_hash)

    handle.__annotations__["request"] = gr.Request
    return handle


def _make_stop_handler(gr: Any, actions: Actions) -> Callable[..., None]:
    """A handler that stops the answers of a browser."""

    def handle(request: Any) -> None:
        actions.stops.stop(request.session_hash)

    handle.__annotations__["request"] = gr.Request
    return handle


def _as_generator(handler: Callable[..., Iterator[Update]]) -> Callable[..., Iterator[Update]]:
    """A generator function; Gradio does not recognise a `partial` as one."""

    def handle(*values: object) -> Iterator[Update]:
        yield from handler(*values)

    return handle


def _html(gr: Any, text: str = "", **options: object) -> Component:
    """Adds HTML, without the script that Gradio runs on every click by default."""
    return gr.HTML(text, js_on_load=None, **options)
