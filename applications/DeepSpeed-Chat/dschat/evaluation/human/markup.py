# SPDX-License-Identifier: Apache-2.0
"""HTML of the human page. Every text that is not ours goes through `escaped`."""

from collections.abc import Iterable

from dschat.common.display import for_reading
from dschat.evaluation.human.guidelines import guidelines
from dschat.evaluation.human.session import View

# Characters that mean something to HTML, to JavaScript's and Handlebars' templates or to Gradio's placeholders.
SPECIAL = str.maketrans({char: f"&#{ord(char)};" for char in "&<>\"'`${}@\\"})


def escaped(text: str) -> str:
    """The text as HTML that shows it, character for character."""
    return text.translate(SPECIAL)


def item_html(view: View) -> str:
    """Prompt and the two responses side by side; nothing if there is no item."""
    if view.item is None:
        return ""
    first, second = (
        _text("response", f"Response {name}", text) for name, text in zip("AB", view.item.responses, strict=True)
    )
    return (
        f'<article class="human-item" data-item="{view.item.pair.id}">'
        f'{_text("prompt", "Prompt", view.item.pair.prompt)}<div class="human-pair">{first}{second}</div></article>'
    )


def progress_html(view: View, rater: str) -> str:
    """Where the rater stands, and who it is."""
    place = f"{view.voted + 1} of {view.total}" if view.item else f"{view.total} of {view.total}"
    return (
        f'<div class="human-progress"><span class="human-place">{place}</span>'
        f'<progress value="{view.voted}" max="{view.total}" aria-label="voted"></progress>'
        f'<span class="human-rater">{escaped(rater)} <a href="?">change rater</a></span></div>'
    )


def guidelines_html(dataset: str) -> str:
    """The guidelines as a list, of which some are lists."""
    points = (escaped(text) + (_list(map(escaped, parts)) if parts else "") for text, parts in guidelines(dataset))
    return f'<div class="human-guidelines">{_list(points)}</div>'


def note_html(text: str) -> str:
    """A message to the rater, read aloud by screen readers."""
    return f'<p class="human-note" role="status">{escaped(text)}</p>' if text else ""


def done_html(view: View) -> str:
    """What is said at the end. Who won is not said: other raters may still be voting."""
    return (
        f'<div class="human-done"><h2>All {view.total} done. Thank you!</h2>'
        "<p>Every vote is saved; you can close this page.</p></div>"
    )


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _text(kind: str, title: str, text: str) -> str:
    return (
        f'<section class="human-{kind}"><h2>{title}</h2>'
        f'<pre dir="auto" tabindex="0" aria-label="{title}">{escaped(for_reading(text))}</pre></section>'
    )
