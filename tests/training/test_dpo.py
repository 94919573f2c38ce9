# SPDX-License-Identifier: Apache-2.0
"""DPO's task: loss and gradient against plain torch, and the log-probs of the policy before training."""

import math
from dataclasses import replace

import pytest
import torch

from closeness import EPS, FORMULA, FORWARD, UPDATE, assert_near, near
from dschat.models.layout import PassSize
from dschat.models.policy import PolicyModel
from dschat.run.distributed import device
from dschat.training.reference import describe_reference, reference_logprobs
from factories import PAD, engine_of, largest_difference, make_causal_lm, supervised_loop, weights_of
from recorded_updates import PREFERENCES as TRAIN

HELD_OUT = TRAIN[:5]


def make_trainer(folder, **overrides):
    flags = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    return supervised_loop("dpo", folder, TRAIN, HELD_OUT, **(flags | overrides))


def prepared(folder, **overrides):
    """A trainer whose pairs have the log-probs of the reference."""
    trainer = make_trainer(folder, **overrides)
    trainer.algorithm.prepare()
    return trainer


# -- the formula once more, from full logits, row by row


def sequence_logprob(causal_lm, prompt, response, temperature=1.0):
    """Σ log softmax(logits) at the response's tokens, of one row without padding."""
    logits = causal_lm(input_ids=torch.tensor([prompt + response])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    return sum(logprobs[len(prompt) + i - 1, token] for i, token in enumerate(response))


def plain_loss(causal_lm, reference, examples, beta, smoothing=0.0):
    """Mean loss and statistics; `reference` None for none."""
    losses, found = [], []
    for example in examples:
        ratios = []
        for response in (example.chosen_ids, example.rejected_ids):
            ratio = sequence_logprob(causal_lm, example.prompt_ids, response)
            if reference is not None:
                ratio = ratio - sequence_logprob(reference, example.prompt_ids, response).detach()
            ratios.append(ratio)
        margin = beta * (ratios[0] - ratios[1])
        right = 1 / (1 + torch.exp(-margin))
        losses.append(-(1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right))
        found.append([x.item() for x in (margin > 0, margin, beta * ratios[0], beta * ratios[1])])
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    return sum(losses) / len(losses), dict(zip(("accuracy", "margin", "chosen", "rejected"), means, strict=True))


@torch.no_grad()
def pair_logprobs(reference, example, temperature=1.0):
    """Of the chosen and the rejected response, by the formula above."""
    responses = (example.chosen_ids, example.rejected_ids)
    return tuple(float(sequence_logprob(reference, example.prompt_ids, ids, temperature)) for ids in responses)


def referenced(examples, reference):
    """The pairs with the log-probs of a model."""
    return [replace(example, ref_logprobs=pair_logprobs(reference, example)) for example in examples]


@pytest.mark.parametrize(("smoothing", "free"), [(0.0, False), (0.2, False), (0.2, True)])
def test_loss_and_gradient_are_those_of_plain_torch(smoothing, free, group, tmp_path):
    """Of a whole model, whose reference is another one; to 1e-6."""
    model, plain = PolicyModel(make_causal_lm().to(device())), make_causal_lm()
    reference = make_causal_lm(seed=1)
    flags = {"beta": 0.05, "label_smoothing": smoothing, "reference_free": free}
    task = make_trainer(tmp_path, **flags).algorithm.task
    short = [TRAIN[number] for number in (1, 3, 6, 12)]  # sums of few log-probs have few roundings
    examples = short if free else referenced(short, reference)
    loss, stats = task.loss(model, examples, 4.0)
    loss.backward()
    expected, expected_stats = plain_loss(plain, None if free else reference, examples, 0.05, smoothing)
    expected.backward()
    assert loss.item() == near(expected.item(), FORMULA)
    assert {name: x.item() for name, x in stats.items()} == near(expected_stats)
    gradients = {name: p.grad.cpu() for name, p in model.inner.named_parameters()}
    assert largest_difference(gradients, {name: p.grad for name, p in plain.named_parameters()}) < FORWARD * EPS / 10
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


# -- a run


def test_a_step_reports_the_mean_over_the_pairs_of_the_whole_update(group, tmp_path):
    """The second update, when policy and reference differ; at first they are one, and the loss is log 2."""
    trainer = prepared(tmp_path, gradient_accumulation_steps=3)
    assert trainer.evaluate()["eval/loss"] == near(math.log(2), UPDATE)
    trainer.iterate([[0, 1], [2, 3], [8, 9]])
    now = make_causal_lm()
    now.load_state_dict(
        {name.removeprefix("inner."): x for name, x in weights_of(trainer.algorithm.engine).items()}, strict=False
    )
    metrics = trainer.iterate([[4, 5], [6, 7], [10, 11]])
    with torch.no_grad():
        expected, stats = plain_loss(now, make_causal_lm(), [TRAIN[i] for i in (4, 5, 6, 7, 10, 11)], 0.1)
    assert abs(expected.item() - math.log(2)) > 0.002
    assert metrics["loss/dpo"] == near(expected.item(), UPDATE)
    for name, value in stats.items():
        assert metrics[f"train/{name}"] == near(value, 8 * UPDATE, scale=0.1), name


def test_a_run_without_a_reference_writes_none(group, tmp_path):
    metrics = prepared(tmp_path, reference_free=True).evaluate()
    assert not (tmp_path / "reference").exists()
    means = {f"eval/{name}" for name in ("loss", "accuracy", "margin", "chosen", "rejected")}
    assert metrics.keys() == means | {f"{name}_stderr" for name in means} | {"eval/rows"}


# -- the reference


def test_only_what_is_evaluated_is_held_out(group, tmp_path):
    """One batch of two pairs; another number of them is another file."""
    trainer = prepared(tmp_path, eval_iters=1)
    assert len(trainer.algorithm.task.eval) == 2
    assert {file.name for file in (tmp_path / "reference").iterdir()} == {"train.safetensors", "eval-2.safetensors"}
    prepared(tmp_path, eval_iters=0)
    assert (tmp_path / "reference" / "eval-5.safetensors").exists()
    trainer = make_trainer(tmp_path / "nothing")
    trainer.algorithm.task.eval = []
    trainer.algorithm.prepare()
    assert [file.name for file in (tmp_path / "nothing" / "reference").iterdir()] == ["train.safetensors"]


def test_log_probs_of_something_else_are_computed_anew(group, tmp_path, caplog):
    file, engine = tmp_path / "reference" / "train.safetensors", engine_of(make_causal_lm())

    def numbers_of(engine, model="m", temperature=1.0):
        identity = describe_reference(TRAIN, model, torch.float32, temperature)
        return reference_logprobs(engine, TRAIN, PAD, PassSize(3), temperature, file, identity)

    numbers = numbers_of(engine)
    assert torch.equal(numbers_of(None), numbers) and not caplog.records
    assert not torch.equal(numbers_of(engine, temperature=0.5), numbers) and "changed: the temperature" in caplog.text
    assert torch.equal(numbers_of(engine, "other"), numbers) and "changed: the model, the temperature" in caplog.text
    file.write_bytes(b"nothing")
    assert torch.equal(numbers_of(engine), numbers) and "cannot be read" in caplog.text


@pytest.mark.parametrize("part", ["prompt_ids", "chosen_ids", "rejected_ids"])
def test_another_response_is_other_data(part):
    changed = [replace(TRAIN[0], **{part: [9]}), *TRAIN[1:]]
    before, after = (describe_reference(examples, "m", torch.float32, 1.0) for examples in (TRAIN, changed))
    assert {name for name in before if before[name] != after[name]} == {"the data"}


def test_the_reference_has_the_temperature_that_it_is_asked_for(group, tmp_path):
    engine = engine_of(make_causal_lm("gpt2"))
    numbers = reference_logprobs(engine, TRAIN[:3], PAD, PassSize(2), 0.5, tmp_path / "file", {})
    expected = [pair_logprobs(make_causal_lm("gpt2"), example, 0.5) for example in TRAIN[:3]]
    assert_near(numbers, expected, UPDATE)
