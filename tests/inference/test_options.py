# SPDX-License-Identifier: Apache-2.0
"""Flags of the inference script, their messages, the place of its file, and the device."""

from pathlib import Path

import pytest
import torch

from dschat.data.rows import DataKeys
from dschat.errors import UserError
from dschat.inference.devices import choose_device
from dschat.inference.options import InferenceOptions, parse_flags
from dschat.inference.values import model_name
from dschat.models.opening import choose_dtype

NEEDED = ["--proj-path", "P", "--dataset", "hh-rlhf", "--model", "M", "--reward-model", "R"]


def parse(*words):
    return parse_flags(InferenceOptions, [*NEEDED, *words], "about")


def make(**changes):
    return InferenceOptions(
        **({"proj_path": Path("P"), "dataset": "hh-rlhf", "model": "M", "reward_model": "R"} | changes)
    )


def test_the_flags_defaults_are_the_protocols(monkeypatch):
    monkeypatch.delenv("PROJ_PATH", raising=False)
    parsed = parse()
    assert parsed == make()
    assert (parsed.temperature, parsed.top_k, parsed.top_p, parsed.max_new_tokens) == ("0.8", 50, 1.0, 512)
    assert (parsed.seed, parsed.num_return, parsed.max_prompt_len, parsed.samples) == (1234, 1, None, 2000)
    assert make(dataset="webgpt").samples is None
    assert make(dataset="webgpt", num_samples=7).samples == 7


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--temperature", "0"], "temperature", "0"),
        (["--gpu", "3"], "gpu", 3),
        (["--device", "cuda:1"], "device", "cuda:1"),
        (["--dtype", "fp16"], "dtype", "fp16"),
        (["--batch-size", "4"], "batch_size", 4),
        (["--ref-scores"], "ref_scores", True),
        (["--num-samples", "5"], "num_samples", 5),
        (["--num-return", "6"], "num_return", 6),
        (["--top-k", "0"], "top_k", 0),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--max-new-tokens", "9"], "max_new_tokens", 9),
        (["--max-prompt-len", "8"], "max_prompt_len", 8),
        (["--seed", "1"], "seed", 1),
        (["--rm-template"], "rm_template", True),
        (["--data-path", "D"], "data_path", "D"),
        (["--prompt-key", "C"], "prompt_key", "C"),
        (["--chosen-key", "C"], "chosen_key", "C"),
        (["--rejected-key", "C"], "rejected_key", "C"),
        (["--response-key", "C"], "response_key", "C"),
        (["--messages-key", "C"], "messages_key", "C"),
        (["--name", "mine"], "name", "mine"),
        (["--overwrite"], "overwrite", True),
        (["--model", "N"], "model", "N"),
        (["--reward-model", "N"], "reward_model", "N"),
        (["--proj-path", "Q"], "proj_path", Path("Q")),
    ],
)
def test_every_flag_in_both_spellings(words, field, value):
    for flag in {words[0], "--" + words[0][2:].replace("-", "_")}:
        assert parse(flag, *words[1:]) == make(**{field: value})


def test_proj_path_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PROJ_PATH", "/some/where")
    assert parse_flags(InferenceOptions, NEEDED[2:], "about").proj_path == Path("/some/where")
    monkeypatch.delenv("PROJ_PATH")
    with pytest.raises(SystemExit) as stopped:
        parse_flags(InferenceOptions, NEEDED[2:], "about")
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "c4"}, ["--dataset c4", "summarize, hh-rlhf, webgpt", "any name, with --data-path FILE"]),
        ({"dataset": "a/b", "data_path": "D"}, ["--dataset a/b", "no path"]),
        ({"dtype": "int8"}, ["--dtype int8", "fp32, bf16, fp16"]),
        ({"model": None}, ["--model", "--ref-scores"]),
        ({"temperature": "warm"}, ["--temperature warm", "0 (greedy)"]),
        ({"temperature": "-1"}, ["--temperature -1"]),
        ({"temperature": "nan"}, ["--temperature nan"]),
        ({"batch_size": 0}, ["--batch-size 0", "at least 1"]),
        ({"num_samples": 0}, ["--num-samples 0"]),
        ({"num_return": 0}, ["--num-return 0"]),
        ({"max_new_tokens": 0}, ["--max-new-tokens 0"]),
        ({"max_prompt_len": 0}, ["--max-prompt-len 0"]),
        ({"top_k": -1}, ["--top-k -1"]),
        ({"top_p": 0.0}, ["--top-p 0.0"]),
        ({"top_p": 1.5}, ["--top-p 1.5"]),
        ({"seed": -1}, ["--seed -1"]),
        ({"name": ""}, ["--name : ", "without a folder"]),
        ({"name": ".."}, ["--name ..", "without a folder"]),
        ({"name": "a/b"}, ["--name a/b", "without a folder"]),
        ({"name": "a/"}, ["--name a/", "without a folder"]),
        ({"name": "a.jsonl"}, ["--name a.jsonl", "without a folder and without .jsonl"]),
        ({"gpu": -1}, ["--gpu -1", "--device cpu"]),
        ({"num_return": 4, "temperature": "0"}, ["--num-return 4", "--temperature 0"]),
        ({"num_return": 4, "ref_scores": True}, ["--num-return 4", "--ref-scores"]),
    ],
)
def test_senseless_values_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        make(**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_sensible_values_pass():
    make(temperature="0", gpu=0, dtype="bf16", num_samples=1, max_prompt_len=1, top_k=0)
    make(model=None, ref_scores=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/runs/ma-ppo", "ma-ppo"),
        ("/runs/ma-ppo/", "ma-ppo"),
        ("/runs/ma-ppo/actor", "ma-ppo"),
        ("/runs/ma-ppo/actor/", "ma-ppo"),
        ("/runs/ma-ppo/actor_ema", "actor_ema"),
        ("baidu/TLDR-Gemma-2B-MA-PPO-Fixed5", "TLDR-Gemma-2B-MA-PPO-Fixed5"),
        ("someone/ppo/actor", "someone-ppo"),
        # The presets' folders: many models have the same last one.
        ("models/tldr-gemma-2b/ppo/actor", "tldr-gemma-2b-ppo"),
        ("models/tldr-gemma-2b/ppo", "tldr-gemma-2b-ppo"),
        ("models/tldr-gemma-7b/ppo-vanilla/actor/", "tldr-gemma-7b-ppo-vanilla"),
        ("models/tldr-gemma-2b/sft", "tldr-gemma-2b-sft"),
        ("models/tldr-gemma-2b/reward/", "tldr-gemma-2b-reward"),
        ("models/hh-gemma-2b/dpo", "hh-gemma-2b-dpo"),
        ("/runs/ppo2/actor", "ppo2"),
        ("/runs/my-sft", "my-sft"),
        ("/runs/my-dpo", "my-dpo"),
        ("/sft", "sft"),
        ("/ppo/actor", "ppo"),
    ],
)
def test_a_models_name(model, name):
    assert model_name(model) == name


def test_a_models_name_from_inside_its_folder(tmp_path, monkeypatch):
    (tmp_path / "ma-ppo" / "actor").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "ma-ppo")
    assert model_name(".") == model_name("actor") == "ma-ppo"
    (tmp_path / "tldr-gemma-2b" / "ppo" / "actor").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tldr-gemma-2b" / "ppo")
    assert model_name(".") == model_name("actor") == "tldr-gemma-2b-ppo"


def test_data_of_ones_own_have_any_name():
    own = make(dataset="mine", data_path="D")
    assert own.result_path == Path("P/results/mine/temperature=0.8/M.jsonl") and own.samples == 2000
    assert make(dataset="tldr").dataset == make(dataset="summarize", data_path="D").dataset == "summarize"


@pytest.mark.parametrize("temperature", ["0.8", "0", "1.0", "0.80"])
def test_the_file_lies_where_the_temperature_was_typed(temperature):
    path = make(temperature=temperature, model="runs/x/actor").result_path
    assert path == Path(f"P/results/hh-rlhf/temperature={temperature}/x.jsonl")
    reference = make(temperature=temperature, ref_scores=True).result_path
    assert reference == Path(f"P/results/hh-rlhf/temperature={temperature}/reference.jsonl")


def test_the_file_may_be_given_another_name():
    folder = Path("P/results/hh-rlhf/temperature=0.8")
    assert make(name="ours").result_path == folder / "ours.jsonl"
    assert make(name="theirs", ref_scores=True).result_path == folder / "theirs.jsonl"
    assert make(name="v1.5 (b)").result_path == folder / "v1.5 (b).jsonl"


def test_columns_keep_their_names_unless_told():
    assert make().keys == DataKeys("prompt", "chosen", "rejected", "response", "messages")
    renamed = make(prompt_key="q", chosen_key="good", rejected_key="bad", response_key="a", messages_key="talk")
    assert renamed.keys == DataKeys(prompt="q", chosen="good", rejected="bad", response="a", messages="talk")


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
        (0, {"gpu": 1}, ["--gpu 1", "no GPU", "--device cpu"]),
        (1, {"gpu": 1}, ["--gpu 1", "1 GPU here, numbered from 0", "--device cpu"]),
        (2, {"gpu": 2}, ["--gpu 2", "2 GPUs here"]),
        (0, {"device": "cuda"}, ["--device cuda", "no GPU", "--device cpu", "CUDA_VISIBLE_DEVICES"]),
        (2, {"device": "cuda:2"}, ["--device cuda:2", "2 GPUs"]),
        (0, {"device": "tpu"}, ["--device tpu", "cuda:N"]),
        (0, {"device": "meta"}, ["--device meta", "cuda:N"]),
    ],
)
def test_absent_devices_are_refused(count, flags, words, gpus):
    gpus(count)
    with pytest.raises(UserError) as error:
        choose_device(**flags)
    assert all(word in str(error.value) for word in words), error.value


def test_number_formats():
    assert choose_dtype(None, torch.device("cpu")) == torch.float32
    assert choose_dtype(None, torch.device("cuda", 0)) == torch.bfloat16
    assert choose_dtype("fp16", torch.device("cpu")) == torch.float16
    assert choose_dtype("fp32", torch.device("cuda")) == torch.float32
