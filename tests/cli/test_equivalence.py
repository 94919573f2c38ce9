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

# Examples of a micro-batch, processes, ZeRO stage; the accumulation follows from the 16 examples of an update.
WAYS = [(2, 1, 0), (4, 1, 2), (2, 1, 3), (4, 2, 0), (2, 2, 1), (1, 2, 2), (2, 2, 3)]


def run(step, flags, processes):
    if processes == 1:
        return run_process(step, flags).expect(0)
    result = launch(STEPS[step] / "main.py", ["--deepspeed", *arguments(flags)], processes)
    assert result.status == 0, result.stdout
    return result


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_cut_up_otherwise(ppo_flags, sft, tmp_path):
    """Weights are near those of one micro-batch on one process; twice the same way, the same bytes.

    One update per rollout: several would deal out the rows of each process by themselves.
    """
    flags = ppo_flags | {"global_batch_size": 16, "dtype": "fp32", "actor_learning_rate": 1e-4}
    flags["per_device_generation_batch_size"] = 16
    actors = {}
    for name in ("whole", "again"):
        run("ppo", flags | {"output_dir": tmp_path / name}, 1)
        actors[name] = tmp_path / name / "actor" / "model.safetensors"
    assert actors["again"].read_bytes() == actors["whole"].read_bytes()
    whole, start = load_file(actors["whole"]), load_file(sft / "model.safetensors")
    assert max(float((whole[name] - start[name]).abs().max()) for name in start) > 8 * WEIGHT_GAP
    flags["deepspeed_config"] = as_large_as(7e9, actors["whole"].parent)
    for micro, processes, stage in WAYS:
        out = tmp_path / f"{micro}-{processes}-{stage}"
        cut = {"per_device_training_batch_size": micro, "per_device_generation_batch_size": 16 // processes}
        cut |= {"actor_zero_stage": stage, "critic_zero_stage": stage, "output_dir": out}
        run("ppo", flags | cut, processes)
        found = load_file(out / "actor" / "model.safetensors")
        assert found.keys() == whole.keys()
        assert_weights_near(found, whole, message=out.name)


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
