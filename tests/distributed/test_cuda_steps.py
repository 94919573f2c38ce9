# SPDX-License-Identifier: Apache-2.0
"""On CUDA: steps 1, 2 and 3 in bf16, one after another, through their mains."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import GOLD, arguments, read_jsonl, run_command
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from launches import launch_command
from real_size import as_large_as

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("launcher"),
]

STEPS = {
    "sft": "step1_supervised_finetuning",
    "reward": "step2_reward_model_finetuning",
    "ppo": "step3_rlhf_finetuning",
}


def run_step(step: str, flags: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A main on one GPU by the launcher; the rows of its metrics."""
    script = Path(__file__).resolve().parents[2] / "applications/DeepSpeed-Chat/training" / STEPS[step] / "main.py"
    command = launch_command(script, arguments(flags | {"output_dir": folder / step, "dtype": "bf16"}), processes=1)
    run_command(command, CUDA_VISIBLE_DEVICES=None, DS_ACCELERATOR="cuda").expect(0)
    return read_jsonl(folder / step / "metrics.jsonl")


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_three_steps_in_bf16(zero_stage: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", 64, 64, 8, seed=1)
    texts = row_texts(make_rows(100, 1, "demonstrations"))
    make_model(tmp_path / "model", texts, seed=1, hidden_size=64, layers=2, vocab_size=400)
    common = {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "zero_stage": zero_stage, "max_seq_len": 192}
    common |= {"deepspeed_config": as_large_as(7e9, tmp_path / "model")}
    demonstrations = {"data_path": tmp_path / "data" / "demonstrations", "data_split": "1,0,0"}
    comparisons = {"data_path": tmp_path / "data" / "comparisons", "data_split": "0,1,1"}
    rows = run_step("sft", common | demonstrations | {"model_name_or_path": tmp_path / "model"}, tmp_path)
    losses = [row["loss/sft"] for row in rows if "loss/sft" in row]
    assert losses[-1] < losses[0]
    rows = run_step("reward", common | comparisons | {"model_name_or_path": tmp_path / "sft"}, tmp_path)
    assert all(math.isfinite(row["loss/reward"]) for row in rows if "loss/reward" in row)
    ppo = comparisons | {
        "deepspeed_config": common["deepspeed_config"],
        "actor_model_name_or_path": tmp_path / "sft",
        "critic_model_name_or_path": tmp_path / "reward",
        "reward_model_name_or_path": tmp_path / "reward",
        "metric_function": f"{GOLD}:gold_scores",
        "max_answer_seq_len": 16,
        "per_device_generation_batch_size": 16,
        "per_device_training_batch_size": 8,
        "actor_zero_stage": zero_stage,
        "critic_zero_stage": zero_stage,
    }
    rows = run_step("ppo", ppo, tmp_path)
    trained = [row for row in rows if "val/ratio" in row]
    assert trained and all(row["val/ratio"] == pytest.approx(1, abs=0.1) for row in trained)
    weights = load_file(tmp_path / "ppo" / "actor" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "ppo" / "run.json").read_text())["finished"] is True
