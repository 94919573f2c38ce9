# SPDX-License-Identifier: Apache-2.0
"""`dschat data preview`: rows as training sees them, and special tokens that surprise in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response
from dschat.data.examples import (
    DropReason,
    EncodedRow,
    encoded_rows,
    fit_comparison,
    fit_demonstration,
    fit_prompt,
    require_both_responses,
    require_responses,
)
from dschat.data.messages import WEIGHT, message_text
from dschat.data.notes import RESPONSES_OF_STEPS, UNREAD_COLUMNS, plain_prompt_note, unread_column_counts
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.data.template_notes import template_notes
from dschat.models.template_date import date_note
from dschat.settings.common import ColumnFlags
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLOURS = {"prompt": "36", "response": "32", "chosen": "32", "rejected": "31"}
NOTES = {
    1: "step 1: the loss is taken on the response alone; the prompt is masked",
    2: "step 2: the score is read at the last token of each response",
    3: "step 3: responses are sampled after the prompts",
}
ALL_TURNS = "step 1: the loss is taken on every turn of the assistant; text between these turns is masked"
PROMPT_USE = {1: "masked", 2: "read", 3: "read"}
RESPONSE_USE = {1: "trained", 2: "scored"}
EPISODES = "prompts: the messages with which the environment begins an episode of each row"
BeginEpisodes = Callable[[Sequence[Row]], list[Row]]


@dataclass(frozen=True)
class Settings:
    """The settings of training that decide how rows are read."""

    keys: ColumnFlags = ColumnFlags()  # column names
    tokenizer: PreTrainedTokenizerBase | None = None  # tokenizer of the model to train; without one nothing is encoded
    max_seq_len: int = 1024  # longest prompt and response, in tokens (steps 1 and 2)
    max_prompt_seq_len: int = 512  # longest prompt, in tokens (step 3)
    end_of_response: int | None = None  # id of the token that ends a response; None = EOS
    all_turns: bool = False  # step 1 trains on every turn of the assistant (--train_on all)

    @property
    def end_id(self) -> int:
        """The token that ends a response; 0 without a tokenizer."""
        if self.end_of_response is not None:
            return self.end_of_response
        if self.tokenizer is None:
            return 0
        return self.tokenizer.eos_token_id or 0


@dataclass(frozen=True)
class RowSpan:
    """A part of a row: a prompt or a response."""

    kind: str  # a key of COLOURS
    note: str  # what training does with it, for instance "masked"
    tokens: int  # number of its tokens; 0 if the row is not encoded
    text: str  # with special tokens


def preview_report(
    path: str,
    count: int,
    step: int | None,
    colour: bool,
    settings: Settings,
    begin_episodes: BeginEpisodes | None = None,
) -> str:
    """The first `count` training rows of a source, their parts marked by name and, with `colour`, by colours.

    They are evaluation rows if the source has no others.

    Without a tokenizer, texts are shown as they are read. Without a `step`, it is the first of 2, 1, 3 whose responses
    the first row has. With `begin_episodes`, which needs step 3, the rows have the prompts of their environments.

    Raises:
        UserError: see `dschat.data.sources.load_source`; a row lacks the responses that the step needs; or the
            environment of a row fails.
    """
    source = load_source(path, settings.keys)
    rows = (source.train or source.eval)[:count]
    if step is None:
        step = _step_of(rows[0])
    note = ALL_TURNS if step == 1 and settings.all_turns else NOTES[step]
    lines = [
        f"{path}: {note}",
        f"rows shown: {len(rows)} of {len(source.train):,} for training; {len(source.eval):,} for evaluation",
    ]
    unread = unread_column_counts(rows, settings.keys)
    if begin_episodes is not None:
        rows = begin_episodes(rows)
        unread.clear()  # environments may read any column
        lines.append(EPISODES)
    if unread:
        lines.append(f"note: {UNREAD_COLUMNS}: {', '.join(unread)}")
    if settings.tokenizer is None:
        lines.append("texts as they are read; --tokenizer MODEL shows tokens and what is cut")
        shown = [_text_parts(row, step, settings.all_turns) for row in rows]
    else:
        encoded = encoded_rows(settings.tokenizer, rows, settings.end_id, all_turns=step == 1 and settings.all_turns)
        fields_read = (WEIGHT,) if step == 1 else ()
        notes = special_notes(rows, row_reports(rows, settings), settings.tokenizer)
        notes += template_notes(settings.tokenizer, rows, settings.end_id, fields_read, RESPONSES_OF_STEPS[step])
        notes += prompt_notes(rows, settings.tokenizer, settings.keys)
        lines += [f"note: {note}" for note in notes]
        shown = [_encoded_parts(row, step, settings.tokenizer, settings) for row in encoded]
    for row, parts in zip(rows, shown, strict=True):
        lines.append("")
        if isinstance(parts, str):
            lines.append(f"{row.origin}: dropped ({parts})")
        else:
            lines.append(row.origin)
            lines += [_mark(part, colour) for part in parts]
    return "\n".join(lines)


def _step_of(row: Row) -> int:
    """The first of steps 2, 1 and 3 whose responses a row has."""
    if row.rejected is not None:
        return 2
    return 3 if row.chosen is None else 1


def _mark(part: RowSpan, colour: bool) -> str:
    """A part after its name; control characters of the data are escaped, never sent to the terminal."""
    amount = f", {part.tokens} tokens" if part.tokens else ""
    text = f"[[{part.kind}{amount}: {part.note}]]"
    for character in part.text:
        is_safe = character.isprintable() or character in "\n\t"
        text += character if is_safe else repr(character)[1:-1]
    if not colour:
        return text
    return f"\x1b[{COLOURS[part.kind]}m{text}\x1b[0m"


def _text_parts(row: Row, step: int, all_turns: bool) -> list[RowSpan] | str:
    """The texts of a row without a tokenizer, or why the row is dropped."""
    prompt = row.prompt
    if prompt is None:
        prompt = "\n".join(f"{message['role']}: {message_text(message)}" for message in row.messages or [])
    parts = [RowSpan("prompt", PROMPT_USE[step], 0, prompt)]
    for column in RESPONSES_OF_STEPS[step]:
        kind = "response" if step == 1 else column
        reply = row.reply(column)
        if reply is None and row.no_response is not None and step == 1:
            return parts if all_turns and row.messages else row.no_response
        if reply is None:
            raise UserError(f"{row.origin}: the row has no {kind} text, which step {step} needs; give another --step.")
        parts.append(RowSpan(kind, RESPONSE_USE[step], 0, message_text(reply)))
    return parts


def _encoded_parts(
    row: EncodedRow, step: int, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> list[RowSpan] | DropReason:
    """The parts of a row as the step reads it, or the reason why it is dropped.

    If only some of the tokens after the prompt are trained on, every run of them is a response, and the runs in
    between are prompts.
    """
    use = PROMPT_USE[step]
    end_id = settings.end_id
    require_responses_of(step, [row.row])
    if step == 3:
        prompt = fit_prompt(row, settings.max_prompt_seq_len, 0)
        if isinstance(prompt, str):
            return prompt
        end = tokenizer.convert_ids_to_tokens(end_id)
        return [_prompt_part(prompt.prompt_ids, use, tokenizer), RowSpan("response", f"sampled, up to {end}", 0, "")]
    if step == 2:
        pair = fit_comparison(row, settings.max_seq_len)
        if isinstance(pair, str):
            return pair
        return [
            _prompt_part(pair.prompt_ids, use, tokenizer),
            _response_part(pair.chosen_ids, "chosen", True, tokenizer, end_id),
            _response_part(pair.rejected_ids, "rejected", True, tokenizer, end_id),
        ]
    example = fit_demonstration(row, settings.max_seq_len)
    if isinstance(example, str):
        return example
    parts = [_prompt_part(example.prompt_ids, use, tokenizer)]
    targets = example.targets or [True] * len(example.response_ids)
    start = 0
    for is_target, group in itertools.groupby(targets):
        stop = start + len(list(group))
        run = example.response_ids[start:stop]
        if is_target:
            parts.append(_response_part(run, "response", stop == len(targets), tokenizer, end_id))
        else:
            parts.append(_prompt_part(run, use, tokenizer))
        start = stop
    return parts


def _prompt_part(ids: Sequence[int], use: str, tokenizer: PreTrainedTokenizerBase) -> RowSpan:
    return RowSpan("prompt", use, len(ids), _decode(tokenizer, ids))


def _response_part(
    ids: Sequence[int], kind: str, is_last: bool, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> RowSpan:
    """A response, with a note on special tokens in it; an earlier turn ends as the chat template writes it."""
    note = RESPONSE_USE[1 if kind == "response" else 2]
    content = ids
    if is_last and ids[-1] != end_id:
        is_eos = end_id == tokenizer.eos_token_id
        end = "EOS" if is_eos else tokenizer.convert_ids_to_tokens(end_id)
        note += f", cut, without {end}"
    else:
        content = ids[:-1]
    special = ends_and_special(tokenizer, end_id)
    inside = [special[token_id] for token_id in dict.fromkeys(content) if token_id in special]
    if inside:
        note += f", holds {', '.join(inside)} inside"
    return RowSpan(kind, note, len(ids), _decode(tokenizer, ids, response=True))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], response: bool = False) -> str:
    """Text of ids, including special tokens."""
    special = special_ids(tokenizer)
    texts = []
    for is_special, group in itertools.groupby(ids, key=special.__contains__):
        run = list(group)
        if is_special:
            texts += [str(token) for token in tokenizer.convert_ids_to_tokens(run)]
        elif response:
            texts.append(decode_response(tokenizer, run))
        else:
            texts.append(str(tokenizer.decode(run, clean_up_tokenization_spaces=False)))
    return "".join(texts)


def ends_and_special(tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[int, str]:
    """Id → token for tokens that nobody expects inside a response: special tokens, and the one that ends responses."""
    token_ids = special_ids(tokenizer) | {end_id}
    texts: dict[int, str] = {}
    for token_id in token_ids:
        texts[token_id] = str(tokenizer.convert_ids_to_tokens(token_id))
    return texts


@dataclass(frozen=True)
class RowReport:
    """Lengths and special tokens of an encoded row, and why steps leave it out."""

    prompt: int  # tokens of the prompt
    response: int  # tokens of the longer response, without the one that ends it
    special: list[str]  # special tokens inside the responses, each once per response
    twice_bos: bool  # whether the prompt begins with BOS twice
    reasons: list[str]  # why steps 1, 2 and 3 leave the row out; empty texts if they do not

    def __len__(self) -> int:
        """Tokens of prompt and longer response, with the one that ends it."""
        return self.prompt + self.response + 1


def row_reports(rows: Sequence[Row], settings: Settings) -> list[RowReport]:
    """Reports on rows as training encodes them; `settings` have a tokenizer."""
    tokenizer = settings.tokenizer
    assert tokenizer is not None
    special = ends_and_special(tokenizer, settings.end_id)
    bos = tokenizer.bos_token_id
    encoded = encoded_rows(tokenizer, rows, settings.end_id)
    demonstrations = encoded
    if settings.all_turns:
        demonstrations = encoded_rows(tokenizer, rows, settings.end_id, ("chosen",), all_turns=True)
    reports = []
    for row, demonstration in zip(encoded, demonstrations, strict=True):
        responses = [ids[:-1] for ids in (row.chosen_ids, row.rejected_ids or [])]
        inside: list[str] = []
        for ids in responses:
            inside += [special[token_id] for token_id in special.keys() & set(ids)]
        results = (
            fit_demonstration(demonstration, settings.max_seq_len),
            fit_comparison(row, settings.max_seq_len),
            fit_prompt(row, settings.max_prompt_seq_len, 0),
        )
        reasons = [result if isinstance(result, str) else "" for result in results]
        twice_bos = bos is not None and row.prompt_ids[:2] == [bos, bos]
        reports.append(RowReport(len(row.prompt_ids), max(map(len, responses)), inside, twice_bos, reasons))
    return reports


def require_responses_of(step: int, rows: Sequence[Row]) -> None:
    """Raises UserError, which names the row, unless every row has the responses that a step needs."""
    if step == 1:
        require_responses(rows)
    elif step == 2:
        require_both_responses(rows, "Step 2")


def special_notes(rows: Sequence[Row], reports: Sequence[RowReport], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes on special tokens in rows, a line each; empty if there is nothing to note."""
    inside: Counter[str] = Counter()  # token → number of responses that hold it
    origins = []
    doubled = []
    for row, report in zip(rows, reports, strict=True):
        inside.update(report.special)
        if report.special:
            origins.append(row.origin)
        if report.twice_bos:
            doubled.append(row.origin)
    notes = []
    if inside:
        counts = ", ".join(f"{name} in {count}" for name, count in inside.most_common())
        notes.append(
            f"the texts of responses contain special tokens, which the tokenizer reads as these tokens: {counts} "
            f"({len(origins)} rows, the first is {origins[0]}); remove them from the texts, or spell them differently"
        )
    if doubled:
        notes.append(
            f"prompts that begin with {tokenizer.bos_token} twice: {len(doubled)} (the first is {doubled[0]}); the "
            "chat template or the tokenizer adds one to the one in the text; remove it from the texts"
        )
    return notes


def prompt_notes(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, keys: ColumnFlags) -> list[str]:
    """Notes on rows and the chat template, a line each; empty if there is nothing to note."""
    plain = plain_prompt_note(rows, tokenizer, keys.apply_chat_template)
    date = date_note(tokenizer) if any(row.messages is not None for row in rows) else None
    return [note for note in (plain, date) if note is not None]
