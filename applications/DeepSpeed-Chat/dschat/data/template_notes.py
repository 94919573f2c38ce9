# SPDX-License-Identifier: Apache-2.0
"""What somebody should know of a chat template before training: what it leaves out, and where it writes other text.

A field of messages counts as read if the template's text changes without it. That is tried on the first messages that
have the field, at most PROBES of a kind, and said of all.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import (
    PROBE,
    THOUGHT_END,
    has_thought,
    is_written,
    other_call_ends,
    other_turn_end,
    prompt_text,
    reply_text,
    special_ids,
    template_variables,
    turn_end,
    turn_end_of,
)
from dschat.data.formats import unread_columns
from dschat.data.messages import DOCUMENTS, EMPTY, TEMPLATE_COLUMNS, TEMPLATE_VARIABLES, TOOLS
from dschat.data.rows import Row, in_words
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBES = 8
UNREAD_COLUMNS = "columns that neither prompts nor responses are made of"
NOT_IN_TEMPLATE = "the chat template does not write"
# Columns from which somebody may expect that they change the prompt.
EXPECTED = (
    *TEMPLATE_COLUMNS,
    *("functions", "system", "system_prompt", "enable_thinking", "images", "videos", "audios"),
    *("input", "context", "history"),  # of an instruction
)


def warn_of_template(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int | None = None,
    keys: ColumnFlags | None = None,
    reads: Sequence[str] = (),
) -> None:
    """Warns of what `template_notes` finds; columns that nobody expects in a prompt are information alone."""
    for note in template_notes(tokenizer, rows, end_id, reads):
        logger.warning("%s", note)
    _say_columns(unread_column_counts(rows, keys or ColumnFlags(), reads))


def _say_columns(columns: Mapping[str, int]) -> None:
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
) -> list[str]:
    """A line for each thing that somebody should know; none where all is well or no row holds messages.

    Args:
        tokenizer: of the model.
        rows: of the data.
        end_id: the token that ends a response in training; None where nothing is trained on.
        reads: fields of messages that the step itself reads: `weight`.
    """
    rows = [row for row in rows if row.messages is not None]
    if tokenizer.chat_template is None or not rows:
        return []
    notes = [] if end_id is None else [other_turn_end(tokenizer, rows, end_id), *other_renderings(tokenizer, rows)]
    if end_id is not None:
        notes += [_note_of_call_ends(tokenizer, rows, end_id), _note_of_second_thoughts(tokenizer, rows)]
    unread = unwritten_parts(tokenizer, rows, reads)
    if unread:
        notes.append(f"{NOT_IN_TEMPLATE}: {in_words(unread)}")
    return [note for note in notes if note]


def _note_of_call_ends(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int,
) -> str | None:
    """What differs where the template ends tool calls with another token than training does."""
    used = str(tokenizer.convert_ids_to_tokens(end_id))
    counts = {token: count for token, count in other_call_ends(tokenizer, rows).items() if token != used}
    if not counts:
        return None
    return f"responses of tool calls that the chat template ends with another token, and training with {used}: " + (
        in_words(counts)
    )


def _note_of_second_thoughts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> str | None:
    """How many responses bring a thought though the generation prompt holds one that is closed."""
    count = 0
    for row in rows:
        replies = [reply for reply in (row.reply("chosen"), row.reply("rejected")) if reply is not None]
        thoughtful = sum(map(has_thought, replies))
        if not thoughtful:
            continue
        try:
            prompt = prompt_text(tokenizer, row)
        except UserError:  # an error elsewhere
            continue
        if prompt.rstrip().endswith(THOUGHT_END):
            count += thoughtful
    if not count:
        return None
    return (
        "responses with a thought behind a generation prompt that holds a closed one: "
        f"{count}; a thought in the content is trained on as a second one, one in a field of its own is lost. Remove "
        f"enable_thinking: false from {TEMPLATE_VARIABLES}, or the thoughts from the responses"
    )


def warn_of_dialogues(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], keys: ColumnFlags) -> None:
    """Warns of what dialogues that are played again leave out: they keep role and content of messages alone."""
    unread = Counter(
        part.name for row in rows if row.messages is not None for part in _parts(row, ()) if part.field != "content"
    )
    if unread:
        logger.warning("dialogues keep role and content of messages alone, and leave out: %s", in_words(unread))
    other = other_rendering(tokenizer)
    if other is not None:
        logger.warning("%s", other)
    _say_columns(unread_column_counts(rows, keys))


def unread_column_counts(
    rows: Iterable[Row],
    keys: ColumnFlags,
    reads: Sequence[str] = (),
) -> Counter[str]:
    """Column → number of rows whose prompt and responses are not made of it though it holds something."""
    return Counter(column for row in rows for column in unread_columns(row, keys) if column not in reads)


def other_renderings(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row]) -> list[str]:
    """What `other_rendering` says, once for each set of variables that rows give to the template; at most PROBES sets.

    Rows without variables are tried in any case.
    """
    sets: dict[str, dict[str, Any]] = {repr({}): {}}
    for row in rows:
        variables = template_variables(row)
        sets.setdefault(repr(variables), variables)
    notes: dict[str, str] = {}
    for variables in islice(sets.values(), PROBES):
        note = other_rendering(tokenizer, variables)
        if note is not None:
            where = f"with {TEMPLATE_VARIABLES} {json.dumps(variables, ensure_ascii=False, default=str)}, "
            notes.setdefault(note, (where if variables else "") + note)
    return list(notes.values())


def other_rendering(
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> str | None:
    """How the text of training differs from the chat template's own, for the user's "a" and the assistant's "b".

    None where both are the same, apart from the end of the turn (see `other_turn_end`), or where the template refuses
    this dialogue. `variables` are further ones of the template.
    """
    arguments = dict(variables or {})
    question = Row(PROBE[0]["content"], PROBE[:1], None, None, {}, "the chat template", template_arguments=arguments)
    try:
        prompt = prompt_text(tokenizer, question)
        end = turn_end(tokenizer, arguments)
        reply = reply_text(tokenizer, question, PROBE[1], prompt, end)
        whole = apply_template(tokenizer, PROBE, False, arguments)
        has_generation_prompt = prompt != apply_template(tokenizer, PROBE[:1], False, arguments)
    except (TemplateRefusal, UserError):
        return None
    if not whole.startswith(prompt + reply):
        remedy = f"; its generation prompt ends with {end.prefill!r}: begin responses with what follows it"
        return (
            f"for the user's 'a' and the assistant's 'b' training reads {prompt + reply!r}, but the chat template "
            f"writes {whole!r}{remedy if end.prefill else ''}"
        )
    special = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))]
    if not has_generation_prompt and any(token in end.lead for token in special):
        return (
            f"the chat template has no generation prompt: {end.lead!r} before the assistant's text is part of the "
            "response, for the model to write. Use a template that reads add_generation_prompt"
        )
    return None


def unwritten_parts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], reads: Sequence[str] = ()
) -> dict[str, int]:
    """What of rows with messages the chat template leaves out → how many messages, or rows, have it.

    Args:
        tokenizer: with a chat template.
        rows: with messages.
        reads: fields of messages that count as read in any case.
    """
    counts: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    written: set[str] = set()
    for row in rows:
        for part in _parts(row, reads):
            counts[part.name] += 1
            if part.name not in written and tried[part.name] < PROBES:
                tried[part.name] += 1
                if part.is_written(tokenizer):
                    written.add(part.name)
    return {name: count for name, count in counts.items() if name not in written}


@dataclass(frozen=True)
class _Part:
    """Something in a row that a chat template could leave out."""

    name: str  # what is said of it
    row: Row
    reply: Mapping[str, Any] | None  # the response that follows the messages; None: it is a part of the prompt
    place: int | None  # of its message in the conversation; None: an argument of the template
    field: str  # of the message, or name of the argument
    text: str = ""  # of a content, or of a piece of it; empty: the whole field is looked at
    in_template: bool = False  # of a response: whether the template's own text counts, not the one that is trained on

    def is_written(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the template's text holds the text, or changes without the field."""
        if self.place is None and self.field not in (TOOLS, DOCUMENTS):
            return self.field in str(tokenizer.chat_template)  # the text is the same where it has the default value
        try:
            whole = self._text(tokenizer, self.row, self.reply)
            if self.text:
                return is_written(self.text, whole) or json.dumps(self.text)[1:-1] in whole
            return self._text(tokenizer, *self._without_field()) != whole
        except (TemplateRefusal, UserError):  # of messages without the field; a row's own refusal is told elsewhere
            return True

    def _text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        row: Row,
        reply: Mapping[str, Any] | None,
    ) -> str:
        """What is trained on or, with `in_template`, what the template itself writes."""
        if reply is None:
            return apply_template(tokenizer, row.messages or [], True, row.template_arguments)
        if self.in_template:
            return apply_template(tokenizer, [*(row.messages or []), reply], False, row.template_arguments)
        prompt = prompt_text(tokenizer, row)
        try:
            end = turn_end_of(tokenizer, row)
        except UserError:
            end = None
        return prompt + reply_text(tokenizer, row, reply, prompt, end)

    def _without_field(self) -> tuple[Row, Mapping[str, Any] | None]:
        """The row and its response without the field."""
        row, reply = self.row, self.reply
        if self.place is None:
            return replace(row, template_arguments=_without(row.template_arguments, self.field)), reply
        if reply is not None:
            return row, _without(reply, self.field)
        messages = [*(row.messages or [])]
        messages[self.place] = _without(messages[self.place], self.field)
        return replace(row, messages=messages), reply


def _without(
    fields: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _parts(row: Row, reads: Sequence[str]) -> Iterator[_Part]:
    for name in row.template_arguments:
        column = name if name in (TOOLS, DOCUMENTS) else f"{TEMPLATE_VARIABLES}.{name}"
        yield _Part(f"column {column!r}", row, None, None, name)
    messages = row.messages or []
    for place, message in enumerate(messages):
        role = message["role"]
        yield from _parts_of(row, None, place, message, f"earlier {role} messages", reads)
    for reply in (row.reply("chosen"), row.reply("rejected")):
        if reply is not None:
            yield from _parts_of(row, reply, len(messages), reply, "responses", reads)


def _parts_of(
    row: Row,
    reply: Mapping[str, Any] | None,
    place: int,
    message: Mapping[str, Any],
    who: str,
    reads: Sequence[str],
) -> Iterator[_Part]:
    """The parts of one message; `who` says of what kind it is."""
    for field, value in message.items():
        if value not in EMPTY and field not in ("role", "content", *reads):
            yield _Part(f"{field!r} of {who}", row, reply, place, field)
    thoughts, mark, answer = message.get("content", "").rpartition(THOUGHT_END)
    if mark and thoughts.strip():
        yield _Part(f"what stands before {mark} in {who}", row, reply, place, "content", thoughts)
    if mark and thoughts.strip() and reply is not None and "tool_calls" not in message:
        name = f"what stands before {mark} in {who}, which are trained on all the same"
        yield _Part(name, row, reply, place, "content", thoughts, True)
    if answer.strip():
        yield _Part(f"the content of {who}", row, reply, place, "content", answer)
