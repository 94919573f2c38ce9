# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data prepare`: a source → filtered, split and encoded rows in a folder that training takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dschat.common.fingerprints import file_hash, tokenizer_fingerprint
from dschat.data.encoding import encode_prompts, encode_responses, prompt_text
from dschat.data.examples import CUT_TO_NOTHING, EMPTY_PROMPT, EQUAL_PAIR, require_both_responses
from dschat.data.hub import find_known
from dschat.data.prepared.folder import STAGES, PreparedExample, Stage, foreign_entry
from dschat.data.prepared.write import write_folder
from dschat.data.rows import DataKeys, Row, in_words
from dschat.data.sources import open_source, read_share
from dschat.data.tokenised import encode_rows, is_plain, workers_for
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Prompts to look at while training; of other data, the first one.
EXAMPLE_PROMPTS = {
    "hh": "\n\nHuman: How does the computer work?\n\nAssistant: ",
    "tldr": (
        "POST\nSubreddit: r/AskReddit\nMy neighbour plays the piano every night until two. I have asked him twice to "
        "stop at eleven, and he agreed both times. Should I talk to the landlord, or to him once more?\nTL;DR: "
    ),
}
DUPLICATE, TOO_LONG, TOO_SHORT, SAME = "duplicate input", "too long", "too short", "same response"
Unit = Literal["tokens", "characters"]


@dataclass(frozen=True)
class Preparation:
    """What to make of a source."""

    stage: Stage  # finetune reads the first part of `data_split`, preference the second
    limits: RowLimits  # which rows are kept
    data_split: str  # parts of the rows, as in training
    # Draw the parts, and what is held out, by `seed`, as training does; else they follow each other in the files.
    shuffle: bool
    seed: int  # of the shuffle
    num_samples: int | None  # of training and of test rows, the first so many of the part; None = all
    validation_percentage: float  # part of the kept training rows, the first, that becomes the validation split
    mask_prompt: bool  # step 1 is to learn from the responses alone
    keys: DataKeys  # column names


@dataclass(frozen=True)
class Target:
    """Where to write, and what."""

    folder: Path
    format: str  # pt, or anything else for Arrow files
    save_skipped: bool
    overwrite: bool


def prepare(
    path: str, preparation: Preparation, target: Target, tokenizer: PreTrainedTokenizerBase, name: str, end_id: int
) -> dict[str, Any]:
    """Prepares a source; returns what `prepared.json` holds.

    Args:
        path: what `--data_path` takes.
        preparation: what to make of it.
        target: where to write it; it appears when it is whole.
        tokenizer, name: of the model to train, and what it was called, for messages.
        end_id: id of the token that ends a response.

    Raises:
        UserError: see `dschat.data.sources.load_source`; the folder exists and may not be replaced; or no row is
            left.
    """
    _check_output(path, target, preparation.keys)
    step, seed = 1 + STAGES.index(preparation.stage), preparation.seed if preparation.shuffle else None
    share = read_share([path], preparation.keys, preparation.data_split, step, seed, show=True)
    (source,), most = share.sources, preparation.num_samples
    rows = {"train": share.train[:most], "test": share.eval[:most]}
    read = {split: len(part) for split, part in rows.items()}
    filtered = Filter(preparation.stage, preparation.limits)
    dropped: dict[str, Counter[str]] = {"train": Counter(), "test": Counter()}
    kept: dict[str, list[PreparedExample]] = {}
    for split, part in rows.items():
        examples = _encode(part, split, preparation.stage, tokenizer, end_id, dropped[split])
        kept[split] = list(filtered.kept(examples, dropped[split]))
    count = int(len(kept["train"]) * preparation.validation_percentage)
    splits = {"train": kept["train"][count:], "validation": kept["train"][:count], "test": kept["test"]}
    if not splits["train"]:
        reasons = in_words(dropped["train"]) or "no rows"
        raise UserError(f"--data_path {path}: no training row is left of {read['train']} ({reasons}); loosen a limit.")
    info = {
        "version": 1,
        "stage": preparation.stage,
        "format": "pt" if target.format == "pt" else "arrow",
        "mask_prompt": preparation.mask_prompt,
        "arguments": {"source": path, **asdict(preparation), "save_skipped": target.save_skipped},
        "source": {
            "name": source["name"],
            "hub": source.get("hub"),
            "sha256": {str(file): file_hash(file) for file in share.files},
        },
        "tokenizer": {"name": name, "fingerprint": tokenizer_fingerprint(tokenizer)},
        "end_id": end_id,
        "read": read,
        "unusable": source["dropped"],
        "left_out": {split: dict(counts) for split, counts in dropped.items()},
        "kept": {split: len(part) for split, part in splits.items() if part},
        "example_prompt": _example_prompt(path, source["name"], splits["train"][0], tokenizer),
    }
    write_folder(target.folder.resolve(), info, splits, filtered.skipped if target.save_skipped else None)
    return info


def _check_output(path: str, target: Target, keys: DataKeys) -> None:
    """Refuses to replace what is no prepared folder, or what holds the source.

    Raises:
        UserError: so it is; or the source cannot be opened.
    """
    folder, where = target.folder.resolve(), f"--output {target.folder}"
    if not target.folder.exists():
        return
    if not target.overwrite:
        raise UserError(f"{where}: it exists; give another folder, or --overwrite to replace it.")
    foreign = foreign_entry(folder)
    if foreign == folder:
        raise UserError(
            f"{where}: --overwrite replaces prepared folders alone, and this is none; give another folder."
        )
    if foreign is not None:
        raise UserError(
            f"{where}: it holds {foreign.name}, which `prepare` did not write and --overwrite would delete; move it "
            "away, or give another folder."
        )
    source = next((file for file in open_source(path, keys).files if folder in file.resolve().parents), None)
    if source is not None:
        raise UserError(f"{where}: the source, {source}, lies in it and would be deleted; give another folder.")


def prepared_examples(
    rows: Sequence[Row], *, tokenizer: PreTrainedTokenizerBase, stage: Stage, end_id: int, held_out: bool = False
) -> tuple[list[PreparedExample], Counter[str]]:
    """Rows encoded, uncut; those that have no response, and say why, are counted.

    Raises:
        UserError: a row lacks a response.
    """
    if stage == "preference":
        require_both_responses(rows, "Preference data")
    for row in rows:
        if row.chosen is None and row.no_response is None:
            raise UserError(
                f"{row.origin}: the row has no response. Name its column with --chosen_key or --response_key."
            )
    dropped = Counter(str(row.no_response) for row in rows if row.chosen is None)
    usable = [row for row in rows if row.chosen is not None]
    prompts = encode_prompts(tokenizer, usable)
    chosen = encode_responses(tokenizer, [row.chosen or "" for row in usable])
    worse = [row.rejected or "" for row in usable] if stage == "preference" else []
    rejected: Sequence[list[int] | None] = encode_responses(tokenizer, worse) if worse else [None] * len(usable)
    examples = [
        PreparedExample(
            prompt_text(tokenizer, row),
            row.chosen or "",
            None if last is None else row.rejected,
            ids,
            [*first, end_id],
            None if last is None else [*last, end_id],
            row if is_plain(row.extra) else replace(row, extra={}),
        )
        for row, ids, first, last in zip(usable, prompts, chosen, rejected, strict=True)
    ]
    return examples, dropped


def _encode(
    rows: Sequence[Row],
    split: str,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    dropped: Counter[str],
) -> Sequence[PreparedExample]:
    odd = sum(not is_plain(row.extra) for row in rows)
    if odd:
        logger.warning(
            "%s: %d rows hold dates, bytes or other values that JSON has not; they keep texts alone", split, odd
        )
    make = partial(prepared_examples, tokenizer=tokenizer, stage=stage, end_id=end_id)
    examples, counts = encode_rows(PreparedExample, make, rows, f"tokenising {split}", workers_for(rows), show=True)
    dropped += counts
    return examples


def _example_prompt(
    path: str, name: str, first: PreparedExample, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, object]:
    known = find_known(path) or find_known(name)
    prompt = EXAMPLE_PROMPTS.get(known.name if known else "", first.prompt)
    (ids,) = encode_prompts(tokenizer, [Row(prompt, None, None, None, {}, "")])
    return {"prompt": prompt, "input_ids": ids, "attention_mask": [1] * len(ids)}


@dataclass(frozen=True)
class RowLimits:
    """What a row must be to be kept."""

    max_length: int  # tokens of prompt and response; the rest is cut
    max_prompt_length: int  # of the prompt, in `unit`; BOS counts as a token
    minimum_response_length: int  # of every response, in `unit`; the token that ends it does not count
    unit: Unit  # tokens or characters
    remove_same_inputs: bool = True  # leave out rows whose prompt and (chosen) response were there before
    remove_same_responses: bool = True  # leave out pairs of equal texts


class Filter:
    """Leaves rows out and counts them, over all splits of a folder: what stands in training is no test."""

    def __init__(self, stage: Stage, limits: RowLimits) -> None:
        self._stage, self._limits = stage, limits
        self._seen: set[tuple[str, str]] = set()
        self.skipped: list[tuple[PreparedExample, str]] = []

    def kept(self, examples: Iterable[PreparedExample], dropped: Counter[str]) -> Iterator[PreparedExample]:
        """The rows that are kept, cut to length; the others are counted in `dropped` and listed in `skipped`."""
        for example in examples:
            reason = self._reason(example)
            self._seen.add((example.prompt, example.chosen))
            cut = _cut(example, self._limits.max_length)
            if reason is None and self._stage == "preference" and cut.chosen_ids == cut.rejected_ids:
                reason = EQUAL_PAIR
            if reason is None:
                yield cut
            else:
                dropped[reason] += 1
                self.skipped.append((example, reason))

    def _reason(self, example: PreparedExample) -> str | None:
        limits = self._limits
        responses = [example.chosen_ids[:-1]] + ([example.rejected_ids[:-1]] if example.rejected_ids else [])
        lengths = [len(example.prompt_ids), *map(len, responses)]
        if limits.unit == "characters":
            texts = [example.prompt, example.chosen] + ([example.rejected] if example.rejected is not None else [])
            lengths = list(map(len, texts))
        if limits.remove_same_inputs and (example.prompt, example.chosen) in self._seen:
            return DUPLICATE
        if lengths[0] > limits.max_prompt_length:
            return TOO_LONG
        if min(lengths[1:]) < limits.minimum_response_length:
            return TOO_SHORT
        if limits.remove_same_responses and self._stage == "preference" and example.chosen == example.rejected:
            return SAME
        if not example.prompt_ids:
            return EMPTY_PROMPT
        return CUT_TO_NOTHING if len(example.prompt_ids) >= limits.max_length else None


def _cut(example: PreparedExample, max_length: int) -> PreparedExample:
    room = max(0, max_length - len(example.prompt_ids))
    rejected = None if example.rejected_ids is None else example.rejected_ids[:room]
    return replace(example, chosen_ids=example.chosen_ids[:room], rejected_ids=rejected)
