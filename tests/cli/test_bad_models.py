# SPDX-License-Identifier: Apache-2.0
"""Models, tokenizers and functions that cannot be used: one clear message, exit status 2, no traceback."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from cli_runs import STEPS, copy_model, message_of
from factories import make_config

HUB_NAME = "nobody-at-all/no-such-model"

# -- models and tokenizers


@pytest.mark.parametrize("step", STEPS)
def test_texts_longer_than_the_model_reads(step, request, run, tmp_path):
    """Said from the configuration alone: the weights need not be there."""
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("sft_flags")["model_name_or_path"])
    folder = tmp_path / "short"
    make_config("gpt2", len(tokenizer), n_positions=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    names = dict.fromkeys(STEPS, "model_name_or_path") | {"ppo": "actor_model_name_or_path"}
    sizes = {"max_seq_len": 65} if step != "ppo" else {"max_prompt_seq_len": 57, "max_answer_seq_len": 8}
    flags = request.getfixturevalue(f"{step}_flags") | {names[step]: folder} | sizes
    what = "--max_seq_len" if step != "ppo" else "--max_prompt_seq_len + --max_answer_seq_len"
    message_of(run(step, flags), f"--{names[step]} {folder} reads at most 64 tokens, but {what} is 65")


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


@pytest.mark.parametrize(("step", "flag"), MODEL_FLAGS)
def test_a_tokenizer_without_eos(step, flag, request, run, tmp_path):
    flags = request.getfixturevalue(f"{step}_flags")
    model = flags.get(flag) or flags["critic_model_name_or_path"]
    folder = copy_model(model, tmp_path / "model", eos_token=None)
    config = json.loads((folder / "config.json").read_text())
    config.pop("end_of_response", None)  # with which step 2 tells where a reward model is read
    (folder / "config.json").write_text(json.dumps(config))
    message_of(run(step, flags | {flag: folder}), f"--{flag} {folder}", "no eos token")


@pytest.mark.parametrize("flag", ["reward_model_name_or_path", "critic_model_name_or_path"])
def test_a_reward_model_that_was_never_trained(flag, run, ppo_flags, sft):
    """The SFT model in place of the reward model: its new head would score everything 0."""
    message_of(run("ppo", ppo_flags | {flag: sft}), f"{sft}", "score")


@pytest.mark.parametrize("step", STEPS)
def test_the_end_token_is_one_token(step, request, run):
    flags = request.getfixturevalue(f"{step}_flags")
    message_of(run(step, flags | {"end_of_conversation_token": "end of turn"}), "--end_of_conversation_token")


@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_fp16_without_a_gpu(step, request, run):
    message_of(run(step, request.getfixturevalue(f"{step}_flags") | {"dtype": "fp16"}), "--dtype fp16", "GPU")


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


@pytest.mark.parametrize("flag", ["reward_function", "metric_function", "termination_condition"])
def test_functions_are_imported_before_data_are_read(flag, run, ppo_flags, tmp_path):
    (tmp_path / "own.py").write_text(FAULTS["fails on import"][0])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("no JSON\n")
    critic = {"critic_model_name_or_path": None} if flag == "reward_function" else {}
    own = {flag: f"{tmp_path / 'own.py'}:f", "data_path": rows}
    message_of(run("ppo", ppo_flags | critic | own), f"--{flag}", "absent_module")


def test_a_condition_of_another_shape(run, ppo_flags, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def f(trajectory, tokenizer):\n    return trajectory.response_mask[:, :1]\n")
    message_of(run("ppo", ppo_flags | {"termination_condition": f"{file}:f"}), "--termination_condition")
