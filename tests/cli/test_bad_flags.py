# SPDX-License-Identifier: Apache-2.0
"""Bad values and combinations of flags: refused before anything is loaded, with one message."""

import json
import sys

import pytest

from cli_runs import (
    Result,
    arguments,
    message_of,
)
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import RewardConfig, SFTConfig
from dschat.main import run_main

CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}


BASE = {
    "sft": {"data_path": "d.jsonl", "output_dir": "out", "model_name_or_path": "m"},
    "reward": {"data_path": "d.jsonl", "output_dir": "out", "model_name_or_path": "m"},
    "ppo": {
        "data_path": "d.jsonl",
        "output_dir": "out",
        "actor_model_name_or_path": "a",
        "critic_model_name_or_path": "c",
    },
}
GOOD_FUNCTION = "def f(prompts, responses, rows):\n    return [0.0] * len(responses)\n"
RULES = {
    "ngram 0": ("ppo", {"ngram": 0}, ["--ngram 0", "at least 1"]),
    "ngram -1": ("ppo", {"ngram": "-1"}, ["--ngram", "at least 1"]),
    "ngram word": ("ppo", {"ngram": "five"}, ["--ngram five"]),
    "cutoff 2": ("ppo", {"parsing_cutoff": 2}, ["--parsing_cutoff 2", "at least 3"]),
    "cutoff, other spelling": ("ppo", {"parser_cutoff": 0}, ["--parsing_cutoff 0", "at least 3"]),
    "temperature 0": ("ppo", {"temperature": 0}, ["--temperature 0", "above 0"]),
    "temperature -1": ("ppo", {"temperature": -1.0}, ["--temperature -1", "above 0"]),
    "temperature nan": ("ppo", {"temperature": "nan"}, ["--temperature nan"]),
    "batch does not divide the rollout": (
        "ppo",
        {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 5},
        ["--per_device_training_batch_size 5", "16", "1, 2, 4, 8 or 16"],
    ),
    "update does not divide the rollout": (
        "ppo",
        {
            "per_device_generation_batch_size": 12,
            "per_device_training_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
        ["--gradient_accumulation_steps 2", "12"],
    ),
    "global batch of step 1": (
        "sft",
        {"per_device_train_batch_size": 8, "global_batch_size": 20},
        ["--global_batch_size 20", "16 or 24"],
    ),
    "global batch of step 3": (
        "ppo",
        {"per_device_training_batch_size": 8, "global_batch_size": 64},
        ["--global_batch_size 64", "--per_device_training_batch_size"],
    ),
    "global batch and accumulation": (
        "reward",
        {"per_device_train_batch_size": 8, "global_batch_size": 16, "gradient_accumulation_steps": 4},
        ["--gradient_accumulation_steps 4", "--global_batch_size"],
    ),
    "bf16 and fp32": ("sft", {"bf16": True, "dtype": "fp32"}, ["--bf16", "--dtype fp32"]),
    "bf16 and fp16": ("ppo", {"bf16": True, "dtype": "fp16"}, ["--bf16", "--dtype fp16"]),
    "unknown condition": ("ppo", {"termination_condition": "bigram"}, ["--termination_condition bigram", "fixed"]),
    "parser": ("ppo", {"termination_condition": "parsing", "parser": "stanford"}, ["--parser stanford", "chunker"]),
    "no such file": ("ppo", {"termination_condition": "absent.py:f"}, ["--termination_condition", "absent.py"]),
    "no such function": ("ppo", {"termination_condition": "good.py:g"}, ["--termination_condition", "g", "good.py"]),
    "no function named": ("ppo", {"reward_function": "good.py"}, ["--reward_function good.py", "module.py:function"]),
    "reward function absent": ("ppo", {"reward_function": "absent.py:f"}, ["--reward_function", "absent.py"]),
    "reward function of another name": ("ppo", {"reward_function": "good.py:g"}, ["--reward_function", "good.py"]),
    "reward function with a syntax error": ("ppo", {"reward_function": "bad.py:f"}, ["--reward_function", "bad.py"]),
    "metric function with a syntax error": ("ppo", {"metric_function": "bad.py:f"}, ["--metric_function", "bad.py"]),
    "metric named like ours": ("ppo", {"metric_function": "good.py:kl"}, ["--metric_function"]),
    "no reward": ("ppo", {"critic_model_name_or_path": None}, ["--critic_model_name_or_path", "--reward_function"]),
    "split of two": ("sft", {"data_split": "5,5"}, ["--data_split 5,5"]),
    "split with words": ("sft", {"data_split": "a,b,c"}, ["--data_split a,b,c"]),
    "split without this step": ("reward", {"data_split": "1,0,1"}, ["--data_split 1,0,1", "step 2"]),
    "finished output": ("sft", {"output_dir": "finished"}, ["--output_dir finished", "--overwrite_output_dir"]),
    "output is a file": ("ppo", {"output_dir": "good.py"}, ["--output_dir good.py"]),
    "two warm-ups": ("sft", {"num_warmup_steps": 1, "warmup_ratio": 0.1}, ["--num_warmup_steps", "--warmup_ratio"]),
    "offload alone": ("sft", {"offload": True}, ["--offload needs ZeRO", "--zero_stage 1, 2 or 3"]),
    "no DeepSpeed file": ("sft", {"deepspeed_config": "absent.json"}, ["--deepspeed_config absent.json"]),
    "negative rate": ("sft", {"learning_rate": -1.0}, ["--learning_rate"]),
    "no epochs": ("reward", {"num_train_epochs": 0}, ["--num_train_epochs 0"]),
    "unknown flag": ("sft", {"learning_rat": 1}, ["--learning_rat", "--learning_rate"]),
    "no number": ("sft", {"seed": "one"}, ["--seed", "one"]),
    "no such choice": ("ppo", {"ppl_mode": "word"}, ["--ppl_mode", "word"]),
    "stage 5": ("sft", {"zero_stage": 5}, ["--zero_stage", "5"]),
    "no output_dir": ("sft", {"output_dir": None}, ["--output_dir"]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name, tmp_path, monkeypatch, capsys):
    step, flags, words = RULES[name]
    (tmp_path / "good.py").write_text(GOOD_FUNCTION + "kl = f\n")
    (tmp_path / "bad.py").write_text("def f(prompts, responses, rows:\n    return 1\n")
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "run.json").write_text(json.dumps({"finished": True}))
    if "reward_function" in flags and "reward_model_name_or_path" not in flags:
        flags = flags | {"critic_model_name_or_path": None}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments(BASE[step] | flags)])

    def never(config, stage):
        raise AssertionError("the bad input was accepted")

    try:
        status = run_main(step, CONFIGS[step], never)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    message_of(Result(status, captured.out, captured.err), *words)
    assert not (tmp_path / "out").exists()


def test_a_good_function_passes_the_rules(tmp_path, monkeypatch):
    from dschat.config.parse import parse

    (tmp_path / "good.py").write_text(GOOD_FUNCTION)
    monkeypatch.chdir(tmp_path)
    flags = BASE["ppo"] | {"critic_model_name_or_path": None, "reward_function": "good.py:f"}
    assert parse(PPOConfig, arguments(flags)).reward_function == ["good.py:f"]
