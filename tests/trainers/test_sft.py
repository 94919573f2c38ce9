# SPDX-License-Identifier: Apache-2.0
"""Step 1's task and the loop that steps 1 and 2 share."""

import json
import math

import pytest
import torch

from closeness import UPDATE, WEIGHT_GAP, near
from dschat.config.supervised import SFTConfig
from dschat.data.examples import SFTExample
from dschat.errors import UserError
from dschat.trainers.loop import total_updates
from dschat.trainers.sft import SFTTask
from factories import (
    PAD,
    engine_of,
    hf_logprobs,
    largest_difference,
    make_causal_lm,
    ragged_rows,
    run_of,
    supervised_loop_of,
    weights_of,
)

TRAIN = [SFTExample(p, r) for p, r in ragged_rows([2, 5, 9, 1, 3, 4, 6, 2, 3], [7, 1, 4, 3, 9, 2, 5, 8, 4], seed=1)]
HELD_OUT = [SFTExample(p, r) for p, r in ragged_rows([3, 1, 6], [5, 9, 2], seed=2)]


def make_trainer(folder, train=TRAIN, held_out=HELD_OUT, micro=4, sft_on_prompt=False, smoothing=0.0, **overrides):
    flags = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": 2, "learning_rate": 1e-2}
    flags |= {"data_path": ["unused"], "output_dir": str(folder), "model_name_or_path": "unused"}
    config = SFTConfig(**(flags | overrides))
    run = run_of("sft", config)
    plan = run.plan
    engine = engine_of(make_causal_lm(), plan.micro_batch, plan.accumulation, learning_rate=config.learning_rate)
    task = SFTTask(train, held_out, PAD, sft_on_prompt, smoothing)
    return supervised_loop_of(engine, task, config, run)


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
    trainer = make_trainer(tmp_path, micro=2, gradient_accumulation_steps=2, smoothing=0.2)
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


def test_one_update_does_not_depend_on_the_accumulation(group, tmp_path):
    weights, norms = [], []
    for micro in (1, 2, 4, 8):
        trainer = make_trainer(
            tmp_path / str(micro), micro=micro, gradient_accumulation_steps=8 // micro, learning_rate=2e-4
        )
        rows = list(range(8))
        norms.append(trainer.iterate([rows[i : i + micro] for i in range(0, 8, micro)])["grad_norm"])
        weights.append(weights_of(trainer.algorithm.engine))
    assert norms == near([norms[0]] * 4, UPDATE)
    assert all(largest_difference(other, weights[0]) < WEIGHT_GAP for other in weights[1:])


def test_fit_learns_and_keeps_its_appointments(group, tmp_path):
    """9 examples, updates of 4, so 2 an epoch; 6 epochs."""
    trainer = make_trainer(tmp_path, num_train_epochs=6, eval_interval=4, save_models=5)
    assert total_updates(9, trainer.config, trainer.run.plan) == 12
    result = trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if "loss/sft" in row]
    assert [row["update"] for row in train] == list(range(1, 13)) and train[-1]["samples"] == 48
    assert [row["update"] for row in rows if "eval/loss" in row] == [0, 4, 8, 12]
    assert train[-1]["loss/sft"] < train[0]["loss/sft"] - 1
    assert trainer.folders.saves == [5, 10, "final", "described"]
    assert result["eval/loss"] == rows[-1]["eval/loss"] and trainer.run.record.metrics == result
    assert trainer.algorithm.engine._engine.global_steps == 12


@pytest.mark.parametrize("fails", ["evaluate", "self_check"])
def test_an_evaluation_that_fails_after_training_leaves_the_models(fails, group, tmp_path, caplog, monkeypatch):
    trainer = make_trainer(tmp_path, num_train_epochs=1)
    calls, real = [], getattr(trainer, fails)

    def second_fails():
        calls.append(fails)
        if len(calls) == 2:
            raise UserError("the server is gone")
        return real()

    monkeypatch.setattr(trainer, fails, second_fails)
    with pytest.raises(UserError, match="the server is gone"):
        trainer.fit()
    assert trainer.folders.saves == ["final"]
    assert f"training is done and the models are saved in {tmp_path}; the evaluation after it failed" in caplog.text


def test_models_are_saved_before_an_evaluation_on_the_way(group, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, num_train_epochs=6, eval_interval=4, save_models=4)
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda: (trainer.folders.saves.append("evaluated"), evaluate())[1])
    trainer.fit()
    order = ["evaluated", 4, "evaluated", 8, "evaluated", 12, "final", "evaluated", "described"]
    assert trainer.folders.saves == order


def test_without_held_out_rows_there_is_no_evaluation(group, tmp_path):
    trainer = make_trainer(tmp_path, held_out=[])
    assert trainer.fit() == {} and trainer.folders.saves == ["final", "described"]


def test_too_few_examples(group, tmp_path):
    trainer = make_trainer(tmp_path, train=TRAIN[:3])
    with pytest.raises(UserError, match="3 training examples are fewer than one global batch of 4"):
        trainer.fit()


def test_a_divergent_run_stops_with_a_message(group, tmp_path):
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        next(trainer.algorithm.engine.module.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="after 0 updates, losses of the model on rank 0 are not finite"):
        trainer.iterate([[0, 1, 2, 3]])
