# SPDX-License-Identifier: Apache-2.0
"""Notes on a chat template before training: what it leaves out, and where training reads other text than it writes.

A field of messages counts as written if the template's text changes without it. That is tried on the first messages
that have the field, at most PROBES of a kind, and assumed for all.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.errors import UserError
from dschat.data.encoding import prompt_text
from dschat.data.formats import unread_columns
from dschat.data.messages import DOCUMENTS, EMPTY, TEMPLATE_COLUMNS, TEMPLATE_VARIABLES, TOOL_CALLS, TOOLS
from dschat.data.rows import Row, in_words
from dschat.data.turn_end import (
    PROBE,
    PROBES,
    THOUGHT_END,
    TurnEnd,
    has_thought,
    is_written,
    other_call_ends,
    other_turn_end,
    reply_text,
    template_cases,
    turn_end,
    turn_end_of,
)
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.settings.common import ColumnFlags
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CONTEXT = 200  # characters of a common beginning that notes show
ResponseColumn = Literal["chosen", "rejected"]
BOTH_RESPONSES: Sequence[ResponseColumn] = ("chosen", "rejected")
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
    surprising = {name: count for name, count in columns.items() if name in EXPECTED}
    if surprising:
        logger.warning("%s: %s", UNREAD_COLUMNS, in_words(surprising))
    others = {name: count for name, count in columns.items() if name not in EXPECTED}
    if others:
        logger.info("%s: %s", UNREAD_COLUMNS, in_words(others))


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
    conversations = [_with_responses(row, responses) for row in rows if row.messages is not None]
    if tokenizer.chat_template is None or not conversations:
        return []
    notes: list[str | None] = []
    if end_id is not None:
        notes.append(other_turn_end(tokenizer, conversations, end_id))
        notes += other_renderings(tokenizer, conversations)
        notes.append(_note_of_call_ends(tokenizer, conversations, end_id))
        notes.append(_note_of_second_thoughts(tokenizer, conversations))
    unwritten = unwritten_parts(tokenizer, conversations, reads)
    if unwritten:
        notes.append(f"{NOT_IN_TEMPLATE}: {in_words(unwritten)}")
    return [note for note in notes if note]


def _with_responses(row: Row, columns: Sequence[ResponseColumn]) -> Row:
    """The row without the responses that a step does not read."""
    if "chosen" not in columns:
        row = replace(row, chosen=None, chosen_message=None)
    if "rejected" not in columns:
        row = replace(row, rejected=None, rejected_message=None)
    return row


def _note_of_call_ends(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], end_id: int) -> str | None:
    """A note if the template ends tool calls with another token than training does."""
    training_end = str(tokenizer.convert_ids_to_tokens(end_id))
    counts = other_call_ends(tokenizer, rows)
    counts.pop(training_end, None)
    if not counts:
        return None
    return (
        "responses of tool calls that the chat template ends with another token, and training with "
        f"{training_end}: {in_words(counts)}"
    )


def _note_of_second_thoughts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> str | None:
    """A note if responses hold a thought though the generation prompt holds a closed one."""
    count = 0
    for row in rows:
        replies = []
        for reply in (row.reply("chosen"), row.reply("rejected")):
            if reply is not None:
                replies.append(reply)
        num_thoughts = sum(has_thought(reply) for reply in replies)
        if num_thoughts == 0:
            continue
        try:
            prompt = prompt_text(tokenizer, row)
        except UserError:  # reported elsewhere
            continue
        if prompt.rstrip().endswith(THOUGHT_END):
            count += num_thoughts
    if not count:
        return None
    return (
        "responses with a thought after a generation prompt that holds a closed one: "
        f"{count}; a thought in the content is trained on as a second one, one in a field of its own is lost. Remove "
        f"enable_thinking: false from {TEMPLATE_VARIABLES}, or the thoughts from the responses"
    )


def warn_of_dialogues(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], keys: ColumnFlags) -> None:
    """Warns of what replayed dialogues leave out: they keep only role and content of messages."""
    unread: Counter[str] = Counter()
    for row in rows:
        if row.messages is not None:
            unread.update(part.name for part in _parts(row, ()) if part.field != "content" and not part.kept)
    if unread:
        logger.warning("dialogues keep role and content of messages alone, and leave out: %s", in_words(unread))
    other = other_rendering(tokenizer)
    if other is not None:
        logger.warning("%s", other.note)
    _log_columns(unread_column_counts(rows, keys))


def unread_column_counts(rows: Iterable[Row], keys: ColumnFlags, reads: Sequence[str] = ()) -> Counter[str]:
    """Column → number of rows with a value in it, for columns that neither prompt nor responses are read from."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(column for column in unread_columns(row, keys) if column not in reads)
    return counts


def other_renderings(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row]) -> list[str]:
    """Notes of `other_rendering` for the `template_cases` of rows; a difference is noted once."""
    notes: dict[str, str] = {}
    for condition, arguments in template_cases(rows):
        other = other_rendering(tokenizer, arguments)
        if other is not None:
            notes.setdefault(other.difference, condition + other.note)
    return list(notes.values())


@dataclass(frozen=True)
class OtherRendering:
    """Where training reads other text than the chat template writes."""

    note: str
    difference: str  # the part of the note that does not depend on the conversation before the reply


def other_rendering(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> OtherRendering | None:
    """A note if training reads other text than the chat template writes for the user's "a" and the assistant's "b".

    None if both are the same, apart from the end of the turn (see `other_turn_end`), or if the template refuses this
    dialogue. `arguments`: additional variables of the template, such as tools.
    """
    question = Row(
        prompt=None,
        messages=PROBE[:1],
        chosen=None,
        rejected=None,
        extra={},
        origin="the chat template",
        template_arguments=dict(arguments or {}),
    )
    try:
        prompt = prompt_text(tokenizer, question)
        whole = apply_template(tokenizer, PROBE, False, arguments)
        has_generation_prompt = prompt != apply_template(tokenizer, PROBE[:1], False, arguments)
    except (TemplateRefusal, UserError):
        return None
    try:
        end = turn_end(tokenizer, arguments)
    except UserError:  # the reply does not follow the generation prompt; training reads the content alone
        end = None
    trained = prompt + reply_text(tokenizer, question, PROBE[1], prompt, end)
    if not whole.startswith(trained):
        return _note_of_texts(trained, whole, end)
    special_tokens = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    if end is not None and not has_generation_prompt and any(str(token) in end.lead for token in special_tokens):
        note = (
            f"the chat template has no generation prompt: {end.lead!r} before the assistant's text is part of the "
            "response, for the model to write. Use a template that reads add_generation_prompt"
        )
        return OtherRendering(note, difference=note)
    return None


def _note_of_texts(trained: str, written: str, end: TurnEnd | None) -> OtherRendering:
    """The note that shows both texts; a long common beginning, such as a list of tools, is shortened."""
    common_length = len(commonprefix([trained, written]))
    num_left_out = common_length - CONTEXT if common_length > 2 * CONTEXT else 0
    mark = "…" if num_left_out else ""
    remedy = ""
    if end is None:
        remedy = "; a reply does not follow its generation prompt: correct the template"
    elif end.prefill:
        remedy = f"; its generation prompt ends with {end.prefill!r}: begin responses with what follows it"
    note = (
        f"for the user's 'a' and the assistant's 'b' training reads {mark + trained[num_left_out:]!r}, but the chat "
        f"template writes {mark + written[num_left_out:]!r}{remedy}"
    )
    return OtherRendering(note, difference=repr((trained[common_length:], written[common_length:])))


def unwritten_parts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], reads: Sequence[str] = ()
) -> dict[str, int]:
    """Parts of rows that the chat template leaves out → number of messages, or rows, that have them.

    Args:
        tokenizer: with a chat template.
        rows: with messages.
        reads: fields of messages that count as read in any case.
    """
    counts: Counter[str] = Counter()
    num_probes: Counter[str] = Counter()
    written_names: set[str] = set()
    for row in rows:
        for part in _parts(row, reads):
            counts[part.name] += 1
            if part.name in written_names or num_probes[part.name] >= PROBES:
                continue
            num_probes[part.name] += 1
            if part.is_written(tokenizer):
                written_names.add(part.name)
    unwritten: dict[str, int] = {}
    for name, count in counts.items():
        if name not in written_names:
            unwritten[name] = count
    return unwritten


@dataclass(frozen=True)
class _Part:
    """A part of a row that a chat template could leave out."""

    name: str  # in the note
    row: Row
    reply: Mapping[str, Any] | None  # the response that the part belongs to; None = it is a part of the prompt
    index: int | None  # index of its message in the conversation; None = an argument of the template
    field: str  # name of the message's field, or of the argument
    text: str = ""  # the text of a content, or a part of it, to look for; empty = test the whole field
    kept: int = 0  # number of entries at the beginning of the field that are not tested
    in_template: bool = False  # look into the template's text of a response, not into the text that is trained on

    def is_written(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the template's text holds the part's text, or changes without the field."""
        if self.index is None and self.field not in (TOOLS, DOCUMENTS):
            # The text does not change if the variable has its default value, so the template's source is searched.
            return self.field in str(tokenizer.chat_template)
        try:
            whole = self._text(tokenizer, self.row, self.reply)
            if self.text:
                return is_written(self.text, whole) or json.dumps(self.text)[1:-1] in whole
            row, reply = self._without_field()
            return self._text(tokenizer, row, reply) != whole
        except (TemplateRefusal, UserError):  # refused without the field; a refusal of the row is reported elsewhere
            return True

    def _text(self, tokenizer: PreTrainedTokenizerBase, row: Row, reply: Mapping[str, Any] | None) -> str:
        """The text that is trained on or, with `in_template`, that the template itself writes."""
        messages = row.messages or []
        if reply is None:
            return apply_template(tokenizer, messages, True, row.template_arguments)
        if self.in_template:
            return apply_template(tokenizer, [*messages, reply], False, row.template_arguments)
        prompt = prompt_text(tokenizer, row)
        try:
            end = turn_end_of(tokenizer, row)
        except UserError:
            end = None
        return prompt + reply_text(tokenizer, row, reply, prompt, end)

    def _without_field(self) -> tuple[Row, Mapping[str, Any] | None]:
        """The row and its response without the field."""
        if self.index is None:
            arguments = _without(self.row.template_arguments, self.field)
            return replace(self.row, template_arguments=arguments), self.reply
        if self.reply is not None:
            return self.row, self._shortened(self.reply)
        messages = list(self.row.messages or [])
        messages[self.index] = self._shortened(messages[self.index])
        return replace(self.row, messages=messages), None

    def _shortened(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without what is tested of the field.

        Without the whole field, it has an empty content if it has none: templates refuse one with neither.
        """
        if self.kept:
            return {**message, self.field: message[self.field][: self.kept]}
        return {"content": "", **_without(message, self.field)}


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    others: dict[str, Any] = {}
    for key, value in fields.items():
        if key != name:
            others[key] = value
    return others


def _parts(row: Row, reads: Sequence[str]) -> Iterator[_Part]:
    for name in row.template_arguments:
        column = name if name in (TOOLS, DOCUMENTS) else f"{TEMPLATE_VARIABLES}.{name}"
        yield _Part(f"column {column!r}", row, None, None, name)
    messages = row.messages or []
    for index, message in enumerate(messages):
        role = message["role"]
        # Templates treat a system prompt at the beginning and later ones differently.
        order = "later" if role == "system" and index > 0 else "earlier"
        yield from _parts_of(row, None, index, message, f"{order} {role} messages", reads)
    for reply in (row.reply("chosen"), row.reply("rejected")):
        if reply is not None:
            yield from _parts_of(row, reply, len(messages), reply, "responses", reads)


def _parts_of(
    row: Row, reply: Mapping[str, Any] | None, index: int, message: Mapping[str, Any], who: str, reads: Sequence[str]
) -> Iterator[_Part]:
    """The parts of one message; `who` says in notes which kind of message it is."""
    for field, value in message.items():
        if value not in EMPTY and field not in ("role", "content", *reads):
            yield _Part(f"{field!r} of {who}", row, reply, index, field)
        if field == TOOL_CALLS and isinstance(value, list) and len(value) > 1:
            yield _Part(f"{field!r} after the first of {who}", row, reply, index, field, kept=1)
    thoughts, mark, answer = message.get("content", "").rpartition(THOUGHT_END)
    if mark and thoughts.strip():
        name = f"what stands before {mark} in {who}"
        yield _Part(name, row, reply, index, "content", thoughts)
        if reply is not None and "tool_calls" not in message:
            name += ", which are trained on all the same"
            yield _Part(name, row, reply, index, "content", thoughts, in_template=True)
    if answer.strip():
        yield _Part(f"the content of {who}", row, reply, index, "content", answer)
