# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check`: what a source holds, how it is read, and what training will leave out, as text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.examples import pair_examples, prompt_examples, sft_examples
from dschat.data.formats.formats import format_of
from dschat.data.formats.registry import find_known
from dschat.data.formats.rows import DataKeys, Row
from dschat.data.inspect.columns import describe_columns, prompt_identity
from dschat.data.inspect.histogram import summary, text_histogram
from dschat.data.sources import Source, load_source
from dschat.data.splits import PHASES, split_indices
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Limits:
    """Longest texts of training, in tokens: of prompt and response (steps 1 and 2), of the prompt (step 3)."""

    max_seq_len: int = 1024
    max_prompt_seq_len: int = 512


def check_report(
    path: str,
    keys: DataKeys,
    data_split: str = "2,4,4",
    seed: int = 1234,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    limits: Limits | None = None,
) -> str:
    """Reads a source as training does and describes it.

    Args:
        path: what `--data_path` takes.
        keys: column names.
        data_split: fractions of the three steps.
        seed: seed of the splits.
        tokenizer: of the model to train; without one lengths are in characters and nothing is said of long rows.
        limits: the longest texts.

    Returns:
        Lines: files, rows, format, columns, duplicates, shares, lengths, and what each step leaves out.

    Raises:
        UserError: see `dschat.data.sources.load_source`.
    """
    limits = limits or Limits()
    source = load_source(path, keys, seed)
    rows = source.train + source.eval
    shares = [
        [[part[i] for i in split_indices(len(part), data_split, phase, seed)] for phase in range(len(PHASES))]
        for part in (source.train, source.eval)
    ]
    lines = [str(path), "=" * len(str(path)), *_describe_rows(path, source, keys)]
    lines += _section("columns (type and number)", describe_columns(row.extra for row in rows))
    lines += _section("prompts", _describe_duplicates(source))
    lines += _section(f"shares of --data_split {data_split}, seed {seed}", _describe_shares(shares))
    if tokenizer is None:
        lines += _lengths_in_characters(rows)
    else:
        lines += _lengths_in_tokens(rows, tokenizer, limits)
        left_out = [_left_out(phase, shares, tokenizer, limits) for phase in range(len(PHASES))]
        lines += _section(f"left out at these lengths, of the steps' shares ({_limits(limits)})", left_out)
    return "\n".join(lines)


def _describe_rows(path: str, source: Source, keys: DataKeys) -> list[str]:
    """Where the rows come from, how many there are, what they are, what was skipped."""
    rows = source.train + source.eval
    read = [str(file) for file in source.files]
    if source.hub:
        read = [f"{source.hub['id']} on the Hugging Face hub, revision {source.hub['revision']}"]
    formats = Counter(format_of(row.extra, keys) for row in rows)
    responses = Counter(_responses(row) for row in rows)
    known = find_known(str(path))
    lines = [
        f"read       {', '.join(read)}",
        f"rows       {len(source.train):,} training, {len(source.eval):,} evaluation",
        *([f"published  {known.train_rows:,} training, {known.eval_rows or 0:,} evaluation"] if known else []),
        f"format     {_counted(formats)}",
        f"responses  {_counted(responses)}",
        f"skipped    {_counted(source.dropped) or 'none'}",
    ]
    return lines


def _responses(row: Row) -> str:
    if row.chosen is None:
        return "none" if row.no_response is None else f"none ({row.no_response}: left out in step 1)"
    return "one" if row.rejected is None else "chosen and rejected"


def _describe_duplicates(source: Source) -> list[str]:
    train, held_out = (
        [prompt_identity(row.prompt, row.messages) for row in part] for part in (source.train, source.eval)
    )
    seen = set(train)
    return [
        f"{len(seen):,} different ones in {len(train):,} training rows, {len(set(held_out)):,} in {len(held_out):,}"
        " evaluation rows",
        f"{sum(prompt in seen for prompt in held_out):,} evaluation rows have a prompt that is in training, too",
    ]


def _describe_shares(shares: Sequence[Sequence[Sequence[Row]]]) -> list[str]:
    return [
        f"step {phase + 1} ({name}): {len(shares[0][phase])} training, {len(shares[1][phase])} evaluation rows"
        for phase, name in enumerate(PHASES)
    ]


def _lengths_in_characters(rows: Sequence[Row]) -> list[str]:
    prompts = [len(prompt_identity(row.prompt, row.messages)) for row in rows]
    whole = [
        length + max(len(text or "") for text in (row.chosen, row.rejected))
        for row, length in zip(rows, prompts, strict=True)
    ]
    return [
        *_histogram("length of the prompts, in characters (--tokenizer MODEL counts tokens)", prompts),
        *_histogram("length of prompt and longer response, in characters", whole),
    ]


def _lengths_in_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", limits: Limits) -> list[str]:
    """As training encodes them: with BOS and EOS."""
    prompts = [len(ids) for ids in encode_prompts(tokenizer, rows)]
    responses = [
        [len(ids) for ids in encode_responses(tokenizer, [getattr(row, name) or "" for row in rows])]
        for name in ("chosen", "rejected")
    ]
    whole = [prompt + max(pair) + 1 for prompt, *pair in zip(prompts, *responses, strict=True)]
    too_long = _share_of(sum(length > limits.max_prompt_seq_len for length in prompts), len(rows))
    to_cut = _share_of(sum(length > limits.max_seq_len for length in whole), len(rows))
    return [
        *_histogram("length of the prompts, in tokens, with BOS", prompts),
        f"  longer than --max_prompt_seq_len {limits.max_prompt_seq_len}: {too_long}, dropped in step 3",
        *_histogram("length of prompt and longer response, in tokens, with BOS and EOS", whole),
        f"  longer than --max_seq_len {limits.max_seq_len}: {to_cut}, cut in steps 1 and 2",
    ]


def _left_out(
    phase: int, shares: Sequence[Sequence[Sequence[Row]]], tokenizer: "PreTrainedTokenizerBase", limits: Limits
) -> str:
    """What one step drops of its share, by the functions that training uses."""
    texts = []
    try:
        for name, part in zip(("training", "evaluation"), shares, strict=True):
            total = len(part[phase])
            dropped = _dropped(phase, part[phase], tokenizer, limits)
            reasons = f" ({_counted(dropped)})" if dropped else ""
            texts.append(f"{dropped.total()} of {total} {name} rows{reasons}")
    except UserError as error:
        return f"step {phase + 1} ({PHASES[phase]}): not possible: {error}"
    return f"step {phase + 1} ({PHASES[phase]}): {', '.join(texts)}"


def _dropped(phase: int, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", limits: Limits) -> Counter[str]:
    eos_id = tokenizer.eos_token_id or 0
    if phase == 0:
        return sft_examples(rows, tokenizer, limits.max_seq_len, eos_id, held_out=True)[1]
    if phase == 1:
        return pair_examples(rows, tokenizer, limits.max_seq_len, eos_id, held_out=True)[1]
    return prompt_examples(rows, tokenizer, limits.max_prompt_seq_len, held_out=True)[1]


def _limits(limits: Limits) -> str:
    return f"--max_seq_len {limits.max_seq_len}, --max_prompt_seq_len {limits.max_prompt_seq_len}"


def _histogram(title: str, lengths: Sequence[int]) -> list[str]:
    return _section(title, [*text_histogram(lengths), summary(lengths)])


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)]


def _share_of(count: int, total: int) -> str:
    return f"{count} of {total} rows ({100 * count / total:.1f} %)"


def _counted(counts: "Counter[str] | dict[str, int]") -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
