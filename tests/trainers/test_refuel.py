# SPDX-License-Identifier: Apache-2.0
"""REFUEL's task: the regression by hand, its start, and how long it goes."""

from dataclasses import replace

import pytest
import torch

from closeness import UPDATE, assert_near, near
from dschat.data.dialogue_pairs import RegressionExample
from dschat.errors import UserError
from dschat.models.layout import PassSize
from dschat.run.metrics import with_variances
from dschat.trainers.reference import reference_logprobs, with_logprobs
from dschat.trainers.refuel_pairs import RefuelTask
from factories import PAD, engine_of, hf_logprobs, make_causal_lm, random_ids, supervised_loop

ETA, TEMPERATURE = 3.0, 0.8
pytestmark = pytest.mark.usefixtures("group")


def pairs(count=3):
    """Pairs of several lengths with rewards, all but the last of which differ."""
    made = []
    for n in range(count):
        ids = [random_ids(length, 10 * n + place) for place, length in enumerate((2 + n, 3 + n % 3, 6 - n % 4))]
        made.append(
            RegressionExample(*ids, chosen_reward=float(n + 1), rejected_reward=float(min(n + 1, count - 1) - n % 2))
        )
    return made


def task_of(train, eval=(), eta=ETA):
    return RefuelTask(train, list(eval), PAD, eta, TEMPERATURE)


def own_sums(model, examples):
    """Σ log π by plain transformers: (n, 2)."""
    sides = [(e.prompt_ids, r) for e in examples for r in (e.chosen_ids, e.rejected_ids)]
    return torch.stack([hf_logprobs(model, side, TEMPERATURE)[0].sum() for side in sides]).view(-1, 2)


def test_the_loss_is_the_regression_on_the_replies_alone():
    model, before = make_causal_lm(), make_causal_lm(seed=4)
    examples = with_logprobs(pairs(), own_sums(before, pairs()))
    expected = own_sums(model, examples) - own_sums(before, examples)
    rewards = torch.tensor([e.chosen_reward - e.rejected_reward for e in examples])
    assert 0 in rewards and rewards.min() >= 0 and rewards.max() > 0
    differences = expected[:, 0] - expected[:, 1]
    wanted = (differences - ETA * rewards).square().mean()
    loss, stats = task_of(examples).loss(engine_of(model), examples, 3)
    assert_near(loss.cpu(), wanted, UPDATE)
    found = with_variances({name: float(x) for name, x in stats.items()})
    ratios = expected.exp()
    assert found == {
        "kl": near(float(expected.mean()), UPDATE),
        "kl_chosen": near(float(expected[:, 0].mean()), UPDATE),
        "kl_rejected": near(float(expected[:, 1].mean()), UPDATE),
        "agreement": pytest.approx(float((differences * rewards > 0).float().mean())),
        "ratio": near(float(ratios.mean()), 8 * UPDATE),
        "ratio_variance": near(float(ratios.var(unbiased=False)), 8 * UPDATE),
    }


def test_large_rewards_that_lie_close_together_keep_their_difference():
    (example,) = pairs(1)
    example = replace(example, chosen_reward=1e6 + 1 / 64, rejected_reward=1e6)
    (example,) = with_logprobs([example], own_sums(make_causal_lm(), [example]))
    loss, _ = task_of([example]).loss(engine_of(make_causal_lm()), [example], 1)
    assert loss.item() == near((ETA / 64) ** 2, UPDATE)


def test_the_parts_of_an_update_add_up():
    engine, examples = engine_of(make_causal_lm()), with_logprobs(pairs(), torch.arange(6.0).view(3, 2) - 20)
    task = task_of(examples)
    parts = [task.loss(engine, [example], 3)[0] for example in examples]
    assert_near(sum(parts), task.loss(engine, examples, 3)[0], UPDATE)


def test_at_the_start_the_loss_is_that_of_the_rewards_alone(tmp_path):
    engine = engine_of(make_causal_lm())
    kept = reference_logprobs(engine, pairs(), PAD, PassSize(2), TEMPERATURE, tmp_path / "r.safetensors", {})
    examples = with_logprobs(pairs(), kept)
    task = task_of(examples)
    task.check_start(engine, examples)
    loss, stats = task.loss(engine, examples, 3)
    expected = sum((ETA * (e.chosen_reward - e.rejected_reward)) ** 2 for e in examples) / 3
    assert loss.item() == near(expected, UPDATE)
    assert abs(float(stats["kl"])) < 1e-5 and float(stats["ratio"]) == near(1)
    wrong = with_logprobs(
        examples, torch.tensor([[chosen, rejected + 1] for chosen, rejected in (e.ref_logprobs for e in examples)])
    )
    with pytest.raises(UserError, match="self-check: the log-probs of a reply .*Remove the file of"):
        task.check_start(engine, wrong)


def trainer_of(folder, **flags):
    """A run on 5 pairs, two to an update."""
    flags = {"learning_rate": 1e-2, "gradient_accumulation_steps": 2, "eval_interval": 2, "eta": 1.0} | flags
    flags = {"total_episodes": 10, "temperature": TEMPERATURE} | flags
    return supervised_loop("refuel", folder, pairs(5), pairs(5)[:2], **flags)


def test_it_goes_through_the_pairs_until_so_many_were_seen(tmp_path, monkeypatch):
    trainer, seen = trainer_of(tmp_path), []
    real = trainer.iterate
    monkeypatch.setattr(trainer, "iterate", lambda batches: seen.append(batches) or real(batches))
    result = trainer.fit()
    rows = [sorted(i for batch in update for i in batch) for update in seen]
    assert len(rows) == 5 and all(len(row) == 2 for row in rows)  # 10 episodes; an epoch is two updates
    assert all(len(set(rows[n] + rows[n + 1])) == 4 for n in (0, 2))
    assert trainer.update == 5 and "eval/ratio_variance" in result


def test_it_learns_the_difference_of_the_rewards(tmp_path):
    """With enough updates D is η ΔR, whatever it began with."""
    trainer = trainer_of(tmp_path, learning_rate=5e-4, total_episodes=50, eval_interval=0, self_checks=False)
    trainer.algorithm.prepare()
    before = trainer.evaluate()["eval/loss"]
    assert trainer.fit()["eval/loss"] < before / 2
