# SPDX-License-Identifier: Apache-2.0
"""The same training, cut up otherwise: micro-batches, accumulation, processes and ZeRO stages, on the command line."""

import pytest
from safetensors.torch import load_file

from cli_runs import STEPS, arguments, run_process
from launches import launch

# Examples of a micro-batch, processes, ZeRO stage; the accumulation follows from the 8 examples of an update.
WAYS = [(2, 1, 0), (4, 1, 2), (2, 1, 3), (4, 2, 0), (2, 2, 1), (1, 2, 2), (2, 2, 3)]
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
    """Weights within 1e-5 of one micro-batch on one process; twice the same way, the same bytes.

    Step 3 makes one update per rollout: several would deal out the rows of each process by themselves.
    """
    flags = request.getfixturevalue(f"{step}_flags") | {"global_batch_size": 8, "dtype": "fp32"}
    rate = "actor_learning_rate" if step == "ppo" else "learning_rate"
    flags |= {rate: 1e-5, "output_dir": tmp_path / "whole", MICRO[step]: 8}
    if step == "ppo":
        flags["global_batch_size"] = 16
    run(step, flags, 1)
    run(step, flags | {"output_dir": tmp_path / "again"}, 1)
    model = "actor/model.safetensors" if step == "ppo" else "model.safetensors"
    assert (tmp_path / "again" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
    whole = load_file(tmp_path / "whole" / model)
    for micro, processes, stage in WAYS:
        if step == "ppo":
            flags["per_device_generation_batch_size"] = 16 // processes
        stages = {"actor_zero_stage": stage, "critic_zero_stage": stage} if step == "ppo" else {"zero_stage": stage}
        out = tmp_path / f"{micro}-{processes}-{stage}"
        run(step, flags | stages | {"output_dir": out, MICRO[step]: micro}, processes)
        found = load_file(out / model)
        assert found.keys() == whole.keys()
        assert max(float((found[name] - whole[name]).abs().max()) for name in whole) < 1e-5, out.name
