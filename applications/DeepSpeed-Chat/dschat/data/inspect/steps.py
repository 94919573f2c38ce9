# SPDX-License-Identifier: Apache-2.0
"""What training would be told, and what each step makes of rows, by the functions that training itself uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.formats.rows import DataKeys, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Examples = Sequence[SFTExample] | Sequence[PairExample] | Sequence[PromptExample]


@dataclass(frozen=True)
class Settings:
    """What training would be told.

    Attributes:
        keys: column names.
        seed: seed of the splits.
        tokenizer: of the model to train; without one nothing is encoded.
        max_seq_len: longest prompt and response, in tokens (steps 1 and 2).
        max_prompt_seq_len: longest prompt, in tokens (step 3).
        all_turns: step 1 trains on every turn of the assistant (--train_on all).
        end_of_response: id of the token that ends a response; EOS if None.
    """

    keys: DataKeys = DataKeys()
    seed: int = 1234
    tokenizer: PreTrainedTokenizerBase | None = None
    max_seq_len: int = 1024
    max_prompt_seq_len: int = 512
    end_of_response: int | None = None
    all_turns: bool = False

    @property
    def end_id(self) -> int:
        """The token that ends a response; 0 without a tokenizer."""
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return self.end_of_response if self.end_of_response is not None else eos or 0


def examples_of(
    step: int, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[Examples, Counter[str]]:
    """The examples of step 1, 2 or 3, and reason → number of rows dropped.

    Raises:
        UserError: a row lacks a response that the step needs.
    """
    if step == 3:
        return prompt_examples(rows, tokenizer, settings.max_prompt_seq_len, held_out=True)
    limit, end_id = settings.max_seq_len, settings.end_id
    if step == 1:
        return sft_examples(rows, tokenizer, limit, end_id, held_out=True, all_turns=settings.all_turns)
    return pair_examples(rows, tokenizer, limit, end_id, held_out=True)
