# SPDX-License-Identifier: Apache-2.0
"""Rows → examples: token ids cut to length, with a count of dropped rows by reason.

A row becomes an `EncodedRow` (`encoded_rows`), and that an example of the step (`fitted_examples`). The rows of a
prepared folder are encoded already. `sft_examples`, `pair_examples`, `preference_examples` and `prompt_examples` do
both for step 1, step 2, DPO and step 3.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from dschat.base.errors import UserError
from dschat.data.encoding import MarkedPrompt, encode_prompt_texts, encode_responses, prompt_text
from dschat.data.formats import NO_LAST_REPLY, NO_SOLUTION, PROMPT_MESSAGES
from dschat.data.messages import is_unwritten, trains_response
from dschat.data.rows import BOTH_RESPONSES, ResponseColumn, Row, in_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Reasons why a row gives no example, as they are counted and shown.
DropReason: TypeAlias = str
CUT_TO_NOTHING = "response cut to nothing"
EQUAL_PAIR = "pair equal after cutting"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_PROMPT = "prompt without tokens"
NOTHING_WRITTEN = "a response without content, whose other fields the chat template does not write"
NO_WEIGHT = "every turn that could be trained on has weight 0"

REASONS_AT_ANY_LENGTH = {EMPTY_PROMPT, NOTHING_WRITTEN, NO_WEIGHT, NO_SOLUTION, NO_LAST_REPLY}

Example = TypeVar("Example")


class HasOrigin(Protocol):
    """A row that can say where it comes from."""

    @property
    def origin(self) -> str: ...


@dataclass(frozen=True)
class SFTExample:
    """A demonstration. Neither part is empty.

    With several turns of the assistant, the response begins with the first turn that is trained on and holds the
    messages in between as well.
    """

    prompt_ids: list[int]  # including BOS
    response_ids: list[int]  # with EOS at the end, unless they were cut
    targets: list[bool] | None = None  # which tokens of the response are trained on, at least one; None = all

    @property
    def num_targets(self) -> int:
        """Tokens that are trained on."""
        if self.targets is None:
            return len(self.response_ids)
        return sum(self.targets)

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PairExample:
    """A comparison for the reward model: two sequences of a prompt and a response."""

    chosen_ids: list[int]  # prompt and better response
    rejected_ids: list[int]  # prompt and worse response
    margin: float = 0.0  # by how much the first is better

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass(frozen=True)
class PromptExample:
    """A prompt to sample responses to."""

    prompt_ids: list[int]  # including BOS
    prompt_text: str  # a conversation as its chat template writes it
    row: Row = field(repr=False)  # row of the data
    index: int  # number of the row in the list that the examples were made from

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of the prompt in rows of results: its text, and the messages of a conversation."""
        columns: dict[str, Any] = {"prompt": self.prompt_text}
        if self.row.messages:
            columns[PROMPT_MESSAGES] = self.row.messages
        return columns

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with a better and a worse response. No part is empty.

    Responses include the token that ends them, unless they were cut.
    """

    prompt_ids: list[int]  # including BOS
    chosen_ids: list[int]
    rejected_ids: list[int]
    # Log-probs of the chosen and the rejected response under the policy before training; None until computed.
    ref_logprobs: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def texts_of(examples: Iterable[SFTExample | PairExample | PreferenceExample]) -> Iterator[list[int]]:
    """The token ids of examples: a list for each of their fields, such as prompt and response."""
    for example in examples:
        for name, value in vars(example).items():
            if name.endswith("_ids"):
                yield value


@dataclass(frozen=True)
class EncodedRow:
    """Texts and token ids of a row, uncut. A response that the row lacks, or that is not read, has no ids."""

    prompt: str  # as the model reads it; a conversation as its chat template writes it
    chosen: str  # the response, or the better one
    rejected: str | None  # the worse response
    prompt_ids: list[int]  # including BOS
    chosen_ids: list[int]  # with the token that ends the response, as in `rejected_ids`
    rejected_ids: list[int] | None
    row: Row = field(repr=False)  # row of the data
    # Which tokens of the prompt belong to earlier turns of the assistant that are trained on; empty = none.
    prompt_targets: Sequence[bool] = ()

    @property
    def origin(self) -> str:
        """File and row of the data, for messages."""
        return self.row.origin

    @property
    def is_unwritten(self) -> bool:
        """Whether the chat template writes nothing of a response that holds something, for instance tool calls."""
        is_rejected_unwritten = self.rejected is not None and is_unwritten(self.row.rejected_message, self.rejected)
        return is_rejected_unwritten or is_unwritten(self.row.chosen_message, self.chosen)

    def __len__(self) -> int:
        """Tokens of prompt and longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids or ()))


def encoded_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    end_id: int = 0,
    columns: Sequence[ResponseColumn] = BOTH_RESPONSES,
    all_turns: bool = False,
) -> list[EncodedRow]:
    """Encodes rows.

    Args:
        tokenizer: the model's tokenizer.
        rows: rows of the data.
        end_id: id of the token that ends a response.
        columns: the responses that are read.
        all_turns: mark the earlier turns of the assistant in prompts, see `dschat.data.turns.encode_turns`.
    """
    prompts = [prompt_text(tokenizer, row) for row in rows]
    if all_turns:
        from dschat.data.turns import encode_turns

        marked_prompts = encode_turns(tokenizer, rows, prompts)
    else:
        marked_prompts = [MarkedPrompt(ids, ()) for ids in encode_prompt_texts(tokenizer, prompts)]
    responses: dict[tuple[int, str], tuple[str, list[int]]] = {}  # (row, column) → text and ids
    for column in columns:
        texts = _response_texts(tokenizer, rows, column, prompts)
        for number, ids in enumerate(encode_responses(tokenizer, texts)):
            if getattr(rows[number], column) is not None:
                responses[number, column] = (texts[number], [*ids, end_id])

    encoded = []
    for number, row in enumerate(rows):
        marked = marked_prompts[number]
        chosen, chosen_ids = responses.get((number, "chosen"), ("", []))
        rejected, rejected_ids = responses.get((number, "rejected"), (None, None))
        encoded.append(
            EncodedRow(
                prompt=prompts[number],
                chosen=chosen,
                rejected=rejected,
                prompt_ids=marked.ids,
                chosen_ids=chosen_ids,
                rejected_ids=rejected_ids,
                row=row,
                prompt_targets=marked.targets,
            )
        )
    return encoded


def _response_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], column: ResponseColumn, prompts: Sequence[str]
) -> list[str]:
    """The responses of rows as texts, without the token that ends them; see `dschat.data.turn_end.response_texts`."""
    if tokenizer.chat_template is None or all(row.messages is None for row in rows):
        return [getattr(row, column) or "" for row in rows]
    from dschat.data.turn_end import response_texts

    return response_texts(tokenizer, rows, column, prompts)


def fitted_examples(
    rows: Sequence[EncodedRow],
    *,
    kind: type[Any],
    limit: int,
    held_out: bool = False,
    margins: Sequence[float] | None = None,
) -> tuple[list[Any], Counter[str]]:
    """Encoded rows as examples of a step: cut or dropped at its limit.

    Args:
        rows: encoded rows.
        kind: SFTExample, PairExample, PreferenceExample or PromptExample.
        limit: maximum length of an example in tokens (--max_seq_len); for PromptExample, of the prompt.
        held_out: whether the rows are for evaluation, which may have no example.
        margins: of pairs; None = all are 0.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: no example is left, and the rows are not held out.
    """

    def make_example(index: int, row: EncodedRow) -> Any:
        if kind is SFTExample:
            return fit_demonstration(row, limit)
        if kind is PromptExample:
            return fit_prompt(row, limit, index)
        if kind is PreferenceExample and not row.prompt_ids:
            return EMPTY_PROMPT
        pair = fit_comparison(row, limit)
        if kind is PairExample and isinstance(pair, PreferenceExample):
            margin = 0.0 if margins is None else margins[index]
            return PairExample(pair.prompt_ids + pair.chosen_ids, pair.prompt_ids + pair.rejected_ids, margin)
        return pair

    results = map(make_example, range(len(rows)), rows)
    flag = "--max_prompt_seq_len" if kind is PromptExample else "--max_seq_len"
    return collect_examples(rows, results, f"{flag} {limit}", held_out)


def fit_prompt(row: EncodedRow, limit: int, index: int) -> PromptExample | DropReason:
    """A prompt, which is never cut, or the reason why there is no example."""
    if not row.prompt_ids:
        return EMPTY_PROMPT
    if len(row.prompt_ids) > limit:
        return PROMPT_TOO_LONG
    return PromptExample(row.prompt_ids, row.prompt, row.row, index)


def fit_demonstration(row: EncodedRow, limit: int) -> SFTExample | DropReason:
    """Prompt and response cut to length, or the reason why there is no example.

    The example's prompt ends where training begins. With the messages user A, assistant B, user C and the response D,
    it is A B C if D alone is trained on. If B is trained on, too, the prompt is A and the response B C D, whose
    targets are the tokens of B and D.
    """
    has_trained_turns = any(row.prompt_targets)
    if row.row.no_response is not None and not has_trained_turns:
        return row.row.no_response  # of a dialogue without a last reply, the earlier turns can be trained on
    if is_unwritten(row.row.chosen_message, row.chosen):
        return NOTHING_WRITTEN
    if not trains_response(row.row) and not has_trained_turns:
        return NO_WEIGHT
    token_ids = [*row.prompt_ids, *row.chosen_ids]
    prompt_length = len(row.prompt_ids)
    targets = None  # all tokens of the response
    if has_trained_turns:
        prompt_length = row.prompt_targets.index(True)
        targets = [*row.prompt_targets, *[trains_response(row.row)] * len(row.chosen_ids)][prompt_length:limit]
    response_ids = token_ids[prompt_length:limit]
    if not prompt_length:
        return EMPTY_PROMPT
    if not response_ids:
        return CUT_TO_NOTHING
    return SFTExample(token_ids[:prompt_length], response_ids, targets)


def fit_comparison(row: EncodedRow, limit: int) -> PreferenceExample | DropReason:
    """Two responses cut to length, or the reason why there is no example."""
    if row.is_unwritten:
        return NOTHING_WRITTEN
    room = max(0, limit - len(row.prompt_ids))
    chosen_ids = row.chosen_ids[:room]
    rejected_ids = (row.rejected_ids or [])[:room]
    if not chosen_ids:
        return CUT_TO_NOTHING
    if chosen_ids == rejected_ids:
        return EQUAL_PAIR
    return PreferenceExample(row.prompt_ids, chosen_ids, rejected_ids)


def sft_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    eos_id: int,
    held_out: bool = False,
    all_turns: bool = False,
) -> tuple[list[SFTExample], Counter[str]]:
    """Demonstrations, each [BOS] + prompt + response + [EOS] cut to its first `max_seq_len` tokens.

    Dropped are:

    - rows without a response that give a reason in `no_response`;
    - rows whose response has no content, but other fields that the chat template omits;
    - rows in which every turn that could be trained on has weight 0;
    - rows whose prompt has no token, so that nothing would predict the first response token;
    - rows without any token left to train on after cutting.

    Args:
        rows: rows of the data.
        tokenizer: the model's tokenizer.
        max_seq_len: maximum length of prompt and response together, in tokens.
        eos_id: id of the token that ends a response.
        held_out: whether the rows are for evaluation, which may have no example.
        all_turns: train on every turn of the assistant in a conversation, not only on the response.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: a row has no response though its format requires one; or no example is left, and the rows are not
            held out.
    """
    require_responses(rows)
    encoded = encoded_rows(tokenizer, rows, eos_id, ("chosen",), all_turns)
    num_single = sum(not any(row.prompt_targets) for row in encoded)
    if all_turns and num_single and not held_out:
        logger.info(
            "--train_on all: %d of %d rows hold no earlier turn of the assistant: only their response is trained on",
            num_single,
            len(encoded),
        )
    return fitted_examples(encoded, kind=SFTExample, limit=max_seq_len, held_out=held_out)


def pair_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    eos_id: int,
    held_out: bool = False,
    margin_key: str | None = None,
) -> tuple[list[PairExample], Counter[str]]:
    """Comparisons; both sequences are [BOS] + prompt + response + [EOS] cut to their first `max_seq_len` tokens.

    Dropped are:

    - rows with a response that has no content, but other fields that the chat template omits;
    - rows whose chosen response is cut to nothing;
    - rows whose sequences are equal after cutting.

    Args:
        rows, tokenizer, max_seq_len, eos_id, held_out: see `sft_examples`.
        margin_key: the column of the margins; None = all margins are 0.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response, or its margin; or no example is left, and the rows are not held out.
    """
    require_both_responses(rows, "Step 2")
    margins = None if margin_key is None else [margin_of(row, margin_key) for row in rows]
    encoded = encoded_rows(tokenizer, rows, eos_id)
    return fitted_examples(encoded, kind=PairExample, limit=max_seq_len, held_out=held_out, margins=margins)


def preference_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[PreferenceExample], Counter[str]]:
    """Comparisons, each response cut so that prompt and response together have at most `max_seq_len` tokens.

    Rows are dropped as by `pair_examples`, and those whose prompt has no token. For arguments see `sft_examples`.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response; or no example is left, and the rows are not held out.
    """
    require_both_responses(rows, "DPO")
    encoded = encoded_rows(tokenizer, rows, eos_id)
    return fitted_examples(encoded, kind=PreferenceExample, limit=max_seq_len, held_out=held_out)


def prompt_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_prompt_seq_len: int, held_out: bool = False
) -> tuple[list[PromptExample], Counter[str]]:
    """Prompts of at most `max_prompt_seq_len` tokens, BOS included.

    Dropped are prompts without tokens, and longer prompts, which are never cut. For arguments see `sft_examples`.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: no example is left, and the rows are not held out.
    """
    encoded = encoded_rows(tokenizer, rows, columns=())
    return fitted_examples(encoded, kind=PromptExample, limit=max_prompt_seq_len, held_out=held_out)


def collect_examples(
    rows: Sequence[HasOrigin], results: Iterable[Example | DropReason], limit: str, held_out: bool
) -> tuple[list[Example], Counter[str]]:
    """Separates examples from the reasons why rows gave none, which are counted.

    Args:
        rows: rows of the data.
        results: for every row an example or a reason.
        limit: the flag that limits the length, with its value, for the message.
        held_out: allow an empty result.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: there are rows, but no example is left.
    """
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    for result in results:
        if isinstance(result, str):
            dropped[result] += 1
        else:
            examples.append(result)
    if rows and not examples and not held_out:
        problem = f"none of the {len(rows)} rows is left ({in_words(dropped)}; the first is {rows[0].origin})"
        if dropped.keys() <= REASONS_AT_ANY_LENGTH:
            raise UserError(f"--data_path: {problem}. Give other data.")
        raise UserError(f"{limit}: {problem}. Give a larger limit or other data.")
    return examples, dropped


def require_responses(rows: Sequence[Row]) -> None:
    """Raises UserError, which names the row, unless every row has a response or says why not."""
    for row in rows:
        if row.chosen is None and row.no_response is None:
            raise UserError(
                f"{row.origin}: the row has no response to learn from. Step 1 needs one per row: name its column with "
                "--chosen_key or --response_key, or end the messages with one of the assistant."
            )


def require_both_responses(rows: Sequence[Row], step: str) -> None:
    """Raises UserError, which names the row, unless every row has a chosen and a rejected response.

    Args:
        rows: rows of the data.
        step: what needs both responses, as the message begins its sentence: "Step 2", for instance.
    """
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(
                f"{row.origin}: the row has no {missing} response. {step} needs a chosen and a rejected one per row: "
                f"name the column with --{missing}_key."
            )


def margin_of(row: Row, key: str) -> float:
    """The number in a row's column. Raises UserError, which names the row, unless it is a number of at least 0."""
    content: Any = row.extra.get(key)
    margin = math.nan
    if not isinstance(content, bool):
        with suppress(TypeError, ValueError, OverflowError):
            margin = float(content)  # CSV files hold numbers as text
    if not 0 <= margin < math.inf:
        problem = f"holds {content!r}" if key in row.extra else "is missing"
        raise UserError(
            f"{row.origin}: --margin_key {key}: the column {problem}; it must hold a number of at least 0, by how"
            " much the chosen response is better."
        )
    return margin
