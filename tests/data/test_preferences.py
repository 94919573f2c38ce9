# SPDX-License-Identifier: Apache-2.0
"""Pairs of responses to one prompt: what is kept of a row, and where the response tokens stand in a batch."""

import pytest
import torch

from dschat.data.collate import collate_preferences
from dschat.data.examples import PreferenceExample, preference_examples
from dschat.data.rows import Row
from dschat.errors import UserError
from factories import make_tokenizer

EOS = 2


def row(prompt: str, chosen: str | None, rejected: str | None, number: int = 1) -> Row:
    return Row(prompt, None, chosen, rejected, {}, f"pairs.jsonl:{number}")


def test_responses_end_with_eos_and_are_cut_to_length() -> None:
    tokenizer = make_tokenizer()
    prompt = len(tokenizer("ab")["input_ids"])
    (whole,), _ = preference_examples([row("ab", "cd", "e")], tokenizer, 64, EOS)
    assert whole.chosen_ids[-1] == whole.rejected_ids[-1] == EOS
    assert whole.prompt_ids == tokenizer("ab")["input_ids"]
    assert len(whole) == prompt + len(whole.chosen_ids)
    (cut,), _ = preference_examples([row("ab", "cd", "e")], tokenizer, prompt + 1, EOS)
    assert cut.chosen_ids == whole.chosen_ids[:1] and cut.rejected_ids == whole.rejected_ids[:1]


def test_what_is_dropped_is_counted() -> None:
    tokenizer = make_tokenizer()
    rows = [row("ab", "c", "d"), row("ab", "same", "same"), row("ab" * 40, "c", "d")]
    examples, dropped = preference_examples(rows, tokenizer, 40, EOS)
    assert len(examples) == 1
    assert dropped == {"pair equal after cutting": 1, "response cut to nothing": 1}


def test_a_missing_response_is_named() -> None:
    with pytest.raises(UserError, match=r"pairs.jsonl:7: the row has no rejected response. DPO .*--rejected_key"):
        preference_examples([row("a", "b", None, 7)], make_tokenizer(), 40, EOS)


def test_equal_responses_alone_are_refused() -> None:
    with pytest.raises(UserError, match="pair equal after cutting: 1"):
        preference_examples([row("a", "b", "b")], make_tokenizer(), 40, EOS)


def test_targets_are_the_response_tokens() -> None:
    examples = [PreferenceExample([5, 6], [7], [8, 9, 2]), PreferenceExample([4], [10, 2], [11])]
    batch = collate_preferences(examples, pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [4, 10, 2, 0, 0], [5, 6, 8, 9, 2], [4, 11, 0, 0, 0]]
    assert batch["input_ids"].flatten()[batch["targets"]].tolist() == [7, 10, 2, 8, 9, 2, 11]
    assert batch["sequence"].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert batch["targets"].dtype == torch.long
