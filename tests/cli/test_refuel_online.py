# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data as its users start it: files, records, messages, and its training script."""

import json
import sys

import pytest

from cli_runs import (
    TRAINING,
    Result,
    arguments,
    built_once,
    check_names,
    evaluation_rows,
    read_jsonl,
    run_command,
    run_forked,
    training_rows,
)
from closeness import UPDATE, near
from factories import make_classifier
from flag_cases import config_of
from metric_conditions import KL, OWN_SAMPLING
from real_size import as_large_as
from script_runs import called, preset

MAIN = TRAINING / "refuel" / "online.py"
PRESET = TRAINING / "refuel" / "training_scripts" / "hh_llama3_8b_online.sh"
GOLD = TRAINING.parent / "dschat" / "quickstart" / "synthetic_dialogues.py"
SMALL = {
    "max_prompt_seq_len": 16,
    "max_answer_seq_len": 6,
    "max_seq_len": 64,
    "per_device_train_batch_size": 4,
    "task.penalty_reward_value": -1,
    "lr": 1e-3,
}


@pytest.fixture
def run_online(tmp_path):
    """run_online(flags): the main, forked."""

    def forked(flags) -> Result:
        return run_forked(MAIN, SMALL | flags, tmp_path / "printed")

    return forked


@pytest.fixture(scope="session")
def talks(shared):
    """data/dialogues and model: the toy, smaller; and reward/, a classifier with the policy's tokenizer."""

    def build(folder):
        from transformers import AutoTokenizer

        from dschat.models.tiny import make_model
        from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE, make_dialogue, texts_of, write_dialogues

        write_dialogues(folder / "data", 8, 16, 4, seed=1)
        texts = texts_of([make_dialogue(index, 1) for index in range(500)])
        make_model(folder / "model", texts, hidden_size=32, layers=2, vocab_size=512, chat_template=CHAT_TEMPLATE)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        make_classifier(vocab_size=len(tokenizer)).save_pretrained(folder / "reward")
        tokenizer.save_pretrained(folder / "reward")

    return built_once(shared, "talks", build)


@pytest.fixture
def flags(talks, tmp_path):
    return {"data_path": talks / "data" / "dialogues", "base_model": talks / "model", "output_dir": tmp_path / "out"}


def test_a_run_with_a_users_function(flags, talks, tmp_path, run_online):
    """16 dialogues, rounds of 4: 4 rounds of 4 updates; a user's function and the documented names of flags."""
    given = {"reward_function": f"{GOLD}:gold_scores", "refuel.eta": 2, "reward.kl_coef": 0.1, "task.cluster": "x"}
    result = run_command([sys.executable, MAIN, *arguments(SMALL | flags | given | {"print_sample_output_freq": 2})])
    result.expect(0)
    assert "--task.cluster does nothing here" in result.stderr and "; 16 updates; " in result.stderr, result.stderr
    out = tmp_path / "out"
    assert [(row["update"], row["samples"]) for row in training_rows(out)] == [(4, 4), (8, 8), (12, 12), (16, 16)]
    assert [row["update"] for row in evaluation_rows(out)] == [0, 8, 16]
    rates = [row["lr"] for row in training_rows(out)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])  # before the first update of each round
    check_names(out, KL, OWN_SAMPLING, number=[1, 2])
    samples = read_jsonl(out / "samples" / "update-000016.jsonl")
    assert len(samples) == 4 and all(len(sample["scores"]) == 2 for sample in samples)
    assert json.loads((out / "run.json").read_text())["step"] == "refuel_online"
    assert "REFUEL with users from data" in (out / "README.md").read_text()


def test_a_reward_model_top_layers_and_a_checkpoint(flags, talks, tmp_path, run_online):
    more = {"reward_model": talks / "reward", "trained_layers": 1, "save_steps": 8}
    more |= {"deepspeed_config": as_large_as(7e9, talks / "model")}
    run_online(flags | more | {"total_episodes": 11, "eval_prompts": 2, "adaptive_kl_target": 6}).expect(0)
    rows = training_rows(tmp_path / "out")
    assert [row["update"] for row in rows] == [4, 8]
    assert rows[0]["objective/scores"] != 0 and rows[0]["objective/kl"] == near(0, UPDATE)
    assert (tmp_path / "out" / "checkpoints" / "step-8" / "manifest.json").exists()


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_training_script_has_the_published_settings(gpus):
    """Llama-3-8B-it on HH: 32 pairs a round whatever the number of GPUs; all else is as in flags.txt."""
    assert called(PRESET) == ("refuel-online", "hh_llama3_8b_online")
    config = preset("refuel-online", "hh_llama3_8b_online", ["--seed", "7"], gpus).config
    defaults = config_of("online", f"--data_path {config.data.data_path[0]} --output_dir {config.output.output_dir}")
    changed = {name: value for name, value in config.flat().items() if value != defaults.flat()[name]}
    assert changed == {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "reward_model_name_or_path": "sfairXC/FsfairX-LLaMA3-RM-v0.1",
        "trained_layers": 4,
        "total_episodes": 1_000_000,
        "print_sample_output_freq": 200,
        "eval_interval": 800,
        "eval_prompts": 500,
        "eval_temperature": 0.01,
        "save_steps": 400,
        "global_batch_size": 32,
        "gradient_checkpointing": True,
        "zero_stage": 2,
        "seed": 7,
    }
    plan = config.plan_batches(gpus)
    assert plan.global_rollout == plan.global_batch == 32 and plan.updates_per_rollout == 4
