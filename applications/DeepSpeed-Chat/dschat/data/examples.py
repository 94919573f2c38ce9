# SPDX-License-Identifier: Apache-2.0
"""Rows → examples: token ids cut to length, with a count of what was dropped and why.

The functions take rows, the tokenizer of the model, the longest example in tokens, and the id that ends a response.
They return the examples in the order of the rows, and reason → number of rows dropped. If none is left they raise
UserError, except for `held_out` rows: an evaluation may have none.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompt_texts, encode_responses, prompt_text, response_texts
from dschat.data.formats import PROMPT_MESSAGES
from dschat.data.messages import EMPTY, WEIGHT, message_text
from dschat.data.rows import Row, in_words
from dschat.data.turns import MarkedPrompt, encode_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CUT_TO_NOTHING = "response cut to nothing"
EQUAL_PAIR = "pair equal after cutting"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_PROMPT = "prompt without tokens"
NOTHING_WRITTEN = "a response without content, whose other fields the chat template does not write"
NO_WEIGHT = "every turn that could be trained on has weight 0"

E = TypeVar("E")


@dataclass(frozen=True)
class SFTExample:
    """A demonstration; neither part is empty."""

    prompt_ids: list[int]  # ids, BOS included
    response_ids: list[int]  # ids, with EOS at the end unless they were cut
    # Which of the response's tokens are trained on, at least one; all where it is None. With several turns of the
    # assistant the prompt ends where the first of them begins.
    targets: list[bool] | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that are trained on."""
        return len(self.response_ids) if self.targets is None else sum(self.targets)

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PairExample:
    """A comparison: the ids of prompt and response together, for the better and the worse response.

    `margin` is how much better the first is.
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass(frozen=True)
class PromptExample:
    """A prompt to answer."""

    prompt_ids: list[int]  # ids, BOS included
    prompt_text: str  # the prompt as text; a conversation as its chat template writes it
    row: Row = field(repr=False)  # the data row
    index: int  # number of the row in the list that the examples were made from

    @property
    def columns(self) -> dict[str, Any]:
        """What rows of results say of it: the text and, where a chat template wrote that, the messages."""
        return {"prompt": self.prompt_text} | ({PROMPT_MESSAGES: self.row.messages} if self.row.messages else {})

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with a better and a worse response; no part is empty."""

    prompt_ids: list[int]  # ids, BOS included
    chosen_ids: list[int]  # both: ids of the responses, with the token that ends them unless they were cut
    rejected_ids: list[int]
    # Log-probs of the chosen and of the rejected response under the policy before training; None until they are
    # computed.
    ref_logprobs: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def sft_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    eos_id: int,
    held_out: bool = False,
    all_turns: bool = False,
) -> tuple[list[SFTExample], Counter[str]]:
    """Demonstrations, each [BOS] + prompt + response + [EOS] cut to its first `max_seq_len` tokens.

    With `all_turns` every turn of the assistant in a conversation is trained on, not the response alone. Dropped are
    rows of which nothing that is trained on is left, rows whose prompt has no token (nothing would predict the first
    response token), and rows that say in `no_response` why they have none.

    Raises:
        UserError: a row has no response though its format wants one.
    """
    require_responses(rows)
    if all_turns:
        prompts = encode_turns(tokenizer, rows)
        without = sum(not any(prompt.targets) for prompt in prompts)
        if without and not held_out:
            logger.info(
                "--train_on all: %d of %d rows hold no earlier turn of the assistant: of these the response is "
                "trained on",
                *(without, len(prompts)),
            )
        texts = response_texts(tokenizer, rows, "chosen")
    else:
        prompt_texts = [prompt_text(tokenizer, row) for row in rows]
        prompts = [MarkedPrompt(ids, []) for ids in encode_prompt_texts(tokenizer, prompt_texts)]
        texts = response_texts(tokenizer, rows, "chosen", prompt_texts)
    responses = encode_responses(tokenizer, texts)

    def make(row: Row, prompt: MarkedPrompt, ids: list[int], text: str) -> SFTExample | str:
        if row.chosen is None:
            return str(row.no_response)
        if is_unwritten(row.chosen_message, text):
            return NOTHING_WRITTEN
        is_trained = (row.chosen_message or {}).get(WEIGHT) != 0
        return fit_demonstration(prompt, [*ids, eos_id], max_seq_len, is_trained)

    return kept(rows, map(make, rows, prompts, responses, texts), f"--max_seq_len {max_seq_len}", held_out)


def is_unwritten(message: Mapping[str, Any] | None, text: str) -> bool:
    """Whether a response that is a message says something, such as tool calls or thoughts, but its text is blank."""
    return message is not None and has_further_fields(message) and not text.strip()


def has_further_fields(message: Mapping[str, Any]) -> bool:
    """Whether a message holds something beside role, content and weight."""
    further = (value for field, value in message.items() if field not in ("role", "content", WEIGHT))
    return any(value not in EMPTY for value in further)


def fit_demonstration(
    prompt: MarkedPrompt, response_ids: list[int], limit: int, is_trained: bool = True
) -> SFTExample | str:
    """Prompt and response cut to length, or why there is no example. Turns that are trained on join the response.

    Args:
        prompt: with its earlier turns marked.
        response_ids: with the token that ends it.
        limit: longest example, in tokens.
        is_trained: whether the response is trained on.
    """
    has_turns = any(prompt.targets)
    if not is_trained and not has_turns:
        return NO_WEIGHT
    first = prompt.targets.index(True) if has_turns else len(prompt.ids)
    targets = [*prompt.targets, *[is_trained] * len(response_ids)][first:limit] if has_turns else None
    trained = [*prompt.ids, *response_ids][first:limit]
    if not prompt.ids[:first]:
        return EMPTY_PROMPT
    return SFTExample(prompt.ids[:first], trained, targets) if trained else CUT_TO_NOTHING


def pair_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    eos_id: int,
    held_out: bool = False,
    margin_key: str | None = None,
) -> tuple[list[PairExample], Counter[str]]:
    """Comparisons; both sequences are [BOS] + prompt + response + [EOS] cut to their first `max_seq_len` tokens.

    Dropped are rows of whose responses nothing is left, and rows whose sequences are equal. `margin_key` is the column
    of their margins, 0 when None.

    Raises:
        UserError: a row lacks a response, or its margin.
    """
    require_both_responses(rows, "Step 2")
    margins = [0.0 if margin_key is None else margin_of(row, margin_key) for row in rows]

    def make(encoded: EncodedRow, margin: float) -> PairExample | str:
        fitted = encoded.fitted(max_seq_len, eos_id)
        return fitted if isinstance(fitted, str) else whole_pair(fitted, margin)

    made = map(make, encode_pairs(tokenizer, rows), margins)
    return kept(rows, made, f"--max_seq_len {max_seq_len}", held_out)


def preference_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[PreferenceExample], Counter[str]]:
    """Comparisons, each response cut so that prompt and response together have at most `max_seq_len` tokens.

    Dropped are rows of whose responses nothing is left, rows whose responses are equal, and rows whose prompt has no
    token.

    Raises:
        UserError: a row lacks a response.
    """
    require_both_responses(rows, "DPO")

    def make(encoded: EncodedRow) -> PreferenceExample | str:
        return encoded.fitted(max_seq_len, eos_id) if encoded.prompt_ids else EMPTY_PROMPT

    return kept(rows, map(make, encode_pairs(tokenizer, rows)), f"--max_seq_len {max_seq_len}", held_out)


def fit_pair(
    prompt: list[int], chosen: list[int], rejected: list[int], limit: int, end: Sequence[int] = ()
) -> PreferenceExample | str:
    """Two responses, each with the tokens of its `end` and cut to length, or why there is no example."""
    room = max(0, limit - len(prompt))
    chosen, rejected = ([*ids, *end][:room] for ids in (chosen, rejected))
    if not chosen:
        return CUT_TO_NOTHING
    return EQUAL_PAIR if chosen == rejected else PreferenceExample(prompt, chosen, rejected)


def whole_pair(pair: PreferenceExample, margin: float = 0.0) -> PairExample:
    """The same with prompt and response together."""
    return PairExample([*pair.prompt_ids, *pair.chosen_ids], [*pair.prompt_ids, *pair.rejected_ids], margin)


def prompt_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_prompt_seq_len: int, held_out: bool = False
) -> tuple[list[PromptExample], Counter[str]]:
    """Prompts of at most `max_prompt_seq_len` tokens, BOS included; longer ones are dropped, never cut."""

    def make(index: int, row: Row, text: str, ids: list[int]) -> PromptExample | str:
        if not ids or len(ids) > max_prompt_seq_len:
            return PROMPT_TOO_LONG if ids else EMPTY_PROMPT
        return PromptExample(ids, text, row, index)

    texts = [prompt_text(tokenizer, row) for row in rows]
    made = map(make, range(len(rows)), rows, texts, encode_prompt_texts(tokenizer, texts))
    return kept(rows, made, f"--max_prompt_seq_len {max_prompt_seq_len}", held_out)


@dataclass(frozen=True)
class EncodedRow:
    """Texts and ids of a row's prompt and of both responses; a response that the row lacks is empty."""

    row: Row
    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]  # BOS included
    chosen_ids: list[int]  # both: without the token that ends a response
    rejected_ids: list[int]

    @property
    def is_unwritten(self) -> bool:
        """Whether a response has tool calls, but the chat template writes nothing of it."""
        row = self.row
        return is_unwritten(row.chosen_message, self.chosen) or is_unwritten(row.rejected_message, self.rejected)

    def fitted(self, limit: int, end_id: int) -> PreferenceExample | str:
        """The comparison cut to length, or why there is none; responses get the token that ends them."""
        if self.is_unwritten:
            return NOTHING_WRITTEN
        return fit_pair(self.prompt_ids, self.chosen_ids, self.rejected_ids, limit, [end_id])


def encode_pairs(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[EncodedRow]:
    """Texts and ids of n rows, see `EncodedRow`."""
    prompts = [prompt_text(tokenizer, row) for row in rows]
    chosen = response_texts(tokenizer, rows, "chosen", prompts)
    rejected = response_texts(tokenizer, rows, "rejected", prompts)
    ids = (
        encode_prompt_texts(tokenizer, prompts),
        encode_responses(tokenizer, chosen),
        encode_responses(tokenizer, rejected),
    )
    return map(EncodedRow, rows, prompts, chosen, rejected, *ids)


def kept(rows: Sequence[Row], made: Iterable[E | str], limit: str, held_out: bool) -> tuple[list[E], Counter[str]]:
    """The examples of what was made of the rows, and how often each reason stands in the place of one.

    Raises:
        UserError: there were rows, and no example is left; says the `limit` (of `held_out` rows none may be left).
    """
    examples: list[E] = []
    dropped: Counter[str] = Counter()
    for example in made:
        if isinstance(example, str):
            dropped[example] += 1
        else:
            examples.append(example)
    if rows and not examples and not held_out:
        raise UserError(
            f"{limit}: none of the {len(rows)} rows is left ({in_words(dropped)}; the first is {rows[0].origin}). Give"
            " a larger limit or other data."
        )
    return examples, dropped


def require_responses(rows: Sequence[Row]) -> None:
    """Raises UserError, which names the row, unless every row has a response or says why not."""
    for row in rows:
        if row.chosen is None and row.no_response is None:
            raise UserError(
                f"{row.origin}: the row has no response to learn from. Step 1 needs one per row: name its column with "
                "--chosen_key or --response_key, or end the messages with one of the assistant."
            )


def require_both_responses(rows: Sequence[Row], who: str) -> None:
    """Raises UserError, which names the row, unless every row has a chosen and a rejected response."""
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise UserError(
                f"{row.origin}: the row has no {missing} response. {who} needs a chosen and a rejected one per row: "
                f"name the column with --{missing}_key."
            )


def empty_responses(rows: Sequence[Row], chosen_alone: bool = False) -> str:
    """How many responses hold no text, and where the first of them stand; nothing where all do."""
    columns: Sequence[Literal["chosen", "rejected"]] = ("chosen",) if chosen_alone else ("chosen", "rejected")
    replies = [(row, row.reply(column)) for row in rows for column in columns]
    written = [(row, reply) for row, reply in replies if reply is not None and not has_further_fields(reply)]
    places = [row.origin for row, reply in written if not message_text(reply).strip()]
    if not places:
        return ""
    first = ", ".join(dict.fromkeys(places[:3]))
    return f"{len(places)} responses without any text, which end at once (first: {first})"


def margin_of(row: Row, key: str) -> float:
    """The number in a row's column; raises UserError, which names the row, unless there is one of at least 0."""
    margin = row.extra.get(key)
    if isinstance(margin, str):  # as CSV files hold numbers
        with suppress(ValueError):
            margin = float(margin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        found = f"holds {margin!r}" if key in row.extra else "is missing"
        raise UserError(
            f"{row.origin}: --margin_key {key}: the column {found}; it must hold a number of at least 0, by how"
            " much the chosen response is better."
        )
    return float(margin)
