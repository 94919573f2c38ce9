# SPDX-License-Identifier: Apache-2.0
"""The commands that users know from DeepSpeed-Chat and from the paper's code, word for word, each in its folder.

Models are small and data is made by code; both come in through environment variables, as they would on a cluster.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from cli_runs import ROOT, built_once, read_jsonl, training_rows, write_jsonl
from fake_judge import always_first, judge_server
from launches import free_port
from published_set_copies import make_rows, write_all
from script_runs import bash

TRAINING = "cd applications/DeepSpeed-Chat/training/{} && bash training_scripts/run_gemma.sh"
STEPS = {
    "sft": TRAINING.format("step1_supervised_finetuning"),
    "reward": TRAINING.format("step2_reward_model_finetuning"),
    "dpo": TRAINING.format("step2_dpo_finetuning"),
    "ppo": TRAINING.format("step3_rlhf_finetuning"),
}
BATCHES = {"sft": 512, "reward": 64, "dpo": 64, "ppo": 256}
INFERENCE = r"""
python inference/inference_with_rewards.py --proj-path ${PROJ_PATH} --dataset summarize --model ${actor_model_path} \
    --reward-model ${reward_model_path} --temperature 0.8 --gpu 0 --batch-size 16
"""
EVALUATION = [
    "python evaluation/tools/sample_from_dataset.py --data-path A.jsonl --save-path A-sampled.jsonl"
    " --dataset summarize",
    "python evaluation/tools/sample_from_dataset.py --data-file B.jsonl --save-file B-sampled.jsonl"
    " --dataset summarize",
    "python evaluation/gpt4-eval.py --model_name_a A-sampled.jsonl --model_name_b B-sampled.jsonl --dataset summarize"
    " --output A-v.s.-B.jsonl --sk ${OPENAI_SK}",
    "python evaluation/gpt4-webgpt-eval.py --model_name_a A-sampled.jsonl --model_name_b B-sampled.jsonl"
    " --dataset summarize --output gpt4-A-v.s.-B.jsonl --sk ${OPENAI_SK}",
    "python evaluation/human-eval.py --model_name_a A-sampled.jsonl --model_name_b B-sampled.jsonl"
    " --output human-A-v.s.-B.jsonl",
]
USE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, device_map="auto", dtype="auto")
input_ids = tokenizer("\\nHuman: ... Assistant:\\n", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**input_ids, max_new_tokens=20)[0], skip_special_tokens=True))
"""
INSTALL = [
    "pip install -r requirements.txt",
    "cd applications/DeepSpeed-Chat && pip install -e .",
    "cd Constituent-Treelib && pip install -e .",
]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_training(step, shared, inputs, sft, reward, tmp_path):
    """The published settings unchanged, on as many short rows as one update or rollout needs."""
    rows = {"sft": 2560, "reward": 320, "dpo": 320, "ppo": 640}[
        step
    ]  # 2/10 of them are one batch of 512, 4/10 are 2 of 64 …
    data = tmp_path / "data" / "tldr"
    write_jsonl(data / "train.jsonl", make_rows("tldr", rows))
    write_jsonl(data / "validation.jsonl", make_rows("tldr", 20, "validation"))
    variables = {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "1", "MASTER_PORT": free_port()}
    variables["MODEL"] = str(inputs / "model")
    if step != "sft":
        variables |= {"MODEL": str(sft), "REWARD_MODEL": str(reward)}
    bash(STEPS[step], ROOT, **variables).expect(0)
    (output,) = (tmp_path / "models").glob(f"*/{step}")
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] and record["batches"]["global_batch"] == BATCHES[step]
    assert len(training_rows(output)) == {"sft": 3, "reward": 2, "dpo": 2, "ppo": 1}[step]
    model = output / "actor" if step == "ppo" else output
    assert (model / "model.safetensors").is_file() and (model / "tokenizer.json").is_file()
    if step == "ppo":
        assert (output / "critic" / "model.safetensors").is_file()


@pytest.fixture(scope="session")
def project(shared: Path) -> Path:
    """PROJ_PATH with local copies of the data sets."""

    def build(folder: Path) -> None:
        write_all(folder / "data", rows=20)

    return built_once(shared, "commands", build)


def test_inference(project, sft, reward, tmp_path):
    model = tmp_path / "my-model"
    model.symlink_to(sft)
    variables = {"PROJ_PATH": str(project), "actor_model_path": str(model), "reward_model_path": str(reward)}
    result = bash(INFERENCE, ROOT, **variables).expect(0)
    file = project / "results" / "summarize" / "temperature=0.8" / "my-model.jsonl"
    rows = read_jsonl(file)
    assert {"prompt", "response", "reward"} <= set(rows[0]) and len({row["prompt"] for row in rows}) == 10
    assert str(file) in result.stdout and "±" in result.stdout.splitlines()[-1]


def test_evaluation(tmp_path):
    """Sampling, both judges and the votes of a person, one after the other, in a folder with A.jsonl and B.jsonl."""
    (tmp_path / "evaluation").symlink_to(ROOT / "evaluation")
    rows = make_rows("tldr", 60)
    for name in ("A", "B"):
        responses = [
            {
                "prompt": f"POST\nSubreddit: r/{row['info']['subreddit']}\n{row['info']['post']} {i}\nTL;DR: ",
                "response": f" {name} says {i}",
                "reward": float(i),
            }
            for i, row in enumerate(rows)
        ]
        write_jsonl(tmp_path / f"{name}.jsonl", responses)
    key = "sk-this-must-stay-secret"
    variables = {"OPENAI_SK": key, "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    output = ""
    with judge_server() as judge:
        judge.answer = always_first
        variables["OPENAI_BASE_URL"] = judge.url
        for command in EVALUATION:
            stdin = "1\n2\n3\n4\n" + "1\n" * 46 if "human" in command else ""
            result = bash(command, tmp_path, stdin, **variables).expect(0)
            output += result.stdout + result.stderr
    sampled = {name: read_jsonl(tmp_path / f"{name}-sampled.jsonl") for name in ("A", "B")}
    assert [row["prompt"] for row in sampled["A"]] == [row["prompt"] for row in sampled["B"]]
    count = len(sampled["A"])
    assert count == len({row["prompt"] for row in sampled["A"]}) == 50
    for name in ("A-v.s.-B.jsonl", "gpt4-A-v.s.-B.jsonl"):
        verdicts = read_jsonl(tmp_path / name)
        assert [row["prompt"] for row in verdicts] == [row["prompt"] for row in sampled["A"]]
        assert {row["verdict"] for row in verdicts} == {"tie"}, "first place wins in both orders"
        assert {row["dataset"] for row in verdicts} == {"webgpt" if name.startswith("gpt4") else "summarize"}
    assert len(judge.bodies) == 4 * count, "two rubrics, two orders"
    assert set(judge.keys) == {f"Bearer {key}"}
    votes = read_jsonl(tmp_path / "human-A-v.s.-B.jsonl")
    assert len(votes) == count and [row["verdict"] for row in votes].count("skip") == 1
    assert key not in output
    files = [file for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [file for file in files if key.encode() in file.read_bytes()]
    report = f"python evaluation/report.py A-v.s.-B.jsonl gpt4-A-v.s.-B.jsonl human-A-v.s.-B.jsonl {' '.join('AB')}"
    # With two rubrics for the same models the files that name no data set do not say by themselves where they belong.
    report = re.sub(" A B$", " A-sampled.jsonl B-sampled.jsonl --output report --dataset summarize", report)
    bash(report, tmp_path).expect(0)
    assert {file.name for file in (tmp_path / "report").iterdir()} >= {"report.json", "report.png"}


def test_use_of_a_trained_model(sft, capsys):
    exec(compile(USE, "README", "exec"), {"model_path": str(sft)})
    assert "Human" in capsys.readouterr().out


@pytest.mark.slow
def test_install(tmp_path):
    """In a copy of the repository and an environment of its own, which finds everything installed already."""
    copy = tmp_path / "copy"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    venv.create(tmp_path / "venv", with_pip=False)
    binary = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "installed.pth").write_text("\n".join(installed) + "\n")
    (binary / "pip").write_text(f'#!/bin/sh\nexec {binary}/python -m pip "$@"\n')
    (binary / "pip").chmod(0o755)
    variables = {
        "PATH": f"{binary}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    for command in INSTALL:
        bash(command, copy, **variables).expect(0)
    code = (
        "import dschat, macro_actions as m, constituent_treelib as t; print(dschat.__file__, m.__file__, t.__file__)"
    )
    printed = bash(f"cd / && {binary}/python -c '{code}'", tmp_path).expect(0).stdout
    assert printed.split() == [
        str(copy / "applications" / "DeepSpeed-Chat" / "dschat" / "__init__.py"),
        str(copy / "applications" / "macro-actions" / "macro_actions" / "__init__.py"),
        str(copy / "Constituent-Treelib" / "constituent_treelib" / "__init__.py"),
    ]
