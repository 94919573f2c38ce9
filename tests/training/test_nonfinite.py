# SPDX-License-Identifier: Apache-2.0
"""A number that is not finite is named, and stops a run or is left out. On two processes: tests/distributed."""

import json
import logging
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.training.nonfinite import bad_rows
from factories import largest_difference, supervised_loop, weights_of
from macro_actions.conditions import fixed
from macro_actions.types import ScoredRollout
from nonfinite_cases import (
    PLACES,
    ROLLOUT,
    UPDATES,
    batches,
    messages_when_stopping,
    notes_when_skipping,
    spoiled,
    trainer_for,
)
from recorded_updates import DEMONSTRATIONS, PAIRS
from rl_cases import credit_of, trajectory_of


def test_every_place_is_named_and_its_batch_written_down(group, tmp_path):
    said = messages_when_stopping(trainer_for(tmp_path), 0)
    assert said.keys() == PLACES.keys()
    for place, message in said.items():
        assert message.startswith(f"after {UPDATES} updates, {place} on rank 0 are not finite"), message
        assert "--on_nonfinite skip" in message
    assert "in rows [7] of the rollout" in said["scores"] and "rows" not in said["gradients of the actor"]
    assert f"{tmp_path}/nonfinite/update-{UPDATES}-rank-0.safetensors" in said["values"]


def test_what_is_written_down(group, tmp_path):
    trainer = trainer_for(tmp_path)
    with spoiled(trainer, "values", 0), pytest.raises(UserError):
        trainer.iterate(batches(0))
    folder = tmp_path / "nonfinite"
    record = json.loads((folder / "update-0-rank-0.json").read_text())
    assert record == {"update": 0, "rank": 0, "quantity": "values", "rows": list(range(ROLLOUT))}
    tensors = load_file(folder / "update-0-rank-0.safetensors")
    mask = tensors["trajectory.rollout.response_mask"]
    assert bool(tensors["trajectory.values"][mask].isnan().all())
    assert bool(tensors["trajectory.logprobs"].isfinite().all()) and len(tensors["advantages"]) == ROLLOUT


def test_what_is_left_out_changes_nothing(group, tmp_path, caplog):
    trainer = trainer_for(tmp_path, on_nonfinite="skip")
    with caplog.at_level(logging.WARNING):
        notes = notes_when_skipping(trainer, 0)
    after = notes.pop("after")
    for place, note in notes.items():
        assert note["counted"] == UPDATES, place
        actor, critic = note["moved"], note["stood"]
        untouched = {"actor": [0], "critic": [1]}.get(place.rsplit(" ", 1)[-1], [0, 1])
        assert [actor[i] for i in untouched] == [0.0] * len(untouched), place
        assert [critic[i] for i in untouched] == [True] * len(untouched), place
    assert "skipped/nonfinite" not in after and all(map(math.isfinite, after.values()))
    assert trainer.update == UPDATES * (len(PLACES) + 1)
    assert "It is left out." in caplog.text
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row.get("skipped/nonfinite") for row in rows] == [2.0] * len(PLACES) + [None]
    # A finite rollout has its metrics, though its updates were left out.
    for place, row in zip(PLACES, rows, strict=False):
        assert ("objective/kl" in row) == (" of the " in place), place
    assert len(list((tmp_path / "nonfinite").glob("*.json"))) == 10


def with_nan_gradient(engine):
    weight = engine.module.inner.model.layers[0].mlp.up_proj.weight
    return weight.register_hook(lambda gradient: gradient * math.nan)


def test_step_1_stops_and_writes_its_micro_batches_down(group, tmp_path):
    trainer = supervised_loop("sft", tmp_path, DEMONSTRATIONS, per_device_train_batch_size=2)
    trainer.iterate([[0, 1]])
    with_nan_gradient(trainer.algorithm.engine)
    file = tmp_path / "nonfinite" / "update-1-rank-0.safetensors"
    said = f"after 1 update, gradients of the model on rank 0 are not finite; the batch is in {file}"
    with pytest.raises(UserError, match=re.escape(said)):
        trainer.iterate([[0, 1]])
    assert {name.split(".")[0] for name in load_file(file)} == {"0"}


@pytest.mark.parametrize(("step", "examples"), [("sft", DEMONSTRATIONS), ("reward", PAIRS)])
def test_steps_1_and_2_go_on_without_it(step, examples, group, tmp_path):
    """A NaN in a gradient; an engine leaves losses out alike."""
    flags = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    trainer = supervised_loop(step, tmp_path, examples, on_nonfinite="skip", **flags)
    engine = trainer.algorithm.engine
    hook = with_nan_gradient(engine)
    before = weights_of(engine)
    assert trainer.iterate([[0, 1], [2, 3]]) == {"skipped/nonfinite": 1.0, "lr": 1e-3}
    assert largest_difference(weights_of(engine), before) == 0 and trainer.update == 1
    hook.remove()
    assert "skipped/nonfinite" not in trainer.iterate([[0, 1], [2, 3]])
    assert largest_difference(weights_of(engine), before) > 1e-4


TRAJECTORY = trajectory_of([3, 5, 2], 5, seed=0)


def batch_of_trajectory(trajectory=TRAJECTORY):
    ends = fixed(trajectory.response_mask, 2)
    return credit_of(trajectory, ends, kl_coef=0.1, gamma=1.0, lam=0.95)


def with_nan(x, row, column, value=math.nan):
    y = x.clone()
    y[row, column] = value
    return y


def first(batch, logits=(), **beside):
    """The first name and its rows; None of a healthy batch."""
    rows = len(batch.trajectory.scores)
    bad_logits = torch.tensor([row in logits for row in range(rows)])
    found = ((name, bad.nonzero().flatten().tolist()) for name, bad in bad_rows(batch, bad_logits, beside))
    return next(((name, numbers) for name, numbers in found if numbers), None)


@pytest.mark.parametrize(("name", "bad"), [("logprobs", math.nan), ("ref_logprobs", math.inf), ("values", -math.inf)])
def test_the_first_field_of_a_trajectory_is_named_not_what_follows_from_it(name, bad):
    """A NaN among the log-probs makes kl, rewards, advantages and returns NaN, too."""
    broken = replace(TRAJECTORY, **{name: with_nan(getattr(TRAJECTORY, name), 1, 2, bad)})
    assert first(batch_of_trajectory(broken)) == (name, [1])


def test_logits_come_first_and_the_sources_of_a_sum_before_it():
    broken = batch_of_trajectory(replace(TRAJECTORY, values=with_nan(TRAJECTORY.values, 1, 2)))
    metric = torch.tensor([math.inf, 0.0, 0.0])
    assert first(broken, logits=[2], metric=metric) == ("logits", [2])
    assert first(broken, metric=metric) == ("values", [1])
    assert first(batch_of_trajectory(), metric=metric) == ("numbers of metric", [0])
    scored = batch_of_trajectory(replace(TRAJECTORY, scores=metric))
    assert first(scored, length=torch.zeros(3), brevity=metric) == ("numbers of brevity", [0])
    assert first(scored, length=torch.zeros(3)) == ("scores", [0])
    sampled = ScoredRollout(TRAJECTORY.rollout, TRAJECTORY.ref_logprobs, metric)
    names = [name for name, bad in bad_rows(sampled, None, {"brevity": metric}) if bad.any()]
    assert names == ["numbers of brevity", "scores"]


@pytest.mark.parametrize("name", ["rewards", "advantages", "returns"])
def test_every_field_of_the_batch(name):
    batch = batch_of_trajectory()
    assert first(replace(batch, **{name: with_nan(getattr(batch, name), 0, 1)})) == (name, [0])


def test_only_rows_that_are_broken_on_the_response_are_named():
    batch = batch_of_trajectory()
    broken = replace(batch, kl=with_nan(with_nan(batch.kl, 2, 4), 1, 0))  # row 2 has two tokens
    assert first(broken) == ("kl", [1])
