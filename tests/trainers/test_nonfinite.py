# SPDX-License-Identifier: Apache-2.0
"""A number that is not finite stops a run or is left out, wherever it comes up. Two processes: tests/distributed."""

import json
import logging
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import read_jsonl
from dschat.data.examples import PairExample, SFTExample
from dschat.errors import UserError
from dschat.trainers.ppo_update import UpdateProgress, UpdateSettings, ppo_update
from factories import (
    collected,
    engine_of,
    largest_difference,
    make_causal_lm,
    make_classifier,
    ragged_rows,
    supervised_loop,
    weights_of,
    weights_of_all,
)
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


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_place_is_named_and_its_batch_written_down(stage, group, tmp_path):
    said = messages_when_stopping(trainer_for(tmp_path, stage), 0)
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
    assert record == {"update": 0, "rank": 0, "what": "values", "rows": list(range(ROLLOUT))}
    tensors = load_file(folder / "update-0-rank-0.safetensors")
    mask = tensors["trajectory.rollout.response_mask"]
    assert bool(tensors["trajectory.values"][mask].isnan().all())
    assert bool(tensors["trajectory.logprobs"].isfinite().all()) and len(tensors["advantages"]) == ROLLOUT


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_left_out_changes_nothing(stage, group, tmp_path, caplog):
    trainer = trainer_for(tmp_path, stage, on_nonfinite="skip")
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
    lines = [record.getMessage() for record in caplog.records if "It is left out." in record.getMessage()]
    rollouts = sum(" of the " not in place for place in PLACES)
    assert len(lines) == rollouts + UPDATES * (len(PLACES) - rollouts)
    assert sum("the batch is in" in line for line in lines) == 10
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row.get("skipped/nonfinite") for row in rows] == [2.0] * len(PLACES) + [None]
    assert len(list((tmp_path / "nonfinite").glob("*.json"))) == 10


def test_an_update_that_is_left_out_is_as_if_it_had_not_been(group, tmp_path):
    """The first of two updates: weights and statistics are those of the second alone."""
    trainer = trainer_for(tmp_path)
    batch = collected(trainer, batches(0)).batch
    settings = UpdateSettings(8, 4, 2, 0.2, 0.2, 1.0)

    def engines():
        return engine_of(make_causal_lm(), 4, 2), engine_of(make_classifier(seed=2), 4, 2)

    actor, critic = engines()
    weight = actor.module.inner.model.layers[0].mlp.up_proj.weight
    value = critic.module.inner.model.layers[0].mlp.up_proj.weight
    hooks = [w.register_hook(lambda gradient: gradient * math.nan) for w in (weight, value)]

    def left_out(done, rows):
        assert sorted(rows.tolist()) == list(range(8))
        for hook in hooks:
            hook.remove()
        return (actor.nonfinite, critic.nonfinite) == ("gradients", "gradients")

    stats = ppo_update(actor, critic, batch, settings, 3, left_out=left_out)
    others = engines()
    alone = ppo_update(*others, batch, settings, 3, UpdateProgress(done=1, skipped=Counter({"skipped/nonfinite": 1})))
    assert stats == alone and stats["skipped/nonfinite"] == 1
    weights = weights_of_all(actor=actor, critic=critic)
    assert largest_difference(weights, weights_of_all(actor=others[0], critic=others[1])) == 0


def test_a_folder_that_cannot_be_written_does_not_change_what_happens(group, tmp_path, caplog):
    trainer = trainer_for(tmp_path)
    (tmp_path / "nonfinite").write_text("a file")
    with spoiled(trainer, "values", 0), pytest.raises(UserError, match=r"in rows .* of the rollout\. Lower"):
        trainer.iterate(batches(0))
    assert "could not be written" in caplog.text


SKIPPED = " --on_reward_error skip leaves such responses out. --on_nonfinite skip"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("length", f"--reward_function rewards.py:length must give finite numbers.{SKIPPED}"),
        ("brevity", f"--reward_function rewards.py:brevity must give finite numbers.{SKIPPED}"),
        ("reward_url", f"--reward_url http://server/ must give finite numbers.{SKIPPED}"),
        ("rouge", "--metric_function metrics.py:rouge must give finite numbers. --on_nonfinite skip"),
    ],
)
def test_of_several_sources_that_which_gave_the_number_is_named_with_its_flag(name, remedy, group, tmp_path):
    """In a rollout as in an evaluation, which knows means by the sources' names."""
    flags = {"metric_function": "metrics.py:rouge", "reward_url": "http://server/"}
    trainer = trainer_for(tmp_path, reward_function=["rewards.py:length", "rewards.py:brevity"], **flags)
    batch = collected(trainer, batches(0)).batch
    beside = {"length": torch.zeros(ROLLOUT), name: torch.tensor([0.0] * 7 + [math.inf])}
    with pytest.raises(UserError) as caught:
        trainer.algorithm.nonfinite.in_rollout(batch, 0, auxiliary=beside)
    assert f"numbers of {name} on rank 0 are not finite in rows [7]" in str(caught.value)
    assert f".safetensors. {remedy}" in str(caught.value)
    with pytest.raises(UserError) as caught:
        trainer.algorithm.nonfinite.in_evaluation(
            {"eval/scores": math.nan, f"eval/{name}": math.nan, "eval/kl": 1.0}, 0
        )
    assert f"eval/scores, eval/{name} of the evaluation is not finite. {remedy}" in str(caught.value)


@pytest.mark.parametrize("skips", [False, True])
def test_a_reward_functions_nan_is_no_matter_of_learning_rates(skips, group, tmp_path):
    trainer = trainer_for(tmp_path, on_reward_error="skip" if skips else "stop")
    for call in (trainer.evaluate, lambda: trainer.iterate(batches(0))):
        with spoiled(trainer, "scores", 0), pytest.raises(UserError) as caught:
            call()
        message = str(caught.value)
        assert "--reward_function unused.py:reward must give finite numbers." in message
        assert "learning rates" not in message and ("--on_reward_error skip" in message) is not skips
    with spoiled(trainer, "values", 0), pytest.raises(UserError, match="Lower the learning rates"):
        trainer.iterate(batches(0))


def test_a_nan_that_whitening_spreads_is_advantages(group, tmp_path):
    trainer = trainer_for(tmp_path, whiten_advantages=True)
    with spoiled(trainer, "scores", 0), pytest.raises(UserError, match=r"scores on rank 0 .* in rows \[7\]"):
        trainer.iterate(batches(0))


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_evaluation_names_its_mean(action, group, tmp_path, caplog):
    trainer = trainer_for(tmp_path, on_nonfinite=action)
    said = "after 0 updates, eval/scores of the evaluation is not finite"
    with spoiled(trainer, "scores", 0):
        if action == "stop":
            with pytest.raises(UserError, match=said):
                trainer.evaluate()
        else:
            trainer.evaluate()
            assert said in caplog.text


ROWS = ragged_rows([2, 5, 3, 1], [7, 1, 4, 3], seed=3)


EXAMPLES = {"sft": [SFTExample(p, r) for p, r in ROWS], "reward": [PairExample(p + r, p) for p, r in ROWS]}


def supervised(step, folder, **flags):
    flags = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3} | flags
    return supervised_loop(step, folder, EXAMPLES[step], **flags)


def spoil(trainer, part):
    """A NaN in the forward pass, or in a gradient."""
    if part == "losses":
        return trainer.algorithm.engine.module.register_forward_hook(
            lambda module, inputs, output: (
                (output[0] * math.nan, output[1])
                if len(output) == 2 and isinstance(output, tuple)
                else output * math.nan
            )
        )
    weight = trainer.algorithm.engine.module.inner.model.layers[0].mlp.up_proj.weight
    return weight.register_hook(lambda gradient: gradient * math.nan)


@pytest.mark.parametrize("part", ["losses", "gradients"])
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_steps_1_and_2_stop(step, part, group, tmp_path):
    trainer = supervised(step, tmp_path)
    trainer.iterate([[0, 1], [2, 3]])
    spoil(trainer, part)
    with pytest.raises(UserError, match=f"after 1 update, {part} of the model on rank 0 are not finite"):
        trainer.iterate([[0, 1], [2, 3]])
    tensors = load_file(tmp_path / "nonfinite" / "update-1-rank-0.safetensors")
    assert {"0.input_ids", "0.attention_mask", "1.input_ids", "1.attention_mask"} <= tensors.keys()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("part", ["losses", "gradients"])
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_steps_1_and_2_go_on_without_it(step, part, stage, group, tmp_path):
    trainer = supervised(step, tmp_path, on_nonfinite="skip", zero_stage=stage)
    hook = spoil(trainer, part)
    before = weights_of(trainer.algorithm.engine)
    assert trainer.iterate([[0, 1], [2, 3]]) == {"skipped/nonfinite": 1.0, "lr": 1e-3}
    assert largest_difference(weights_of(trainer.algorithm.engine), before) == 0 and trainer.update == 1
    hook.remove()
    metrics = trainer.iterate([[0, 1], [2, 3]])
    assert (
        "skipped/nonfinite" not in metrics and largest_difference(weights_of(trainer.algorithm.engine), before) > 1e-4
    )
