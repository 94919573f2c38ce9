# SPDX-License-Identifier: Apache-2.0
"""Models, tokenizers and functions that cannot be used: one clear message, exit status 2, no traceback."""

import shutil

import pytest

from cli_runs import STEPS, message_of

HUB_NAME = "nobody-at-all/no-such-model"

# -- models and tokenizers


@pytest.mark.parametrize("step", [*STEPS, "critic"])
def test_an_encoder_decoder_is_refused_before_the_data_are_read(step, request, run, tmp_path):
    from transformers import T5Config

    T5Config(vocab_size=100).save_pretrained(tmp_path / "t5")
    flag = {"ppo": "actor_model_name_or_path", "critic": "critic_model_name_or_path"}.get(step, "model_name_or_path")
    step = "ppo" if step == "critic" else step
    flags = request.getfixturevalue(f"{step}_flags") | {flag: tmp_path / "t5", "data_path": "absent.jsonl"}
    message_of(run(step, flags), f"--{flag} {tmp_path / 't5'}: a t5 model is an encoder-decoder")


@pytest.mark.parametrize("mistake", [{"data_path": "absent.jsonl"}, {"model_name_or_path": "./absent"}, "output"])
def test_a_mistake_loses_no_earlier_model(mistake, run, sft_flags, sft, tmp_path):
    """With --overwrite_output_dir, whether data or model cannot be read, or the old model is the new one's base."""
    folder = tmp_path / "old"
    shutil.copytree(sft, folder)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    changes = {"model_name_or_path": folder} if mistake == "output" else mistake
    result = run("sft", sft_flags | {"output_dir": folder, "overwrite_output_dir": True} | changes)
    message_of(result, "--")
    assert all(file.read_bytes() == content for file, content in before.items())


MODEL_FLAGS = [
    ("sft", "model_name_or_path"),
    ("reward", "model_name_or_path"),
    ("ppo", "actor_model_name_or_path"),
    ("ppo", "critic_model_name_or_path"),
    ("ppo", "reward_model_name_or_path"),
]


@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS)
def test_no_such_model(step, flag, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    message_of(run(step, flags | {flag: tmp_path / "absent"}), f"--{flag} {tmp_path / 'absent'}")
    for name in (HUB_NAME, "no-such-model") if step == "sft" else (HUB_NAME,):
        message_of(run(step, flags | {flag: name}), f"--{flag} {name}", "Hugging Face hub", "hf download")


# Every kind of damage in one step, one kind in the others: tests/models has each loader.
DAMAGES = ["empty folder", "no weights", "cut weights", "no config", "bad config", "pickle"]
DAMAGED = [(*MODEL_FLAGS[0], damage) for damage in DAMAGES] + [(*flag, "cut weights") for flag in MODEL_FLAGS[1:3]]


@pytest.mark.parametrize(("step", "flag", "damage"), DAMAGED)
def test_a_damaged_model(step, flag, damage, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    folder = tmp_path / "damaged"
    shutil.copytree(flags[flag], folder, ignore=shutil.ignore_patterns("checkpoints", "models", "tensorboard"))
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "no config":
        config.unlink()
    elif damage == "bad config":
        config.write_text("{")
    else:
        weights.rename(folder / "pytorch_model.bin")
    message_of(run(step, flags | {flag: folder}), f"--{flag} {folder}")


@pytest.mark.parametrize("step", STEPS)
def test_the_end_token_is_one_token(step, request, run):
    flags = request.getfixturevalue(f"{step}_flags")
    message_of(run(step, flags | {"end_of_conversation_token": "end of turn"}), "--end_of_conversation_token")


# -- functions


# tests/scoring and tests/conditions have every kind of fault; these come through the mains.
FAULTS = {
    "two dimensions": ("import torch\ndef f(p, r, rows):\n    return torch.zeros(len(r), 1)\n", [", 1)"]),
    "not finite": ("def f(p, r, rows):\n    return [float('nan')] * len(r)\n", ["finite"]),
    "fails on import": ("import absent_module\ndef f(p, r, rows):\n    return [0.0]\n", ["absent_module"]),
    "exits on import": ("import sys\nsys.exit(0)\ndef f(p, r, rows):\n    return [0.0]\n", []),
    "takes other arguments": ("def f(responses):\n    return [0.0] * len(responses)\n", []),
}


@pytest.mark.parametrize(
    ("flag", "name"), [*(("reward_function", name) for name in FAULTS), ("metric_function", "not finite")]
)
def test_functions(flag, name, run, ppo_flags, tmp_path):
    source, words = FAULTS[name]
    file = tmp_path / "own.py"
    file.write_text(source)
    critic = {"critic_model_name_or_path": None} if flag == "reward_function" else {}
    message_of(run("ppo", ppo_flags | critic | {flag: f"{file}:f"}), f"--{flag}", *words)
