# SPDX-License-Identifier: Apache-2.0
"""REFUEL's task: the regression by hand, its start, what is kept of the policy before, and how long it goes."""

from dataclasses import replace

import pytest
import torch

from closeness import UPDATE, assert_near, near
from dschat.config.refuel import RefuelConfig
from dschat.data.dialogue_pairs import RegressionExample
from dschat.errors import UserError
from dschat.run.metrics import with_variances
from dschat.trainers.reference import describe_reference, reference_logprobs, with_logprobs
from dschat.trainers.refuel_pairs import RefuelTask
from factories import PAD, engine_of, hf_logprobs, make_causal_lm, random_ids, run_of, supervised_loop_of
from resume_runs import Made, check_every_stop

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


def test_swapping_the_sides_and_splitting_the_batch_change_nothing():
    engine, examples = engine_of(make_causal_lm()), with_logprobs(pairs(), torch.arange(6.0).view(3, 2) - 20)
    task = task_of(examples)
    whole = task.loss(engine, examples, 3)[0]
    swapped = [
        RegressionExample(
            e.prompt_ids, e.rejected_ids, e.chosen_ids, e.ref_logprobs[::-1],
            chosen_reward=e.rejected_reward, rejected_reward=e.chosen_reward,
        )
        for e in examples
    ]  # fmt: skip
    torch.testing.assert_close(task.loss(engine, swapped, 3)[0], whole)
    parts = [task.loss(engine, [example], 3)[0] for example in examples]
    assert_near(sum(parts), whole, UPDATE)


def reference(engine, examples, file, **changes):
    described = describe_reference(examples, "hash", torch.float32, TEMPERATURE) | changes
    return reference_logprobs(engine, examples, PAD, 2, TEMPERATURE, file, described)


def test_at_the_start_the_loss_is_that_of_the_rewards_alone(tmp_path):
    engine = engine_of(make_causal_lm())
    examples = with_logprobs(pairs(), reference(engine, pairs(), tmp_path / "r.safetensors"))
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


@pytest.mark.parametrize(
    "name", ["the data", "the model", "the number format", "the kind of device", "the temperature"]
)
def test_kept_log_probs_of_other_circumstances_are_refused(name, tmp_path):
    engine, file = engine_of(make_causal_lm()), tmp_path / "kept" / "box.safetensors"
    first = reference(engine, pairs(), file)
    other = engine_of(make_causal_lm(seed=9))  # what is kept is used, nothing is computed again
    torch.testing.assert_close(reference(other, pairs(), file), first, rtol=0, atol=0)
    with pytest.raises(UserError, match=f"are not of this run: {name} differ. Remove .*box.safetensors"):
        reference(engine, pairs(), file, **{name: "changed"})


def test_what_the_kept_log_probs_depend_on():
    one = describe_reference(pairs(), "hash", torch.float32, TEMPERATURE)
    assert describe_reference(pairs(), "other", torch.float32, TEMPERATURE) != one
    assert one["the kind of device"] == "cpu" or torch.cuda.is_available()
    assert describe_reference(pairs(), "hash", torch.bfloat16, TEMPERATURE) != one
    assert describe_reference(pairs(), "hash", torch.float32, 1.0) != one
    assert describe_reference(pairs(2), "hash", torch.float32, TEMPERATURE)["the data"] != one["the data"]


def refuel(folder, rate=1e-2, **flags):
    """A run on 5 pairs, two to an update."""
    flags = {"data_path": ["unused"], "model_name_or_path": "unused", "learning_rate": 1e-2} | flags
    flags = {"output_dir": str(folder), "gradient_accumulation_steps": 2, "eval_interval": 2} | flags
    config = RefuelConfig(**({"total_episodes": 10} | flags))
    run, engine = run_of("refuel", config), engine_of(make_causal_lm(), 1, 2, learning_rate=rate)
    examples = with_logprobs(pairs(5), own_sums(make_causal_lm(), pairs(5)))
    task = task_of(examples, examples[:2], eta=1.0)
    return Made(supervised_loop_of(engine, task, config, run), {"model": engine})


def test_it_goes_through_the_pairs_until_so_many_were_seen(tmp_path, monkeypatch):
    trainer, seen = refuel(tmp_path).trainer, []
    real = trainer.iterate
    monkeypatch.setattr(trainer, "iterate", lambda batches: seen.append(batches) or real(batches))
    result = trainer.fit()
    rows = [sorted(i for batch in update for i in batch) for update in seen]
    assert len(rows) == 5 and all(len(row) == 2 for row in rows)  # 10 episodes; an epoch is two updates
    assert all(len(set(rows[n] + rows[n + 1])) == 4 for n in (0, 2))
    assert trainer.update == 5 and "eval/ratio_variance" in result


def test_it_learns_the_difference_of_the_rewards(tmp_path):
    """With enough updates D is η ΔR, whatever it began with."""
    trainer = refuel(tmp_path, 5e-4, total_episodes=50, eval_interval=0, self_checks=False).trainer
    before = trainer.evaluate()["eval/loss"]
    assert trainer.fit()["eval/loss"] < before / 2


@pytest.mark.slow
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_end(tmp_path):
    assert check_every_stop(refuel, tmp_path, every=3) > 10
