# SPDX-License-Identifier: Apache-2.0
"""`dschat data prepare`: a source → filtered, split and encoded rows in a folder that training takes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.atomic import reporting, writing_folder
from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash, template_fingerprint, tokenizer_fingerprint
from dschat.base.jsonl import write_rows
from dschat.data.examples import (
    CUT_TO_NOTHING,
    EMPTY_PROMPT,
    EQUAL_PAIR,
    NO_WEIGHT,
    NOTHING_WRITTEN,
    EncodedRow,
    encoded_rows,
    require_both_responses,
    require_responses,
)
from dschat.data.messages import WEIGHT, trains_response
from dschat.data.notes import RESPONSES_OF_STEPS, warn_of_plain_prompts, warn_of_responses, warn_of_template
from dschat.data.options import PrepareFlags, PrepareOptions
from dschat.data.prepared.folder import INFO, SKIPPED, STAGES, Stage
from dschat.data.prepared.sheeprl import write_pt
from dschat.data.rows import Row, in_words, is_plain
from dschat.data.sources import Share, read_share
from dschat.data.splits import prompt_of_rows, split_part
from dschat.data.tokenised import encode_rows, table_of
from dschat.models.template_date import date_read_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PUBLISHED_STAGES = "1,1,0"  # parts of a published set for finetune and preference, without --data_split
DUPLICATE = "duplicate input"
TOO_LONG = "too long"
TOO_SHORT = "too short"
SAME = "same response"
Splits = Mapping[str, Sequence[EncodedRow]]


def prepare(path: str, options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[str, Any]:
    """Prepares a source and writes the folder, which appears when it is complete.

    Args:
        path: a `--data_path`.
        options: what to make of it, and where to write it.
        tokenizer: tokenizer of the model to train.
        end_id: id of the token that ends a response.

    Returns:
        The content of `prepared.json`.

    Raises:
        UserError: see `dschat.data.sources.load_source`; or no row is left.
    """
    flags = options.prepared
    share = _read_rows(path, options, tokenizer, end_id)
    rows = {"train": share.train[: flags.num_samples], "test": share.eval[: flags.num_samples]}
    warn_of_plain_prompts(rows["train"], tokenizer, options.columns.apply_chat_template)

    row_filter = Filter(flags)
    left_out: dict[str, Counter[str]] = {}
    remaining: dict[str, list[EncodedRow]] = {}
    make = partial(prepared_examples, tokenizer=tokenizer, stage=flags.stage, end_id=end_id)
    for split, split_rows in rows.items():
        _warn_of_values(split_rows, split)
        examples, left_out[split] = encode_rows(EncodedRow, make, split_rows, f"tokenising {split}")
        remaining[split] = list(row_filter.passing(examples, left_out[split]))
    validation, train = _split_validation(remaining["train"], flags.validation_percentage)
    if not train:
        raise UserError(
            f"--data_path {path}: no training row is left of {len(rows['train'])} "
            f"({in_words(left_out['train']) or 'no rows'}); loosen a limit."
        )
    splits = {"train": train, "validation": validation, "test": remaining["test"]}
    filled_splits = {split: examples for split, examples in splits.items() if examples}

    info = {
        "stage": flags.stage,
        "format": flags.format,
        "flags": options.flat(),
        "source": _source_record(share),
        "tokenizer": {"name": options.source.tokenizer, "fingerprint": tokenizer_fingerprint(tokenizer)},
        "template": _template_record(tokenizer, [*rows["train"], *rows["test"]]),
        "end_id": end_id,
        "read": {split: len(split_rows) for split, split_rows in rows.items()},
        "unusable": share.sources[0]["dropped"],
        "left_out": left_out,
        "kept": {split: len(examples) for split, examples in filled_splits.items()},
    }
    skipped = row_filter.skipped if flags.save_skipped else None
    _write_folder(Path(flags.output), info, filled_splits, skipped)
    return info


def _source_record(share: Share[Row]) -> dict[str, Any]:
    (source,) = share.sources
    hashes = {str(file): file_hash(file) for file in share.files}
    return {"name": source["name"], "hub": source.get("hub"), "sha256": hashes}


def _template_record(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Any]:
    num_conversations = sum(row.messages is not None for row in rows)
    fingerprint = template_fingerprint(tokenizer)
    return {"rows": num_conversations, "fingerprint": fingerprint, "date": date_read_by(tokenizer)}


def _read_rows(path: str, options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, end_id: int) -> Share[Row]:
    """The rows of the stage's part of the source; warns of odd responses and of what the chat template leaves out."""
    step = 1 + STAGES.index(options.prepared.stage)
    keys = options.columns
    share = read_share(
        [path],
        keys,
        options.prepared.data_split,
        step,
        show=True,
        published_split=PUBLISHED_STAGES,
        shuffle=options.prepared.shuffle,
    )
    fields_read = (WEIGHT,) if options.prepared.stage == "finetune" else ()
    warn_of_template(tokenizer, share.train, end_id, keys, fields_read, RESPONSES_OF_STEPS[step])
    warn_of_responses(share.train, options.prepared.stage == "finetune")
    return share


def _warn_of_values(rows: Sequence[Row], split: str) -> None:
    num_stripped = sum(not is_plain(row.extra) for row in rows)
    if num_stripped:
        logger.warning(
            "%s: %d rows hold dates, bytes or other values that JSON does not have; only their texts are kept",
            split,
            num_stripped,
        )


def prepared_examples(
    rows: Sequence[Row], *, tokenizer: PreTrainedTokenizerBase, stage: Stage, end_id: int, held_out: bool = False
) -> tuple[list[EncodedRow], Counter[str]]:
    """Encodes rows without cutting them; counts the rows that have no response, by their reasons.

    Raises:
        UserError: a row lacks a response.
    """
    is_pair = stage == "preference"
    if is_pair:
        require_both_responses(rows, "Preference data")
    else:
        require_responses(rows)
    dropped = Counter(str(row.no_response) for row in rows if row.chosen is None)
    usable_rows = [row for row in rows if row.chosen is not None]
    examples = []
    for encoded in encoded_rows(tokenizer, usable_rows, end_id, RESPONSES_OF_STEPS[2 if is_pair else 1]):
        row = encoded.row
        if encoded.is_unwritten:
            dropped[NOTHING_WRITTEN] += 1
        elif not is_pair and not trains_response(encoded.row):
            dropped[NO_WEIGHT] += 1
        else:
            examples.append(encoded if is_plain(row.extra) else replace(encoded, row=replace(row, extra={})))
    return examples, dropped


class Filter:
    """Leaves rows out and counts them, over all splits of a folder: a row that training has seen tests nothing.

    BOS counts as a token of the prompt; the end of a response does not count.
    """

    def __init__(self, flags: PrepareFlags) -> None:
        self._flags = flags
        self._seen: set[tuple[str, str]] = set()
        self.skipped: list[tuple[EncodedRow, str]] = []  # rows that were left out, and the reasons

    def passing(self, examples: Iterable[EncodedRow], dropped: Counter[str]) -> Iterator[EncodedRow]:
        """The rows that pass, cut to length; the others are counted in `dropped` and listed in `skipped`."""
        for example in examples:
            reason = self._reason(example)
            cut = _cut(example, self._flags.max_length)
            if reason is None and cut.chosen_ids == cut.rejected_ids:
                reason = EQUAL_PAIR
            if reason is None:
                self._seen.add((example.prompt, example.chosen))
                yield cut
            else:
                dropped[reason] += 1
                self.skipped.append((example, reason))

    def _reason(self, example: EncodedRow) -> str | None:
        """Why a row is left out; None if it is not."""
        flags = self._flags
        if flags.length_unit == "characters":
            prompt_length = len(example.prompt)
            texts = (example.chosen, example.rejected)
            response_lengths = [len(text) for text in texts if text is not None]
        else:
            prompt_length = len(example.prompt_ids)
            responses = (example.chosen_ids, example.rejected_ids)
            response_lengths = [len(ids) - 1 for ids in responses if ids]
        if flags.remove_same_inputs and (example.prompt, example.chosen) in self._seen:
            return DUPLICATE
        if prompt_length > flags.max_prompt_length:
            return TOO_LONG
        if min(response_lengths) < flags.minimum_response_length:
            return TOO_SHORT
        if flags.remove_same_responses and example.chosen == example.rejected:
            return SAME
        if not example.prompt_ids:
            return EMPTY_PROMPT
        if len(example.prompt_ids) >= flags.max_length:
            return CUT_TO_NOTHING
        return None


def _cut(example: EncodedRow, max_length: int) -> EncodedRow:
    room = max(0, max_length - len(example.prompt_ids))
    rejected_ids = None if example.rejected_ids is None else example.rejected_ids[:room]
    return replace(example, chosen_ids=example.chosen_ids[:room], rejected_ids=rejected_ids)


def _split_validation(examples: list[EncodedRow], share: float) -> tuple[list[EncodedRow], list[EncodedRow]]:
    """The first examples, a share of all in whole prompts, and the others."""
    prompt_of_row = prompt_of_rows([example.row for example in examples])

    def prompt_of(example: EncodedRow) -> str:
        return example.origin if prompt_of_row is None else prompt_of_row(example.row)

    if not examples:
        return [], []
    count = int(len(examples) * share)  # rounded down, as SheepRL does
    split = f"{count},{len(examples) - count}"
    validation = split_part(examples, split, 0, prompt_of, shuffle=False)
    train = split_part(examples, split, 1, prompt_of, shuffle=False)
    return validation, train


def _write_folder(
    folder: Path, info: Mapping[str, Any], splits: Splits, skipped: Sequence[tuple[EncodedRow, str]] | None
) -> None:
    """Writes the whole folder.

    Args:
        folder: to write.
        info: the content of `prepared.json`.
        splits: the rows; at least one in each split.
        skipped: rows that were left out, and the reasons; None = do not write them.

    Raises:
        UserError: it cannot be written.
    """
    import datasets
    from datasets.table import InMemoryTable

    with reporting(f"--output {folder}"), writing_folder(folder) as new_folder:
        if info["format"] == "pt":
            write_pt(new_folder, info, splits)
        else:
            for split, examples in splits.items():
                table = InMemoryTable(table_of(EncodedRow, examples))
                datasets.Dataset(table).save_to_disk(new_folder / split)
            (new_folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
        if skipped is not None:
            write_rows(new_folder / SKIPPED, [_skipped_row(example, reason) for example, reason in skipped])
        (new_folder / INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def _skipped_row(example: EncodedRow, reason: str) -> dict[str, object]:
    row: dict[str, object] = {"reason": reason, "origin": example.row.origin}
    for name in ("prompt", "chosen", "rejected"):
        text = getattr(example, name)
        if text is not None:
            row[name] = text
    return row
