# SPDX-License-Identifier: Apache-2.0
"""Notes on a chat template before training: what it leaves out, and where training reads other text than it writes.

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
from typing import TYPE_CHECKING, Any, Literal

from dschat.base.errors import UserError
from dschat.data.encoding import prompt_text
from dschat.data.formats import unread_columns
from dschat.data.messages import DOCUMENTS, EMPTY, TEMPLATE_COLUMNS, TEMPLATE_VARIABLES, THOUGHT_END, TOOL_CALLS, TOOLS
from dschat.data.rows import Row, in_words
from dschat.data.turn_end import QUESTION, TurnEnd, template_form, turn_end, where_texts_differ
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.settings.common import ColumnFlags
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBES = 8  # cases of a kind that are tried
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
    notes = []
    if end_id is not None:
        notes += _notes_of_turns(tokenizer, conversations, end_id)
        notes += _notes_of_second_thoughts(tokenizer, conversations, responses)
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

    A template that refuses a plain dialogue is not asked. `end_id`: the token that ends a response in training; None
    if the template's own does.
    """
    notes: dict[str, str] = {}
    for condition, arguments in _template_cases(rows):
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
        other_text = _note_of_other_text(tokenizer, arguments, end)
        if other_text:
            notes.setdefault(other_text, condition + other_text)
    return list(notes.values())


def _note_of_other_text(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], end: TurnEnd) -> str | None:
    """A note if the generation prompt opens a thought that written turns lack, or if there is no such prompt."""
    answer = [{"role": "assistant", "content": "b"}]
    prompt = apply_template(tokenizer, QUESTION, True, arguments)
    written = apply_template(tokenizer, [*QUESTION, *answer], False, arguments)
    if not written.startswith(prompt):
        trained_end, written_end = where_texts_differ(prompt + end.lead + answer[0]["content"], written)
        return (
            f"for the user's 'a' and the assistant's 'b' training reads {trained_end!r}, but the chat template writes "
            f"{written_end!r}: begin responses with what follows the generation prompt, such as a thought"
        )
    special_tokens = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    has_prompt = prompt != apply_template(tokenizer, QUESTION, False, arguments)
    if not has_prompt and any(str(token) in end.lead for token in special_tokens):
        return (
            f"the chat template has no generation prompt: {end.lead!r} before the assistant's text is part of the "
            "response, for the model to write. Use a template that reads add_generation_prompt"
        )
    return None


def _template_cases(rows: Iterable[Row]) -> list[tuple[str, Mapping[str, Any]]]:
    """A condition in words, for notes, and the template's arguments, for the first row of every form of turns.

    At most PROBES cases. The first is the template without arguments, whose condition is empty.
    """
    first_rows: dict[str, Row] = {}
    for row in rows:
        if row.template_arguments:
            first_rows.setdefault(template_form(row), row)
    cases: list[tuple[str, Mapping[str, Any]]] = [("", {})]
    for row in islice(first_rows.values(), PROBES - 1):
        cases.append((f"with {' and '.join(row.template_arguments)} of {row.origin}, ", row.template_arguments))
    return cases


def _notes_of_second_thoughts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], responses: Sequence[ResponseColumn]
) -> list[str]:
    """A note if responses hold a thought though the generation prompt holds a closed one."""
    count = 0
    for row in rows:
        num_thoughts = sum(THOUGHT_END in str(reply.get("content")) for reply in _replies(row, responses))
        if num_thoughts and prompt_text(tokenizer, row).rstrip().endswith(THOUGHT_END):
            count += num_thoughts
    if not count:
        return []
    return [
        f"responses with a thought after a generation prompt that holds a closed one: {count}; it is trained on as a "
        f"second one. Remove enable_thinking: false from {TEMPLATE_VARIABLES}, or the thoughts from the responses"
    ]


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
