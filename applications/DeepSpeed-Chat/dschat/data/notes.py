# SPDX-License-Identifier: Apache-2.0
"""Notes on data before training: responses, prompts, and what the chat template leaves out or writes otherwise.

A field of messages counts as written if the template's text changes without it. That is tried on the first messages
that have the field, at most PROBES of a kind, and assumed for all.
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.formats import unread_columns
from dschat.data.messages import (
    DOCUMENTS,
    EMPTY,
    TEMPLATE_COLUMNS,
    TEMPLATE_VARIABLES,
    THOUGHT_END,
    TOOL_CALLS,
    TOOLS,
    has_further_fields,
    message_text,
)
from dschat.data.rows import BOTH_RESPONSES, ResponseColumn, Row, in_words
from dschat.data.turn_end import QUESTION, template_form, turn_end, where_texts_differ
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.settings.common import ColumnFlags
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "dschat-probe"  # a message whose text is located in the output of the template
PROBES = 8  # cases of a kind that are tried
LABELS = ("label", "kto_tag")  # columns of KTO data: whether the response is a good one
LONG_PROMPT = 20  # minimum prompt length in characters at which a repeated prompt is no coincidence
# Step → the responses that it reads.
RESPONSES_OF_STEPS: Mapping[int, Sequence[ResponseColumn]] = {1: ("chosen",), 2: BOTH_RESPONSES, 3: ()}
UNREAD_COLUMNS = "columns that neither prompts nor responses are made of"
NOT_IN_TEMPLATE = "the chat template does not write"
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
        replies = _replies(row, columns)
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
    special_tokens, end = _template_marks(tokenizer)
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


def _template_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str]:
    """What a chat template writes around a user's message: special tokens without BOS, and the stripped text behind.

    Nothing if it refuses a single message of the user.
    """
    try:
        whole = apply_template(tokenizer, [{"role": "user", "content": PROBE}], True)
    except TemplateRefusal:
        return [], ""
    before, _, after = whole.rpartition(PROBE)
    tokens = {str(token) for token in tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer)))}
    tokens.discard(str(tokenizer.bos_token))
    return sorted(token for token in tokens if token in before + after), after.strip()


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
    for note in template_notes(tokenizer, rows, end_id, reads, responses):
        logger.warning("%s", note)
    _log_columns(unread_column_counts(rows, keys or ColumnFlags(), reads))


def _log_columns(columns: Mapping[str, int]) -> None:
    for are_expected, level in ((True, logging.WARNING), (False, logging.INFO)):
        counts = {name: count for name, count in columns.items() if (name in EXPECTED) == are_expected}
        if counts:
            logger.log(level, "%s: %s", UNREAD_COLUMNS, in_words(counts))


def template_notes(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int | None = None,
    reads: Sequence[str] = (),
    responses: Sequence[ResponseColumn] = BOTH_RESPONSES,
) -> list[str]:
    """Notes on the chat template, a line each; empty if there is nothing to note or no row holds messages.

    Args:
        tokenizer: tokenizer of the model.
        rows: rows of the data.
        end_id: the token that ends a response in training; None if no response is trained on.
        reads: fields of messages that the step itself reads: `weight`.
        responses: the responses that the step reads; step 3 reads none.
    """
    conversations = [row for row in rows if row.messages is not None]
    if tokenizer.chat_template is None or not conversations:
        return []
    notes = [] if end_id is None else _notes_of_turns(tokenizer, conversations, end_id)
    unwritten = unwritten_parts(tokenizer, conversations, reads, responses)
    if unwritten:
        notes.append(f"{NOT_IN_TEMPLATE}: {in_words(unwritten)}")
    return notes


def _replies(row: Row, columns: Sequence[ResponseColumn]) -> list[dict[str, Any]]:
    """Responses of a row as messages."""
    replies = [row.reply(column) for column in columns]
    return [reply for reply in replies if reply is not None]


def _notes_of_turns(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row], end_id: int | None) -> list[str]:
    """Notes on how the template writes turns, each once: their end, and where training reads other text.

    It is asked without arguments, and with those of the first row of every form of turns, at most PROBES times. A
    template that refuses a plain dialogue is not asked. `end_id`: the token that ends a response in training; None if
    the template's own does.
    """
    cases: dict[str, tuple[str, Mapping[str, Any]]] = {"": ("", {})}  # condition, for notes, and arguments
    for row in rows:
        if row.template_arguments:
            condition = f"with {' and '.join(row.template_arguments)} of {row.origin}, "
            cases.setdefault(template_form(row), (condition, row.template_arguments))
    notes: dict[str, str] = {}
    for condition, arguments in islice(cases.values(), PROBES):
        try:
            end = turn_end(tokenizer, arguments)
        except UserError:
            continue
        if end_id is not None and end.written and end.token_id != end_id:
            training_token = str(tokenizer.convert_ids_to_tokens(end_id))
            note = (
                f"the chat template ends the assistant's turns with {end.token}, but in training a response ends with "
                f"{training_token}: earlier turns and responses end differently. --end_of_conversation_token "
                f"{shlex.quote(end.token)} ends both with the template's"
            )
            notes.setdefault(note, condition + note)
        prompt = apply_template(tokenizer, QUESTION, True, arguments)
        written = apply_template(tokenizer, [*QUESTION, {"role": "assistant", "content": "b"}], False, arguments)
        if not written.startswith(prompt):  # the generation prompt opens a thought, for instance
            trained_end, written_end = where_texts_differ(f"{prompt}{end.lead}b", written)
            note = (
                f"for the user's 'a' and the assistant's 'b' training reads {trained_end!r}, but the chat template "
                f"writes {written_end!r}: begin responses with what follows the generation prompt, such as a thought"
            )
            notes.setdefault(note, condition + note)
    return list(notes.values())


def warn_of_dialogues(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], keys: ColumnFlags) -> None:
    """Warns of what replayed dialogues leave out: they keep only role and content of messages."""
    unread: Counter[str] = Counter()
    for row in rows:
        if row.messages is not None:
            unread.update(part.name for part in _parts(row, (), BOTH_RESPONSES) if part.field != "content")
    if unread:
        logger.warning("dialogues keep role and content of messages alone, and leave out: %s", in_words(unread))
    for note in _notes_of_turns(tokenizer, [], None):
        logger.warning("%s", note)
    _log_columns(unread_column_counts(rows, keys))


def unread_column_counts(rows: Iterable[Row], keys: ColumnFlags, reads: Sequence[str] = ()) -> Counter[str]:
    """Column → number of rows with a value in it, for columns that neither prompt nor responses are read from."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(column for column in unread_columns(row, keys) if column not in reads)
    return counts


def unwritten_parts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    reads: Sequence[str] = (),
    responses: Sequence[ResponseColumn] = BOTH_RESPONSES,
) -> dict[str, int]:
    """Parts of rows that the chat template leaves out → number of messages, or rows, that have them.

    Args:
        tokenizer: with a chat template.
        rows: with messages.
        reads: fields of messages that count as read in any case.
        responses: the responses that are looked at.
    """
    counts: Counter[str] = Counter()
    num_probes: Counter[str] = Counter()
    written_names: set[str] = set()
    for row in rows:
        for part in _parts(row, reads, responses):
            counts[part.name] += 1
            if part.name in written_names or num_probes[part.name] >= PROBES:
                continue
            num_probes[part.name] += 1
            if part.is_written(tokenizer):
                written_names.add(part.name)
    return {name: count for name, count in counts.items() if name not in written_names}


@dataclass(frozen=True)
class _Part:
    """A part of a conversation that a chat template could leave out: it is written if the text changes without it."""

    name: str  # in the note
    whole: Row  # its messages are the conversation, up to the response that the part belongs to
    without: Row
    field: str  # of the message, or name of the column or variable

    def is_written(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the template's text changes without the part."""
        if self.field in self.whole.template_arguments and self.field not in (TOOLS, DOCUMENTS):
            # The text does not change if the variable has its default value, so the template's source is searched.
            return self.field in str(tokenizer.chat_template)
        try:
            return _text_of(tokenizer, self.whole) != _text_of(tokenizer, self.without)
        except TemplateRefusal:  # refused without the part; a refusal of the row is reported elsewhere
            return True


def _text_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The template's text of a row's messages, with a generation prompt unless the last is the assistant's."""
    messages = row.messages or []
    needs_prompt = messages[-1]["role"] != "assistant"
    return apply_template(tokenizer, messages, needs_prompt, row.template_arguments)


def _parts(row: Row, reads: Sequence[str], responses: Sequence[ResponseColumn]) -> Iterator[_Part]:
    """The parts of a row's variables, messages and responses; `reads` are fields of messages that are no parts."""
    for name in row.template_arguments:
        column = name if name in (TOOLS, DOCUMENTS) else f"{TEMPLATE_VARIABLES}.{name}"
        without = replace(row, template_arguments=_without(row.template_arguments, name))
        yield _Part(f"column {column!r}", row, without, name)
    messages = row.messages or []
    for index, message in enumerate(messages):
        # Templates treat a system prompt at the beginning and later ones differently.
        order = "later" if message["role"] == "system" and index > 0 else "earlier"
        yield from _parts_of(row, index, f"{order} {message['role']} messages", reads)
    for reply in _replies(row, responses):
        yield from _parts_of(replace(row, messages=[*messages, reply]), len(messages), "responses", reads)


def _parts_of(row: Row, index: int, who: str, reads: Sequence[str]) -> Iterator[_Part]:
    """The parts of one message; `who` says in notes which kind of message it is."""
    messages = row.messages or []
    message = messages[index]

    def part(name: str, field: str, shortened: dict[str, Any]) -> _Part:
        others = [*messages[:index], shortened, *messages[index + 1 :]]
        return _Part(name, row, replace(row, messages=others), field)

    for field, value in message.items():
        if value in EMPTY or field in ("role", "content", *reads):
            continue
        # Templates refuse a message with neither content nor calls.
        yield part(f"{field!r} of {who}", field, {"content": "", **_without(message, field)})
        if field == TOOL_CALLS and len(value) > 1:
            yield part(f"{field!r} after the first of {who}", field, {**message, field: value[:1]})
    thought, mark, answer = str(message.get("content") or "").rpartition(THOUGHT_END)
    if thought.strip():
        is_trained = who == "responses" and TOOL_CALLS not in message
        name = f"thoughts in the content of {who}" + (", which are trained on all the same" if is_trained else "")
        yield part(name, "content", {**message, "content": answer})
    if answer.strip():
        yield part(f"the content of {who}", "content", {**message, "content": thought + mark})


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
