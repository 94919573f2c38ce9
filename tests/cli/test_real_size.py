# SPDX-License-Identifier: Apache-2.0
"""Step 3 by its main program at ZeRO 3, with the limits that a model of 7 billion weights meets."""

import pytest
from safetensors.torch import load_file

from cli_runs import STEPS, arguments, files_under, read_jsonl, run_forked
from closeness import WEIGHT_GAP, near
from factories import largest_difference
from launches import launch
from real_size import as_large_as

# Evaluations, checkpoints and models on the way; two epochs of the data and of PPO on 2 rollouts, each of 2 updates.
EVERYTHING = {
    "num_train_epochs": 2,
    "ppo_epochs": 2,
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 8,
    "eval_interval": 4,
    "save_steps": 4,
    "save_models": 8,
    "enable_ema": True,
    "actor_learning_rate": 1e-4,
    "critic_learning_rate": 1e-4,
}
LORA = {"lora_dim": 2, "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
WAYS = {
    "float32": {},
    "bf16": {"dtype": "bf16", "gradient_clipping": 0},  # as in training/test_real_size.py
    "log-probs of the update": {"ppo_epochs": 1, "per_device_training_batch_size": 16},
    "LoRA": LORA,
    "shared base": LORA | {"share_base": True, "critic_model_name_or_path": None},
}


@pytest.fixture
def run(ppo_flags, sft, tmp_path):
    """run(name, stage, flags, processes): the rows of metrics.jsonl without times, and the files."""

    def run(name, stage, flags, processes=1):
        place = tmp_path / f"{name}-{stage}-{processes}"
        flags = {"dtype": "fp32"} | ppo_flags | EVERYTHING | flags | {"output_dir": place, "zero_stage": stage}
        flags |= {"deepspeed_config": as_large_as(7e9, sft)} if stage else {}
        if "reward_model_name_or_path" not in flags and flags["critic_model_name_or_path"] is None:
            flags["reward_model_name_or_path"] = ppo_flags["critic_model_name_or_path"]
        if processes == 1:
            run_forked("ppo", flags, tmp_path / f"{place.name}-printed").expect(0)
        else:
            sizes = {name: flags[name] // processes for name in flags if name.startswith("per_device")}
            launch(STEPS["ppo"] / "main.py", ["--deepspeed", *arguments(flags | sizes)], processes).expect(0)
        rows = read_jsonl(place / "metrics.jsonl")
        return [{k: x for k, x in row.items() if "seconds" not in k and "time/" not in k} for row in rows], place

    return run


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
@pytest.mark.parametrize(("name", "processes"), [(name, processes) for processes in (1, 2) for name in WAYS])
def test_metrics_are_those_of_whole_weights(name, processes, run):
    rows, place = run(name, 0, WAYS[name], processes)
    found, sharded = run(name, 3, WAYS[name], processes)
    assert len(rows) > 5 and any("eval/scores" in row for row in rows)
    for row, expected in zip(found, rows, strict=True):
        assert row == near(expected)
        assert all(row[name] == expected[name] for name in expected if name.startswith("lr"))
    saved = [{f for f in files_under(p) if not f.startswith("checkpoints")} for p in (place, sharded)]
    assert saved[0] == saved[1] and "actor_ema/model.safetensors" in saved[0]
    for file in (file for file in saved[0] if file.endswith(".safetensors")):
        whole, parts = ({n: w.float() for n, w in load_file(p / file).items()} for p in (place, sharded))
        assert largest_difference(parts, whole) < (0.01 if name == "bf16" else WEIGHT_GAP), file
