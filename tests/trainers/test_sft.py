# SPDX-License-Identifier: Apache-2.0
"""Step 1's task."""

import math

import pytest
import torch

from closeness import UPDATE, near
from dschat.data.examples import SFTExample
from dschat.trainers.sft import SFTTask
from factories import PAD, hf_logprobs, make_causal_lm, ragged_rows, supervised_loop

TRAIN = [SFTExample(p, r) for p, r in ragged_rows([2, 5, 9, 1, 3, 4, 6, 2, 3], [7, 1, 4, 3, 9, 2, 5, 8, 4], seed=1)]
HELD_OUT = [SFTExample(p, r) for p, r in ragged_rows([3, 1, 6], [5, 9, 2], seed=2)]


def make_trainer(folder, micro=4, **overrides):
    flags = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": 2, "learning_rate": 1e-2}
    return supervised_loop("sft", folder, TRAIN, HELD_OUT, **(flags | overrides))


def nll_of(examples, on_prompt=False):
    """Mean negative log-likelihood per trained token, from the model's own logits row by row."""
    model, rows = make_causal_lm(), [(e.prompt_ids, e.response_ids) for e in examples]
    if on_prompt:
        rows = [(p[:1], p[1:] + r) for p, r in rows]
    return -torch.cat([hf_logprobs(model, row)[0] for row in rows]).mean().item()


@pytest.mark.parametrize("on_prompt", [False, True])
def test_evaluation_is_the_perplexity_over_tokens(on_prompt, group, tmp_path):
    trainer = make_trainer(tmp_path, sft_on_prompt=on_prompt)
    metrics = trainer.evaluate()
    expected = nll_of(HELD_OUT, on_prompt)
    assert metrics == near({"eval/loss": expected, "eval/perplexity": math.exp(expected)}, UPDATE)


def test_eval_iters_limits_the_evaluation(group, tmp_path):
    trainer = make_trainer(tmp_path, eval_iters=1)
    assert trainer.evaluate()["eval/loss"] == near(nll_of(HELD_OUT[:2]), UPDATE)


def test_a_perplexity_beyond_floats_is_no_crash():
    assert SFTTask([], [], PAD).summary({"loss": 1e4})["perplexity"] < math.inf


@pytest.mark.parametrize("on_prompt", [False, True])
def test_the_loss_is_the_mean_over_the_tokens_of_the_whole_update(on_prompt, group, tmp_path):
    trainer = make_trainer(tmp_path, micro=2, gradient_accumulation_steps=2, sft_on_prompt=on_prompt)
    metrics = trainer.iterate([[0, 1], [2, 4]])
    assert metrics["loss/sft"] == near(nll_of([TRAIN[i] for i in (0, 1, 2, 4)], on_prompt), UPDATE)
    assert metrics["lr"] == pytest.approx(1e-2) and metrics["grad_norm"] > 0


def test_label_smoothing_is_torchs_and_leaves_the_evaluation_alone(group, tmp_path):
    trainer = make_trainer(tmp_path, micro=2, gradient_accumulation_steps=2, label_smoothing=0.2)
    held_out = trainer.evaluate()["eval/loss"]
    metrics = trainer.iterate([[0, 1], [2, 4]])
    model, total, count = make_causal_lm(), 0.0, 0
    for example in (TRAIN[i] for i in (0, 1, 2, 4)):
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        logits = model(input_ids=ids).logits[0, len(example.prompt_ids) - 1 : -1]
        response = torch.tensor(example.response_ids)
        total += torch.nn.functional.cross_entropy(logits, response, reduction="sum", label_smoothing=0.2).item()
        count += len(response)
    assert metrics["loss/sft"] == near(total / count, UPDATE)
    assert held_out == near(nll_of(HELD_OUT), UPDATE)


def test_it_learns(group, tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=6)
    trainer.algorithm.task.eval = TRAIN
    assert trainer.evaluate()["eval/loss"] - trainer.fit()["eval/loss"] > 1
