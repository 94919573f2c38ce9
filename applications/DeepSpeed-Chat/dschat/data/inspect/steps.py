# SPDX-License-Identifier: Apache-2.0
"""What each training step makes of rows, by the functions that training itself uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.formats.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Examples = Sequence[SFTExample] | Sequence[PairExample] | Sequence[PromptExample]


@dataclass(frozen=True)
class Limits:
    """Longest texts of training, in tokens: of prompt and response (steps 1 and 2), of the prompt (step 3)."""

    max_seq_len: int = 1024
    max_prompt_seq_len: int = 512


def examples_of(
    step: int, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> tuple[Examples, Counter[str]]:
    """The examples of step 1, 2 or 3, and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response that the step needs.
    """
    if step == 3:
        return prompt_examples(rows, tokenizer, limits.max_prompt_seq_len, held_out=True)
    make = sft_examples if step == 1 else pair_examples
    return make(rows, tokenizer, limits.max_seq_len, tokenizer.eos_token_id or 0, held_out=True)
