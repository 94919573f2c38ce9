# SPDX-License-Identifier: Apache-2.0
"""The chat template that is saved with a reward model: its text of a dialogue ends where the score was trained.

transformers reads a classifier's number at the last token. Many chat templates write a line break after the token that
ends a turn, or end turns with another token than training did, so that this number would be a meaningless one.
"""

from __future__ import annotations

Template = str | dict[str, str] | None

BEGIN = "{% set dialogue %}"
END = "{% endset %}{# A finished dialogue ends with the token at which the reward model was trained. #}"


def score_template(template: str, start: str, turn_end: str, trained_end: str) -> str:
    """A chat template that begins a dialogue with `start` and ends it with `trained_end` in place of `turn_end`.

    A dialogue that does not end with the assistant, and one with a generation prompt, are written as by `template`.
    """
    source = template.removesuffix("\n")  # Jinja drops the line break that ends a template's file
    return (
        f"{BEGIN}{source}{END}{{% if add_generation_prompt or messages[-1].role != 'assistant' %}}{{{{ dialogue }}}}"
        f"{{% else %}}{{{{ {start!r} ~ dialogue.removesuffix({turn_end!r}) ~ {trained_end!r} }}}}{{% endif %}}"
    )


def original_template(template: Template) -> Template:
    """The template that `score_template` was given; any other one, or one of several, as it is."""
    if isinstance(template, str) and template.startswith(BEGIN) and END in template:
        return template.removeprefix(BEGIN).rpartition(END)[0]
    return template
