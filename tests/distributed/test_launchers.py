# SPDX-License-Identifier: Apache-2.0
"""Launchers: a process that dies takes the run with it; two of them without ssh, as on two nodes, train together."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from cli_runs import TIMEOUT, arguments
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from launches import free_port, launch_environment
from real_size import as_large_as

pytestmark = pytest.mark.xdist_group("launcher")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def rows_of(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
def test_killing_a_rank_ends_the_run_and_names_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", 32, 8, 8, seed=1)
    texts = row_texts(make_rows(50, 1, "demonstrations"))
    make_model(tmp_path / "model", texts, seed=1, hidden_size=32, layers=1, vocab_size=300)
    flags = {
        "data_path": tmp_path / "data" / "demonstrations",
        "data_split": "1,0,0",
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 10_000,
        "zero_stage": 3,
        "deepspeed_config": as_large_as(7e9, tmp_path / "model"),
    }
    words = arguments(flags | {"num_gpus": 2, "master_port": free_port()})
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "dschat", "sft", *words]
        process = subprocess.Popen(command, env=launch_environment(), stdout=log, stderr=log)
    with process:
        try:
            metrics = tmp_path / "out" / "metrics.jsonl"
            wait_for(lambda: rows_of(metrics) > 3 or process.poll() is not None, TIMEOUT)
            ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(process.pid).children()}
            ranks["1"].kill()
            killed = time.monotonic()
            status = process.wait(TIMEOUT)
        finally:
            process.terminate()
    said = (tmp_path / "log").read_text()
    assert time.monotonic() - killed < 60
    assert status == 128 + signal.SIGKILL and "warning: rank 1 was ended by SIGKILL" in said, said
    assert not any(rank.is_running() for rank in ranks.values())


SCRIPTS = Path(__file__).resolve().parents[2] / "applications/DeepSpeed-Chat/training/step3_rlhf_finetuning"
TWO_NODES = {
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
    from dschat.models.classifiers import load_scalar
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
    flags = TWO_NODES | {"--deepspeed_config": as_large_as(7e9, sft)}
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
