# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and taken up again is, to the last bit, the run that was never stopped."""

import pytest

from refuel_runs import length, trainer_of
from resume_runs import Made, Setup, check_every_stop, ppo, supervised


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_steps_1_and_2_stop_anywhere(step, group, tmp_path):
    points = check_every_stop(lambda folder, **flags: supervised(step, folder, **flags), tmp_path, every=1)
    assert points == 4 * 2 + 3 * 2, "micro-batches of 4 updates, and batches of 3 evaluations"


CONDITIONS = [
    {"termination_condition": "fixed", "ngram": 3},
    {"termination_condition": "randomized"},
    {"termination_condition": "parsing", "parser": "chunker"},
    {"termination_condition": "ppl"},
]


@pytest.mark.parametrize("flags", CONDITIONS, ids=lambda flags: flags["termination_condition"])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere(flags, every, group, tmp_path):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, inside a rollout, between epochs."""
    first = CONDITIONS.index(flags) if every > 1 else 0
    check_every_stop(lambda folder, **more: ppo(folder, **flags, **more), tmp_path, every, first)


@pytest.mark.parametrize("setup", [Setup(zero_stage=2), Setup(zero_stage=3), Setup(lora_dim=2)], ids=str)
@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere_with_sharding_and_lora(setup, every, group, tmp_path):
    check_every_stop(
        lambda folder, **flags: ppo(folder, setup, **flags), tmp_path, every, first=40 if every > 3 else 0
    )


@pytest.mark.parametrize("step", ["sft", "reward"])
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
        return Made(trainer, {"policy": trainer.models.policy})

    check_every_stop(make, tmp_path, every, first=11 * bool(lora_dim) if every > 1 else 0)
