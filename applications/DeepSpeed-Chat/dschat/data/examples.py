# SPDX-License-Identifier: Apache-2.0
"""Rows → examples: token ids cut to length, with a count of what was dropped and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dschat.data.encoding import encode_prompt, encode_prompts, encode_response, encode_responses, prompt_text
from dschat.data.formats.rows import Row
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "PairExample",
    "PromptExample",
    "SFTExample",
    "encode_prompt",
    "encode_response",
    "pair_examples",
    "prompt_examples",
    "sft_examples",
]

CUT_TO_NOTHING = "response cut to nothing"
EQUAL_PAIR = "pair equal after cutting"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_PROMPT = "prompt without tokens"


@dataclass(frozen=True)
class SFTExample:
    """A demonstration; neither part is empty.

    Attributes:
        prompt_ids: ids, BOS included.
        response_ids: ids, with EOS at the end unless they were cut.
    """

    prompt_ids: list[int]
    response_ids: list[int]

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PairExample:
    """A comparison: the ids of prompt and response together, for the better and the worse response."""

    chosen_ids: list[int]
    rejected_ids: list[int]

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass(frozen=True)
class PromptExample:
    """A prompt to answer.

    Attributes:
        prompt_ids: ids, BOS included.
        prompt_text: the prompt as text; a conversation as its chat template writes it.
        row: the data row.
        index: number of the row in the list that the examples were made from.
    """

    prompt_ids: list[int]
    prompt_text: str
    row: Row = field(repr=False)
    index: int

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


def sft_examples(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[SFTExample], Counter[str]]:
    """Demonstrations, each [BOS] + prompt + response + [EOS] cut to its first `max_seq_len` tokens.

    Args:
        rows: rows with a `chosen` response, or with a reason for having none.
        tokenizer: the model's tokenizer.
        max_seq_len: longest example, in tokens.
        eos_id: id that ends a response.
        held_out: rows of an evaluation, of which none need be left.

    Returns:
        The examples in the order of the rows, and reason → number of rows dropped: nothing of the response was left,
        the prompt has no token (nothing would predict the first response token), or the row's `no_response`.

    Raises:
        UserError: a row has no response though its format wants one, or every row was dropped.
    """
    for row in rows:
        if row.chosen is None and row.no_response is None:
            raise UserError(
                f"{row.origin}: the row has no response to learn from. Step 1 needs one per row: name its column with "
                "--chosen_key or --response_key, or end the messages with one of the assistant."
            )
    examples: list[SFTExample] = []
    dropped: Counter[str] = Counter()
    prompts = encode_prompts(tokenizer, rows)
    responses = encode_responses(tokenizer, [row.chosen or "" for row in rows])
    for row, prompt_ids, ids in zip(rows, prompts, responses, strict=True):
        response_ids = [*ids, eos_id][: max(0, max_seq_len - len(prompt_ids))]
        if row.chosen is None:
            dropped[str(row.no_response)] += 1
        elif not prompt_ids:
            dropped[EMPTY_PROMPT] += 1
        elif not response_ids:
            dropped[CUT_TO_NOTHING] += 1
        else:
            examples.append(SFTExample(prompt_ids, response_ids))
    if not held_out:
        _refuse_none_left(rows, examples, dropped, f"--max_seq_len {max_seq_len}")
    return examples, dropped


def pair_examples(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[PairExample], Counter[str]]:
    """Comparisons; both sequences are [BOS] + prompt + response + [EOS] cut to their first `max_seq_len` tokens.

    Args:
        rows: rows with a `chosen` and a `rejected` response.
        tokenizer: the model's tokenizer.
        max_seq_len: longest sequence, in tokens.
        eos_id: id that ends a response.
        held_out: rows of an evaluation, of which none need be left.

    Returns:
        The examples in the order of the rows, and reason → number of rows dropped: nothing of the responses was left,
        or both sequences are equal.

    Raises:
        UserError: a row lacks a response, or every row was dropped.
    """
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(
                f"{row.origin}: the row has no {missing} response. Step 2 needs a chosen and a rejected one per row: "
                f"name the column with --{missing}_key."
            )
    examples: list[PairExample] = []
    dropped: Counter[str] = Counter()
    prompts = encode_prompts(tokenizer, rows)
    chosen = encode_responses(tokenizer, [row.chosen or "" for row in rows])
    rejected = encode_responses(tokenizer, [row.rejected or "" for row in rows])
    for prompt_ids, better, worse in zip(prompts, chosen, rejected, strict=True):
        chosen_ids = [*prompt_ids, *better, eos_id][:max_seq_len]
        rejected_ids = [*prompt_ids, *worse, eos_id][:max_seq_len]
        if len(prompt_ids) >= max_seq_len:
            dropped[CUT_TO_NOTHING] += 1
        elif chosen_ids == rejected_ids:
            dropped[EQUAL_PAIR] += 1
        else:
            examples.append(PairExample(chosen_ids, rejected_ids))
    if not held_out:
        _refuse_none_left(rows, examples, dropped, f"--max_seq_len {max_seq_len}")
    return examples, dropped


def prompt_examples(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_prompt_seq_len: int, held_out: bool = False
) -> tuple[list[PromptExample], Counter[str]]:
    """Prompts of at most `max_prompt_seq_len` tokens, BOS included; longer ones are dropped, never cut.

    Args:
        rows: any rows; their responses are not used.
        tokenizer: the actor's tokenizer.
        max_prompt_seq_len: longest prompt, in tokens.
        held_out: rows of an evaluation, of which none need be left.

    Returns:
        The examples in the order of the rows, and reason → number of rows dropped.

    Raises:
        UserError: every row was dropped.
    """
    examples: list[PromptExample] = []
    dropped: Counter[str] = Counter()
    for index, (row, ids) in enumerate(zip(rows, encode_prompts(tokenizer, rows), strict=True)):
        if not ids:
            dropped[EMPTY_PROMPT] += 1
        elif len(ids) > max_prompt_seq_len:
            dropped[PROMPT_TOO_LONG] += 1
        else:
            examples.append(PromptExample(ids, prompt_text(tokenizer, row), row, index))
    if not held_out:
        _refuse_none_left(rows, examples, dropped, f"--max_prompt_seq_len {max_prompt_seq_len}")
    return examples, dropped


def _refuse_none_left(rows: Sequence[Row], examples: Sequence[object], dropped: Counter[str], limit: str) -> None:
    if rows and not examples:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
        raise UserError(
            f"{limit}: none of the {len(rows)} rows is left ({reasons}; the first is {rows[0].origin}). Give a larger "
            "limit or other data."
        )
