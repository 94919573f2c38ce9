# SPDX-License-Identifier: Apache-2.0
"""Makes examples from rows: token ids cut to length, with a count of dropped rows by reason.

`sft_examples`, `pair_examples`, `preference_examples` and `prompt_examples` make those of step 1, step 2, DPO and
step 3.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompt_texts, encode_responses, prompt_text
from dschat.data.formats import NO_SOLUTION, PROMPT_MESSAGES
from dschat.data.messages import WEIGHT, has_further_fields, is_unwritten, message_text
from dschat.data.rows import Row, in_words
from dschat.data.turn_end import response_texts
from dschat.data.turns import MarkedPrompt, encode_turns

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

REASONS_AT_ANY_LENGTH = {EMPTY_PROMPT, NOTHING_WRITTEN, NO_WEIGHT, NO_SOLUTION}

LABELS = ("label", "kto_tag")  # columns of KTO data: whether the response is a good one
LONG_PROMPT = 20  # minimum prompt length in characters at which a repeated prompt is no coincidence

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
    if all_turns:
        prompts = encode_turns(tokenizer, rows)
        texts = response_texts(tokenizer, rows, "chosen")
        num_single = sum(not any(prompt.targets) for prompt in prompts)
        if num_single and not held_out:
            logger.info(
                "--train_on all: %d of %d rows hold no earlier turn of the assistant: only their response is trained "
                "on",
                num_single,
                len(prompts),
            )
    else:
        prompt_texts = [prompt_text(tokenizer, row) for row in rows]
        prompts = [MarkedPrompt(ids, []) for ids in encode_prompt_texts(tokenizer, prompt_texts)]
        texts = response_texts(tokenizer, rows, "chosen", prompt_texts)
    responses = encode_responses(tokenizer, texts)

    def make_demonstration(
        row: Row, prompt: MarkedPrompt, response_ids: list[int], text: str
    ) -> SFTExample | DropReason:
        if row.chosen is None:
            # Of a dialogue without a last reply, the earlier turns can be trained on.
            return fit_demonstration(prompt, [], max_seq_len) if any(prompt.targets) else str(row.no_response)
        if is_unwritten(row.chosen_message, text):
            return NOTHING_WRITTEN
        # Only a response with further fields is kept as a message; one of them may be its weight.
        message = row.chosen_message or {}
        is_trained = message.get(WEIGHT) != 0
        return fit_demonstration(prompt, [*response_ids, eos_id], max_seq_len, is_trained)

    results = map(make_demonstration, rows, prompts, responses, texts)
    return collect_examples(rows, results, f"--max_seq_len {max_seq_len}", held_out)


def fit_demonstration(
    prompt: MarkedPrompt, response_ids: list[int], limit: int, is_trained: bool = True
) -> SFTExample | DropReason:
    """Prompt and response cut to length, or the reason why there is no example.

    The example's prompt ends where training begins. With the messages user A, assistant B, user C and the response D,
    it is A B C if D alone is trained on. If B is trained on, too, the prompt is A and the response B C D, whose
    targets are the tokens of B and D.

    Args:
        prompt: everything before the response, with the earlier turns that are trained on marked.
        response_ids: with the token that ends it.
        limit: maximum length of the example, in tokens.
        is_trained: whether the response is trained on.
    """
    has_trained_turns = any(prompt.targets)
    if not is_trained and not has_trained_turns:
        return NO_WEIGHT
    token_ids = [*prompt.ids, *response_ids]
    if has_trained_turns:
        prompt_length = prompt.targets.index(True)
        token_targets = [*prompt.targets, *[is_trained] * len(response_ids)]
        targets = token_targets[prompt_length:limit]
    else:
        prompt_length = len(prompt.ids)
        targets = None  # all tokens of the response
    prompt_ids = token_ids[:prompt_length]
    trained_ids = token_ids[prompt_length:limit]
    if not prompt_ids:
        return EMPTY_PROMPT
    if not trained_ids:
        return CUT_TO_NOTHING
    return SFTExample(prompt_ids, trained_ids, targets)


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
        rows: rows of the data.
        tokenizer: the model's tokenizer.
        max_seq_len: maximum length of each sequence, in tokens.
        eos_id: id of the token that ends a response.
        held_out: whether the rows are for evaluation, which may have no example.
        margin_key: the column of the margins; None = all margins are 0.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response, or its margin; or no example is left, and the rows are not held out.
    """
    require_both_responses(rows, "Step 2")
    margins = []
    for row in rows:
        margins.append(0.0 if margin_key is None else margin_of(row, margin_key))

    def make_pair(encoded: EncodedRow, margin: float) -> PairExample | DropReason:
        pair = encoded.fitted(max_seq_len, eos_id)
        return pair if isinstance(pair, str) else join_pair(pair, margin)

    results = map(make_pair, encode_pairs(tokenizer, rows), margins)
    return collect_examples(rows, results, f"--max_seq_len {max_seq_len}", held_out)


def preference_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[PreferenceExample], Counter[str]]:
    """Comparisons, each response cut so that prompt and response together have at most `max_seq_len` tokens.

    Dropped are:

    - rows whose prompt has no token;
    - rows with a response that has no content, but other fields that the chat template omits;
    - rows whose chosen response is cut to nothing;
    - rows whose responses are equal after cutting.

    Args:
        rows: rows of the data.
        tokenizer: the model's tokenizer.
        max_seq_len: maximum length of the prompt with either response, in tokens.
        eos_id: id of the token that ends a response.
        held_out: whether the rows are for evaluation, which may have no example.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response; or no example is left, and the rows are not held out.
    """
    require_both_responses(rows, "DPO")

    def make_preference(encoded: EncodedRow) -> PreferenceExample | DropReason:
        return encoded.fitted(max_seq_len, eos_id) if encoded.prompt_ids else EMPTY_PROMPT

    results = map(make_preference, encode_pairs(tokenizer, rows))
    return collect_examples(rows, results, f"--max_seq_len {max_seq_len}", held_out)


def fit_pair(
    prompt: list[int], chosen: list[int], rejected: list[int], limit: int, end_ids: Sequence[int] = ()
) -> PreferenceExample | DropReason:
    """Two responses, each ended by `end_ids` and cut to length, or the reason why there is no example."""
    room = max(0, limit - len(prompt))
    chosen_ids = [*chosen, *end_ids][:room]
    rejected_ids = [*rejected, *end_ids][:room]
    if not chosen_ids:
        return CUT_TO_NOTHING
    if chosen_ids == rejected_ids:
        return EQUAL_PAIR
    return PreferenceExample(prompt, chosen_ids, rejected_ids)


def join_pair(pair: PreferenceExample, margin: float = 0.0) -> PairExample:
    """A comparison with prompt and response joined in each sequence."""
    chosen = pair.prompt_ids + pair.chosen_ids
    rejected = pair.prompt_ids + pair.rejected_ids
    return PairExample(chosen, rejected, margin)


def prompt_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_prompt_seq_len: int, held_out: bool = False
) -> tuple[list[PromptExample], Counter[str]]:
    """Prompts of at most `max_prompt_seq_len` tokens, BOS included.

    Dropped are prompts without tokens, and longer prompts, which are never cut.

    Args:
        rows: rows of the data.
        tokenizer: the model's tokenizer.
        max_prompt_seq_len: maximum length of a prompt, in tokens.
        held_out: whether the rows are for evaluation, which may have no example.

    Returns:
        The examples in the order of the rows; and reason → number of rows dropped.

    Raises:
        UserError: no example is left, and the rows are not held out.
    """

    def make_prompt(index: int, row: Row, text: str, ids: list[int]) -> PromptExample | DropReason:
        if not ids:
            return EMPTY_PROMPT
        if len(ids) > max_prompt_seq_len:
            return PROMPT_TOO_LONG
        return PromptExample(ids, text, row, index)

    texts = [prompt_text(tokenizer, row) for row in rows]
    ids = encode_prompt_texts(tokenizer, texts)
    results = map(make_prompt, range(len(rows)), rows, texts, ids)
    return collect_examples(rows, results, f"--max_prompt_seq_len {max_prompt_seq_len}", held_out)


@dataclass(frozen=True)
class EncodedRow:
    """Texts and ids of a row's prompt and both responses. A response that the row lacks is empty.

    Ids of responses do not include the token that ends them.
    """

    row: Row
    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]  # including BOS
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def is_unwritten(self) -> bool:
        """Whether the chat template writes nothing of a response that holds something, for instance tool calls."""
        is_chosen_unwritten = is_unwritten(self.row.chosen_message, self.chosen)
        return is_chosen_unwritten or is_unwritten(self.row.rejected_message, self.rejected)

    def fitted(self, limit: int, end_id: int) -> PreferenceExample | DropReason:
        """The comparison cut to length, or the reason why there is none; responses get the token that ends them."""
        if self.is_unwritten:
            return NOTHING_WRITTEN
        return fit_pair(self.prompt_ids, self.chosen_ids, self.rejected_ids, limit, [end_id])


def encode_pairs(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[EncodedRow]:
    """Texts and ids of several rows, see `EncodedRow`."""
    prompts = [prompt_text(tokenizer, row) for row in rows]
    chosen = response_texts(tokenizer, rows, "chosen", prompts)
    rejected = response_texts(tokenizer, rows, "rejected", prompts)
    prompt_ids = encode_prompt_texts(tokenizer, prompts)
    chosen_ids = encode_responses(tokenizer, chosen)
    rejected_ids = encode_responses(tokenizer, rejected)
    return map(EncodedRow, rows, prompts, chosen, rejected, prompt_ids, chosen_ids, rejected_ids)


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


def empty_responses(rows: Sequence[Row], chosen_alone: bool = False) -> str:
    """A note on responses without text: their number and the first of their rows; empty if there are none."""
    columns: Sequence[Literal["chosen", "rejected"]] = ("chosen",) if chosen_alone else ("chosen", "rejected")
    origins = []
    for row in rows:
        for column in columns:
            reply = row.reply(column)
            if reply is not None and not has_further_fields(reply) and not message_text(reply).strip():
                origins.append(row.origin)
    if not origins:
        return ""
    first = ", ".join(dict.fromkeys(origins[:3]))
    return f"{len(origins)} responses without any text, which end at once (first: {first})"


def bad_responses(rows: Sequence[Row]) -> str:
    """A note on responses that data for KTO label as bad ones; empty if there are none.

    Step 1 trains on every response.
    """
    origins = []
    for row in rows:
        is_bad = any(_is_false(row.extra.get(column)) for column in LABELS)
        if is_bad and row.chosen is not None:
            origins.append(row.origin)
    if not origins:
        return ""
    return (
        f"{len(origins)} of {len(rows)} responses are labelled false ({' or '.join(LABELS)}, as in data for KTO), and "
        f"step 1 trains on them like on the others (first: {origins[0]})"
    )


def _is_false(label: object) -> bool:
    """Whether a label says false, also as the text in a CSV cell; a number may be a class."""
    if isinstance(label, str):
        return label.strip().lower() == "false"
    return label is False


def repeated_prompts(rows: Sequence[Row], chosen_alone: bool = False) -> str:
    """A note if at least half of the rows have a response that begins with its plain-text prompt; else empty.

    Some preference data repeat the prompt in `chosen` and `rejected`, and training would read it twice.
    """
    origins = []
    for row in rows:
        prompt = (row.prompt or "").strip()
        responses = [row.chosen] if chosen_alone else [row.chosen, row.rejected]
        begins_with_prompt = any((response or "").lstrip().startswith(prompt) for response in responses)
        if len(prompt) >= LONG_PROMPT and begins_with_prompt:
            origins.append(row.origin)
    if not origins or 2 * len(origins) < len(rows):
        return ""
    return (
        f"the responses of {len(origins)} of {len(rows)} rows begin with their prompt, so that training would "
        f"read the prompt twice (first: {origins[0]})"
    )


def warn_of_responses(rows: Sequence[Row], chosen_alone: bool) -> None:
    """Warns of responses that are empty, labelled as bad ones, or repeat their prompts.

    `chosen_alone`: the step trains on the chosen responses, and reads no others.
    """
    bad = bad_responses(rows) if chosen_alone else ""
    for note in (empty_responses(rows, chosen_alone), bad, repeated_prompts(rows, chosen_alone)):
        if note:
            logger.warning("%s; correct or remove these rows if that is not intended", note)


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
