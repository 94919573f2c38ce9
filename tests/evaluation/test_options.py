# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands, their messages, the place of the file, and the device."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from cli_runs import ROOT
from dschat.base.errors import UserError
from dschat.evaluation.generate_options import (
    BestOfOptions,
    InferenceOptions,
    ResponseFlags,
    TextOptions,
    TokenSamplerFlags,
    model_name,
)
from dschat.evaluation.options import ReportOptions, VoteOptions
from dschat.judge.options import JudgeOptions, TurnOptions
from dschat.models.opening import choose_device
from dschat.programs.options import ProgramOptions
from dschat.refuel.data_options import GenerateOptions, RankOptions
from dschat.settings.config import Config
from dschat.settings.parse import parse as parse_flags

PROJECT = {"proj_path": Path("P"), "model": "M"}
SCORED = PROJECT | {"dataset": "hh-rlhf", "reward_model": "R"}
OUTPUT = {"output_repo": "o"}


def checked(command, **flags):
    options = command(**flags)
    options.validate()
    return options


def make(**changes):
    return checked(InferenceOptions, **(SCORED | changes))


MAKE = {
    "rewards": make,
    "best of": partial(checked, BestOfOptions, **SCORED),
    "programs": partial(checked, ProgramOptions, **PROJECT),
    "text": partial(checked, TextOptions, data="D", output=Path("O")),
    "generate": partial(checked, GenerateOptions, **OUTPUT, model="M"),
    "rank": partial(checked, RankOptions, **OUTPUT, prompts="p"),
}
NEEDED = ["--proj_path", "P", "--dataset", "hh-rlhf", "--model", "M", "--reward_model", "R"]


def parse(*words):
    return parse_flags(InferenceOptions, [*NEEDED, *words])


COMPARED = "--model_name_a a.jsonl --model_name_b b.jsonl --output o.jsonl"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (JudgeOptions, COMPARED.replace("o.jsonl", "a.jsonl"), "--output a.jsonl has the name of --model_name_a"),
        (VoteOptions, f"{COMPARED} --port 99", "--port 99 does nothing on its own: add --web"),
        (VoteOptions, COMPARED.replace("o.jsonl", "b.jsonl"), "--output b.jsonl has the name of --model_name_b"),
        (TurnOptions, COMPARED.replace("a.jsonl", "o.json"), "--output o.jsonl has the name of --model_name_a"),
        (ReportOptions, "a.jsonl --output o --reward_margin -1", "--reward_margin -1.0 is out of range"),
    ],
)
def test_flags_of_comparisons_that_make_no_sense_are_refused(command, words, message):
    with pytest.raises(UserError, match=message):
        options = parse_flags(command, words.split())
        if isinstance(options, Config):
            options.validate()


def test_the_flags_defaults_are_the_protocols(monkeypatch):
    monkeypatch.delenv("PROJ_PATH", raising=False)
    parsed = parse()
    assert parsed == make()
    assert parsed.sampler == TokenSamplerFlags(top_k=50, top_p=1.0, seed=1234)
    assert parsed.responses == ResponseFlags(temperature="0.8", num_return=1)
    assert parsed.generation.max_new_tokens == 512 and parsed.prompts.max_prompt_len is None
    assert parsed.prompt_count == 2000


def test_proj_path_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PROJ_PATH", "/some/where")
    assert parse_flags(InferenceOptions, NEEDED[2:]).project.proj_path == Path("/some/where")
    assert parse_flags(InferenceOptions, NEEDED).project.proj_path == Path("P")


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("rewards", {"dataset": "c4"}, ["--dataset c4", "summarize, hh-rlhf, webgpt", "any name, with --data_path"]),
        ("rewards", {"dataset": "a/b", "data_path": "D"}, ["--dataset a/b", "may hold only letters"]),
        ("rewards", {"model": None}, ["--model", "--ref_scores"]),
        ("rewards", {"temperature": "warm"}, ["--temperature warm", "0 (greedy)"]),
        ("rewards", {"name": "a.jsonl"}, ["--name a.jsonl", "without .jsonl"]),
        ("rewards", {"gpu": -1}, ["--gpu -1", "--device cpu"]),
        ("rewards", {"num_return": 4, "temperature": "0"}, ["--num_return 4", "--temperature 0"]),
        ("rewards", {"reward_function": "f.py:f"}, ["both score the responses"]),
        ("rewards", {"reward_model": None, "ref_scores": True}, ["--ref_scores needs scores"]),
        ("rewards", {"reward_model": None, "rm_template": True}, ["--rm_template says how a reward model reads"]),
        (
            "rewards",
            {"reward_model": None, "reward_function": f"{__file__}:make", "ref_scores": True, "model": None},
            ["--ref_scores with --reward_function also needs --model"],
        ),
        ("rewards", {"num_return": 4, "ref_scores": True}, ["--num_return 4", "--ref_scores"]),
        ("best of", {"temperatures": (0.0, 1.0)}, ["--temperatures 0 gives", "--best_of 32", "--single_temperatures"]),
        ("best of", {"temperatures": (), "single_temperatures": ()}, ["--temperatures and --single_temperatures"]),
        ("programs", {"temperature": "0"}, ["--num_return 5", "--temperature 0"]),
        ("text", {}, ["Nothing to measure", "--model"]),
        ("generate", {"user_server": "u", "user_function": "f"}, ["--user_server and --user_function"]),
        ("rank", {"reward_model": "m", "reward_function": "f.py:f"}, ["either --reward_model or"]),
    ],
)
def test_senseless_values_are_refused(command, changes, words):
    with pytest.raises(UserError) as error:
        MAKE[command](**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_flags_and_votes_load_no_torch():
    """--help comes at once, and a vote in a terminal needs no package of a page."""
    program = "import sys; sys.argv[1:] = ['--help']; import runpy, dschat.evaluation.vote.command\n"
    program += "try: runpy.run_path('inference/inference_with_rewards.py', run_name='__main__')\n"
    program += "except SystemExit: pass\n"
    program += "assert not {'gradio', 'torch', 'transformers', 'datasets'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/runs/ma-ppo/models/step-40/actor_ema", "ma-ppo-step-40-ema"),
        ("someone/models/stepwise", "stepwise"),
        ("baidu/TLDR-Gemma-2B-MA-PPO-Fixed5", "TLDR-Gemma-2B-MA-PPO-Fixed5"),
        # The presets' folders: many models have the same last one.
        ("models/tldr-gemma-2b/sft", "tldr-gemma-2b-sft"),
        ("/runs/ppo2/actor", "ppo2"),
    ],
)
def test_a_models_name(model, name):
    assert model_name(model) == name


def test_data_of_ones_own_have_any_name():
    own = make(dataset="mine", data_path="D", temperature="0.80", name="v1.5 (b)")
    assert own.result_path == Path("P/results/mine/temperature=0.80/v1.5 (b).jsonl"), "as they were typed"
    assert make(dataset="tldr").dataset_name == "summarize"
    assert make(dataset="summarize", data_path="D").dataset_name == "summarize"


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): as if PyTorch found n GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_the_cpu_stands_in_for_gpu_0_with_one_warning(gpus, caplog):
    gpus(0)
    assert choose_device(gpu=0) == torch.device("cpu")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--gpu 0" in caplog.text
    caplog.clear()
    assert choose_device() == choose_device(device="cpu") == choose_device(gpu=5, device="cpu") == torch.device("cpu")
    assert not caplog.records


def test_gpus_by_number(gpus):
    gpus(2)
    assert choose_device() == choose_device(gpu=0) == choose_device(device="cuda") == torch.device("cuda", 0)
    assert choose_device(gpu=1) == choose_device(device="cuda:1") == torch.device("cuda", 1)
    assert choose_device(gpu=0, device="cuda:1") == torch.device("cuda", 1)
    assert choose_device(gpu=0, device="cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "flags", "words"),
    [
        (2, {"device": "cuda:2"}, ["--device cuda:2", "GPUs found by PyTorch: 2."]),
        (0, {"device": "cuda"}, ["--device cuda", "by PyTorch: 0.", "--device cpu", "CUDA_VISIBLE_DEVICES"]),
        (0, {"device": "tpu"}, ["--device tpu", "cuda:N"]),
    ],
)
def test_absent_devices_are_refused(count, flags, words, gpus):
    gpus(count)
    with pytest.raises(UserError) as error:
        choose_device(**flags)
    assert all(word in str(error.value) for word in words), error.value
