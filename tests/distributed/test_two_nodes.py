# SPDX-License-Identifier: Apache-2.0
"""Two launchers without ssh, as on two nodes, run ten PPO updates together at ZeRO stage 3."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from launches import free_port, launch_environment
from real_size import as_large_as

SCRIPTS = Path(__file__).resolve().parents[2] / "applications/DeepSpeed-Chat/training/step3_rlhf_finetuning"
FLAGS = {
    "--data_split": "0,0,1",
    "--per_device_generation_batch_size": 4,
    "--per_device_training_batch_size": 2,
    "--global_batch_size": 8,
    "--dtype": "fp32",
    "--max_prompt_seq_len": 96,
    "--max_answer_seq_len": 12,
    "--eval_interval": 0,
}


@pytest.mark.slow
def test_ten_updates_on_two_nodes(tmp_path):
    from dschat.models.load import load_scalar
    from dschat.models.save import save_model
    from dschat.models.tiny import make_model
    from dschat.models.tokenizer import load_tokenizer
    from dschat.quickstart.synthetic import make_rows, row_texts
    from factories import saved_weights

    rows = make_rows(90, 1, "comparisons")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))  # 95,5: 86 prompts to train on
    sft = make_model(tmp_path / "sft", row_texts(rows), seed=1)
    tokenizer = load_tokenizer(str(sft), "--model")
    reward = load_scalar(str(sft), "--model", torch.float32, tokenizer)
    torch.nn.init.normal_(reward.score.weight, generator=torch.Generator().manual_seed(0))
    save_model(reward, saved_weights(reward), tokenizer, tmp_path / "reward")
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "PROJ_PATH": str(tmp_path),
        "MODEL": str(sft),
        "REWARD_MODEL": str(tmp_path / "reward"),
        "DATA": str(data),
    }
    flags = FLAGS | {"--deepspeed_config": as_large_as(7e9, sft)}
    command = ["bash", str(SCRIPTS / "training_scripts" / "run_gemma_two_nodes.sh"), *map(str, sum(flags.items(), ()))]
    nodes = []
    for node in range(2):
        with open(tmp_path / f"node-{node}.log", "w") as log:
            environment = launch_environment(**variables, NODE_RANK=str(node))
            nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    statuses = [node.wait(timeout=400) for node in nodes]
    logs = [(tmp_path / f"node-{node}.log").read_text() for node in range(2)]
    assert statuses == [0, 0], logs
    (metrics,) = tmp_path.glob("models/*/ppo/metrics.jsonl")
    lines = metrics.read_text().splitlines()
    updates = [row["update"] for row in map(json.loads, lines) if "objective/kl" in row]
    assert updates == list(range(1, 11)) and "= 4 per process x 2 processes" in logs[0]
