# SPDX-License-Identifier: Apache-2.0
"""`dschat data check`: what data hold, how they are read, and what training will leave out, as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.progress import progress
from dschat.data.examples import empty_responses
from dschat.data.formats import format_of
from dschat.data.hub import find_known
from dschat.data.messages import WEIGHT, message_text
from dschat.data.prepared.folder import PreparedFolder, summary_of
from dschat.data.prepared.read import check_folder, read_split
from dschat.data.prepared.write import lengths_of_parts
from dschat.data.preview import RowTokens, Settings, examples_of, prompt_notes, row_tokens, special_notes
from dschat.data.rows import Row, in_words
from dschat.data.sources import STEPS, Source, load_source, split_for, step_rows
from dschat.data.template_notes import UNREAD_COLUMNS, template_notes, unread_column_counts
from dschat.data.tokenised import encode_rows, workers_for
from dschat.settings.common import ColumnFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_COLUMNS = 60  # lines of a description
Shares = Mapping[str, Sequence[Sequence[Row]]]  # training, evaluation → the rows of each step
MAX_BINS = 12  # of a histogram
BAR_WIDTH = 40  # characters of the longest bar


def check_report(path: str, data_split: str | None, settings: Settings) -> str:
    """Reads a source as training does and describes it, in lines.

    They tell of files, rows, format, columns, duplicates, the shares of the three steps, lengths (in characters where
    there is no tokenizer), and, with a tokenizer, what each step leaves out.

    Raises:
        UserError: see `dschat.data.sources.load_source`.
    """
    source, tokenizer = load_source(path, settings.keys, settings.seed, show=True), settings.tokenizer
    rows = source.train + source.eval
    split = split_for(path, data_split)
    steps = range(1, len(STEPS) + 1)
    shares = {
        "training": [step_rows(source.train, split, step, settings.seed) for step in steps],
        "evaluation": [step_rows(source.eval, split, step, settings.seed) for step in steps],
    }
    title = "rows of the steps: all rows in each (no --data_split)"
    if split is not None:
        title = f"shares of --data_split {split}, seed {settings.seed}"
    sections = {
        "columns (type and number)": describe_columns(
            row.extra for row in progress(desc="columns", unit="row", iterable=rows)
        ),
        UNREAD_COLUMNS: [in_words(unread_column_counts(rows, settings.keys)) or "none"],
        "prompts": _describe_duplicates(source),
        title: _describe_shares(shares, source),
    }
    if tokenizer is None:
        sections |= _lengths_in_characters(rows)
    else:
        measure = partial(_measured, tokenizer, settings.end_id)
        tokens, _ = encode_rows(RowTokens, measure, rows, "tokenising", workers_for(rows), show=True)
        tokens = list(tokens)
        sections |= _lengths_in_tokens(tokens, settings)
        at = f"--max_seq_len {settings.max_seq_len}, --max_prompt_seq_len {settings.max_prompt_seq_len}"
        left_out = [_left_out(step, shares, settings) for step in range(1, len(STEPS) + 1)]
        sections["special tokens"] = special_notes(rows, tokens, tokenizer, settings.end_id) or ["nothing to note"]
        template = template_notes(tokenizer, rows, settings.end_id, (WEIGHT,))
        template += prompt_notes(rows, tokenizer, settings.keys)
        if template:
            sections["chat template"] = template
        sections[f"left out at these lengths, of the steps' shares ({at})"] = left_out
    lines = [path, "=" * len(path), *_describe_rows(path, source, settings.keys)]
    for title, content in sections.items():
        lines += ["", title, *(f"  {line}" for line in content)]
    return "\n".join(lines)


def _describe_rows(path: str, source: Source, keys: ColumnFlags) -> list[str]:
    """Where the rows come from, how many there are, what they are, what was skipped."""
    rows = source.train + source.eval
    read = ", ".join(map(str, source.files))
    if source.hub:
        read = f"{source.hub['id']} on the Hugging Face hub, revision {source.hub['revision']}"
    known = find_known(path)
    return [
        f"read       {read}",
        f"rows       {len(source.train):,} training, {len(source.eval):,} evaluation",
        *([f"published  {known.train_rows:,} training, {known.eval_rows or 0:,} evaluation"] if known else []),
        f"format     {in_words(Counter(format_of(row.extra, keys) for row in rows))}",
        f"responses  {in_words(Counter(map(_responses, rows)))}",
        *([f"empty      {empty}"] if (empty := empty_responses(rows)) else []),
        f"skipped    {in_words(source.dropped) or 'none'}",
    ]


def _responses(row: Row) -> str:
    if row.chosen is None:
        return "none" if row.no_response is None else f"none ({row.no_response}: left out in step 1)"
    return "one" if row.rejected is None else "chosen and rejected"


def _describe_duplicates(source: Source) -> list[str]:
    train, held_out = ([_prompt(row) for row in part] for part in (source.train, source.eval))
    seen = set(train)
    return [
        f"{len(seen):,} different ones in {len(train):,} training rows, {len(set(held_out)):,} in {len(held_out):,}"
        " evaluation rows",
        f"{sum(prompt in seen for prompt in held_out):,} evaluation rows have a prompt that is in training, too",
    ]


def _prompt(row: Row) -> str:
    """What two rows with the same prompt share, whether it is a text or a conversation."""
    if row.prompt is not None:
        return row.prompt
    asked = [row.messages, row.template_arguments] if row.template_arguments else row.messages
    return json.dumps(asked, sort_keys=True, default=str)


def _describe_shares(shares: Shares, source: Source) -> list[str]:
    """For each step, how many of the source's rows it reads."""
    read, read_eval = len(source.train), len(source.eval)
    lines = []
    for step in range(1, len(STEPS) + 1):
        train, held_out = (len(shares[name][step - 1]) for name in ("training", "evaluation"))
        lines.append(f"{_step(step)}: {train} of {read} training, {held_out} of {read_eval} evaluation rows")
    return lines


def _lengths_in_characters(rows: Sequence[Row]) -> dict[str, list[str]]:
    prompts = [len(_prompt(row)) for row in rows]
    replies = [(row.reply("chosen"), row.reply("rejected")) for row in rows]
    responses = [max(len(message_text(reply or {})) for reply in pair) for pair in replies]
    whole = list(map(sum, zip(prompts, responses, strict=True)))
    return {
        "length of the prompts, in characters (--tokenizer MODEL counts tokens)": _histogram(prompts),
        "length of prompt and longer response, in characters": _histogram(whole),
    }


def _lengths_in_tokens(
    tokens: Sequence[RowTokens],
    settings: Settings,
) -> dict[str, list[str]]:
    """As training encodes them: with BOS and EOS."""
    prompts = [row.prompt for row in tokens]
    whole = list(map(len, tokens))
    return {
        "length of the prompts, in tokens, with BOS": [
            *_histogram(prompts),
            _longer("--max_prompt_seq_len", settings.max_prompt_seq_len, prompts, "dropped in step 3"),
        ],
        "length of prompt and longer response, in tokens, with BOS and EOS": [
            *_histogram(whole),
            _longer("--max_seq_len", settings.max_seq_len, whole, "cut in steps 1 and 2"),
        ],
    }


def _longer(
    flag: str,
    limit: int,
    lengths: Sequence[int],
    fate: str,
) -> str:
    count = sum(length > limit for length in lengths)
    share = f"{count} of {len(lengths)} rows ({100 * count / len(lengths):.1f} %)"
    return f"longer than {flag} {limit}: {share}, {fate}"


def _left_out(step: int, shares: Shares, settings: Settings) -> str:
    """What one step drops of its share."""
    texts = []
    try:
        for name, parts in shares.items():
            own = parts[step - 1]
            count, title = partial(_dropped, step, settings), f"step {step}, {name}"
            _, dropped = encode_rows(RowTokens, count, own, title, workers_for(own), show=True)
            reasons = f" ({in_words(dropped)})" if dropped else ""
            texts.append(f"{dropped.total()} of {len(parts[step - 1])} {name} rows{reasons}")
    except UserError as error:
        return f"{_step(step)}: not possible: {error}"
    return f"{_step(step)}: {', '.join(texts)}"


def _measured(
    tokenizer: PreTrainedTokenizerBase, end_id: int, rows: Sequence[Row], *, held_out: bool
) -> tuple[list[RowTokens], Counter[str]]:
    return row_tokens(tokenizer, end_id, rows), Counter()


def _dropped(
    step: int, settings: Settings, rows: Sequence[Row], *, held_out: bool
) -> tuple[list[RowTokens], Counter[str]]:
    assert settings.tokenizer is not None
    return [], examples_of(step, rows, settings.tokenizer, settings)[1]


def _step(step: int) -> str:
    return f"step {step} ({STEPS[step - 1]})"


def _histogram(lengths: Sequence[int]) -> list[str]:
    return [*text_histogram(lengths), summary(lengths)]


def describe_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines "name  type number, type number", nested columns as "info.post" and "summaries[].text".

    One line per column, in the order of their first appearance, at most MAX_COLUMNS and one that says how many were
    left out. Types: text, text (empty), number, true/false, null, list, object, or the name of another.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for name, kind in _flatten("", row):
            found.setdefault(name, Counter())[kind] += 1
    shown = dict(islice(found.items(), MAX_COLUMNS))
    width = max(map(len, shown), default=0)
    lines = [
        f"{name:{width}}  {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}"
        for name, kinds in shown.items()
    ]
    if len(found) > MAX_COLUMNS:
        lines.append(f"... and {len(found) - MAX_COLUMNS} more")
    return lines


def _flatten(
    name: str,
    value: Any,
) -> Iterator[tuple[str, str]]:
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
    names = {type(None): "null", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


def prepared_report(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describes a prepared folder, in lines; with the tokenizer of a model, whether it fits.

    Raises:
        UserError: a file cannot be read.
    """
    title = str(folder.path)
    lines = [title, "=" * len(title), "prepared data with splits of their own: --data_split does not cut them"]
    parts = {split: lengths_of_parts(read_split(folder, split)) for split in folder.files}
    if folder.info:
        lines += summary_of(folder.info)
    else:
        rows = ", ".join(f"{len(lengths['prompt']):,} {split}" for split, lengths in parts.items())
        lines += [f"for        {folder.stage}, tokenizer {folder.tokenizer_name}, pt files", f"rows       {rows}"]
    if tokenizer is not None:
        try:
            check_folder(folder, tokenizer, None, None)
            lines.append(f"tokenizer  {tokenizer.name_or_path} gives the same ids")
        except UserError as error:
            lines.append(f"tokenizer  {error}")
    for name in parts["train"]:
        lines += ["", f"length of {name}, in tokens"]
        for split, lengths in parts.items():
            bars = text_histogram(lengths[name]) if split == "train" else []
            lines += [f"  {line}" for line in [f"{split}: {summary(lengths[name])}", *bars]]
    return "\n".join(lines)


def bin_width(largest: int) -> int:
    """Width of the bins: the smallest of 1, 2, 5, 10, 20, 50, ... that needs at most MAX_BINS from 0 to `largest`."""
    widths = (factor * 10**zeros for zeros in count() for factor in (1, 2, 5))
    return next(width for width in widths if largest // width < MAX_BINS)


def text_histogram(lengths: Sequence[int]) -> list[str]:
    """Bars of how many numbers, each 0 or more, fall into bins of equal width.

    One line per bin, from the one of the smallest number to the one of the largest: "20 - 29  12 ##########". A bar of
    a bin that is not empty has at least one mark.
    """
    width = bin_width(max(lengths))
    counts = Counter(length // width for length in lengths)
    most, last = max(counts.values()), max(counts)
    digits = len(str((last + 1) * width - 1))
    lines = []
    for number in range(min(counts), last + 1):
        bar = "#" * -(-counts[number] * BAR_WIDTH // most)  # rounded up
        bounds = f"{number * width:{digits}d} - {(number + 1) * width - 1:{digits}d}"
        lines.append(f"{bounds}  {counts[number]:{len(str(most))}d} {bar}".rstrip())
    return lines


def summary(lengths: Sequence[int]) -> str:
    """Smallest, median, mean, 95th and 99th percentile (nearest rank) and largest of at least one number."""
    ordered = sorted(lengths)

    def percentile(percent: int) -> int:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return (
        f"min {ordered[0]}, median {percentile(50)}, mean {sum(ordered) / len(ordered):.1f}, "
        f"95 % {percentile(95)}, 99 % {percentile(99)}, max {ordered[-1]}"
    )
