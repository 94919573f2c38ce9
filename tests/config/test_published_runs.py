# SPDX-License-Identifier: Apache-2.0
"""Presets of public runs of other trainers, and of the paper's released code, against the published numbers."""

import pytest

from script_runs import preset

# Of step 3 on GSM8K: rewards 1 or 0 at the end, KL in the reward, no discount.
GSM8K = {
    "reward_function": ["gsm8k"],
    "apply_chat_template": True,
    "data_path": ["gsm8k"],
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 1e-5,
    "lam": 1,
    "gamma": 1,
    "kl_coef": 0.001,
    "temperature": 1,
    "max_prompt_seq_len": 1024,
    "max_answer_seq_len": 512,
    "num_train_epochs": 15,
    "ngram": 1,
}
TLDR = {"data_path": ["trl-lib/tldr"], "global_batch_size": 128, "learning_rate": 3e-6, "lr_scheduler_type": "cosine"}
SETTINGS = {
    ("ppo", "gsm8k_qwen25_05b"): GSM8K | {"actor_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"},
    ("ppo", "gsm8k_gemma2_2b"): GSM8K,
    ("sft", "tldr_pythia_1b"): TLDR | {"num_train_epochs": 1, "model_name_or_path": "EleutherAI/pythia-1b-deduped"},
    ("reward", "tldr_pythia_1b"): TLDR | {"data_path": ["trl-lib/tldr-preference"], "global_batch_size": 64},
    ("ppo", "tldr_pythia_1b"): {
        "data_path": ["trl-lib/tldr"],
        "ppo_epochs": 4,
        "actor_learning_rate": 3e-6,
        "critic_learning_rate": 3e-6,
        "kl_coef": 0.05,
        "lam": 0.95,
        "vf_coef": 0.1,
        "temperature": 0.7,
        "max_prompt_seq_len": 512,
        "max_answer_seq_len": 53,
        "missing_eos_penalty": 1,
        "whiten_advantages": True,
        "ngram": 1,
    },
}
# GPUs, prompts of a rollout, responses of an update, and updates of the whole run on the rows of the data.
BATCHES = [
    ("gsm8k_qwen25_05b", 4, 256, 64, 7_473, 435 * 4),
    ("gsm8k_gemma2_2b", 4, 512, 128, 7_473, 14 * 15 * 4),
    ("gsm8k_qwen25_15b", 4, 1_024, 256, 7_473, 40 * 4),
    ("tldr_pythia_1b", 8, 512, 512, 116_722, 1_953 * 4),  # a million episodes, in four passes
]


@pytest.mark.parametrize(("step", "name"), SETTINGS)
def test_settings(step, name, tmp_path):
    given = preset(step, name, processes=8 if "pythia" in name else 4, PROJ_PATH=str(tmp_path)).given()
    wanted = SETTINGS[step, name]
    assert {flag: given.get(flag) for flag in wanted} == wanted


@pytest.mark.parametrize(("name", "gpus", "rollout", "update", "rows", "updates"), BATCHES)
def test_batches(name, gpus, rollout, update, rows, updates, tmp_path):
    words = ["--generation_batches", "1"] if (name, gpus) == ("gsm8k_qwen25_05b", 4) else []
    config = preset("ppo", name, words, processes=gpus, PROJ_PATH=str(tmp_path)).config
    batches = config.plan_batches(gpus)
    assert (batches.global_rollout, batches.global_batch) == (rollout, update)
    assert config.total_updates(rows, batches) == updates


def test_the_nightly_test_has_the_value_clip_and_a_critic_of_the_same_model(tmp_path):
    given = preset("ppo", "gsm8k_qwen25_15b", processes=4, PROJ_PATH=str(tmp_path)).given()
    assert (given["cliprange_value"], given["lam"], given.get("critic_model_name_or_path")) == (0.5, 1, None)
    assert given["actor_model_name_or_path"] == "Qwen/Qwen2.5-1.5B-Instruct"


def test_the_released_arithmetic_differs_in_three_flags_alone(tmp_path):
    paper = preset("ppo", "tldr_gemma_2b", processes=8, PROJ_PATH=str(tmp_path)).given()
    released = preset("ppo", "tldr_gemma_2b_as_released", processes=8, PROJ_PATH=str(tmp_path)).given()
    changed = {name: value for name, value in released.items() if paper.get(name) != value}
    folder = changed.pop("output_dir")
    assert changed == {"macro_reward": "mean", "isolate_last_token": True, "clip_reward_value": 2.5}
    assert folder.endswith("/ppo-as-released")
