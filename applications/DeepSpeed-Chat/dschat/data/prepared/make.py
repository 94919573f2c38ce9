# SPDX-License-Identifier: Apache-2.0
"""`dschat data prepare`: a source → filtered, split and encoded rows in a folder that training takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
)
from dschat.data.hub import find_known
from dschat.data.messages import WEIGHT
from dschat.data.options import PrepareOptions
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.prepared.folder import STAGES, PreparedExample, Stage, foreign_entry
from dschat.data.prepared.write import write_folder
from dschat.data.rows import Row, in_words, is_plain
from dschat.data.sources import open_source, read_share
from dschat.data.template_notes import warn_of_template
from dschat.data.tokenised import encode_rows, workers_for
from dschat.models.template_date import date_read_by

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
# Of the flags, those that prepared.json holds as they were given.
ARGUMENTS = (
    *("stage", "data_split", "shuffle", "seed", "num_samples", "validation_percentage", "mask_prompt"),
    "save_skipped",
)
PUBLISHED_STAGES = "1,1,0"  # parts of a published set for finetune and preference, without --data_split
DUPLICATE, TOO_LONG, TOO_SHORT, SAME = "duplicate input", "too long", "too short", "same response"
Unit = Literal["tokens", "characters"]


def prepare(path: str, options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, end_id: int) -> dict[str, Any]:
    """Prepares a source; returns what `prepared.json` holds. The folder appears when it is whole.

    Args:
        path: what `--data_path` takes.
        options: what to make of it, and where.
        tokenizer: of the model to train.
        end_id: id of the token that ends a response.

    Raises:
        UserError: see `dschat.data.sources.load_source`; the folder exists and may not be replaced; or no row is
            left.
    """
    _check_output(path, options)
    keys = options.columns
    flags = options.prepared
    step, seed = 1 + STAGES.index(flags.stage), options.source.seed if flags.shuffle else None
    share = read_share([path], keys, flags.data_split, step, seed, show=True, published_split=PUBLISHED_STAGES)
    reads = (WEIGHT,) if flags.stage == "finetune" else ()
    warn_of_template(tokenizer, share.train, end_id, keys, reads)
    (source,), most = share.sources, flags.num_samples
    rows = {"train": share.train[:most], "test": share.eval[:most]}
    warn_of_plain_prompts(rows["train"], tokenizer, keys.apply_chat_template)
    read = {split: len(part) for split, part in rows.items()}
    limits = RowLimits(
        flags.max_length, flags.max_prompt_length, flags.minimum_response_length, flags.length_unit,
        flags.remove_same_inputs, flags.remove_same_responses,
    )  # fmt: skip
    filtered = Filter(flags.stage, limits)
    dropped: dict[str, Counter[str]] = {"train": Counter(), "test": Counter()}
    kept: dict[str, list[PreparedExample]] = {}
    for split, part in rows.items():
        examples = _encode(part, split, flags.stage, tokenizer, end_id, dropped[split])
        kept[split] = list(filtered.kept(examples, dropped[split]))
    count = int(len(kept["train"]) * flags.validation_percentage)
    splits = {"train": kept["train"][count:], "validation": kept["train"][:count], "test": kept["test"]}
    if not splits["train"]:
        reasons = in_words(dropped["train"]) or "no rows"
        raise UserError(f"--data_path {path}: no training row is left of {read['train']} ({reasons}); loosen a limit.")
    values = options.flat()
    arguments = {name: values[name] for name in ARGUMENTS}
    info = {
        "stage": flags.stage,
        "format": flags.format,
        "mask_prompt": flags.mask_prompt,
        "arguments": {"source": path, **arguments, "limits": asdict(limits), "keys": asdict(keys)},
        "source": {
            "name": source["name"],
            "hub": source.get("hub"),
            "sha256": {str(file): file_hash(file) for file in share.files},
        },
        "tokenizer": {"name": options.source.tokenizer, "fingerprint": tokenizer_fingerprint(tokenizer)},
        "template": {
            "rows": sum(row.messages is not None for part in rows.values() for row in part),
            "fingerprint": template_fingerprint(tokenizer),
            "date": date_read_by(tokenizer),
        },
        "end_id": end_id,
        "read": read,
        "unusable": source["dropped"],
        "left_out": {split: dict(counts) for split, counts in dropped.items()},
        "kept": {split: len(part) for split, part in splits.items() if part},
        "example_prompt": _example_prompt(path, source["name"], splits["train"][0], tokenizer),
    }
    write_folder(Path(flags.output).resolve(), info, splits, filtered.skipped if flags.save_skipped else None)
    return info


def _check_output(path: str, options: PrepareOptions) -> None:
    """Refuses to replace what is no prepared folder, or what holds the source. Raises UserError."""
    output = options.prepared.output
    folder, where = Path(output).resolve(), f"--output {output}"
    if not folder.exists():
        return
    if not options.result.overwrite:
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
    source = next(
        (file for file in open_source(path, options.columns).files if folder in file.resolve().parents), None
    )
    if source is not None:
        raise UserError(f"{where}: the source, {source}, lies in it and would be deleted; give another folder.")


def prepared_examples(
    rows: Sequence[Row], *, tokenizer: PreTrainedTokenizerBase, stage: Stage, end_id: int, held_out: bool = False
) -> tuple[list[PreparedExample], Counter[str]]:
    """Rows encoded, uncut; those that have no response, and say why, are counted.

    Raises:
        UserError: a row lacks a response.
    """
    is_pair = stage == "preference"
    (require_both_responses(rows, "Preference data") if is_pair else require_responses(rows))
    dropped = Counter(str(row.no_response) for row in rows if row.chosen is None)
    usable = [row for row in rows if row.chosen is not None]
    read = usable if is_pair else [replace(row, rejected=None, rejected_message=None) for row in usable]
    examples = []
    for row, encoded in zip(usable, encode_pairs(tokenizer, read), strict=True):
        if encoded.is_unwritten:
            dropped[NOTHING_WRITTEN] += 1
            continue
        if not is_pair and (row.chosen_message or {}).get(WEIGHT) == 0:
            dropped[NO_WEIGHT] += 1
            continue
        examples.append(
            PreparedExample(
                encoded.prompt,
                encoded.chosen,
                encoded.rejected if is_pair else None,
                encoded.prompt_ids,
                [*encoded.chosen_ids, end_id],
                [*encoded.rejected_ids, end_id] if is_pair else None,
                row if is_plain(row.extra) else replace(row, extra={}),
            )
        )
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
    (ids,) = encode_prompt_texts(tokenizer, [prompt])
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
