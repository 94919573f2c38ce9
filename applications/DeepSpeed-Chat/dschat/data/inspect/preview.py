# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data preview`: rows as training sees them, encoded, collated and decoded again, part by part."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.data.collate import collate_pairs, collate_prompts, collate_sft
from dschat.data.encoding import decode_response, encode_prompt
from dschat.data.examples import pair_examples, prompt_examples, sft_examples
from dschat.data.formats.rows import DataKeys, Row
from dschat.data.inspect.check import Limits
from dschat.data.sources import load_source
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLOURS = {"prompt": "36", "response": "32", "chosen": "32", "rejected": "31", "padding": "90"}
NOTES = {
    1: "step 1: the loss is taken on the response alone; prompt and padding are masked",
    2: "step 2: the score is read at the last token before the padding; padding is masked",
    3: "step 3: the response is sampled after the prompt; padding is masked",
}


@dataclass(frozen=True)
class Part:
    """A stretch of one encoded row.

    Attributes:
        kind: a key of COLOURS.
        note: what training does with it, for instance "masked".
        tokens: its number of tokens.
        text: its tokens decoded, special ones shown; empty for padding.
    """

    kind: str
    note: str
    tokens: int
    text: str


def preview_report(
    path: str,
    keys: DataKeys,
    count: int = 3,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    step: int | None = None,
    limits: Limits | None = None,
    colour: bool = False,
    seed: int = 1234,
) -> str:
    """The first training rows of a source with their parts marked.

    Args:
        path: what `--data_path` takes.
        keys: column names.
        count: number of rows, 1 or more.
        tokenizer: of the model to train; without one the texts are shown as they are read.
        step: 1, 2 or 3; if None, the first of 2, 1, 3 for which the first row has the responses.
        limits: the longest texts.
        colour: mark parts by colours of a terminal, beside their names.
        seed: seed of the 95 to 5 split of a source without evaluation rows.

    Raises:
        UserError: see `dschat.data.sources.load_source`; or a row lacks the responses that the step needs.
    """
    rows = load_source(path, keys, seed).train[:count]
    if step is None:
        step = 2 if rows[0].rejected is not None else 1 if rows[0].chosen is not None else 3
    lines = [f"{path}: {NOTES[step]}"]
    if tokenizer is None:
        shown: Iterable[tuple[Row, list[Part] | str]] = [(row, _text_parts(row, step)) for row in rows]
        lines.append("texts as they are read; --tokenizer MODEL shows tokens, padding and what is cut")
    else:
        shown = _encoded_parts(rows, tokenizer, step, limits or Limits())
    for row, parts in shown:
        if isinstance(parts, str):
            lines += ["", f"{row.origin}: dropped ({parts})"]
        else:
            lines += ["", row.origin, *(_mark(part, colour) for part in parts)]
    return "\n".join(lines)


def _mark(part: Part, colour: bool) -> str:
    """A part with its name before it; control characters of the data are shown, never sent to the terminal."""
    amount = f" x{part.tokens}" if part.kind == "padding" else f", {part.tokens} tokens" if part.tokens else ""
    head = f"[[{part.kind}{amount}: {part.note}]]"
    text = head + "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in part.text)
    return f"\x1b[{COLOURS[part.kind]}m{text}\x1b[0m" if colour else text


def _text_parts(row: Row, step: int) -> list[Part] | str:
    """The texts of a row without a tokenizer; why it is dropped if it has no response and may have none."""
    if row.prompt is not None:
        prompt = row.prompt
    else:
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in row.messages or [])
    parts = [Part("prompt", "masked" if step == 1 else "read", 0, prompt)]
    wanted = {1: [("response", row.chosen)], 2: [("chosen", row.chosen), ("rejected", row.rejected)], 3: []}[step]
    for kind, text in wanted:
        if text is None and row.no_response is not None and step == 1:
            return row.no_response
        if text is None:
            raise UserError(f"{row.origin}: the row has no {kind} text, which step {step} needs; give another --step.")
        parts.append(Part(kind, "trained" if step == 1 else "scored", 0, text))
    return parts


def _encoded_parts(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", step: int, limits: Limits
) -> list[tuple[Row, list[Part] | str]]:
    """Each row with its parts, read off one batch of all rows, or with the reason for which it is dropped."""
    examples = [_example(row, tokenizer, step, limits) for row in rows]
    kept: list[Any] = [example for example in examples if not isinstance(example, str)]
    parts: list[list[Part]] = []
    if kept:
        kept_rows = [row for row, example in zip(rows, examples, strict=True) if not isinstance(example, str)]
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if step == 1:
            parts = _sft_parts(collate_sft(kept, pad_id), tokenizer)
        elif step == 2:
            lengths = [len(encode_prompt(tokenizer, row)) for row in kept_rows]
            parts = _pair_parts(collate_pairs(kept, pad_id), lengths, tokenizer)
        else:
            parts = _prompt_parts(collate_prompts(kept, pad_id), tokenizer)
    rest = iter(parts)
    return [
        (row, example if isinstance(example, str) else next(rest)) for row, example in zip(rows, examples, strict=True)
    ]


def _example(row: Row, tokenizer: "PreTrainedTokenizerBase", step: int, limits: Limits) -> Any:
    """The example that training makes of a row, or why it makes none."""
    if step == 3:
        made, dropped = prompt_examples([row], tokenizer, limits.max_prompt_seq_len, held_out=True)
    else:
        make: Any = sft_examples if step == 1 else pair_examples
        made, dropped = make([row], tokenizer, limits.max_seq_len, tokenizer.eos_token_id, held_out=True)
    return made[0] if made else next(iter(dropped))


def _sft_parts(batch: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[list[Part]]:
    prompt_width = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    rows = []
    for ids, mask, trained in zip(batch["input_ids"], batch["attention_mask"], batch["response_mask"], strict=True):
        prompt = ids[:prompt_width][mask[:prompt_width]].tolist()
        response = ids[prompt_width:][trained].tolist()
        rows.append(
            [
                *_padding(prompt_width - len(prompt)),
                Part("prompt", "masked", len(prompt), _decode(tokenizer, prompt)),
                _response("response", "trained", response, tokenizer),
                *_padding(len(trained) - len(response)),
            ]
        )
    return rows


def _pair_parts(
    batch: dict[str, Any], prompt_lengths: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> list[list[Part]]:
    rows = []
    half = len(prompt_lengths)
    for number, prompt_length in enumerate(prompt_lengths):
        parts: list[Part] = []
        for kind, place in (("chosen", number), ("rejected", half + number)):
            ids, mask = batch["input_ids"][place], batch["attention_mask"][place]
            real = ids[mask].tolist()
            if not parts:
                parts.append(Part("prompt", "read", prompt_length, _decode(tokenizer, real[:prompt_length])))
            parts.append(_response(kind, "scored", real[prompt_length:], tokenizer))
            parts += _padding(len(ids) - len(real))
        rows.append(parts)
    return rows


def _prompt_parts(batch: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[list[Part]]:
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        prompt = ids[mask].tolist()
        text = _decode(tokenizer, prompt)
        rows.append([*_padding(len(ids) - len(prompt)), Part("prompt", "read", len(prompt), text)])
    return rows


def _response(kind: str, note: str, ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Part:
    cut = "" if list(ids[-1:]) == [tokenizer.eos_token_id] else ", cut, without EOS"
    return Part(kind, note + cut, len(ids), _decode(tokenizer, ids, response=True))


def _padding(tokens: int) -> list[Part]:
    return [Part("padding", "masked", tokens, "")] if tokens else []


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], response: bool = False) -> str:
    """Text of ids, special tokens by their names."""
    special = set(tokenizer.all_special_ids)
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
