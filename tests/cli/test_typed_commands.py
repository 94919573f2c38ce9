# SPDX-License-Identifier: Apache-2.0
"""Commands with their usual flags, as a user types them in a folder that holds what they name."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import PLAIN, ROOT
from published_set_copies import write_all
from script_runs import bash

pytestmark = pytest.mark.slow

DATA = """
dschat data check tldr --tokenizer google/gemma-2b
dschat data preview tldr --tokenizer google/gemma-2b --step 1
dschat data prepare tldr --tokenizer google/gemma-2b --output prepared/sft --stage finetune
dschat data check apps --run_solutions 200
"""
PROGRAMS = """
python inference/inference_with_programs.py --proj-path ${PROJ_PATH} --model ${actor_model_path} --num-return 5
python evaluation/pass-at-k.py ${PROJ_PATH}/results/apps/temperature=1.0/NAME.jsonl
"""
CHAT = (
    "dschat demo chat --model runs/quickstart/step3-ma-ppo --other runs/quickstart/step1-sft"
    " --reward-model runs/quickstart/step2-reward"
)
SERVERS = ["dschat serve --model FOLDER"]
PLANS = """
dschat plan tldr_gemma_2b
dschat plan tldr_gemma_7b --gpus 4 --gpu_memory 40 --zero_stage 3
"""


def lines(text: str) -> list[str]:
    """The commands of a block."""
    return text.replace("\\\n", " ").strip().splitlines()


@pytest.fixture
def folder(tmp_path, inputs, sft, reward, ppo):
    """A folder with the repository's scripts and everything that the commands name."""
    for name in ("evaluation", "inference"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_all(tmp_path / "data", rows=20, eval_rows=4)
    links = {
        "google/gemma-2b": inputs / "model",
        "models/NAME": sft,
        "FOLDER": reward,
        "OUTPUT_DIR": sft,
        "runs/quickstart/step1-sft": sft,
        "runs/quickstart/step2-reward": reward,
        "runs/quickstart/step3-ma-ppo": ppo,
    }
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    return tmp_path


@pytest.fixture
def variables(folder):
    return {
        "PROJ_PATH": str(folder),
        "MA_RLHF_DATA": str(folder / "data"),
        "actor_model_path": str(folder / "models" / "NAME"),
        "reward_model_path": str(folder / "FOLDER"),
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "home" / "cache"),
    }


def test_data(folder, variables):
    for command in lines(DATA):
        bash(command, folder, **variables).expect(0)
    assert (folder / "prepared" / "sft" / "train").is_dir()


@pytest.mark.xdist_group("sandbox")
def test_programs(folder, variables):
    for command in lines(PROGRAMS):
        printed = bash(command, folder, **variables).expect(0).stdout
    assert "pass@5" in printed


def test_plans(folder, variables):
    for command in lines(PLANS):
        assert "GB" in bash(command, folder, **variables).stdout


@pytest.mark.parametrize("command", [CHAT, *SERVERS])
def test_servers(command, folder, variables):
    """They say where they listen, and end at Ctrl-C."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "said.txt").open("w") as said:
        server = subprocess.Popen(
            command.split(), cwd=folder, env=os.environ | PLAIN | variables | {"PATH": path}, stdout=said, stderr=said
        )
    try:
        for _ in range(600):
            if re.search(r"http://127\.0\.0\.1:\d+", (folder / "said.txt").read_text()) or server.poll() is not None:
                break
            time.sleep(0.1)
        assert server.poll() is None, (folder / "said.txt").read_text()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130, -signal.SIGINT)
    finally:
        server.kill()
