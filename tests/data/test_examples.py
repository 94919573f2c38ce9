# SPDX-License-Identifier: Apache-2.0
"""Cutting, dropping and counting, with one token per word and ids written out by hand."""

import math
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dschat.data.examples import PairExample, PromptExample, SFTExample, pair_examples, prompt_examples, sft_examples
from dschat.data.rows import Row
from dschat.errors import UserError
from factories import put_before_texts

WORDS = ["<pad>", "<s>", "</s>", "a", "b", "c", "d", "e", "<end>"]  # ids 0 to 8
EOS, END = 2, 8


def make_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="e"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    put_before_texts(backend, bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>", pad_token="<pad>")


def make_row(prompt: str, chosen: str | None = None, rejected: str | None = None, line: int = 1) -> Row:
    return Row(prompt, None, chosen, rejected, {"line": line}, f"rows.jsonl:{line}")


@pytest.mark.parametrize(
    ("max_seq_len", "response"),
    [(9, [5, 6, 7, 2]), (7, [5, 6, 7, 2]), (6, [5, 6, 7]), (5, [5, 6]), (4, [5])],
)
def test_sft_cut(max_seq_len, response):
    examples, dropped = sft_examples([make_row("a b", "c d e")], make_tokenizer(), max_seq_len, EOS)
    assert examples == [SFTExample([1, 3, 4], response)]
    assert not dropped


def test_sft_dropped_rows_are_counted():
    rows = [make_row("a b", "c"), make_row("a", "b"), make_row("a b c d", "e"), make_row("a", "")]
    examples, dropped = sft_examples(rows, make_tokenizer(), 3, EOS)
    assert examples == [SFTExample([1, 3], [4]), SFTExample([1, 3], [2])]
    assert dropped == {"response cut to nothing": 2}


def test_sft_end_of_conversation_token():
    examples, _ = sft_examples([make_row("a", "b")], make_tokenizer(), 9, END)
    assert examples == [SFTExample([1, 3], [4, 8])]


def test_prompt_without_tokens():
    rows = [make_row("", "b"), make_row("a", "b")]
    assert sft_examples(rows, make_tokenizer(), 9, EOS)[0][0] == SFTExample([1], [4, 2])
    tokenizer = make_tokenizer(bos=None)
    examples, dropped = sft_examples(rows, tokenizer, 9, EOS)
    assert examples == [SFTExample([3], [4, 2])]
    assert dropped == {"prompt without tokens": 1}
    prompts, dropped = prompt_examples(rows, tokenizer, 9)
    assert [prompt.index for prompt in prompts] == [1]
    assert dropped == {"prompt without tokens": 1}


def test_pairs_cut_and_dropped():
    rows = [
        make_row("a", "b", "c"),  # 4 tokens each: whole
        make_row("a", "b c d", "b c e"),  # cut to a b c: equal
        make_row("a", "b", "b"),  # equal from the start
        make_row("a", "b c", "b"),  # the longer one loses its EOS
        make_row("a b c", "d", "e"),  # no room for a response
        make_row("a", "b", ""),
    ]
    examples, dropped = pair_examples(rows, make_tokenizer(), 4, EOS)
    assert examples == [
        PairExample([1, 3, 4, 2], [1, 3, 5, 2]),
        PairExample([1, 3, 4, 5], [1, 3, 4, 2]),
        PairExample([1, 3, 4, 2], [1, 3, 2]),
    ]
    assert dropped == {"pair equal after cutting": 2, "response cut to nothing": 1}


def test_margins_of_pairs():
    rows = [make_row("a", "b", "c"), make_row("a", "b", "b"), make_row("a", "b", "d")]
    rows = [replace(row, extra={"gap": i}) for i, row in enumerate(rows)]
    examples, _ = pair_examples(rows, make_tokenizer(), 9, EOS, margin_key="gap")
    assert [example.margin for example in examples] == [0.0, 2.0]


def test_a_margin_may_be_text_as_in_csv_files():
    row = replace(make_row("a", "b", "c"), extra={"gap": "1.5"})
    assert pair_examples([row], make_tokenizer(), 9, EOS, margin_key="gap")[0][0].margin == 1.5


@pytest.mark.parametrize("margin", [-0.5, True, "much", "-1", "nan", None, math.nan, math.inf])
def test_margins_that_are_none_are_refused(margin):
    row = replace(make_row("a", "b", "c", line=7), extra={"gap": margin})
    with pytest.raises(UserError, match="rows.jsonl:7: --margin_key gap: the column holds .* a number of at least 0"):
        pair_examples([row], make_tokenizer(), 9, EOS, margin_key="gap")
    with pytest.raises(UserError, match="rows.jsonl:7: --margin_key other: the column is missing"):
        pair_examples([row], make_tokenizer(), 9, EOS, margin_key="other")


def test_prompts_are_dropped_never_cut():
    rows = [make_row("a b c", line=1), make_row("a b", line=2), make_row("a", line=3)]
    examples, dropped = prompt_examples(rows, make_tokenizer(), 3)
    assert examples == [
        PromptExample([1, 3, 4], "a b", rows[1], 1),
        PromptExample([1, 3], "a", rows[2], 2),
    ]
    assert dropped == {"prompt too long": 1}


def test_nothing_left():
    tokenizer = make_tokenizer()
    rows = [make_row("a b c", "d", "e"), make_row("a b", "d", "e")]
    with pytest.raises(
        UserError, match="--max_prompt_seq_len 2: none of the 2 rows .*prompt too long: 2.*rows.jsonl:1"
    ):
        prompt_examples(rows, tokenizer, 2)
    for build in (sft_examples, pair_examples):
        with pytest.raises(UserError, match="--max_seq_len 3: none of the 2 rows .*response cut to nothing: 2"):
            build(rows, tokenizer, 3, EOS)


def test_no_rows_no_examples():
    tokenizer = make_tokenizer()
    assert sft_examples([], tokenizer, 3, EOS) == ([], {})
    assert pair_examples([], tokenizer, 3, EOS) == ([], {})
    assert prompt_examples([], tokenizer, 3) == ([], {})


def test_missing_responses_are_named():
    tokenizer = make_tokenizer()
    with pytest.raises(UserError, match="rows.jsonl:4: .*no response.* --chosen_key or --response_key"):
        sft_examples([make_row("a", "b"), make_row("a", line=4)], tokenizer, 9, EOS)
    with pytest.raises(UserError, match="rows.jsonl:4: .*no rejected response.* --rejected_key"):
        pair_examples([make_row("a", "b", line=4)], tokenizer, 9, EOS)
    with pytest.raises(UserError, match="rows.jsonl:1: .*no chosen response.* --chosen_key"):
        pair_examples([make_row("a", None, "b")], tokenizer, 9, EOS)
