# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic, with numbers worked out by hand."""

from dataclasses import replace
from itertools import product

import pytest

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan, BatchSizes, plan_batches, smaller_sizes
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import RewardConfig, SFTConfig
from support.script_runs import preset


def _supervised(config_class, **sizes):
    return config_class(data_path=["rows.jsonl"], output_dir="out", model_name_or_path="m", **sizes)


def _ppo(generation=16, batches=1, training=16, **sizes):
    return PPOConfig(
        data_path=["rows.jsonl"],
        output_dir="out",
        actor_model_name_or_path="a",
        critic_model_name_or_path="c",
        per_device_generation_batch_size=generation,
        generation_batches=batches,
        per_device_training_batch_size=training,
        **sizes,
    )


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig])
def test_steps_1_and_2_have_no_rollout(config_class):
    config = _supervised(config_class, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert config.plan_batches(8) == BatchPlan(8, 4, 3, 12, 96)


@pytest.mark.parametrize("given", [None, 16])
def test_global_batch_derives_the_accumulation(given):
    config = _supervised(
        SFTConfig, per_device_train_batch_size=4, gradient_accumulation_steps=given, global_batch_size=512
    )
    assert config.plan_batches(8) == BatchPlan(8, 4, 16, 64, 512)


@pytest.mark.parametrize(
    ("wanted", "world_size", "remedies"),
    [
        (100, 1, "--per_device_train_batch_size 10, or --global_batch_size 96"),
        (100, 4, "--per_device_train_batch_size 5, or --global_batch_size 128"),  # 100 is nearer to 128 than to 64
        (100, 3, "--global_batch_size 96"),
        (8, 1, "--per_device_train_batch_size 8, or --global_batch_size 16"),
    ],
)
def test_unreachable_global_batch_names_the_nearest(wanted, world_size, remedies):
    with pytest.raises(UserError) as refusal:
        _supervised(RewardConfig, global_batch_size=wanted).plan_batches(world_size)
    assert f"--global_batch_size {wanted} is not a multiple of --per_device_train_batch_size 16" in str(refusal.value)
    assert str(refusal.value).endswith(f"Give {remedies}.")


def test_processes_that_vllm_cannot_divide():
    config = _ppo(rollout_engine="vllm", vllm_tensor_parallel=4)
    assert config.plan_batches(8).world_size == 8
    with pytest.raises(UserError, match="--vllm_tensor_parallel 4 does not divide .* processes, 6: .* 1, 2, 3, 6"):
        config.plan_batches(6)


def test_accumulation_and_global_batch_must_agree():
    config = _supervised(SFTConfig, gradient_accumulation_steps=2, global_batch_size=64)
    with pytest.raises(UserError) as refusal:
        config.plan_batches(1)
    assert "makes a global batch of 32 with" in str(refusal.value)
    assert str(refusal.value).endswith("Give --gradient_accumulation_steps 4, or --global_batch_size 32.")


@pytest.mark.parametrize(
    ("config", "world_size", "plan"),
    [
        (_ppo(), 1, BatchPlan(1, 16, 1, 16, 16, 16, 1)),
        (_ppo(8, 4, 2, gradient_accumulation_steps=4, ppo_epochs=3), 1, BatchPlan(1, 2, 4, 8, 8, 32, 12)),
        # 8 processes, 32 prompts each: the published global batch of 256 in one update per rollout
        (_ppo(16, 2, 4, global_batch_size=256), 8, BatchPlan(8, 4, 8, 32, 256, 32, 1)),
        (_ppo(16, 2, 4, global_batch_size=64, gradient_accumulation_steps=2), 8, BatchPlan(8, 4, 2, 8, 64, 32, 4)),
    ],
)
def test_rollouts_and_updates(config, world_size, plan):
    assert config.plan_batches(world_size) == plan


@pytest.mark.parametrize(
    ("config", "problem", "remedies"),
    [
        # Prompts are few: 64 responses are four rollouts of 16.
        (
            _ppo(16, 1, 16, global_batch_size=128),
            "an update of 64 responses per process",
            ["--per_device_generation_batch_size 64", "--generation_batches 4", "--global_batch_size 32"],
        ),
        (
            _ppo(16, 1, 5),
            "does not divide its rollout of 16",
            ["--per_device_generation_batch_size 20", "--generation_batches 5", "--per_device_training_batch_size 4"],
        ),
        (
            _ppo(16, 1, 4, gradient_accumulation_steps=3),
            "an update of 12 responses per process",
            ["--per_device_generation_batch_size 24", "--generation_batches 3", "--gradient_accumulation_steps 2"],
        ),
        # 24 is a multiple of 4 x 2, but 12 responses per process do not divide 16. Two samples of 18 prompts are 36.
        (
            _ppo(16, 1, 4, global_batch_size=24, samples_per_prompt=2),
            "does not divide its rollout of 32",
            ["--per_device_generation_batch_size 18", "--generation_batches 3", "--global_batch_size 16"],
        ),
        (
            _ppo(16, 1, 4, global_batch_size=4),
            "--global_batch_size 4 is not a multiple of --per_device_training_batch_size 4 on 2 processes",
            ["--per_device_training_batch_size 2", "--global_batch_size 8"],
        ),
        (
            _ppo(16, 1, 4, global_batch_size=32, gradient_accumulation_steps=2),
            "--gradient_accumulation_steps 2 makes a global batch of 16",
            ["--gradient_accumulation_steps 4", "--global_batch_size 16"],
        ),
    ],
)
def test_updates_that_do_not_fit_a_rollout(config, problem, remedies):
    with pytest.raises(UserError) as refusal:
        config.plan_batches(2)
    assert problem in str(refusal.value)
    assert _remedies(refusal.value) == remedies


def _remedies(message):
    """The flags that a message of batch arithmetic names, one command line for each of its alternatives."""
    alternatives = str(message).split(" Give ")[1].removesuffix(".").split(", or ")
    return [words for words in alternatives if words.startswith("--")]


def _followed(sizes, words):
    """The sizes after a command line of remedies."""
    flags = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    values = {name.removeprefix("--"): int(value) for name, value in flags.items()}
    if sizes.micro_flag in values:
        values["micro_batch"] = values.pop(sizes.micro_flag)
    return replace(sizes, **values)


def _grid():
    """Sizes of steps 1 and 2, and of step 3, most of which do not fit together."""
    for sizes in product((1, 4, 5, 16), (None, 1, 3), (None, 8, 50, 64, 101)):
        yield BatchSizes("per_device_train_batch_size", *sizes)
        for rollout in product((1, 6, 16), (1, 3), (1, 4)):
            yield BatchSizes("per_device_training_batch_size", *sizes, *rollout)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_remedy_works_and_one_keeps_the_update(world_size):
    """At once, without a second message, which might name the first one's cause as its remedy."""
    refused = 0
    for sizes in _grid():
        try:
            plan_batches(sizes, world_size)
        except UserError as error:
            refused += 1
            asked = sizes.global_batch_size
            if asked is None:
                asked = sizes.micro_batch * (sizes.gradient_accumulation_steps or 1) * world_size
            updates = []
            for words in _remedies(error):
                better = _followed(sizes, words)
                updates.append(plan_batches(better, world_size).global_batch)
                assert better.micro_batch <= sizes.micro_batch
                assert better.global_batch_size in (None, updates[-1])
            assert asked in updates or asked % world_size, (sizes, str(error))
            assert len(updates) == len(_remedies(error)) > 0
    assert refused > 200


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("step", ["sft", "ppo"])
@pytest.mark.parametrize(
    "flags", ["--global_batch_size 72", "--gradient_accumulation_steps 3", "--global_batch_size 24", ""]
)
@pytest.mark.parametrize("more", ["", "--per_device_{}_batch_size 5", "--per_device_generation_batch_size 3"])
def test_remedies_work_with_a_preset(gpus, step, flags, more):
    """Its own batch sizes follow from those that are given."""
    flags = f"{flags} {more.format('train' if step == 'sft' else 'training')}".split()
    if step == "sft" and "--per_device_generation_batch_size" in flags:
        return
    try:
        preset(step, "tldr_gemma_2b", flags, gpus).config.plan_batches(gpus)
    except UserError as error:
        for words in _remedies(error):
            preset(step, "tldr_gemma_2b", [*flags, *words.split()], gpus).config.plan_batches(gpus)


@pytest.mark.parametrize("examples", [1, 3, 7, 11])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_smaller_sizes_for_few_examples_work(examples, world_size):
    for sizes in _grid():
        try:
            plan = plan_batches(sizes, world_size)
        except UserError:
            continue
        if plan.iteration_size > examples:
            words = smaller_sizes(sizes, world_size, examples)
            if examples < world_size:
                assert words == ""
            else:
                size = plan_batches(_followed(sizes, words), world_size).iteration_size
                assert 0 < size <= examples
