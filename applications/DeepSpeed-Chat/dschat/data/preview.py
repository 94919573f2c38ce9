# SPDX-License-Identifier: Apache-2.0
"""`dschat data preview`: rows as training sees them, and special tokens that surprise in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import (
    decode_response,
    encode_prompts,
    prompt_text,
    puts_bos,
    special_ids,
)
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
from dschat.data.template_notes import UNREAD_COLUMNS, template_notes, unread_column_counts
from dschat.models.template_date import date_note
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

COLOURS = {"prompt": "36", "response": "32", "chosen": "32", "rejected": "31", "padding": "90"}
NOTES = {
    1: "step 1: the loss is taken on the response alone; prompt and padding are masked",
    2: "step 2: the score is read at the last token before the padding; padding is masked",
    3: "step 3: prompts are padded on the left, responses are sampled after them; padding is masked",
}
ALL_TURNS = "step 1: the loss is taken on every turn of the assistant; what is between them and padding are masked"
RESPONSES = {1: ("response",), 2: ("chosen", "rejected"), 3: ()}  # that a step reads
PROMPT_USE = {1: "masked", 2: "read", 3: "read"}
RESPONSE_USE = {1: "trained", 2: "scored"}
Examples = Sequence[SFTExample] | Sequence[PairExample] | Sequence[PromptExample]


@dataclass(frozen=True)
class Settings:
    """What training would be told."""

    keys: ColumnFlags = ColumnFlags()  # column names
    seed: int = 1234  # seed of the splits
    tokenizer: PreTrainedTokenizerBase | None = None  # of the model to train; without one nothing is encoded
    max_seq_len: int = 1024  # longest prompt and response, in tokens (steps 1 and 2)
    max_prompt_seq_len: int = 512  # longest prompt, in tokens (step 3)
    end_of_response: int | None = None  # id of the token that ends a response; EOS if None
    all_turns: bool = False  # step 1 trains on every turn of the assistant (--train_on all)

    @property
    def end_id(self) -> int:
        """The token that ends a response; 0 without a tokenizer."""
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return self.end_of_response if self.end_of_response is not None else eos or 0


def examples_of(
    step: int, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[Examples, Counter[str]]:
    """The examples of step 1, 2 or 3, and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response that the step needs.
    """
    if step == 3:
        return prompt_examples(rows, tokenizer, settings.max_prompt_seq_len, held_out=True)
    limit, end_id = settings.max_seq_len, settings.end_id
    if step == 1:
        return sft_examples(rows, tokenizer, limit, end_id, held_out=True, all_turns=settings.all_turns)
    return pair_examples(rows, tokenizer, limit, end_id, held_out=True)


@dataclass(frozen=True)
class RowSpan:
    """A stretch of one row."""

    kind: str  # a key of COLOURS
    note: str  # what training does with it, for instance "masked"
    tokens: int  # its number of tokens; 0 where the row is not encoded
    text: str  # what it says, special tokens shown; empty for padding


@dataclass(frozen=True)
class RowView:
    """For whom rows are shown: the tokenizer, the step, and the token that ends a response."""

    tokenizer: PreTrainedTokenizerBase
    step: int
    end_id: int


def preview_report(
    path: str,
    count: int,
    step: int | None,
    colour: bool,
    settings: Settings,
) -> str:
    """The first `count` training rows of a source, their parts marked by name and, with `colour`, by colours.

    Without a tokenizer, the texts as they are read. Without a `step`, the first of 2, 1, 3 for which the first row has
    the responses.

    Raises:
        UserError: see `dschat.data.sources.load_source`; or a row lacks the responses that the step needs.
    """
    source = load_source(path, settings.keys, settings.seed)
    rows = source.train[:count]
    if step is None:
        step = 2 if rows[0].rejected is not None else 1 if rows[0].chosen is not None else 3
    lines = [f"{path}: {ALL_TURNS if step == 1 and settings.all_turns else NOTES[step]}"]
    lines.append(f"rows shown: {len(rows)} of {len(source.train):,} for training; {len(source.eval):,} for evaluation")
    unread = unread_column_counts(rows, settings.keys)
    if unread:
        lines.append(f"note: {UNREAD_COLUMNS}: {', '.join(unread)}")
    if settings.tokenizer is None:
        lines.append("texts as they are read; --tokenizer MODEL shows tokens, padding and what is cut")
        shown = [_text_parts(row, step) for row in rows]
    else:
        tokens = row_tokens(settings.tokenizer, settings.end_id, rows)
        notes = special_notes(rows, tokens, settings.tokenizer, settings.end_id)
        notes += template_notes(settings.tokenizer, rows, settings.end_id, (WEIGHT,) if step == 1 else ())
        notes += prompt_notes(rows, settings.tokenizer, settings.keys)
        lines += [f"note: {note}" for note in notes]
        shown = _encoded_parts(rows, RowView(settings.tokenizer, step, settings.end_id), settings)
    for row, parts in zip(rows, shown, strict=True):
        if isinstance(parts, str):
            lines += ["", f"{row.origin}: dropped ({parts})"]
        else:
            lines += ["", row.origin, *(_mark(part, colour) for part in parts)]
    return "\n".join(lines)


def _mark(part: RowSpan, colour: bool) -> str:
    """A part with its name before it; control characters of the data are shown, never sent to the terminal."""
    amount = f" x{part.tokens}" if part.kind == "padding" else f", {part.tokens} tokens" if part.tokens else ""
    head = f"[[{part.kind}{amount}: {part.note}]]"
    text = head + "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in part.text)
    return f"\x1b[{COLOURS[part.kind]}m{text}\x1b[0m" if colour else text


def _text_parts(row: Row, step: int) -> list[RowSpan] | str:
    """The texts of a row without a tokenizer; why it is dropped if it has no response and may have none."""
    if row.prompt is not None:
        prompt = row.prompt
    else:
        prompt = "\n".join(f"{message['role']}: {message_text(message)}" for message in row.messages or [])
    parts = [RowSpan("prompt", PROMPT_USE[step], 0, prompt)]
    for kind in RESPONSES[step]:
        reply = row.reply("rejected" if kind == "rejected" else "chosen")
        if reply is None and row.no_response is not None and step == 1:
            return row.no_response
        if reply is None:
            raise UserError(f"{row.origin}: the row has no {kind} text, which step {step} needs; give another --step.")
        parts.append(RowSpan(kind, RESPONSE_USE[step], 0, message_text(reply)))
    return parts


def _encoded_parts(
    rows: Sequence[Row],
    view: RowView,
    settings: Settings,
) -> list[list[RowSpan] | str]:
    """Per row its parts, read off one batch of all rows, or the reason for which it is dropped."""
    made = [examples_of(view.step, [row], view.tokenizer, settings) for row in rows]
    kept_rows = [row for row, (examples, _) in zip(rows, made, strict=True) if examples]
    kept = [examples[0] for examples, _ in made if examples]
    parts = iter(_batch_parts(kept_rows, kept, view) if kept else ())
    return [next(parts) if examples else next(iter(dropped)) for examples, dropped in made]


def _batch_parts(
    rows: Sequence[Row],
    examples: Sequence[Any],
    view: RowView,
) -> list[list[RowSpan]]:
    from dschat.data.collate import collate_pairs, collate_sft

    tokenizer, step = view.tokenizer, view.step
    if step == 3:
        return _rollout_parts(examples, view)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    batch = collate_sft(examples, pad_id) if step == 1 else collate_pairs(examples, pad_id)
    if step == 2:
        prompt_lengths = [len(ids) for ids in encode_prompts(tokenizer, rows)]
    else:
        prompt_lengths = [len(example.prompt_ids) for example in examples]
    # The batch of step 2 holds the chosen sequences, then the rejected ones.
    order = itertools.product(RESPONSES[step] or ("none",), prompt_lengths)
    parts = []
    for number, (kind, prompt_length) in enumerate(order):
        ids, mask = batch["input_ids"][number], batch["attention_mask"][number]
        targets = batch["response_mask"][number] if step == 1 else None
        parts.append(_parts(ids, mask, prompt_length, kind, targets, view))
    if step != 2:
        return parts
    pairs = zip(parts[: len(rows)], parts[len(rows) :], strict=True)
    return [chosen + rejected[1:] for chosen, rejected in pairs]  # the prompt is shown once


def _rollout_parts(
    examples: Sequence[PromptExample],
    view: RowView,
) -> list[list[RowSpan]]:
    """Rows of a rollout: the prompts of a process, padded on the left to the longest, then what is to be sampled."""
    longest = max(map(len, examples))
    end = str(view.tokenizer.convert_ids_to_tokens(view.end_id))
    sampled = RowSpan("response", f"sampled, up to {end}", 0, "")
    return [
        [*_padding(longest - len(example)), _prompt_part(example.prompt_ids, view), sampled] for example in examples
    ]


def _parts(
    ids: Tensor,
    mask: Tensor,
    prompt_length: int,
    kind: str,
    targets: Tensor | None,
    view: RowView,
) -> list[RowSpan]:
    """One sequence of a batch: padding, prompt, response, padding.

    Where only some of the tokens behind the prompt are `targets`, they are a response each, and the others prompts.
    """
    real = ids[mask].tolist()
    prompt, response = real[:prompt_length], real[prompt_length:]
    left = int(mask.int().argmax())
    parts = [*_padding(left), _prompt_part(prompt, view)]
    uses = [True] * len(response) if targets is None else targets[: len(response)].tolist()
    place = 0
    for is_target, group in itertools.groupby(uses):
        run = response[place : place + len(list(group))]
        place += len(run)
        parts.append(_response_part(run, kind, place == len(response), view) if is_target else _prompt_part(run, view))
    return [*parts, *_padding(len(ids) - left - len(real))]


def _prompt_part(ids: Sequence[int], view: RowView) -> RowSpan:
    return RowSpan("prompt", PROMPT_USE[view.step], len(ids), _decode(view.tokenizer, ids))


def _response_part(
    ids: Sequence[int],
    kind: str,
    is_last: bool,
    view: RowView,
) -> RowSpan:
    """A response, with what surprises in it; an earlier turn's ends as the chat template writes it."""
    note, is_whole = RESPONSE_USE[view.step], not is_last or ids[-1] == view.end_id
    if not is_whole:
        is_eos = view.end_id == view.tokenizer.eos_token_id
        end = "EOS" if is_eos else view.tokenizer.convert_ids_to_tokens(view.end_id)
        note += f", cut, without {end}"
    special = ends_and_special(view.tokenizer, view.end_id)
    inside = [special[number] for number in dict.fromkeys(ids[:-1] if is_whole else ids) if number in special]
    note += f", holds {', '.join(inside)} inside" if inside else ""
    return RowSpan(kind, note, len(ids), _decode(view.tokenizer, ids, response=True))


def _padding(tokens: int) -> list[RowSpan]:
    return [RowSpan("padding", "masked", tokens, "")] if tokens else []


def _decode(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    response: bool = False,
) -> str:
    """Text of ids, special tokens by their names."""
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
    """What the token ids of a row show; a response that the row lacks is empty."""

    prompt: int  # number of its tokens
    response: int  # tokens of the longer response, without the one that ends it
    special: list[str]  # names of the special tokens inside the responses, each once a response
    twice_bos: bool  # the prompt begins with BOS twice

    def __len__(self) -> int:
        """Tokens of prompt and longer response, with the one that ends it."""
        return self.prompt + self.response + 1


def row_tokens(
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    rows: Sequence[Row],
) -> list[RowTokens]:
    """Rows as training encodes them."""
    special, bos = ends_and_special(tokenizer, end_id), tokenizer.bos_token_id
    found = []
    for encoded in encode_pairs(tokenizer, rows):
        responses = (encoded.chosen_ids, encoded.rejected_ids)
        inside = [special[number] for ids in responses for number in special.keys() & set(ids)]
        twice = bos is not None and encoded.prompt_ids[:2] == [bos, bos]
        found.append(RowTokens(len(encoded.prompt_ids), max(map(len, responses)), inside, twice))
    return found


def ends_and_special(tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[int, str]:
    """Id → name of what nobody expects inside a response: special tokens, and the token that ends responses."""
    return {number: str(tokenizer.convert_ids_to_tokens(number)) for number in special_ids(tokenizer) | {end_id}}


def special_notes(
    rows: Sequence[Row], tokens: Sequence[RowTokens], tokenizer: PreTrainedTokenizerBase, end_id: int
) -> list[str]:
    """What somebody should know of the special tokens of rows, a line each; none where all is well."""
    notes = []
    inside, places = Counter[str](), []
    for row, found in zip(rows, tokens, strict=True):
        inside.update(found.special)
        places += [row.origin] if found.special else []
    if inside:
        counted = ", ".join(f"{name} in {count}" for name, count in inside.most_common())
        notes.append(
            f"responses hold special tokens, written out in their texts and read as the tokens themselves: {counted} "
            f"({len(places)} rows, the first is {places[0]}); remove them from the texts, or write them otherwise"
        )
    if tokenizer.bos_token_id is not None:
        notes += _bos_notes(rows, tokens, tokenizer)
    return notes


def prompt_notes(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    keys: ColumnFlags,
) -> list[str]:
    """What somebody should know of rows and the chat template, a line each; none where all is well."""
    plain = plain_prompt_note(rows, tokenizer, keys.apply_chat_template)
    date = date_note(tokenizer) if any(row.messages is not None for row in rows) else None
    return [note for note in (plain, date) if note is not None]


def _bos_notes(
    rows: Sequence[Row],
    tokens: Sequence[RowTokens],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    notes, name = [], str(tokenizer.bos_token)
    doubled = [row.origin for row, found in zip(rows, tokens, strict=True) if found.twice_bos]
    if doubled:
        notes.append(
            f"prompts that begin with {name} twice: {len(doubled)} (the first is {doubled[0]}); the chat template "
            "puts one, or the tokenizer, and the text brings another; remove it from the texts"
        )
    if not puts_bos(tokenizer):
        return notes
    own = [row.origin for row in rows if row.prompt is not None and row.prompt.startswith(name)]
    if own:
        notes.append(
            f"prompts whose text begins with {name}: {len(own)} (the first is {own[0]}); the tokenizer's is not put "
            "before it"
        )
    talk = next((row for row in rows if row.messages is not None), None)
    if talk is not None and prompt_text(tokenizer, talk).startswith(name):
        notes.append(f"the chat template begins with {name}; the tokenizer's is not put before it")
    return notes
