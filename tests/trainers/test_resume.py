# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and taken up again is, to the last bit, the run that was never stopped."""

import shutil

import pytest
import torch

from dschat.trainers import reference as pairs
from refuel_runs import length, trainer_of
from resume_runs import Made, Setup, check_every_stop, ppo, result_of, supervised


@pytest.mark.parametrize(
    ("step", "every"), [("sft", 1), ("reward", 1), ("dpo", 3), pytest.param("dpo", 1, marks=pytest.mark.slow)]
)
def test_steps_1_and_2_stop_anywhere(step, every, group, tmp_path):
    points = check_every_stop(lambda folder, **flags: supervised(step, folder, **flags), tmp_path, every)
    reference = 5 + 2 + 1 if step == "dpo" else 0  # batches of 9 and 3 pairs, and the end
    assert points == reference + 4 * 2 + 3 * 2, "micro-batches of 4 updates, and batches of 3 evaluations"


def test_the_reference_is_used_again(group, tmp_path, monkeypatch):
    """Neither computed again nor taken from the weights of the checkpoint."""
    whole = result_of(supervised("dpo", tmp_path / "whole"), tmp_path / "whole")
    place = tmp_path / "stopped"
    assert result_of(supervised("dpo", place, save_steps=2), place)[1] == whole[1]
    before = {file.name: file.read_bytes() for file in (place / "reference").iterdir()}
    assert before.keys() == {"train.safetensors", "eval-3.safetensors"}
    monkeypatch.setattr(pairs, "_compute", None)
    again = result_of(supervised("dpo", place, resume_from_checkpoint=f"{place}/checkpoints/step-2"), place)
    assert again[1] == whole[1] and all(torch.equal(again[0][name], x) for name, x in whole[0].items())
    assert {file.name: file.read_bytes() for file in (place / "reference").iterdir()} == before


def test_a_lost_reference_is_computed_before_the_checkpoint_is_loaded(group, tmp_path):
    whole = result_of(supervised("dpo", tmp_path), tmp_path)
    place = tmp_path / "stopped"
    result_of(supervised("dpo", place, save_steps=2), place)
    shutil.rmtree(place / "reference")
    again = result_of(supervised("dpo", place, resume_from_checkpoint=f"{place}/checkpoints/step-2"), place)
    assert again[1] == whole[1] and all(torch.equal(again[0][name], x) for name, x in whole[0].items())


CONDITIONS = [
    {"termination_condition": "fixed", "ngram": 3},
    {"termination_condition": "randomized"},
    {"termination_condition": "parsing", "parser": "chunker"},
    {"termination_condition": "ppl"},
]
# Prompts are half as many as responses, so that updates are as many as above.
RLOO = {"advantage_estimator": "rloo", "samples_per_prompt": 2, "per_device_generation_batch_size": 2}


@pytest.mark.parametrize("flags", CONDITIONS, ids=lambda flags: flags["termination_condition"])
@pytest.mark.parametrize("every", [43, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere(flags, every, group, tmp_path):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, inside a rollout, between epochs."""
    first = 9 * CONDITIONS.index(flags) if every > 1 else 0
    check_every_stop(lambda folder, **more: ppo(folder, **flags, **more), tmp_path, every, first)


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_with_normalised_scores_stops_anywhere(every, group, tmp_path):
    """The running moments go on where they were, also after a stop between scores and updates."""
    flags = {"normalize_scores": True, "normalize_advantages": "row", "clip_reward_value": 1.5}
    check_every_stop(lambda folder, **more: ppo(folder, **(flags | more)), tmp_path, every)


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_without_a_critic_stops_anywhere(every, group, tmp_path):
    flags = RLOO | {"termination_condition": "randomized", "num_train_epochs": 1}
    check_every_stop(
        lambda folder, **more: ppo(folder, **(flags | more)), tmp_path, every, first=12 if every > 1 else 0
    )


@pytest.mark.parametrize("setup", [Setup(zero_stage=2), Setup(zero_stage=3), Setup(lora_dim=2)], ids=str)
@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere_with_sharding_and_lora(setup, every, group, tmp_path):
    check_every_stop(
        lambda folder, **flags: ppo(folder, setup, **flags), tmp_path, every, first=40 if every > 3 else 0
    )


@pytest.mark.parametrize("step", ["sft", "reward", "dpo"])
def test_adapters_stop_anywhere(step, group, tmp_path):
    setup = Setup(lora_dim=2)
    check_every_stop(lambda folder, **flags: supervised(step, folder, setup, **flags), tmp_path, every=5)


# Two epochs of 2 rounds of 8 pairs in 2 micro-batches, 3 updates each; a reward that draws from the global state.
REFUEL = {
    "noptepochs": 3,
    "num_train_epochs": 2,
    "eval_interval": 6,
    "max_answer_seq_len": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "adaptive_kl_target": 2.0,
    "kl_coef": 0.1,
    "eval_temperature": 1.0,
}


@pytest.mark.parametrize("lora_dim", [0, 2])
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_refuel_stops_anywhere(every, lora_dim, group, tmp_path):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, between the updates of a round."""

    def make(folder, **flags):
        trainer = trainer_of(folder, reward=length, lora_dim=lora_dim, **REFUEL, **flags)
        return Made(trainer, {"policy": trainer.algorithm.models.policy})

    check_every_stop(make, tmp_path, every, first=11 * bool(lora_dim) if every > 1 else 0)
