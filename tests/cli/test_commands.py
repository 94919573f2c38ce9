# SPDX-License-Identifier: Apache-2.0
"""The commands that users know from DeepSpeed-Chat and from the paper's code, word for word, each in its folder.

Models are small and data is made by code; both come in through environment variables, as they would on a cluster.
"""

from pathlib import Path

import pytest

from cli_runs import ROOT, built_once, prompt_of, read_jsonl, write_jsonl
from fake_judge import always_first, judge_server
from published_set_copies import make_rows, write_all
from script_runs import bash

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
        responses = []
        for number, row in enumerate(rows):
            info = row["info"] | {"post": f"{row['info']['post']} {number}"}
            prompt = prompt_of({"info": info})
            responses.append({"prompt": prompt, "response": f" {name} says {number}", "reward": float(number)})
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
