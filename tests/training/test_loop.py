# SPDX-License-Identifier: Apache-2.0
"""What the loop does for every algorithm: updates, evaluations, saved models and checkpoints, self-checks.

That a run which is stopped goes on to the same end: test_resume.py.
"""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.run import checkpoint
from factories import ppo_config, supervised_config
from refuel_runs import config_of as refuel_config
from refuel_runs import share_of_early
from resume_runs import lengths, ppo, refuel_online, supervised

# Runs of four iterations; optimiser updates of an iteration, and samples.
PPO = {"reward": lengths, "per_device_training_batch_size": 4}
ALGORITHMS = {
    "sft": (partial(supervised, "sft"), 1, 4),
    "ppo": (partial(ppo, **PPO), 2, 8),
    "refuel online": (partial(refuel_online, reward=share_of_early), 3, 8),
}
pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize(("make", "updates", "samples"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_keeps_its_appointments(make, updates, samples, tmp_path, monkeypatch):
    """Evaluations and saves every two iterations, saves first: an evaluation may fail."""
    due = dict.fromkeys(("eval_interval", "save_models", "save_steps"), 2 * updates)
    loop = make(tmp_path, **due)
    saves, evaluate = loop.folders.saves, loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda: (saves.append("evaluated"), evaluate())[1])
    result = loop.fit()
    order = ["evaluated", 2 * updates, "evaluated", 4 * updates, "final", "evaluated", "described"]
    assert saves == order and loop.update == 4 * updates
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    train = [(row["update"], row["samples"]) for row in rows if row not in evaluations]
    assert train == [(updates * number, samples * number) for number in (1, 2, 3, 4)]
    assert [row["update"] for row in evaluations] == [0, 2 * updates, 4 * updates]
    assert result and result.items() <= rows[-1].items() and loop.run.record.metrics == result
    assert {engine._engine.global_steps for engine in loop.checkpoints._engines.values()} == {4 * updates}
    steps = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert steps == {f"step-{2 * updates}", f"step-{4 * updates}"}


@pytest.mark.parametrize("fails", ["evaluate", "self_check"])
def test_what_fails_after_training_leaves_the_models(fails, tmp_path, caplog, monkeypatch):
    loop = supervised("sft", tmp_path, num_train_epochs=1)
    real = getattr(loop, fails)

    def last_fails():
        if "final" in loop.folders.saves:
            raise UserError("the server is gone")
        return real()

    monkeypatch.setattr(loop, fails, last_fails)
    with pytest.raises(UserError, match="the server is gone"):
        loop.fit()
    assert loop.folders.saves == ["final"]
    assert f"training is done and the models are saved in {tmp_path}; the evaluation after it failed" in caplog.text


@pytest.mark.parametrize("name", ["ppo", "refuel online"])
def test_every_evaluation_says_the_same(name, tmp_path):
    """Whatever the global random state and the iteration are."""
    loop, found = ALGORITHMS[name][0](tmp_path), []
    loop.algorithm.prepare()
    for number in (1, 2):
        torch.manual_seed(number)
        loop.iteration = number
        found.append(loop.evaluate())
    assert found[0] and found[0] == found[1]


sft_config = partial(supervised_config, "sft")
TWO_UPDATES = {"per_device_generation_batch_size": 8, "per_device_training_batch_size": 4}  # of a rollout, by rank


# Configuration and flags, examples, processes; updates of the run.
@pytest.mark.parametrize(
    ("make", "flags", "examples", "processes", "updates"),
    [
        (ppo_config, TWO_UPDATES | {"num_train_epochs": 3, "ppo_epochs": 2}, 35, 2, 3 * 2 * 2 * 2),
        (sft_config, {"num_train_epochs": 3, "per_device_train_batch_size": 4}, 35, 2, 3 * 4),
        (refuel_config, {"num_train_epochs": 3}, 17, 1, 6 * 4),
        (refuel_config, {"total_episodes": 47}, 17, 1, 5 * 4),
        (ppo_config, TWO_UPDATES | {"num_train_epochs": 3, "max_steps": 8}, 35, 2, 8),
        (refuel_config, {"total_episodes": 47, "max_steps": 40}, 17, 1, 40),
    ],
)
def test_the_updates_that_a_schedule_is_over(make, flags, examples, processes, updates, tmp_path):
    config = make(tmp_path, **flags)
    assert config.total_updates(examples, config.plan_batches(processes)) == updates


@pytest.mark.parametrize(("step", "metric", "best"), [("sft", "eval/loss", min), ("reward", "eval/accuracy", max)])
def test_the_best_checkpoint_is_named(step, metric, best, tmp_path, caplog, monkeypatch):
    """It is kept beside the newest, although its evaluation is not the last."""
    loop = supervised(step, tmp_path, save_steps=1, eval_interval=1, save_total_limit=1)
    scores = iter([0.5, 0.1, 0.9, 0.3, 0.4])
    evaluate = loop.algorithm.evaluate
    loop.algorithm.evaluate = lambda: (evaluate()[0] | {metric: next(scores)}, [])
    with caplog.at_level(logging.INFO):
        loop.fit()
    folder = tmp_path / "checkpoints" / ("step-1" if best is min else "step-2")
    score = best(0.1, 0.9)
    said = f"the best checkpoint is {folder} with {metric} {score}: `dschat export {folder} FOLDER` writes its models"
    assert said in caplog.messages and {path.name for path in folder.parent.iterdir()} == {folder.name, "step-4"}
    loop.checkpoints._run.metrics.close()
    with monkeypatch.context() as other_rank:  # which has no metrics
        other_rank.setattr("dschat.run.checkpoint.is_main", lambda: False)
        loop.checkpoints._run.metrics._file = None
        loop.checkpoints.name_best()


@pytest.mark.parametrize(("save_steps", "expected"), [(0, {2, 4, 6}), (3, {2, 3, 5, 6})])
def test_a_checkpoint_every_some_minutes(save_steps, expected, tmp_path, monkeypatch):
    """At 40 s an update, a minute has passed after two; a checkpoint of --save_steps begins another one.

    The last update's checkpoint is saved in any case.
    """
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(checkpoint, "time", clock)
    minutes = {"save_minutes": 1.0, "save_steps": save_steps, "save_total_limit": 0}
    loop = supervised("sft", tmp_path, num_train_epochs=3, **minutes)
    iterate = loop.iterate

    def iterate_slowly(work):
        clock.now += 40.0
        return iterate(work)

    monkeypatch.setattr(loop, "iterate", iterate_slowly)
    loop.fit()
    saved = {int(folder.name.removeprefix("step-")) for folder in (tmp_path / "checkpoints").iterdir()}
    assert saved == expected


def test_the_main_processs_clock_decides(tmp_path, monkeypatch):
    """Every process asks, whatever its own clock says; without the flag none does."""
    asked = []
    monkeypatch.setattr(checkpoint, "largest_over_ranks", lambda number: asked.append(number) or 1)
    loop = supervised("sft", tmp_path / "a", save_minutes=1.0)
    loop.checkpoints._saved_at -= 61.0
    assert loop.checkpoints.is_overdue()
    with monkeypatch.context() as other_rank:
        other_rank.setattr(checkpoint, "is_main", lambda: False)
        assert loop.checkpoints.is_overdue()
    assert asked == [1, 0]
    assert not supervised("sft", tmp_path / "b").checkpoints.is_overdue() and asked == [1, 0]


@pytest.mark.parametrize(("steps", "nearest"), [(1, "2"), (7, "6")])
def test_max_steps_inside_a_rollout_is_refused(steps, nearest, tmp_path):
    config = ppo_config(tmp_path, max_steps=steps, **TWO_UPDATES)
    with pytest.raises(UserError, match=f"--max_steps {steps}: a rollout makes 2 .* make it {nearest}\\."):
        config.plan_batches(2)


@pytest.mark.parametrize(
    ("make", "flags", "examples", "said"),
    [
        (ppo_config, {}, 7, "7 prompts are fewer than one rollout of 8. Give --per_device_training_batch_size 7"),
        (sft_config, {"per_device_train_batch_size": 4}, 3, "3 training examples are fewer than one global batch"),
        (refuel_config, {}, 7, "7 dialogues are fewer than one round of 8"),
        (refuel_config, {"total_episodes": 7}, 17, "--total_episodes 7 is less than one batch of 8"),
    ],
)
def test_fewer_examples_than_an_iteration_takes_are_refused(make, flags, examples, said, tmp_path):
    config = make(tmp_path, **flags)
    with pytest.raises(UserError, match=said):
        config.total_updates(examples, config.plan_batches(1))
