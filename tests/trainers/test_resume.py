# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and taken up again is, to the last bit, the run that was never stopped."""

import pytest

from resume_runs import Setup, check_every_stop, ppo, supervised


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
# Prompts are half as many as responses, so that updates are as many as above.
RLOO = {"advantage_estimator": "rloo", "samples_per_prompt": 2, "per_device_generation_batch_size": 2}


@pytest.mark.parametrize("flags", CONDITIONS, ids=lambda flags: flags["termination_condition"])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere(flags, every, group, tmp_path):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, inside a rollout, between epochs."""
    first = CONDITIONS.index(flags) if every > 1 else 0
    check_every_stop(lambda folder, **more: ppo(folder, **flags, **more), tmp_path, every, first)


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


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_adapters_stop_anywhere(step, group, tmp_path):
    setup = Setup(lora_dim=2)
    check_every_stop(lambda folder, **flags: supervised(step, folder, setup, **flags), tmp_path, every=5)
