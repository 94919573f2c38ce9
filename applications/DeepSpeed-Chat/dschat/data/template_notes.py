# SPDX-License-Identifier: Apache-2.0
"""Notes on the chat template of dialogues before training: what it leaves out, or writes otherwise than is read.

A field of messages counts as written if the template's text changes without it. That is tried on the first messages
that have the field, at most PROBES of a kind, and assumed for all.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.messages import DOCUMENTS, EMPTY, TEMPLATE_VARIABLES, THOUGHT_END, TOOL_CALLS, TOOLS
from dschat.data.rows import BOTH_RESPONSES, ResponseColumn, Row, in_words
from dschat.data.turn_end import QUESTION, template_form, turn_end, where_texts_differ
from dschat.models.templates import TemplateRefusal, apply_template
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "dschat-probe"  # a message whose text is located in the output of the template
PROBES = 8  # cases of a kind that are tried
NOT_IN_TEMPLATE = "the chat template does not write"


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


def dialogue_notes(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[str]:
    """Notes on what replayed dialogues leave out, which keep only role and content of messages."""
    unread: Counter[str] = Counter()
    for row in rows:
        if row.messages is not None:
            unread.update(part.name for part in _parts(row, (), BOTH_RESPONSES) if part.field != "content")
    notes = _notes_of_turns(tokenizer, [], None)
    if unread:
        notes.insert(0, f"dialogues keep role and content of messages alone, and leave out: {in_words(unread)}")
    return notes


def template_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str]:
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
    for reply in row.replies(responses):
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
