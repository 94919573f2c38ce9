# SPDX-License-Identifier: Apache-2.0
"""`dschat data prepare`: a source → filtered, split and encoded rows in a folder that training takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash, template_fingerprint, tokenizer_fingerprint
from dschat.data.encoding import encode_prompt_texts
from dschat.data.examples import (
    CUT_TO_NOTHING,
    EMPTY_PROMPT,
    EQUAL_PAIR,
    NO_WEIGHT,
    NOTHING_WRITTEN,
    encode_pairs,
    require_both_responses,
    require_responses,
    warn_of_responses,
)
from dschat.data.hub import find_known
from dschat.data.messages import WEIGHT
from dschat.data.options import PrepareOptions
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.prepared.folder import STAGES, PreparedExample, Stage, foreign_entry
from dschat.data.prepared.write import write_folder
from dschat.data.rows import Row, in_words, is_plain
from dschat.data.sources import Share, open_source, read_share
from dschat.data.splits import parts_of_rows, prompt_of_rows
from dschat.data.template_notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.data.tokenised import encode_rows
from dschat.models.template_date import date_read_by
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Example prompts of published sets, to look at while training; other data show their first prompt.
EXAMPLE_PROMPTS = {
    "hh": "\n\nHuman: How does the computer work?\n\nAssistant: ",
    "tldr": (
        "POST\nSubreddit: r/AskReddit\nMy neighbour plays the piano every night until two. I have asked him twice to "
        "stop at eleven, and he agreed both times. Should I talk to the landlord, or to him once more?\nTL;DR: "
    ),
}
# Flags that prepared.json records as they were given.
RECORDED_FLAGS = (
    "stage",
    "data_split",
    "shuffle",
    "seed",
    "num_samples",
    "validation_percentage",
    "mask_prompt",
    "save_skipped",
)
PUBLISHED_STAGES = "1,1,0"  # parts of a published set for finetune and preference, without --data_split
DUPLICATE = "duplicate input"
TOO_LONG = "too long"
TOO_SHORT = "too short"
SAME = "same response"
Unit = Literal["tokens", "characters"]


def prepare(
    path: str, options: PrepareOptions, keys: ColumnFlags, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> dict[str, Any]:
    """Prepares a source and writes the folder, which appears when it is complete.

    Args:
        path: a `--data_path`.
        options: what to make of it, and where to write it.
        keys: column names.
        tokenizer: tokenizer of the model to train.
        end_id: id of the token that ends a response.

    Returns:
        The content of `prepared.json`.

    Raises:
        UserError: see `dschat.data.sources.load_source`; the folder exists and may not be replaced; or no row is
            left.
    """
    _check_output(path, options, keys)
    share = _read_rows(path, options, keys, tokenizer, end_id)
    warn_of_plain_prompts(share.train[: options.prepared.num_samples], tokenizer, keys.apply_chat_template)
    row_filter = Filter(options.prepared.stage, _limits_of(options))
    prepared = _prepare_rows(share, options, row_filter, tokenizer, end_id)
    if not prepared.splits["train"]:
        reasons = in_words(prepared.dropped["train"]) or "no rows"
        raise UserError(
            f"--data_path {path}: no training row is left of {len(prepared.read['train'])} ({reasons}); loosen a "
            "limit."
        )
    info = _describe(path, options, keys, tokenizer, end_id, share, prepared)
    skipped = row_filter.skipped if options.prepared.save_skipped else None
    write_folder(Path(options.prepared.output).resolve(), info, prepared.splits, skipped)
    return info


def _limits_of(options: PrepareOptions) -> RowLimits:
    flags = options.prepared
    return RowLimits(
        max_length=flags.max_length,
        max_prompt_length=flags.max_prompt_length,
        minimum_response_length=flags.minimum_response_length,
        unit=flags.length_unit,
        remove_same_inputs=flags.remove_same_inputs,
        remove_same_responses=flags.remove_same_responses,
    )


@dataclass(frozen=True)
class _PreparedRows:
    """Rows of a source by split: as they are read, as they are written, and why the others are left out."""

    read: dict[str, Sequence[Row]]
    splits: dict[str, list[PreparedExample]]
    dropped: dict[str, Counter[str]]


def _prepare_rows(
    share: Share[Row], options: PrepareOptions, row_filter: Filter, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> _PreparedRows:
    """Encodes, filters and cuts rows; the first of the training rows become the validation split."""
    num_samples = options.prepared.num_samples
    rows: dict[str, Sequence[Row]] = {"train": share.train[:num_samples], "test": share.eval[:num_samples]}
    dropped: dict[str, Counter[str]] = {"train": Counter(), "test": Counter()}
    remaining: dict[str, list[PreparedExample]] = {}
    for split, split_rows in rows.items():
        examples = _encode(split_rows, split, options.prepared.stage, tokenizer, end_id, dropped[split])
        remaining[split] = list(row_filter.passing(examples, dropped[split]))
    validation, train = _split_validation(remaining["train"], options.prepared.validation_percentage)
    splits = {"train": train, "validation": validation, "test": remaining["test"]}
    return _PreparedRows(rows, splits, dropped)


def _split_validation(
    examples: list[PreparedExample], share: float
) -> tuple[list[PreparedExample], list[PreparedExample]]:
    """The first examples, a share of all in whole prompts, and the others."""
    rows = [example.row for example in examples]
    count = len(rows)
    prompt_of = prompt_of_rows(rows)
    prompts: Sequence[Hashable] = range(count)
    if prompt_of is not None:
        prompts = list(map(prompt_of, rows))
    parts = parts_of_rows(prompts, (0, int(count * share), count), np.arange(count))
    validation: list[PreparedExample] = []
    train: list[PreparedExample] = []
    for example, part in zip(examples, parts, strict=True):
        (train if part else validation).append(example)
    return validation, train


def _describe(
    path: str,
    options: PrepareOptions,
    keys: ColumnFlags,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    share: Share[Row],
    prepared: _PreparedRows,
) -> dict[str, Any]:
    """The content of `prepared.json`."""
    (source,) = share.sources
    flags = options.flat()
    recorded_flags = {name: flags[name] for name in RECORDED_FLAGS}
    file_hashes = {str(file): file_hash(file) for file in share.files}
    num_conversations = 0
    num_read: dict[str, int] = {}
    left_out: dict[str, dict[str, int]] = {}
    for split, rows in prepared.read.items():
        num_conversations += sum(row.messages is not None for row in rows)
        num_read[split] = len(rows)
        left_out[split] = dict(prepared.dropped[split])
    return {
        "stage": options.prepared.stage,
        "format": options.prepared.format,
        "mask_prompt": options.prepared.mask_prompt,
        "arguments": {"source": path, **recorded_flags, "limits": asdict(_limits_of(options)), "keys": asdict(keys)},
        "source": {"name": source["name"], "hub": source.get("hub"), "sha256": file_hashes},
        "tokenizer": {"name": options.source.tokenizer, "fingerprint": tokenizer_fingerprint(tokenizer)},
        "template": {
            "rows": num_conversations,
            "fingerprint": template_fingerprint(tokenizer),
            "date": date_read_by(tokenizer),
        },
        "end_id": end_id,
        "read": num_read,
        "unusable": source["dropped"],
        "left_out": left_out,
        "kept": {split: len(examples) for split, examples in prepared.splits.items() if examples},
        "example_prompt": _example_prompt(path, source["name"], prepared.splits["train"][0], tokenizer),
    }


def _check_output(path: str, options: PrepareOptions, keys: ColumnFlags) -> None:
    """Refuses to replace a folder that is not a prepared one, or that holds the source. Raises UserError."""
    folder = Path(options.prepared.output).resolve()
    flag = f"--output {options.prepared.output}"
    if not folder.exists():
        return
    if not options.result.overwrite:
        raise UserError(f"{flag}: it exists; give another folder, or --overwrite to replace it.")
    foreign = foreign_entry(folder)
    if foreign == folder:
        raise UserError(
            f"{flag}: --overwrite only replaces prepared folders, and this is not one; give another folder."
        )
    if foreign is not None:
        raise UserError(
            f"{flag}: it holds {foreign.name}, which `prepare` did not write and --overwrite would delete; move it "
            "away, or give another folder."
        )
    for file in open_source(path, keys).files:
        if folder in file.resolve().parents:
            raise UserError(f"{flag}: it contains the source {file}, which would be deleted; give another folder.")


def _read_rows(
    path: str, options: PrepareOptions, keys: ColumnFlags, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> Share[Row]:
    """The rows of the stage's part of the source; warns of odd responses and of what the chat template leaves out."""
    step = 1 + STAGES.index(options.prepared.stage)
    seed = options.source.seed if options.prepared.shuffle else None
    share = read_share(
        [path], keys, options.prepared.data_split, step, seed, show=True, published_split=PUBLISHED_STAGES
    )
    fields_read = (WEIGHT,) if options.prepared.stage == "finetune" else ()
    warn_of_template(tokenizer, share.train, end_id, keys, fields_read, RESPONSES_OF_STEPS[step])
    warn_of_responses(share.train, options.prepared.stage == "finetune")
    return share


def prepared_examples(
    rows: Sequence[Row], *, tokenizer: PreTrainedTokenizerBase, stage: Stage, end_id: int, held_out: bool = False
) -> tuple[list[PreparedExample], Counter[str]]:
    """Encodes rows without cutting them; counts the rows that have no response, by their reasons.

    Raises:
        UserError: a row lacks a response.
    """
    is_pair = stage == "preference"
    if is_pair:
        require_both_responses(rows, "Preference data")
    else:
        require_responses(rows)
    dropped: Counter[str] = Counter()
    usable_rows = []
    for row in rows:
        if row.chosen is None:
            dropped[str(row.no_response)] += 1
        else:
            usable_rows.append(row)
    rows_to_encode = usable_rows
    if not is_pair:
        rows_to_encode = [replace(row, rejected=None, rejected_message=None) for row in usable_rows]

    examples = []
    for row, encoded in zip(usable_rows, encode_pairs(tokenizer, rows_to_encode), strict=True):
        weight = (row.chosen_message or {}).get(WEIGHT)
        if encoded.is_unwritten:
            dropped[NOTHING_WRITTEN] += 1
        elif not is_pair and weight == 0:
            dropped[NO_WEIGHT] += 1
        else:
            example = PreparedExample(
                prompt=encoded.prompt,
                chosen=encoded.chosen,
                rejected=encoded.rejected if is_pair else None,
                prompt_ids=encoded.prompt_ids,
                chosen_ids=[*encoded.chosen_ids, end_id],
                rejected_ids=[*encoded.rejected_ids, end_id] if is_pair else None,
                row=row if is_plain(row.extra) else replace(row, extra={}),
            )
            examples.append(example)
    return examples, dropped


def _encode(
    rows: Sequence[Row],
    split: str,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    dropped: Counter[str],
) -> Sequence[PreparedExample]:
    num_stripped = sum(not is_plain(row.extra) for row in rows)
    if num_stripped:
        logger.warning(
            "%s: %d rows hold dates, bytes or other values that JSON does not have; only their texts are kept",
            split,
            num_stripped,
        )
    make = partial(prepared_examples, tokenizer=tokenizer, stage=stage, end_id=end_id)
    examples, counts = encode_rows(PreparedExample, make, rows, f"tokenising {split}")
    dropped += counts
    return examples


def _example_prompt(
    path: str, name: str, first: PreparedExample, tokenizer: PreTrainedTokenizerBase
) -> dict[str, object]:
    published = find_known(path) or find_known(name)
    prompt = first.prompt
    if published is not None:
        prompt = EXAMPLE_PROMPTS.get(published.name, prompt)
    (ids,) = encode_prompt_texts(tokenizer, [prompt])
    return {"prompt": prompt, "input_ids": ids, "attention_mask": [1] * len(ids)}


@dataclass(frozen=True)
class RowLimits:
    """The limits that a row must meet. BOS counts as a token of the prompt; the end of a response does not count."""

    max_length: int  # tokens of prompt and response; longer rows are cut
    max_prompt_length: int  # in `unit`
    minimum_response_length: int  # length of every response, in `unit`
    unit: Unit
    remove_same_inputs: bool = True  # leave out rows whose prompt and (chosen) response occurred before
    remove_same_responses: bool = True  # leave out pairs of equal texts


class Filter:
    """Leaves rows out and counts them, over all splits of a folder: a row that training has seen tests nothing."""

    def __init__(self, stage: Stage, limits: RowLimits) -> None:
        self._stage = stage
        self._limits = limits
        self._seen: set[tuple[str, str]] = set()
        self.skipped: list[tuple[PreparedExample, str]] = []  # rows that were left out, and the reasons

    def passing(self, examples: Iterable[PreparedExample], dropped: Counter[str]) -> Iterator[PreparedExample]:
        """The rows that pass, cut to length; the others are counted in `dropped` and listed in `skipped`."""
        for example in examples:
            reason = self._reason(example)
            cut = _cut(example, self._limits.max_length)
            if reason is None and self._stage == "preference" and cut.chosen_ids == cut.rejected_ids:
                reason = EQUAL_PAIR
            if reason is None:
                self._seen.add((example.prompt, example.chosen))
                yield cut
            else:
                dropped[reason] += 1
                self.skipped.append((example, reason))

    def _reason(self, example: PreparedExample) -> str | None:
        """Why a row is left out; None if it is not."""
        limits = self._limits
        if limits.unit == "characters":
            prompt_length = len(example.prompt)
            response_lengths = []
            for text in (example.chosen, example.rejected):
                if text is not None:
                    response_lengths.append(len(text))
        else:
            prompt_length = len(example.prompt_ids)
            response_lengths = []
            for ids in (example.chosen_ids, example.rejected_ids):
                if ids:
                    response_lengths.append(len(ids) - 1)
        if limits.remove_same_inputs and (example.prompt, example.chosen) in self._seen:
            return DUPLICATE
        if prompt_length > limits.max_prompt_length:
            return TOO_LONG
        if min(response_lengths) < limits.minimum_response_length:
            return TOO_SHORT
        if limits.remove_same_responses and self._stage == "preference" and example.chosen == example.rejected:
            return SAME
        if not example.prompt_ids:
            return EMPTY_PROMPT
        if len(example.prompt_ids) >= limits.max_length:
            return CUT_TO_NOTHING
        return None


def _cut(example: PreparedExample, max_length: int) -> PreparedExample:
    room = max(0, max_length - len(example.prompt_ids))
    rejected_ids = None if example.rejected_ids is None else example.rejected_ids[:room]
    return replace(example, chosen_ids=example.chosen_ids[:room], rejected_ids=rejected_ids)
