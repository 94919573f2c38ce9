# SPDX-License-Identifier: Apache-2.0
"""training_scripts/run_gemma.sh of each step, through the deepspeed launcher, on the small model."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from cli_runs import STEPS, files_under, run_command, training_rows
from launches import free_port

SMALL = {
    "sft": "--data_split 1,0,0 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "reward": "--data_split 0,32,32 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "ppo": "--data_split 0,32,32 --max_prompt_seq_len 160 --max_answer_seq_len 8 --per_device_generation_batch_size 16"
    " --per_device_training_batch_size 8 --global_batch_size 8",
}
OUTPUT = {"sft": "models/sft", "reward": "models/reward", "ppo": "models/ppo"}


def script_of(step: str) -> Path:
    return STEPS[step] / "training_scripts" / "run_gemma.sh"


@pytest.fixture(scope="session")
def project(shared, inputs, sft, reward):
    """The scripts' PROJ_PATH with the chain's models at their places."""
    from cli_runs import built_once

    def build(folder: Path) -> None:
        (folder / "models").mkdir(parents=True)
        (folder / "given").mkdir()
        (folder / "given" / "sft").symlink_to(sft)
        (folder / "given" / "reward").symlink_to(reward)

    return built_once(shared, "project", build)


@pytest.mark.parametrize("step", STEPS)
def test_a_script_runs_through_the_launcher(step, project, inputs):
    """Its PROJ_PATH, models and data come from the environment; flags given to it win."""
    given = project / "given"
    variables = {
        "PROJ_PATH": str(project),
        "NUM_GPUS": "1",
        "BASE_MODEL": str(inputs / "model"),
        "SFT_MODEL": str(given / "sft"),
        "REWARD_MODEL": str(given / "reward"),
        "DATA_PATH": str(inputs / "data" / ("demonstrations" if step == "sft" else "comparisons")),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": free_port(),
    }
    words = shlex.split(SMALL[step]) + ["--num_train_epochs", "2", "--seed", "77", "--enable_tensorboard"]
    result = run_command(["bash", script_of(step), *words], cwd=project, **variables).expect(0)
    assert "Traceback" not in result.stderr + result.stdout
    output = project / OUTPUT[step]
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] is True and record["seeds"] == {"seed": 77} and record["step"] == step
    assert record["batches"]["global_batch"] == 8
    assert len(training_rows(output)) == (4 if step == "ppo" else 8)  # two epochs
    assert "tensorboard/events" in files_under(output)


def test_a_bad_flag_given_to_a_script_is_reported(tmp_path):
    variables = {
        "PROJ_PATH": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": free_port(),
    }
    result = run_command(["bash", script_of("sft"), "--learning_rats", "1"], cwd=tmp_path, **variables)
    everything = result.stdout + result.stderr
    assert result.status != 0 and "--learning_rats" in everything and not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", STEPS)
def test_a_script_states_the_published_settings(step):
    """Table of the paper's hyperparameters (TL;DR, 2B)."""
    text = " ".join(script_of(step).read_text().replace("\\\n", " ").split())
    published = {
        "sft": ["--global_batch_size 512", "--learning_rate 5e-5", "--num_train_epochs 3", "--warmup_ratio 0.1"],
        "reward": ["--global_batch_size 64", "--learning_rate 1e-5", "--num_train_epochs 1", "--warmup_ratio 0.1"],
        "ppo": [
            *("--global_batch_size 256", "--actor_learning_rate 1.5e-5", "--critic_learning_rate 1.5e-5"),
            *("--ngram 5", "--kl_ctl 0.05", "--gamma 1.0", "--lam 0.95", "--ppo_epochs 1", "--temperature 0.8"),
            *("--top_k 50", "--max_prompt_seq_len 512", "--max_answer_seq_len 512"),
        ],
    }
    for setting in [*published[step], "--seed 1234", "--data_split 2,4,4"]:
        assert f"{setting} " in text + " ", setting
    assert '"$@"' in text and os.access(script_of(step), os.R_OK)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_every_flag_of_a_script_is_known_and_fits(step, gpus, tmp_path, monkeypatch):
    """The script's own flags, unchanged, pass the step's rules, also those for several processes."""
    from dschat.config import parse as parsing
    from dschat.config.ppo import PPOConfig
    from dschat.config.reward import RewardConfig
    from dschat.config.sft import SFTConfig

    fake = tmp_path / "deepspeed"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$WORDS"\n')
    fake.chmod(0o755)
    variables = {
        "PROJ_PATH": str(tmp_path),
        "NUM_GPUS": str(gpus),
        "WORDS": str(tmp_path / "words"),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    run_command(["bash", script_of(step), "--print_loss"], cwd=tmp_path, **variables).expect(0)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:5] == ["--num_gpus", str(gpus), "--master_port", "29500", "main.py"] and words[-1] == "--print_loss"
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    config = parsing.parse({"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}[step], words[5:])
    plan = config.check_batches(gpus)
    assert plan.global_batch == {"sft": 512, "reward": 64, "ppo": 256}[step]
    assert Path(config.output_dir) == tmp_path / OUTPUT[step]


def test_the_cause_of_a_failure_comes_last(tmp_path):
    """Below the launcher's own lines, whichever process failed."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": \n')
    environment = {
        "PROJ_PATH": str(tmp_path),
        "DATA_PATH": str(bad),
        "BASE_MODEL": str(tmp_path / "absent"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": free_port(),
    }
    result = run_command(["bash", script_of("sft"), "--dtype", "fp32"], cwd=tmp_path, **environment)
    assert result.status != 0
    assert "--model_name_or_path" in result.stderr.strip().splitlines()[-1]
