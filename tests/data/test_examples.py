# SPDX-License-Identifier: Apache-2.0
"""Cutting, dropping and counting, with one token per word and ids written out by hand; pairs as DPO wants them."""

from dataclasses import replace

import pytest
import torch

from data_cases import text_row, word_tokenizer
from dschat.base.errors import UserError
from dschat.data.collate import collate_preferences
from dschat.data.examples import (
    PairExample,
    PreferenceExample,
    PromptExample,
    SFTExample,
    pair_examples,
    preference_examples,
    prompt_examples,
    sft_examples,
)

EOS = 2


@pytest.mark.parametrize(("max_seq_len", "response"), [(7, [5, 6, 7, 2]), (6, [5, 6, 7]), (4, [5])])
def test_sft_cut(max_seq_len, response):
    examples, dropped = sft_examples([text_row("a b", "c d e")], word_tokenizer(), max_seq_len, EOS)
    assert examples == [SFTExample([1, 3, 4], response)]
    assert not dropped


def test_sft_dropped_rows_are_counted():
    rows = [text_row("a b", "c"), text_row("a", "b"), text_row("a b c d", "e"), text_row("a", "")]
    examples, dropped = sft_examples(rows, word_tokenizer(), 3, EOS)
    assert examples == [SFTExample([1, 3], [4]), SFTExample([1, 3], [2])]
    assert dropped == {"response cut to nothing": 2}


def test_prompt_without_tokens():
    rows = [text_row("", "b"), text_row("a", "b")]
    assert sft_examples(rows, word_tokenizer(), 9, EOS)[0][0] == SFTExample([1], [4, 2])
    tokenizer = word_tokenizer(bos=None)
    examples, dropped = sft_examples(rows, tokenizer, 9, EOS)
    assert examples == [SFTExample([3], [4, 2])]
    assert dropped == {"prompt without tokens": 1}
    prompts, dropped = prompt_examples(rows, tokenizer, 9)
    assert [prompt.index for prompt in prompts] == [1]
    assert dropped == {"prompt without tokens": 1}


def test_pairs_cut_and_dropped():
    rows = [
        text_row("a", "b", "c"),  # 4 tokens each: whole
        text_row("a", "b c d", "b c e"),  # cut to a b c: equal
        text_row("a", "b", "b"),  # equal from the start
        text_row("a", "b c", "b"),  # the longer one loses its EOS
        text_row("a b c", "d", "e"),  # no room for a response
        text_row("a", "b", ""),
    ]
    examples, dropped = pair_examples(rows, word_tokenizer(), 4, EOS)
    assert examples == [
        PairExample([1, 3, 4, 2], [1, 3, 5, 2]),
        PairExample([1, 3, 4, 5], [1, 3, 4, 2]),
        PairExample([1, 3, 4, 2], [1, 3, 2]),
    ]
    assert dropped == {"pair equal after cutting": 2, "response cut to nothing": 1}


def test_margins_of_pairs():
    rows = [text_row("a", "b", "c"), text_row("a", "b", "b"), text_row("a", "b", "d")]
    rows = [replace(row, extra={"gap": i}) for i, row in enumerate(rows)]
    rows.append(replace(rows[0], extra={"gap": "1.5"}))  # text, as in CSV files
    examples, _ = pair_examples(rows, word_tokenizer(), 9, EOS, margin_key="gap")
    assert [example.margin for example in examples] == [0.0, 2.0, 1.5]


@pytest.mark.parametrize("margin", [-0.5, True, "much", None, "nan", 10**400])
def test_margins_that_are_none_are_refused(margin):
    row = replace(text_row("a", "b", "c", line=7), extra={"gap": margin})
    with pytest.raises(UserError, match="rows.jsonl:7: --margin_key gap: the column holds .* a number of at least 0"):
        pair_examples([row], word_tokenizer(), 9, EOS, margin_key="gap")
    with pytest.raises(UserError, match="rows.jsonl:7: --margin_key other: the column is missing"):
        pair_examples([row], word_tokenizer(), 9, EOS, margin_key="other")


def test_prompts_are_dropped_never_cut():
    rows = [text_row("a b c", line=1), text_row("a b", line=2), text_row("a", line=3)]
    examples, dropped = prompt_examples(rows, word_tokenizer(), 3)
    assert examples == [PromptExample([1, 3, 4], "a b", rows[1], 1), PromptExample([1, 3], "a", rows[2], 2)]
    assert dropped == {"prompt too long": 1}


def test_nothing_left():
    tokenizer = word_tokenizer()
    rows = [text_row("a b c", "d", "e"), text_row("a b", "d", "e")]
    with pytest.raises(
        UserError, match="--max_prompt_seq_len 2: none of the 2 rows .*prompt too long: 2.*rows.jsonl:1"
    ):
        prompt_examples(rows, tokenizer, 2)
    for build in (sft_examples, pair_examples, preference_examples):
        with pytest.raises(UserError, match="--max_seq_len 3: none of the 2 rows .*response cut to nothing: 2"):
            build(rows, tokenizer, 3, EOS)


@pytest.mark.parametrize(
    ("build", "responses", "words"),
    [
        (sft_examples, (), "no response.* --chosen_key or --response_key"),
        (pair_examples, ("b",), "no rejected response.* --rejected_key"),
        (preference_examples, ("b",), "no rejected response. DPO .*--rejected_key"),
        (pair_examples, (None, "b"), "no chosen response.* --chosen_key"),
    ],
)
def test_missing_responses_are_named(build, responses, words):
    rows = [text_row("a", "b", "c"), text_row("a", *responses, line=4)]
    with pytest.raises(UserError, match=f"rows.jsonl:4: .*{words}"):
        build(rows, word_tokenizer(), 9, EOS)


@pytest.mark.parametrize(("longest", "ids"), [(9, ([5, 6, 2], [7, 2])), (4, ([5], [7]))])
def test_preferences_end_with_eos_and_are_cut_to_length(longest, ids) -> None:
    (example,), _ = preference_examples([text_row("a b", "c d", "e")], word_tokenizer(), longest, EOS)
    assert example == PreferenceExample([1, 3, 4], *ids)


def test_targets_of_preferences_are_the_response_tokens() -> None:
    examples = [PreferenceExample([5, 6], [7], [8, 9, 2]), PreferenceExample([4], [10, 2], [11])]
    batch = collate_preferences(examples, pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [4, 10, 2, 0, 0], [5, 6, 8, 9, 2], [4, 11, 0, 0, 0]]
    assert batch["input_ids"].flatten()[batch["targets"]].tolist() == [7, 10, 2, 8, 9, 2, 11]
    assert batch["sequence"].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert batch["targets"].dtype == torch.long
