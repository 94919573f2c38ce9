# SPDX-License-Identifier: Apache-2.0
"""Commands with their usual flags, as a user types them in a folder that holds what they name."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import PLAIN, ROOT, read_jsonl, write_jsonl
from fake_judge import always_first, judge_server
from published_set_copies import write_all
from script_runs import bash

pytestmark = pytest.mark.slow

DATA = """
dschat data check tldr --tokenizer google/gemma-2b
dschat data preview tldr --tokenizer google/gemma-2b --step 1
dschat data prepare tldr --tokenizer google/gemma-2b --output prepared/sft --stage finetune
dschat data check apps --run_solutions 200
"""
MACRO_ACTIONS = r"""
dschat macro-actions --model google/gemma-2b --text "The quick fox jumped over the lazy dog." \
    --termination_condition fixed ppl parsing --ngram 1 5 --parser chunker --html macro-actions.html
"""
SWEEP = r"""
python inference/best_of_n.py --proj-path ${PROJ_PATH} --dataset summarize --model ${actor_model_path} \
    --reward-model ${reward_model_path}
"""
PROGRAMS = """
python inference/inference_with_programs.py --proj-path ${PROJ_PATH} --model ${actor_model_path} --num-return 5
python evaluation/pass-at-k.py ${PROJ_PATH}/results/apps/temperature=1.0/NAME.jsonl
"""
TURNS = "python evaluation/winrate_by_turn.py --model_name_a A.jsonl --model_name_b B.jsonl --output A-v.s.-B.jsonl"
TEXT = "dschat text --checkpoints OUTPUT_DIR --data tldr --num-samples 500 --output text"
CHAT = (
    "dschat demo chat --model runs/quickstart/step3-ma-ppo --other runs/quickstart/step1-sft"
    " --reward-model runs/quickstart/step2-reward"
)
SERVERS = ["dschat serve --model FOLDER"]
PLANS = """
dschat plan tldr_gemma_2b
dschat plan {script} --gpus 4 --gpu_memory 40 --zero_stage 3
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


def test_macro_actions(folder, variables):
    (command,) = lines(MACRO_ACTIONS)
    printed = bash(command, folder, **variables).expect(0).stdout
    assert all(word in printed for word in ("fixed, n = 1", "fixed, n = 5", "perplexity", "chunker"))
    assert (folder / "macro-actions.html").is_file()


def test_best_of_n_and_its_comparison(folder, variables):
    (command,) = lines(SWEEP)
    bash(command, folder, **variables).expect(0)
    sweeps = folder / "results" / "summarize" / "best-of-n"
    for name in ("SFT", "PPO", "MA-PPO"):
        (folder / f"{name}.jsonl").symlink_to(sweeps / "NAME.jsonl")
    report = "python evaluation/report.py SFT.jsonl PPO.jsonl MA-PPO.jsonl --output report"
    bash(report, folder, **variables).expect(0)
    assert (folder / "report" / "report.json").is_file()


@pytest.mark.xdist_group("sandbox")
def test_programs(folder, variables):
    for command in lines(PROGRAMS):
        printed = bash(command, folder, **variables).expect(0).stdout
    assert "pass@5" in printed


def test_winrate_by_turn(folder, variables):
    for name in ("A", "B"):
        messages = [{"role": role, "content": f"{role} {name}"} for role in ("user", "assistant") * 2]
        messages[0] = {"role": "user", "content": "hello"}
        write_jsonl(folder / f"{name}.jsonl", [{"number": 0, "messages": messages}])
    with judge_server() as judge:
        judge.answer = always_first
        keys = {"OPENAI_API_KEY": "sk-none", "OPENAI_BASE_URL": judge.url}
        bash(TURNS, folder, **variables, **keys).expect(0)
    assert {row["verdict"] for row in read_jsonl(folder / "A-v.s.-B.jsonl")} == {"tie"}


def test_text(folder, variables):
    bash(TEXT, folder, **variables).expect(0)
    assert json.loads((folder / "text" / "report.json").read_text())


def test_plans(folder, variables):
    script = "applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/training_scripts/tldr_gemma_7b.sh"
    for command in lines(PLANS.format(script=ROOT / script)):
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
