# SPDX-License-Identifier: Apache-2.0
"""What the page shows of models and answers. Every text that is not ours is escaped."""

from html import escape

from dschat.common.display import EMPTY, visible
from dschat.demo.session import Reply
from dschat.macro_view.html import legend_html, macro_spans

# Characters that mean something to JavaScript's and Handlebars' templates or to Gradio's placeholders.
TEMPLATES = str.maketrans({char: f"&#{ord(char)};" for char in "`${}@\\"})
LEGEND = legend_html(numbers=False)


def text_html(text: str) -> str:
    """A text as it stands, for Gradio's chat, which lets some HTML through even where Markdown is off."""
    return escape(visible(text), quote=False)


def status_html(text: str, failed: bool = False) -> str:
    """A status line, read aloud by screen readers."""
    kind = "demo-status demo-failed" if failed else "demo-status"
    return f'<p class="{kind}" role="status">{_safe(escape(visible(text)))}</p>'


def answer_html(reply: Reply, draw: bool) -> str:
    """A whole answer's caption; if wanted, below the answer with its macro actions.

    Args:
        reply: done.
        draw: show the macro actions, which say all that the answer says.
    """
    if not (draw and reply.tokens):
        return _safe(f'<p class="demo-caption">{escape(reply.caption)}</p>')
    count = reply.tokens[-1].macro_action + 1
    caption = f"{reply.caption} · {count} macro action{'' if count == 1 else 's'}"
    return _safe(f'{macro_spans(reply.tokens)}<p class="demo-caption">{escape(caption)}</p>')


def summary_html(reply: Reply, draw: bool) -> str:
    """An answer by itself, as far as it is there."""
    text = _safe(escape(visible(reply.text).strip() or (EMPTY if reply.done else "…")))
    plain = "" if draw and reply.tokens else f'<pre class="demo-text" dir="auto">{text}</pre>'
    return plain + (answer_html(reply, draw) if reply.done else "")


def _safe(html: str) -> str:
    return html.translate(TEMPLATES)
