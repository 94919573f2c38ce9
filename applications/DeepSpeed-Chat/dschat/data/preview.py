# SPDX-License-Identifier: Apache-2.0
"""`dschat data preview`: rows as training sees them, and special tokens that surprise in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response, encode_prompts, prompt_text, puts_bos
from dschat.data.examples import (
    PairExample,
    PromptExample,
    SFTExample,
    encode_pairs,
    pair_examples,
    prompt_examples,
    sft_examples,
)
from dschat.data.messages import WEIGHT, message_text
from dschat.data.plain_prompts import plain_prompt_note
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.data.template_notes import RESPONSES_OF_STEPS, UNREAD_COLUMNS, template_notes, unread_column_counts
from dschat.models.template_date import date_note
from dschat.settings.common import ColumnFlags
from macro_actions.token_text import special_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

COLOURS = {"prompt": "36", "response": "32", "chosen": "32", "rejected": "31", "padding": "90"}
NOTES = {
    1: "step 1: the loss is taken on the response alone; prompt and padding are masked",
    2: "step 2: the score is read at the last token before the padding; padding is masked",
    3: "step 3: prompts are padded on the left, responses are sampled after them; padding is masked",
}
ALL_TURNS = "step 1: the loss is taken on every turn of the assistant; text between these turns and padding are masked"
RESPONSES = {1: ("response",), 2: ("chosen", "rejected"), 3: ()}  # responses that each step reads
PROMPT_USE = {1: "masked", 2: "read", 3: "read"}
RESPONSE_USE = {1: "trained", 2: "scored"}
EPISODES = "prompts: the messages with which the environment begins an episode of each row"
BeginEpisodes = Callable[[Sequence[Row]], list[Row]]
Examples = Sequence[SFTExample] | Sequence[PairExample] | Sequence[PromptExample]


@dataclass(frozen=True)
class Settings:
    """The settings of training that decide how rows are read."""

    keys: ColumnFlags = ColumnFlags()  # column names
    seed: int = 1234  # seed of the splits
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


def examples_of(
    step: int, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[Examples, Counter[str]]:
    """The examples of step 1, 2 or 3, and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response that the step needs.
    """
    if step == 3:
        return prompt_examples(rows, tokenizer, settings.max_prompt_seq_len, held_out=True)
    limit = settings.max_seq_len
    end_id = settings.end_id
    if step == 1:
        return sft_examples(rows, tokenizer, limit, end_id, held_out=True, all_turns=settings.all_turns)
    return pair_examples(rows, tokenizer, limit, end_id, held_out=True)


@dataclass(frozen=True)
class RowSpan:
    """A part of a row: prompt, response or padding."""

    kind: str  # a key of COLOURS
    note: str  # what training does with it, for instance "masked"
    tokens: int  # number of its tokens; 0 if the row is not encoded
    text: str  # with special tokens; empty for padding


@dataclass(frozen=True)
class RowView:
    """What the display of a row depends on: the tokenizer, the training step, and the id that ends a response."""

    tokenizer: PreTrainedTokenizerBase
    step: int
    end_id: int


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
    source = load_source(path, settings.keys, settings.seed)
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
        lines.append("texts as they are read; --tokenizer MODEL shows tokens, padding and what is cut")
        shown = [_text_parts(row, step, settings.all_turns) for row in rows]
    else:
        tokens = row_tokens(settings.tokenizer, settings.end_id, rows)
        fields_read = (WEIGHT,) if step == 1 else ()
        notes = special_notes(rows, tokens, settings.tokenizer, settings.end_id)
        notes += template_notes(settings.tokenizer, rows, settings.end_id, fields_read, RESPONSES_OF_STEPS[step])
        notes += prompt_notes(rows, settings.tokenizer, settings.keys)
        lines += [f"note: {note}" for note in notes]
        shown = _encoded_parts(rows, RowView(settings.tokenizer, step, settings.end_id), settings)
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
    amount = ""
    if part.kind == "padding":
        amount = f" x{part.tokens}"
    elif part.tokens:
        amount = f", {part.tokens} tokens"
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
    for kind in RESPONSES[step]:
        reply = row.reply("rejected" if kind == "rejected" else "chosen")
        if reply is None and row.no_response is not None and step == 1:
            return parts if all_turns and row.messages else row.no_response
        if reply is None:
            raise UserError(f"{row.origin}: the row has no {kind} text, which step {step} needs; give another --step.")
        parts.append(RowSpan(kind, RESPONSE_USE[step], 0, message_text(reply)))
    return parts


def _encoded_parts(rows: Sequence[Row], view: RowView, settings: Settings) -> list[list[RowSpan] | str]:
    """The parts of every row, read from one batch of all rows, or the reason why it is dropped."""
    batch_rows: list[Row] = []
    batch_examples: list[Any] = []
    reasons: list[str | None] = []  # None for a row that is in the batch
    for row in rows:
        examples, dropped = examples_of(view.step, [row], view.tokenizer, settings)
        if examples:
            batch_rows.append(row)
            batch_examples.append(examples[0])
        reasons.append(None if examples else next(iter(dropped)))
    parts = iter(_batch_parts(batch_rows, batch_examples, view) if batch_rows else ())
    parts_of_rows: list[list[RowSpan] | str] = []
    for reason in reasons:
        parts_of_rows.append(next(parts) if reason is None else reason)
    return parts_of_rows


def _batch_parts(rows: Sequence[Row], examples: Sequence[Any], view: RowView) -> list[list[RowSpan]]:
    """The parts of rows as they are in a batch of the step."""
    from dschat.data.collate import collate_pairs, collate_sft

    if view.step == 3:
        return _rollout_parts(examples, view)
    pad_id = view.tokenizer.pad_token_id
    if pad_id is None:
        pad_id = view.tokenizer.eos_token_id
    parts = []
    if view.step == 1:
        batch = collate_sft(examples, pad_id)
        for number, example in enumerate(examples):
            sequence = _Sequence(batch, number, len(example.prompt_ids), batch["response_mask"][number])
            parts.append(_sequence_parts(sequence, "response", view))
        return parts
    # The batch of step 2 holds the chosen sequences, then the rejected ones.
    batch = collate_pairs(examples, pad_id)
    for number, prompt_ids in enumerate(encode_prompts(view.tokenizer, rows)):
        chosen = _Sequence(batch, number, len(prompt_ids))
        rejected = _Sequence(batch, len(rows) + number, len(prompt_ids))
        rejected_parts = _sequence_parts(rejected, "rejected", view)
        parts.append(_sequence_parts(chosen, "chosen", view) + rejected_parts[1:])  # the prompt is shown once
    return parts


def _rollout_parts(examples: Sequence[PromptExample], view: RowView) -> list[list[RowSpan]]:
    """Rows of a rollout: prompts padded on the left to the longest, then the response to be sampled."""
    longest = max(map(len, examples))
    end = str(view.tokenizer.convert_ids_to_tokens(view.end_id))
    response = RowSpan("response", f"sampled, up to {end}", 0, "")
    rows = []
    for example in examples:
        padding = _padding(longest - len(example))
        rows.append([*padding, _prompt_part(example.prompt_ids, view), response])
    return rows


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a padded batch."""

    batch: dict[str, Tensor]
    number: int  # number of the row in the batch
    prompt_length: int
    targets: Tensor | None = None  # (R,) which tokens after the prompt are trained on; None = all


def _sequence_parts(sequence: _Sequence, kind: str, view: RowView) -> list[RowSpan]:
    """The parts of a sequence: padding, prompt, response, padding.

    If only some of the tokens after the prompt are trained on, every run of them is a response, and the runs in
    between are prompts.
    """
    padded_ids = sequence.batch["input_ids"][sequence.number]
    mask = sequence.batch["attention_mask"][sequence.number]
    ids = padded_ids[mask].tolist()
    response = ids[sequence.prompt_length :]
    left_padding = int(mask.int().argmax())
    targets = [True] * len(response)
    if sequence.targets is not None:
        targets = sequence.targets[: len(response)].tolist()

    parts = _padding(left_padding)
    parts.append(_prompt_part(ids[: sequence.prompt_length], view))
    start = 0
    for is_target, group in itertools.groupby(targets):
        stop = start + len(list(group))
        run = response[start:stop]
        if is_target:
            is_last = stop == len(response)
            parts.append(_response_part(run, kind, is_last, view))
        else:
            parts.append(_prompt_part(run, view))
        start = stop
    parts += _padding(len(padded_ids) - left_padding - len(ids))
    return parts


def _prompt_part(ids: Sequence[int], view: RowView) -> RowSpan:
    text = _decode(view.tokenizer, ids)
    return RowSpan("prompt", PROMPT_USE[view.step], len(ids), text)


def _response_part(ids: Sequence[int], kind: str, is_last: bool, view: RowView) -> RowSpan:
    """A response, with a note on special tokens in it; an earlier turn ends as the chat template writes it."""
    note = RESPONSE_USE[view.step]
    content = ids
    if is_last and ids[-1] != view.end_id:
        is_eos = view.end_id == view.tokenizer.eos_token_id
        end = "EOS" if is_eos else view.tokenizer.convert_ids_to_tokens(view.end_id)
        note += f", cut, without {end}"
    else:
        content = ids[:-1]
    special = ends_and_special(view.tokenizer, view.end_id)
    inside = []
    for token_id in dict.fromkeys(content):
        if token_id in special:
            inside.append(special[token_id])
    if inside:
        note += f", holds {', '.join(inside)} inside"
    text = _decode(view.tokenizer, ids, response=True)
    return RowSpan(kind, note, len(ids), text)


def _padding(tokens: int) -> list[RowSpan]:
    return [RowSpan("padding", "masked", tokens, "")] if tokens else []


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


@dataclass(frozen=True)
class RowTokens:
    """Lengths and special tokens of an encoded row; a response that the row lacks is empty."""

    prompt: int  # tokens of the prompt
    response: int  # tokens of the longer response, without the one that ends it
    special: list[str]  # special tokens inside the responses, each once per response
    twice_bos: bool  # whether the prompt begins with BOS twice

    def __len__(self) -> int:
        """Tokens of prompt and longer response, with the one that ends it."""
        return self.prompt + self.response + 1


def row_tokens(tokenizer: PreTrainedTokenizerBase, end_id: int, rows: Sequence[Row]) -> list[RowTokens]:
    """Rows as training encodes them."""
    special = ends_and_special(tokenizer, end_id)
    bos = tokenizer.bos_token_id
    measured = []
    for encoded in encode_pairs(tokenizer, rows):
        inside = []
        for ids in (encoded.chosen_ids, encoded.rejected_ids):
            inside += [special[token_id] for token_id in special.keys() & set(ids)]
        response_length = max(len(encoded.chosen_ids), len(encoded.rejected_ids))
        twice_bos = bos is not None and encoded.prompt_ids[:2] == [bos, bos]
        measured.append(RowTokens(len(encoded.prompt_ids), response_length, inside, twice_bos))
    return measured


def ends_and_special(tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[int, str]:
    """Id → token for tokens that nobody expects inside a response: special tokens, and the one that ends responses."""
    token_ids = special_ids(tokenizer) | {end_id}
    texts: dict[int, str] = {}
    for token_id in token_ids:
        texts[token_id] = str(tokenizer.convert_ids_to_tokens(token_id))
    return texts


def special_notes(
    rows: Sequence[Row], tokens: Sequence[RowTokens], tokenizer: PreTrainedTokenizerBase, end_id: int
) -> list[str]:
    """Notes on special tokens in rows, a line each; empty if there is nothing to note."""
    notes = []
    inside: Counter[str] = Counter()
    origins = []
    for row, row_length in zip(rows, tokens, strict=True):
        inside.update(row_length.special)
        if row_length.special:
            origins.append(row.origin)
    if inside:
        counts = ", ".join(f"{name} in {count}" for name, count in inside.most_common())
        notes.append(
            f"the texts of responses contain special tokens, which the tokenizer reads as these tokens: {counts} "
            f"({len(origins)} rows, the first is {origins[0]}); remove them from the texts, or spell them differently"
        )
    if tokenizer.bos_token_id is not None:
        notes += _bos_notes(rows, tokens, tokenizer)
    return notes


def prompt_notes(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, keys: ColumnFlags) -> list[str]:
    """Notes on rows and the chat template, a line each; empty if there is nothing to note."""
    plain = plain_prompt_note(rows, tokenizer, keys.apply_chat_template)
    date = date_note(tokenizer) if any(row.messages is not None for row in rows) else None
    return [note for note in (plain, date) if note is not None]


def _bos_notes(rows: Sequence[Row], tokens: Sequence[RowTokens], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes = []
    name = str(tokenizer.bos_token)
    doubled = []
    for row, row_length in zip(rows, tokens, strict=True):
        if row_length.twice_bos:
            doubled.append(row.origin)
    if doubled:
        notes.append(
            f"prompts that begin with {name} twice: {len(doubled)} (the first is {doubled[0]}); the chat template or "
            "the tokenizer adds one to the one in the text; remove it from the texts"
        )
    if not puts_bos(tokenizer):
        return notes
    with_bos = []
    for row in rows:
        if row.prompt is not None and row.prompt.startswith(name):
            with_bos.append(row.origin)
    if with_bos:
        notes.append(
            f"prompts whose text begins with {name}: {len(with_bos)} (the first is {with_bos[0]}); the tokenizer does "
            "not add another one"
        )
    conversation = next((row for row in rows if row.messages is not None), None)
    if conversation is not None and prompt_text(tokenizer, conversation).startswith(name):
        notes.append(f"the chat template begins with {name}; the tokenizer does not add another one")
    return notes
