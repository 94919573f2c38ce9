# SPDX-License-Identifier: Apache-2.0
"""Step 2's task: pairs."""

import math
from dataclasses import replace

import pytest
import torch

from closeness import UPDATE, near
from dschat.data.examples import PairExample
from factories import hf_score, largest_difference, make_classifier, random_ids, supervised_loop, weights_of


def pairs(count, seed):
    """The chosen response holds the tokens 10 to 20, the rejected one 30 to 40."""
    examples = []
    for i in range(count):
        prompt = random_ids(2 + i % 3, 10 * seed + i)
        chosen = [10 + (token % 10) for token in random_ids(3 + i % 4, 100 * seed + i)]
        rejected = [30 + (token % 10) for token in random_ids(2 + i % 5, 200 * seed + i)]
        examples.append(PairExample(prompt + chosen, prompt + rejected))
    return examples


TRAIN, HELD_OUT = pairs(16, 1), pairs(5, 2)


def make_trainer(folder, micro=4, train=TRAIN, model=None, **overrides):
    flags = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    return supervised_loop("reward", folder, train, HELD_OUT, model, **(flags | overrides))


def expected_of(examples):
    """Loss and statistics from the classifier's own scores, pair by pair."""
    model = make_classifier()
    scores = [(hf_score(model, e.chosen_ids), hf_score(model, e.rejected_ids)) for e in examples]
    n = len(scores)
    return {
        "loss": sum(math.log1p(math.exp(r - c)) for c, r in scores) / n,
        "accuracy": sum(c > r for c, r in scores) / n,
        "chosen": sum(c for c, _ in scores) / n,
        "rejected": sum(r for _, r in scores) / n,
        "margin": sum(c - r for c, r in scores) / n,
    }


def test_evaluation(group, tmp_path):
    expected = {f"eval/{name}": value for name, value in expected_of(HELD_OUT).items()}
    assert make_trainer(tmp_path).evaluate() == near(expected, UPDATE)


def test_a_step_reports_the_mean_over_the_pairs_of_the_whole_update(group, tmp_path):
    metrics = make_trainer(tmp_path, micro=2, gradient_accumulation_steps=3).iterate([[0, 1], [2, 3], [8, 9]])
    expected = expected_of([TRAIN[i] for i in (0, 1, 2, 3, 8, 9)])
    assert metrics["loss/reward"] == near(expected.pop("loss"), UPDATE)
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == near(value, UPDATE)


@pytest.mark.parametrize("loss", ["end", "last_token", "per_sample", "average"])
def test_an_update_of_each_loss_does_not_depend_on_the_accumulation(loss, group, tmp_path):
    """Nor on where the pair of equal sequences is, which only per_sample leaves out."""
    equal = PairExample(TRAIN[3].chosen_ids, TRAIN[3].chosen_ids)
    train, results = [*TRAIN[:3], equal, *TRAIN[4:]], []
    for micro in (1, 2, 8):
        trainer = make_trainer(
            tmp_path / str(micro), micro, train, gradient_accumulation_steps=8 // micro, reward_loss=loss
        )
        metrics = trainer.iterate([list(range(8))[i : i + micro] for i in range(0, 8, micro)])
        results.append({name: metrics[name] for name in ("loss/reward", "train/accuracy", "grad_norm")})
    assert results[1] == near(results[0], UPDATE) and results[2] == near(results[0], UPDATE)
    without = make_trainer(tmp_path / "7", 7, train, reward_loss=loss).iterate([[0, 1, 2, 4, 5, 6, 7]])
    rest = results[0]["loss/reward"] * (7 if loss == "per_sample" else 8) - (loss != "per_sample") * math.log(2)
    assert without["loss/reward"] == near(rest / 7, UPDATE)


def test_an_update_without_a_pair_that_counts_changes_nothing(group, tmp_path):
    equal = PairExample(TRAIN[0].chosen_ids, TRAIN[0].chosen_ids)
    trainer = make_trainer(tmp_path, 2, [equal, equal], reward_loss="per_sample")
    before = weights_of(trainer.algorithm.engine)
    metrics = trainer.iterate([[0, 1]])
    assert metrics["loss/reward"] == 0 and metrics["grad_norm"] == 0
    assert largest_difference(before, weights_of(trainer.algorithm.engine)) == 0


def test_margins_and_centring_reach_the_loss(group, tmp_path):
    train = [replace(example, margin=0.5 * i) for i, example in enumerate(TRAIN[:4])]
    trainer = make_trainer(tmp_path, train=train, center_rewards_coefficient=0.2)
    model = make_classifier()
    scores = [(hf_score(model, e.chosen_ids), hf_score(model, e.rejected_ids)) for e in train]
    costs = [math.log1p(math.exp(r - c + 0.5 * i)) + 0.2 * (c + r) ** 2 for i, (c, r) in enumerate(scores)]
    assert trainer.iterate([[0, 1, 2, 3]])["loss/reward"] == near(sum(costs) / 4, UPDATE)


@pytest.mark.parametrize("loss", ["last_token", "average"])
def test_a_new_head_ranks_nothing(loss, group, tmp_path):
    model = make_classifier()
    torch.nn.init.zeros_(model.score.weight)
    found = make_trainer(tmp_path, model=model, reward_loss=loss).evaluate()
    assert found["eval/accuracy"] == found["eval/end_accuracy"] == 0
    assert found["eval/loss"] == near(math.log(2))


@pytest.mark.parametrize("loss", ["end", "last_token", "per_sample", "average"])
def test_it_learns_to_rank(loss, group, tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=6, reward_loss=loss)
    first, last = trainer.evaluate(), trainer.fit()
    assert last["eval/loss"] < first["eval/loss"] / 2
    assert last["eval/accuracy"] == 1.0 and last["eval/margin"] > 1
    assert torch.tensor(list(last.values())).isfinite().all()
