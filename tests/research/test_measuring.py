# SPDX-License-Identifier: Apache-2.0
"""Policies measured on the same prompts: log-ratios against plain transformers, best of N by hand."""

import math

import torch

from closeness import UPDATE, assert_near, near
from dschat.models.policy import PolicyModel
from factories import (
    favouring,
    hf_logprobs,
    make_causal_lm,
    make_prompt,
    make_rollout,
    make_tokenizer,
    ragged_rows,
    sampling_of,
)
from measuring import Answer, best_of, log_ratios, measure


def policy(seed: int) -> PolicyModel:
    return PolicyModel(make_causal_lm("gemma", seed=seed)).eval()


def test_log_ratios_are_sums_over_the_response() -> None:
    own, other = policy(0), policy(1)
    rows = ragged_rows([3, 5, 2], [4, 1, 7])
    found = log_ratios(own, other, make_rollout(rows), 0.7, 2)
    expected = [
        hf_logprobs(own.inner, row, 0.7)[0].sum() - hf_logprobs(other.inner, row, 0.7)[0].sum() for row in rows
    ]
    assert_near(found, torch.stack(expected).float())


def test_best_of_takes_the_first_so_many() -> None:
    answers = [Answer("a", 1.0, 5.0, 3), Answer("b", 2.0, 5.0, 4), Answer("c", 9.0, 5.0, 5)]
    assert best_of(answers, 2) == Answer("b", 2.0, math.log(2) - 0.5, 4)
    assert best_of(answers, 3).text == "c"
    assert best_of(answers, 1).kl == 0


def test_an_end_token_that_is_not_special_is_no_part_of_the_text() -> None:
    """An end of conversation may be any token of the vocabulary."""
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("e")
    other = tokenizer.convert_tokens_to_ids("z")
    model = PolicyModel(favouring([end, other])).eval()
    prompts = [make_prompt([1, 5, 9], "p", 0)]

    def number(rollout, texts):
        assert rollout.finished.any()
        for text, ids, finished in zip(texts.responses, rollout.response_rows(), rollout.finished, strict=True):
            assert text == tokenizer.decode(ids).removesuffix("e" if finished else "")
        return rollout.response_mask.sum(1).float()

    measure(model, model, number, tokenizer, prompts, sampling_of(6, (end,)), 7, num_responses=8)


def test_answers_do_not_depend_on_how_many_are_drawn() -> None:
    model, tokenizer = policy(0), make_tokenizer()
    prompts = [make_prompt([1, 5 + i, 9], f"p{i}", i) for i in range(3)]

    def length(rollout, texts):
        return rollout.response_mask.sum(1).float()

    many = measure(model, policy(1), length, tokenizer, prompts, sampling_of(6), 7, num_responses=3, rows=4)
    (one,) = measure(model, policy(1), length, tokenizer, prompts[1:2], sampling_of(6), 7)
    assert many[1][0].text == one[0].text and many[1][0].score == one[0].score == one[0].tokens
    assert many[1][0].kl == near(one[0].kl, UPDATE)
    assert len({answer.text for answer in many[1]}) > 1
