# SPDX-License-Identifier: Apache-2.0
"""The page: Gradio's chat, in which every answer is one element with the models side by side.

Every text from users and models is escaped.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from dschat.base.display import EMPTY, visible
from dschat.base.errors import UserError
from dschat.base.web_page import Component, import_gradio
from dschat.demo.models import GrowingAnswer
from dschat.demo.sampling import SamplingChoice
from dschat.demo.session import Session, Turn, Turns
from dschat.evaluation.macro_actions import STYLE, legend_html, macro_spans

TITLES = {"chat": "Chat", "summary": "Summaries"}
EXAMPLE = "What should I look at when I buy a second-hand bicycle?"
# Characters with a meaning in JavaScript's and Handlebars' templates or in Gradio's placeholders.
TEMPLATES = str.maketrans({char: f"&#{ord(char)};" for char in "`${}@\\"})
PAGE_STYLE = """
.demo-sides { display: flex; flex-wrap: wrap; gap: 1.5rem; }
.demo-side { flex: 1; min-width: 240px; overflow-wrap: anywhere; }
.demo-side h2 { font-size: 0.95rem; margin: 0 0 0.25rem; }
.demo-text, .ma-text { white-space: pre-wrap; font: inherit; line-height: 1.55; margin: 0; }
.demo-caption { margin: 0.25rem 0 0; font-size: 0.85em; opacity: 0.75; }
.demo-failed { color: var(--error-text-color); font-weight: 600; }
"""
PAGE_STYLE = STYLE + PAGE_STYLE


def build(session: Session, task: str) -> Component:
    """The page as Gradio Blocks.

    Args:
        session: the loaded models.
        task: "chat", or "summary" of posts, which has boxes for a subreddit and a title.
    """
    gr = import_gradio(f"dschat demo {task}")
    with gr.Blocks(title=TITLES[task], analytics_enabled=False, fill_width=True) as blocks:
        turns = gr.State(())
        panel = _sampling_panel(gr, session.sampling)
        chatbot = gr.Chatbot(
            show_label=False,
            render_markdown=False,
            allow_tags=False,
            buttons=[],
            feedback_options=None,
            elem_id="demo-chat",
        )
        is_chat = task == "chat"
        boxes = [] if is_chat else [_box(gr, "Subreddit", "AskReddit"), _box(gr, "Title, if it has one", "")]
        gr.ChatInterface(
            _answer_function(gr, session, is_chat),
            chatbot=chatbot,
            textbox=_message_box(gr, is_chat),
            additional_inputs=[turns, *panel, *boxes],
            additional_inputs_accordion=gr.Accordion(
                "Sampling" if is_chat else "Subreddit, title and sampling", open=not is_chat, render=False
            ),
            additional_outputs=[turns],
            description=_html(legend_html()),
            api_visibility="private",
        )
    return blocks


def _sampling_panel(gr: Any, choice: SamplingChoice) -> list[Component]:
    """The boxes of the sampling settings, in the order of `SamplingChoice`."""
    return [
        gr.Number(choice.temperature, label="Temperature (0: greedy)", minimum=0, render=False),
        gr.Number(choice.top_k, label="Top-k (0: all)", precision=0, minimum=0, render=False),
        gr.Number(choice.top_p, label="Top-p", minimum=0.001, maximum=1, render=False),
        gr.Number(choice.max_new_tokens, label="Max new tokens", precision=0, minimum=1, render=False),
    ]


def _message_box(gr: Any, is_chat: bool) -> Component:
    """The box of the next message or post, with buttons that send it and stop the answer."""
    hint = f"Type a message, such as: {EXAMPLE}" if is_chat else "Paste a post; Shift+Enter sends it"
    lines = 1 if is_chat else 8
    return gr.Textbox(
        placeholder=hint,
        lines=lines,
        max_lines=8,
        show_label=False,
        container=False,
        submit_btn=True,
        stop_btn=True,
        elem_id="demo-message",
        render=False,
    )


def _box(gr: Any, label: str, placeholder: str) -> Component:
    return gr.Textbox(label=label, placeholder=placeholder, render=False)


def _answer_function(gr: Any, session: Session, is_chat: bool) -> Any:
    """The function of Gradio's chat: yields the answers as they grow, and the turns with them."""

    def answer(message: str, history: list[Any], turns: Turns, *values: Any) -> Iterator[tuple[Component, Turns]]:
        earlier = turns[: len(history) // 2]  # the page may have taken turns back
        try:
            if None in values[:4]:
                raise UserError("a box of the sampling panel is empty: fill it in.")
            choice = SamplingChoice(*values[:4])
            if is_chat:
                drafts = session.chat(earlier, message, choice)
            else:
                subreddit, title = values[4:]
                drafts = session.summary(subreddit, title, message, choice)
            for answers in drafts:
                html = answers_html([model.name for model in session.models], answers)
                yield gr.HTML(html, js_on_load=None), (*earlier, Turn(message, tuple(answers)))
        except UserError as error:
            html = _html(f'<p class="demo-failed" role="status">{escape(visible(str(error)))}</p>')
            yield gr.HTML(html, js_on_load=None), (*earlier, Turn(message, ()))

    return answer


def answers_html(names: Sequence[str], answers: Sequence[GrowingAnswer]) -> str:
    """The answers of all models to one message, side by side: the text, and once it is done its macro actions.

    Args:
        names: of the models, shown as headings if there are several.
        answers: one of each model.
    """
    columns = []
    for name, answer in zip(names, answers, strict=True):
        heading = f"<h2>{escape(visible(name))}</h2>" if len(names) > 1 else ""
        text = visible(answer.text).strip() or ("…" if answer.done is None else EMPTY)
        body = (
            macro_spans(answer.tokens) if answer.tokens else f'<pre class="demo-text" dir="auto">{escape(text)}</pre>'
        )
        caption = f'<p class="demo-caption">{escape(answer.caption)}</p>' if answer.done else ""
        columns.append(f'<div class="demo-side">{heading}{body}{caption}</div>')
    return _html(f'<div class="demo-sides">{"".join(columns)}</div>')


def _html(html: str) -> str:
    """HTML in which Gradio finds no template."""
    return html.translate(TEMPLATES)
