# SPDX-License-Identifier: Apache-2.0
"""The script of REFUEL's published run, whose settings are written down here once more, and a run with its flags."""

import pytest

from cli_runs import TRAINING, arguments, run_forked, training_rows, write_jsonl
from real_size import as_large_as
from refuel_cases import REFUEL, make_models, small_pairs
from script_runs import called, preset

SCRIPT = TRAINING / "refuel" / "training_scripts" / "llama_3_8b_it.sh"
PUBLISHED = {
    **{"model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "max_seq_len": 2048, "temperature": 0.8},
    **{"eta": 1000.0, "learning_rate": 3e-7, "weight_decay": 1e-6, "optimizer": "adamw", "seed": 555134},
    **{"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "total_episodes": 64000, "gradient_clipping": 0.0},
    **{"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "eval_interval": 100, "zero_stage": 3},
    **{"dtype": "bf16"},
}


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_published_settings(gpus, tmp_path):
    assert called(SCRIPT) == ("refuel", "llama_3_8b_it")
    config = preset("refuel", "llama_3_8b_it", processes=gpus, PROJ_PATH=str(tmp_path)).config
    assert {name: getattr(config, name) for name in PUBLISHED} == PUBLISHED
    assert config.plan_batches(gpus).global_batch == 128
    assert config.total_iterations(500, 128) == 500 and config.cluster is None
    assert config.data_path == [str(tmp_path / "data" / "refuel" / "llama-3-8b-it" / "pairs")]


def test_variables_and_flags_win():
    config = preset("refuel", "llama_3_8b_it", ["--lr", "1e-6"], MODEL="mine", DATA="pairs", CLUSTER="h100").config
    assert (config.model_name_or_path, config.data_path, config.cluster) == ("mine", ["pairs"], "h100")
    assert config.learning_rate == 1e-6


@pytest.mark.slow
def test_two_updates(tmp_path):
    make_models(tmp_path)
    write_jsonl(tmp_path / "pairs" / "train.jsonl", small_pairs(8))
    flags = {"global_batch_size": 4, "total_episodes": 8, "dtype": "fp32"}
    words = arguments(flags | {"deepspeed_config": as_large_as(7e9, tmp_path / "policy")})
    variables = {"PROJ_PATH": str(tmp_path), "MODEL": str(tmp_path / "policy"), "DATA": str(tmp_path / "pairs")}
    told = preset("refuel", "llama_3_8b_it", words, **variables).words()
    run_forked(REFUEL / "refuel.py", told, tmp_path / "printed").expect(0)
    (folder,) = tmp_path.glob("models/*/refuel")
    assert len(training_rows(folder)) == 2
