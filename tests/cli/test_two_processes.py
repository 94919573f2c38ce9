# SPDX-License-Identifier: Apache-2.0
"""Runs of two processes from the command line: they train as one does, and check how gradients are reduced."""

import json
import sys

import pytest
from safetensors.torch import load_file

from cli_runs import arguments, built_once, evaluation_rows, run_command, run_forked, run_process, write_jsonl
from closeness import WEIGHT_GAP
from factories import largest_difference
from launches import free_port, launch_environment, run_ranks
from real_size import as_large_as
from reduction_cases import halve_reduced_gradients
from refuel_cases import REFUEL, small_pairs

RATE = 1e-4
LORA = {"lora_dim": 2, "actor_learning_rate": 10 * RATE, "critic_learning_rate": 10 * RATE}
SIZES = ("per_device_train_batch_size", "per_device_generation_batch_size", "per_device_training_batch_size")


@pytest.fixture(scope="session")
def reward_adapter(shared, reward_flags):
    """A reward model that is an adapter of step 1's model."""

    def build(folder):
        run_process("reward", reward_flags | {"lora_dim": 2, "no_merge_lora": True, "output_dir": folder}).expect(0)

    return built_once(shared, "reward-adapter", build)


@pytest.fixture
def flags_of(ppo_flags, dpo_flags, sft, reward_adapter, tmp_path):
    """flags_of(command): two updates or more of 8 examples or more, in float32."""

    def flags(command):
        common = {"dtype": "fp32"}
        if command == "ppo":
            models = {"critic_model_name_or_path": reward_adapter, "reward_model_name_or_path": reward_adapter}
            sizes = {"per_device_training_batch_size": 16}  # one update per rollout: several deal out rows by process
            return common | ppo_flags | LORA | models | sizes | {"share_base": True}
        if command == "dpo":
            return common | dpo_flags | {"learning_rate": RATE}
        write_jsonl(tmp_path / "pairs" / "train.jsonl", small_pairs(32))
        write_jsonl(tmp_path / "pairs" / "test.jsonl", small_pairs(4))
        sizes = {"max_seq_len": 32, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        sizes |= {"learning_rate": RATE, "total_episodes": 32}
        return common | sizes | {"data_path": tmp_path / "pairs", "model_name_or_path": sft}

    return flags


def run_on_two(command, flags):
    """`dschat COMMAND --num_gpus 2`, each process with half of the examples."""
    halves = {name: flags[name] // 2 for name in SIZES if name in flags}
    words = arguments(flags | halves | {"num_gpus": 2, "master_port": free_port()})
    variables = {name: launch_environment()[name] for name in ("PATH", "DS_ACCELERATOR")}
    run_command([sys.executable, "-m", "dschat", command, *words], None, **variables).expect(0)


def weights_of(folder):
    """Every weight that a run leaves, by its file and name."""
    files = [file for file in folder.rglob("*.safetensors") if "reference" not in file.parts]
    return {f"{file.relative_to(folder)}:{name}": x for file in files for name, x in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("command", ["ppo", "dpo", "refuel"])
def test_two_processes_train_as_one_does(command, stage, flags_of, sft, tmp_path):
    """In step 3, policy, critic and reward model share a base and have an adapter each."""
    flags = flags_of(command)
    step = REFUEL / "refuel.py" if command == "refuel" else command
    run_forked(step, flags | {"output_dir": tmp_path / "one"}, tmp_path / "printed").expect(0)
    sharded = {"zero_stage": stage, "deepspeed_config": as_large_as(7e9, sft)}
    run_on_two(command, flags | sharded | {"output_dir": tmp_path / "two"})
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["batches"]["world_size"] == 2 and record["finished"] is True
    one, two = (weights_of(tmp_path / name) for name in ("one", "two"))
    assert largest_difference(one, two) < WEIGHT_GAP
    file = "actor/model.safetensors" if command == "ppo" else "model.safetensors"
    start = {f"{file}:{name}": x for name, x in load_file(sft / "model.safetensors").items()}
    assert largest_difference(start, {name: one[name] for name in start}) > 8 * WEIGHT_GAP
    counts = [len(evaluation_rows(tmp_path / name)) for name in ("one", "two")]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_checks_how_its_gradients_are_reduced(checked, inputs, sft_flags, tmp_path):
    """By default; the check reads half of every gradient here."""
    flags = sft_flags | {"per_device_train_batch_size": 4, "output_dir": tmp_path / "out", "dtype": "fp32"}
    flags |= {} if checked else {"no_self_checks": True}
    first, second = run_ranks("sft", arguments(flags), tmp_path / "printed", first=halve_reduced_gradients)
    if checked:
        assert "self-check: before the first update, DeepSpeed" in first.expect(2).stderr
        assert "than the 2 processes computed together" in first.stderr and "Traceback" not in first.stderr
        second.expect(2)
    else:
        first.expect(0)
        second.expect(0)
