# SPDX-License-Identifier: Apache-2.0
"""Notes on data before training: responses, prompts and columns; those on chat templates are in template_notes.py."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.data.formats import unread_columns
from dschat.data.messages import TEMPLATE_COLUMNS, has_further_fields, message_text
from dschat.data.rows import BOTH_RESPONSES, ResponseColumn, Row, in_words
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LABELS = ("label", "kto_tag")  # columns of KTO data: whether the response is a good one
LONG_PROMPT = 20  # minimum prompt length in characters at which a repeated prompt is no coincidence
# Step → the responses that it reads.
RESPONSES_OF_STEPS: Mapping[int, Sequence[ResponseColumn]] = {1: ("chosen",), 2: BOTH_RESPONSES, 3: ()}
UNREAD_COLUMNS = "columns that neither prompts nor responses are made of"
# Columns that users may expect to change the prompt.
EXPECTED = (
    *TEMPLATE_COLUMNS,
    "functions",
    "system",
    "system_prompt",
    "enable_thinking",
    "images",
    "videos",
    "audios",
    # Columns of instructions.
    "input",
    "context",
    "history",
)


def response_notes(rows: Sequence[Row], columns: Sequence[ResponseColumn] = BOTH_RESPONSES) -> dict[str, str]:
    """Notes on responses that are empty, labelled as bad ones in data for KTO, or repeat their plain-text prompt.

    The last note is made if at least half of the rows repeat it: training would read the prompt twice.
    """
    empty = []
    labelled = []
    repeated = []
    for row in rows:
        replies = row.replies(columns)
        texts = [message_text(reply) for reply in replies]
        for reply, text in zip(replies, texts, strict=True):
            if not text.strip() and not has_further_fields(reply):
                empty.append(row.origin)
        if row.chosen is not None and any(_is_false(row.extra.get(column)) for column in LABELS):
            labelled.append(row.origin)
        prompt = (row.prompt or "").strip()
        if len(prompt) >= LONG_PROMPT and any(text.lstrip().startswith(prompt) for text in texts):
            repeated.append(row.origin)
    notes = {}
    if empty:
        first = ", ".join(dict.fromkeys(empty[:3]))
        notes["empty"] = f"{len(empty)} responses without any text, which end at once (first: {first})"
    if labelled:
        notes["labelled"] = (
            f"{len(labelled)} of {len(rows)} responses are labelled false ({' or '.join(LABELS)}, as in data for KTO),"
            f" and step 1 trains on them like on the others (first: {labelled[0]})"
        )
    if repeated and 2 * len(repeated) >= len(rows):
        notes["repeated"] = (
            f"the responses of {len(repeated)} of {len(rows)} rows begin with their prompt, so that training would "
            f"read the prompt twice (first: {repeated[0]})"
        )
    return notes


def _is_false(label: object) -> bool:
    """Whether a label says false, also as the text in a CSV cell; a number may be a class."""
    return label is False or (isinstance(label, str) and label.strip().lower() == "false")


def warn_of_responses(rows: Sequence[Row], chosen_alone: bool) -> None:
    """Logs the notes of `response_notes` as warnings.

    `chosen_alone`: the step trains on the chosen responses, whatever their labels, and reads no others.
    """
    notes = response_notes(rows, ("chosen",) if chosen_alone else BOTH_RESPONSES)
    if not chosen_alone:
        notes.pop("labelled", None)
    for note in notes.values():
        logger.warning("%s; correct or remove these rows if that is not intended", note)


def plain_prompt_note(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool
) -> str | None:
    """A note on prompts of plain text and the chat template, with the remedy; None if there is nothing to note.

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
    from dschat.data.template_notes import template_marks

    special_tokens, end = template_marks(tokenizer)
    marked = []
    plain = []
    for row in rows:
        text = row.prompt
        if text is None and row.messages and [message["role"] for message in row.messages] == ["user"]:
            text = str(row.messages[0].get("content") or "")
        if text is None:
            continue
        is_marked = any(token in text for token in special_tokens) or (end != "" and text.rstrip().endswith(end))
        if row.prompt is None and is_marked:
            marked.append(row.origin)
        elif row.prompt is not None and not is_marked:
            plain.append(row.origin)
    if apply_chat_template and marked:
        return (
            f"{len(marked)} prompts of {len(rows)} hold the chat template's marks in their text already, and "
            f"--apply_chat_template writes it around them once more (first: {marked[0]}): drop the flag, or remove "
            "the marks from the texts"
        )
    if plain and not apply_chat_template:
        return (
            f"{len(plain)} prompts of {len(rows)} are plain text, and the tokenizer's chat template is not written "
            f"around them (first: {plain[0]}): a chat model reads them in another form than it was trained on. "
            "--apply_chat_template writes each as a message of the user and its response as the assistant's"
        )
    return None


def warn_of_plain_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> None:
    """Logs the note of `plain_prompt_note` as a warning. Raises UserError as that function does."""
    note = plain_prompt_note(rows, tokenizer, apply_chat_template)
    if note is not None:
        logger.warning("%s.", note)


def warn_of_template(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int | None = None,
    keys: ColumnFlags | None = None,
    reads: Sequence[str] = (),
    responses: Sequence[ResponseColumn] = BOTH_RESPONSES,
) -> None:
    """Logs the notes of `template_notes` as warnings, and unread columns.

    Unread columns that nobody expects in a prompt are logged as information.
    """
    if tokenizer.chat_template is not None and any(row.messages is not None for row in rows):
        from dschat.data.template_notes import template_notes

        for note in template_notes(tokenizer, rows, end_id, reads, responses):
            logger.warning("%s", note)
    _log_columns(unread_column_counts(rows, keys or ColumnFlags(), reads))


def _log_columns(columns: Mapping[str, int]) -> None:
    for are_expected, level in ((True, logging.WARNING), (False, logging.INFO)):
        counts = {name: count for name, count in columns.items() if (name in EXPECTED) == are_expected}
        if counts:
            logger.log(level, "%s: %s", UNREAD_COLUMNS, in_words(counts))


def warn_of_dialogues(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], keys: ColumnFlags) -> None:
    """Warns of what replayed dialogues leave out: they keep only role and content of messages."""
    from dschat.data.template_notes import dialogue_notes

    for note in dialogue_notes(tokenizer, rows):
        logger.warning("%s", note)
    _log_columns(unread_column_counts(rows, keys))


def unread_column_counts(rows: Iterable[Row], keys: ColumnFlags, reads: Sequence[str] = ()) -> Counter[str]:
    """Column → number of rows with a value in it, for columns that neither prompt nor responses are read from."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(column for column in unread_columns(row, keys) if column not in reads)
    return counts
