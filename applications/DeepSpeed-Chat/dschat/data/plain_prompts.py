# SPDX-License-Identifier: Apache-2.0
"""Prompts of plain text beside a tokenizer with a chat template, which is written around messages alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.data.encoding import special_ids
from dschat.data.rows import Row
from dschat.models.templates import TemplateRefusal, apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "dschat-probe"  # a message's text, found again in what the template writes


@dataclass(frozen=True)
class TemplateMarks:
    """What a chat template writes around a user's message."""

    special: tuple[str, ...]  # names of the special tokens in it, BOS left out
    end: str  # what it writes behind the message, up to the reply, without space at either end

    def are_in(self, text: str) -> bool:
        """Whether somebody has written the template's marks into a text."""
        return any(name in text for name in self.special) or bool(self.end and text.rstrip().endswith(self.end))


def template_marks(tokenizer: PreTrainedTokenizerBase) -> TemplateMarks:
    """The marks of the tokenizer's chat template; none where it refuses a single message of the user."""
    try:
        whole = apply_template(tokenizer, [{"role": "user", "content": PROBE}], True)
    except TemplateRefusal:
        return TemplateMarks((), "")
    before, _, behind = whole.rpartition(PROBE)
    names = {str(tokenizer.convert_ids_to_tokens(number)) for number in special_ids(tokenizer)}
    written = sorted(name for name in names - {tokenizer.bos_token} if name in before + behind)
    return TemplateMarks(tuple(written), behind.strip())


def plain_prompt_note(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool
) -> str | None:
    """What somebody should know of plain-text prompts and the chat template, with the remedy; None where all is well.

    Args:
        rows: as they are read.
        tokenizer: of the model.
        apply_chat_template: whether prompts of plain text became messages (`--apply_chat_template`).

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
    plain = [row.origin for row in rows if row.prompt is not None and not marks.are_in(row.prompt)]
    if not plain:
        return None
    return (
        f"{len(plain)} prompts of {len(rows)} are plain text, and the tokenizer's chat template is not written around "
        f"them (first: {plain[0]}): a chat model reads them in another form than it was trained on. "
        "--apply_chat_template writes each as a message of the user and its response as the assistant's"
    )


def warn_of_plain_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> None:
    """Warns of what `plain_prompt_note` finds. Raises UserError as it does."""
    note = plain_prompt_note(rows, tokenizer, apply_chat_template)
    if note is not None:
        logger.warning("%s.", note)


def _is_one_message(row: Row) -> bool:
    return row.messages is not None and [message["role"] for message in row.messages] == ["user"]


def _text_of(row: Row) -> str:
    return str(row.messages[0].get("content") or "") if row.messages else ""
