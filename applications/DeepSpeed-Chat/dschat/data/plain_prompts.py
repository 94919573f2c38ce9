# SPDX-License-Identifier: Apache-2.0
"""Notes on prompts of plain text for a tokenizer with a chat template, which is written only around messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.models.templates import TemplateRefusal, apply_template
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "dschat-probe"  # a message whose text is located in the output of the template


@dataclass(frozen=True)
class TemplateMarks:
    """The text that a chat template writes around a user's message."""

    special: tuple[str, ...]  # its special tokens, without BOS
    end: str  # the text between the message and the reply, stripped

    def are_in(self, text: str) -> bool:
        """Whether a text holds the template's marks already."""
        if any(token in text for token in self.special):
            return True
        return bool(self.end) and text.rstrip().endswith(self.end)


def template_marks(tokenizer: PreTrainedTokenizerBase) -> TemplateMarks:
    """The marks of the tokenizer's chat template; none if it refuses a single message of the user."""
    try:
        whole = apply_template(tokenizer, [{"role": "user", "content": PROBE}], True)
    except TemplateRefusal:
        return TemplateMarks((), "")
    before, _, after = whole.rpartition(PROBE)
    tokens = {str(token) for token in tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer)))}
    tokens.discard(str(tokenizer.bos_token))
    written = sorted(token for token in tokens if token in before + after)
    return TemplateMarks(tuple(written), after.strip())


def plain_prompt_note(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool
) -> str | None:
    """A note on plain-text prompts and the chat template, with the remedy; None if there is nothing to note.

    Args:
        rows: rows as read from the source.
        tokenizer: tokenizer of the model.
        apply_chat_template: whether prompts of plain text were made messages (`--apply_chat_template`).

    Raises:
        UserError: `--apply_chat_template` without a chat template.
    """
    if tokenizer.chat_template is None:
        if not apply_chat_template:
            return None
        raise UserError(
            f"--apply_chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template. Drop the flag, "
            "or give a model whose folder holds chat_template.jinja."
        )
    marks = template_marks(tokenizer)
    if apply_chat_template:
        doubled = [row.origin for row in rows if _is_one_message(row) and marks.are_in(_text_of(row))]
        if not doubled:
            return None
        return (
            f"{len(doubled)} prompts of {len(rows)} hold the chat template's marks in their text already, and "
            f"--apply_chat_template writes it around them once more (first: {doubled[0]}): drop the flag, or remove "
            "the marks from the texts"
        )
    plain = []
    for row in rows:
        if row.prompt is not None and not marks.are_in(row.prompt):
            plain.append(row.origin)
    if not plain:
        return None
    return (
        f"{len(plain)} prompts of {len(rows)} are plain text, and the tokenizer's chat template is not written around "
        f"them (first: {plain[0]}): a chat model reads them in another form than it was trained on. "
        "--apply_chat_template writes each as a message of the user and its response as the assistant's"
    )


def warn_of_plain_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> None:
    """Logs the note of `plain_prompt_note` as a warning. Raises UserError as that function does."""
    note = plain_prompt_note(rows, tokenizer, apply_chat_template)
    if note is not None:
        logger.warning("%s.", note)


def _is_one_message(row: Row) -> bool:
    return row.messages is not None and [message["role"] for message in row.messages] == ["user"]


def _text_of(row: Row) -> str:
    return str(row.messages[0].get("content") or "") if row.messages else ""
