# SPDX-License-Identifier: Apache-2.0
"""The same training, cut up otherwise: micro-batches, accumulation, processes and ZeRO stages, on the command line."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from cli_runs import STEPS, arguments, run_process
from closeness import WEIGHT_GAP, assert_weights_near
from launches import launch
from real_size import as_large_as

# Examples of a micro-batch, processes, ZeRO stage; the accumulation follows from the 8 examples of an update.
WAYS = [(2, 1, 0), (4, 1, 2), (2, 1, 3), (4, 2, 0), (2, 2, 1), (1, 2, 2), (2, 2, 3)]
START = dict.fromkeys(STEPS, "model_name_or_path") | {"ppo": "actor_model_name_or_path"}
MICRO = dict.fromkeys(STEPS, "per_device_train_batch_size") | {"ppo": "per_device_training_batch_size"}


def run(step, flags, processes):
    if processes == 1:
        return run_process(step, flags).expect(0)
    result = launch(STEPS[step] / "main.py", ["--deepspeed", *arguments(flags)], processes)
    assert result.status == 0, result.stdout
    return result


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
@pytest.mark.parametrize("step", STEPS)
def test_cut_up_otherwise(step, request, tmp_path):
    """Weights are near those of one micro-batch on one process; twice the same way, the same bytes.

    Step 3 makes one update per rollout: several would deal out the rows of each process by themselves.
    """
    flags = request.getfixturevalue(f"{step}_flags") | {"global_batch_size": 8, "dtype": "fp32"}
    rate = "actor_learning_rate" if step == "ppo" else "learning_rate"
    flags |= {rate: 1e-4}
    if step == "ppo":
        flags["global_batch_size"] = 16
    check_ways(step, flags, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_step_3_goes_on_cut_up_otherwise(ppo_flags, tmp_path):
    """At ZeRO 3, two processes make four updates; then one makes the last three, and two the last two of those."""
    model, out = ppo_flags["actor_model_name_or_path"], tmp_path / "out"
    flags = ppo_flags | {"actor_zero_stage": 3, "critic_zero_stage": 3, "deepspeed_config": as_large_as(7e9, model)}
    flags |= {"actor_learning_rate": 1e-4, "critic_learning_rate": 1e-4, "global_batch_size": 16, "enable_ema": True}
    flags |= {"num_train_epochs": 2, "save_steps": 1, "save_total_limit": 0, "resume_from_checkpoint": "latest"}
    found = []
    for processes, done in (2, 0), (1, 1), (2, 2):
        for later in range(done + 1, 5) if found else ():
            shutil.rmtree(out / "checkpoints" / f"step-{later}")
        run("ppo", flags | {"output_dir": out, "per_device_generation_batch_size": 16 // processes}, processes)
        files = {file.parent.name: load_file(file) for file in out.glob("*/model.safetensors")}
        found.append({f"{folder}.{name}": x for folder, weights in files.items() for name, x in weights.items()})
    whole, *resumed = found
    assert {name.split(".")[0] for name in whole} == {"actor", "actor_ema", "critic"}
    assert json.loads((out / "run.json").read_text())["resumed_at"] == [1, 2]
    for weights in resumed:
        assert_weights_near(weights, whole)


def check_ways(step, flags, prompts, tmp_path):
    """Runs all ways to make the updates; in step 3, of so many prompts a rollout."""
    flags = flags | {"output_dir": tmp_path / "whole", MICRO[step]: 8}
    if step == "ppo":
        flags["per_device_generation_batch_size"] = prompts
    run(step, flags, 1)
    run(step, flags | {"output_dir": tmp_path / "again"}, 1)
    model = "actor/model.safetensors" if step == "ppo" else "model.safetensors"
    assert (tmp_path / "again" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
    whole_model = (tmp_path / "whole" / model).parent
    whole = load_file(tmp_path / "whole" / model)
    start = load_file(flags[START[step]] / "model.safetensors")
    moved = max(float((whole[name] - start[name]).abs().max()) for name in whole.keys() & start.keys())
    assert moved > 8 * WEIGHT_GAP
    for micro, processes, stage in WAYS:
        if step == "ppo":
            flags["per_device_generation_batch_size"] = prompts // processes
        stages = {"actor_zero_stage": stage, "critic_zero_stage": stage} if step == "ppo" else {"zero_stage": stage}
        out = tmp_path / f"{micro}-{processes}-{stage}"
        stages["deepspeed_config"] = as_large_as(7e9, whole_model)
        run(step, flags | stages | {"output_dir": out, MICRO[step]: micro}, processes)
        found = load_file(out / model)
        assert found.keys() == whole.keys()
        assert_weights_near(found, whole, message=out.name)
