# SPDX-License-Identifier: Apache-2.0
"""`dschat data check`: describes data, how they are read, and which rows training will leave out, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dschat.base.errors import UserError
from dschat.base.progress import progress
from dschat.data.formats import format_of
from dschat.data.known_sets import find_known
from dschat.data.messages import WEIGHT
from dschat.data.notes import UNREAD_COLUMNS, response_notes, unread_column_counts
from dschat.data.prepared.folder import PreparedFolder, summary_of
from dschat.data.prepared.read import check_folder, read_split
from dschat.data.preview import RowReport, Settings, prompt_notes, require_responses_of, row_reports, special_notes
from dschat.data.rows import Row, in_words
from dschat.data.sources import Source, load_source, split_for
from dschat.data.splits import STEPS, step_rows, whole_prompt
from dschat.data.template_notes import template_notes
from dschat.data.tokenised import encode_rows
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_COLUMNS = 60  # lines of a description
ALL_STEPS = range(1, len(STEPS) + 1)
Shares = dict[str, dict[int, list[Row]]]  # "training" or "evaluation" → step → its rows
TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true/false",
    int: "number",
    float: "number",
    list: "list",
    dict: "object",
}


def check_report(path: str, data_split: str | None, settings: Settings) -> str:
    """Reads a source as training does and describes it, in lines.

    The lines cover files, rows, format, columns, duplicates, the shares of the three steps and, with a tokenizer,
    lengths and the rows that each step leaves out.

    Raises:
        UserError: see `dschat.data.sources.load_source`.
    """
    source = load_source(path, settings.keys, show=True)
    rows = source.train + source.eval
    split = split_for(path, data_split)
    shares: Shares = {}
    for name, part_rows in (("training", source.train), ("evaluation", source.eval)):
        shares[name] = {}
        for step in ALL_STEPS:
            shares[name][step] = step_rows(part_rows, split, step, source.prompt_of)
    shares_title = "rows of the steps: all rows in each (no --data_split)"
    if split is not None:
        shares_title = f"shares of --data_split {split}"

    shown_rows = progress(desc="columns", unit="row", iterable=rows)
    sections = {
        "columns (type and number)": describe_columns(row.extra for row in shown_rows),
        UNREAD_COLUMNS: [in_words(unread_column_counts(rows, settings.keys)) or "none"],
        "prompts": _describe_duplicates(source),
        shares_title: _describe_shares(shares, source),
    }
    if settings.tokenizer is None:
        sections["lengths"] = ["--tokenizer MODEL counts tokens, and the rows that each step leaves out"]
    else:
        sections |= _token_sections(rows, shares, settings.tokenizer, settings)

    lines = [path, "=" * len(path), *_describe_rows(path, source, settings.keys)]
    for title, content in sections.items():
        lines += ["", title]
        lines += [f"  {line}" for line in content]
    return "\n".join(lines)


def _token_sections(
    rows: Sequence[Row], shares: Shares, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> dict[str, list[str]]:
    """The sections of the report that need a tokenizer."""
    encoded, _ = encode_rows(RowReport, partial(_report_batch, settings=settings), rows, "tokenising")
    reports = list(encoded)
    sections = _describe_lengths(reports, settings)
    sections["special tokens"] = special_notes(rows, reports, tokenizer) or ["nothing to note"]
    notes = template_notes(tokenizer, rows, settings.end_id, (WEIGHT,))
    notes += prompt_notes(rows, tokenizer, settings.keys)
    if notes:
        sections["chat template"] = notes
    limits = f"--max_seq_len {settings.max_seq_len}, --max_prompt_seq_len {settings.max_prompt_seq_len}"
    title = f"left out at these lengths, of the steps' shares ({limits})"
    report_of = dict(zip(map(id, rows), reports, strict=True))
    sections[title] = [_left_out(step, shares, report_of) for step in ALL_STEPS]
    return sections


def _report_batch(rows: Sequence[Row], *, settings: Settings, held_out: bool) -> tuple[list[RowReport], Counter[str]]:
    """Reports on rows, for `encode_rows`; no row is dropped."""
    return row_reports(rows, settings), Counter()


def _describe_rows(path: str, source: Source, keys: ColumnFlags) -> list[str]:
    """Describes the rows of a source: files, number, format, responses, and number of skipped rows."""
    rows = source.train + source.eval
    origin = ", ".join(map(str, source.files))
    if source.hub:
        origin = f"{source.hub['id']} on the Hugging Face hub, revision {source.hub['revision']}"
    lines = [f"read       {origin}", f"rows       {len(source.train):,} training, {len(source.eval):,} evaluation"]
    published = find_known(path)
    if published:
        lines.append(f"published  {published.train_rows:,} training, {published.eval_rows or 0:,} evaluation")
    lines += [
        f"format     {in_words(Counter(format_of(row.extra, keys) for row in rows))}",
        f"responses  {in_words(Counter(map(_responses, rows)))}",
    ]
    lines += [f"{name:10} {note}" for name, note in response_notes(rows).items()]
    lines.append(f"skipped    {in_words(source.dropped) or 'none'}")
    return lines


def _responses(row: Row) -> str:
    """The responses of a row, in words."""
    if row.chosen is not None:
        return "one" if row.rejected is None else "chosen and rejected"
    if row.no_response is not None:
        return f"none ({row.no_response})"
    return "none"


def _describe_duplicates(source: Source) -> list[str]:
    train_prompts = [whole_prompt(row) for row in source.train]
    eval_prompts = [whole_prompt(row) for row in source.eval]
    different = set(train_prompts)
    num_shared = sum(prompt in different for prompt in eval_prompts)
    return [
        f"{len(different):,} different ones in {len(train_prompts):,} training rows, {len(set(eval_prompts)):,} in "
        f"{len(eval_prompts):,} evaluation rows",
        f"{num_shared:,} evaluation rows have a prompt that is in training, too",
    ]


def _describe_shares(shares: Shares, source: Source) -> list[str]:
    """For each step, the number of the source's rows that it reads."""
    lines = []
    for step in ALL_STEPS:
        num_train = len(shares["training"][step])
        num_eval = len(shares["evaluation"][step])
        lines.append(
            f"{_step(step)}: {num_train} of {len(source.train)} training, {num_eval} of {len(source.eval)} evaluation "
            "rows"
        )
    return lines


def _describe_lengths(reports: Sequence[RowReport], settings: Settings) -> dict[str, list[str]]:
    """Lengths as training encodes the rows: with BOS and EOS."""
    prompts = [report.prompt for report in reports]
    totals = [len(report) for report in reports]
    longer_prompts = _longer("--max_prompt_seq_len", settings.max_prompt_seq_len, prompts, "dropped in step 3")
    longer_totals = _longer("--max_seq_len", settings.max_seq_len, totals, "cut in steps 1 and 2")
    return {
        "length of the prompts, in tokens, with BOS": [summary(prompts), longer_prompts],
        "length of prompt and longer response, in tokens, with BOS and EOS": [summary(totals), longer_totals],
    }


def _longer(flag: str, limit: int, lengths: Sequence[int], consequence: str) -> str:
    count = sum(length > limit for length in lengths)
    share = f"{count} of {len(lengths)} rows ({100 * count / len(lengths):.1f} %)"
    return f"longer than {flag} {limit}: {share}, {consequence}"


def _left_out(step: int, shares: Shares, report_of: Mapping[int, RowReport]) -> str:
    """The rows that a step drops of its share, with reasons. `report_of`: reports by the `id` of their rows."""
    texts = []
    try:
        for name, share_by_step in shares.items():
            rows = share_by_step[step]
            require_responses_of(step, rows)
            reasons = [report_of[id(row)].reasons[step - 1] for row in rows]
            dropped = Counter(filter(None, reasons))
            in_detail = f" ({in_words(dropped)})" if dropped else ""
            texts.append(f"{dropped.total()} of {len(rows)} {name} rows{in_detail}")
    except UserError as error:
        return f"{_step(step)}: not possible: {error}"
    return f"{_step(step)}: {', '.join(texts)}"


def _step(step: int) -> str:
    return f"step {step} ({STEPS[step - 1]})"


def describe_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines "name  type number, type number", nested columns as "info.post" and "summaries[].text".

    One line per column, in the order of their first appearance; at most MAX_COLUMNS, and a line with the number of
    other columns. Types: text, text (empty), number, true/false, null, list, object, or the name of another type.
    """
    types_by_column: dict[str, Counter[str]] = {}
    for row in rows:
        for column, kind in _flatten("", row):
            types_by_column.setdefault(column, Counter())[kind] += 1
    shown_columns = list(types_by_column)[:MAX_COLUMNS]
    width = max(map(len, shown_columns), default=0)
    lines = []
    for column in shown_columns:
        types = ", ".join(f"{kind} {count}" for kind, count in types_by_column[column].most_common())
        lines.append(f"{column:{width}}  {types}")
    if len(types_by_column) > MAX_COLUMNS:
        lines.append(f"... and {len(types_by_column) - MAX_COLUMNS} more")
    return lines


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(column, type) of a value and of everything in it; the row itself has no name."""
    if name:
        yield name, _type(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list):
        for item in value:
            yield from _flatten(f"{name}[]", item)


def _type(value: Any) -> str:
    if isinstance(value, str):
        return "text" if value else "text (empty)"
    return TYPE_NAMES.get(type(value), type(value).__name__)


def prepared_report(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describes a prepared folder, in lines; with the tokenizer of a model, whether it fits.

    Raises:
        UserError: a file cannot be read.
    """
    title = str(folder.path)
    lines = [title, "=" * len(title), "prepared data with splits of their own: --data_split does not cut them"]
    lengths_by_split = {}
    for split in folder.files:
        lengths_by_split[split] = list(map(len, read_split(folder, split)))
    counts = {split: len(lengths) for split, lengths in lengths_by_split.items()}
    lines += summary_of({"kept": counts, **folder.info})
    if tokenizer is not None:
        try:
            check_folder(folder, tokenizer, None, None)
            lines.append(f"tokenizer  {tokenizer.name_or_path} gives the same ids")
        except UserError as error:
            lines.append(f"tokenizer  {error}")
    lines += ["", "length of prompt and longer response, in tokens"]
    for split, lengths in lengths_by_split.items():
        lines.append(f"  {split}: {summary(lengths)}")
    return "\n".join(lines)


def summary(lengths: Sequence[int]) -> str:
    """Smallest, median, mean, 95th and 99th percentile (nearest rank) and largest of at least one number."""
    percentiles = np.percentile(lengths, (0, 50, 95, 99, 100), method="inverted_cdf")
    low, median, high, highest, top = percentiles
    return f"min {low}, median {median}, mean {np.mean(lengths):.1f}, 95 % {high}, 99 % {highest}, max {top}"
