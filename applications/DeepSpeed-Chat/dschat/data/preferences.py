# SPDX-License-Identifier: Apache-2.0
"""Two responses to one prompt, as token ids: what DPO and REFUEL train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.examples import CUT_TO_NOTHING, EMPTY_PROMPT, EQUAL_PAIR, refuse_none_left, require_both_responses
from dschat.data.formats.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with a better and a worse response; no part is empty.

    Attributes:
        prompt_ids: ids, BOS included.
        chosen_ids, rejected_ids: ids of the responses, with the token that ends them unless they were cut.
        ref_logprobs: log-probs of the chosen and of the rejected response under the policy before training; None
            until they are computed.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    ref_logprobs: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Tokens of the longer sequence, which decides the padding."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def preference_examples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int, eos_id: int, held_out: bool = False
) -> tuple[list[PreferenceExample], Counter[str]]:
    """Comparisons, each response cut so that prompt and response together have at most `max_seq_len` tokens.

    Dropped are rows of whose responses nothing is left, rows whose responses are equal, and rows whose prompt has no
    token.

    Returns:
        The examples in the order of the rows, and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response, or no row is left (of `held_out` rows none may be).
    """
    require_both_responses(rows, "DPO")
    examples: list[PreferenceExample] = []
    dropped: Counter[str] = Counter()
    prompts = encode_prompts(tokenizer, rows)
    chosen = encode_responses(tokenizer, [row.chosen or "" for row in rows])
    rejected = encode_responses(tokenizer, [row.rejected or "" for row in rows])
    for prompt_ids, better, worse in zip(prompts, chosen, rejected, strict=True):
        room = max(0, max_seq_len - len(prompt_ids))
        chosen_ids, rejected_ids = [*better, eos_id][:room], [*worse, eos_id][:room]
        if not prompt_ids:
            dropped[EMPTY_PROMPT] += 1
        elif not room:
            dropped[CUT_TO_NOTHING] += 1
        elif chosen_ids == rejected_ids:
            dropped[EQUAL_PAIR] += 1
        else:
            examples.append(PreferenceExample(prompt_ids, chosen_ids, rejected_ids))
    refuse_none_left(rows, examples, dropped, f"--max_seq_len {max_seq_len}", held_out)
    return examples, dropped


def collate_preferences(examples: Sequence[PreferenceExample], pad_id: int) -> dict[str, Tensor]:
    """B comparisons → their 2B sequences, the B chosen ones first, padded on the right to the longest.

    Returns:
        input_ids (2B, T) long; targets (N,) long, the places of the response tokens in ``input_ids.flatten()``; and
        sequence (N,) long, the number of the sequence that each of them belongs to.
    """
    pairs = [(e.prompt_ids, e.chosen_ids) for e in examples] + [(e.prompt_ids, e.rejected_ids) for e in examples]
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    rows = [[*prompt, *response, *[pad_id] * (width - len(prompt) - len(response))] for prompt, response in pairs]
    spans = [(number * width + len(prompt), len(response)) for number, (prompt, response) in enumerate(pairs)]
    return {
        "input_ids": torch.tensor(rows, dtype=torch.long),
        "targets": torch.cat([torch.arange(start, start + count) for start, count in spans]),
        "sequence": torch.repeat_interleave(torch.tensor([count for _, count in spans])),
    }
