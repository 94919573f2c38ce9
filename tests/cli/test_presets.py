# SPDX-License-Identifier: Apache-2.0
"""The presets: every training script against the published settings."""

import os
import re

import pytest

from cli_runs import STEPS
from dschat.settings.presets import preset_names
from script_runs import GEMMA, PRESETS, SCRIPTS, SHIM, called, preset

# The paper's tables.
TLDR, HH, WEBGPT, APPS = (
    *("openai/summarize_from_feedback", "Dahoas/full-hh-rlhf", "openai/webgpt_comparisons", "codeparrot/apps"),
)
SFT = {  # global batch, epochs, learning rate, warm-up ratio
    ("google/gemma-2b", TLDR): (512, 3, 5e-5, 0.1),
    ("google/gemma-2b", HH): (512, 3, 5e-5, 0.1),
    ("google/gemma-2b", WEBGPT): (64, 3, 1e-4, 0.1),
    ("google/gemma-7b", TLDR): (128, 1, 2e-5, 0.1),
    ("google/gemma-7b", HH): (128, 1, 2e-5, 0.1),
    ("google/gemma-7b", WEBGPT): (128, 5, 2e-5, 0.1),
    ("google/gemma-2-27b", TLDR): (128, 3, 5e-6, 0.1),
    ("google/codegemma-2b", APPS): (16, 1, 5e-6, 0),
    ("google/codegemma-7b-it", APPS): (32, 1, 2e-6, 0),
}
REWARD = {  # global batch, learning rate; one epoch
    ("google/gemma-2b", TLDR): (64, 1e-5),
    ("google/gemma-2b", HH): (64, 1e-5),
    ("google/gemma-2b", WEBGPT): (32, 2e-5),
    ("google/gemma-7b", TLDR): (128, 1e-6),
    ("google/gemma-7b", HH): (64, 1e-6),
    ("google/gemma-7b", WEBGPT): (32, 1e-6),
    ("google/gemma-2-27b", TLDR): (128, 8e-6),
}
DPO = {  # learning rate and beta, which are all that is published; the rest is that of the reward model
    ("google/gemma-2b", TLDR): (2e-7, 0.1),
    ("google/gemma-2b", HH): (2e-7, 0.01),
}
PPO = {  # actor's and critic's learning rate, epochs, KL coefficient, warm-up in updates
    ("google/gemma-2b", TLDR): (1.5e-5, 1.5e-5, 1, 0.05, 6),
    ("google/gemma-2b", HH): (1.5e-5, 1.5e-5, 1, 0.05, 6),
    ("google/gemma-2b", WEBGPT): (1.5e-5, 1.5e-5, 4, 0.05, 6),
    ("google/gemma-7b", TLDR): (1e-6, 1e-6, 1, 0.01, 6),
    ("google/gemma-7b", HH): (1e-6, 1e-6, 1, 0.05, 6),
    ("google/gemma-7b", WEBGPT): (1e-6, 1e-6, 4, 0.1, 6),
    ("google/gemma-2-27b", TLDR): (7e-7, 1e-6, 1, 0.1, 0),
    ("google/codegemma-2b", APPS): (5e-7, 5e-5, 1, 0.05, 20),
    ("google/codegemma-7b-it", APPS): (5e-7, 5e-5, 1, 0.05, 20),
}
VANILLA = {  # KL coefficient of PPO on tokens, which is all that differs from PPO above
    ("google/gemma-2b", TLDR): 0.05,
    ("google/gemma-7b", TLDR): 0.05,
}
RLOO = {  # responses to a prompt and the actor's learning rate; no critic, else as PPO above
    ("google/gemma-2b", TLDR): (4, 1.5e-5)
}
OF_A_CRITIC = ("critic_learning_rate", "critic_weight_decay", "cliprange_value", "gamma", "lam", "value_function")
FIXED = {  # of every row of a step
    "sft": {"max_seq_len": 1024, "weight_decay": 0.01, "lr_scheduler_type": "cosine"},
    "reward": {"max_seq_len": 1024, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1}
    | {"num_train_epochs": 1},
    "dpo": {"max_seq_len": 1024, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1}
    | {"num_train_epochs": 1, "global_batch_size": 64},
    "ppo": {"actor_weight_decay": 0.1, "critic_weight_decay": 0.1, "lr_scheduler_type": "linear", "ppo_epochs": 1}
    | {"cliprange": 0.2, "cliprange_value": 0.2, "lam": 0.95, "gamma": 1, "max_answer_seq_len": 512, "top_p": 1}
    | {"value_function": "equal"},
}
TEXT = {"global_batch_size": 256, "max_prompt_seq_len": 512, "temperature": 0.8, "top_k": 50, "ngram": 5}
CODE = {"global_batch_size": 16, "max_prompt_seq_len": 600, "temperature": 1.0, "top_k": 5, "ngram": 10}


def expected(stage: str, model: str, data: str) -> dict:
    """The settings of a row, from the tables above."""
    split = "2,0,8" if data == APPS else "2,4,4"
    common = {"seed": 1234, "gradient_clipping": 1.0, "data_split": split} | FIXED[stage]
    if stage == "sft":
        names = ["global_batch_size", "num_train_epochs", "learning_rate", "warmup_ratio"]
        return common | dict(zip(names, SFT[model, data], strict=True))
    if stage == "reward":
        return common | dict(zip(["global_batch_size", "learning_rate"], REWARD[model, data], strict=True))
    if stage == "dpo":
        return common | dict(zip(["learning_rate", "beta"], DPO[model, data], strict=True))
    names = ["actor_learning_rate", "critic_learning_rate", "num_train_epochs", "kl_coef", "num_warmup_steps"]
    return common | (CODE if data == APPS else TEXT) | dict(zip(names, PPO[model, data], strict=True))


VARIANT = re.compile(r"_(vanilla|randomized|ppl|parsing|rloo|two_nodes)$")
MODELS = {"2b": "google/gemma-2b", "7b": "google/gemma-7b", "27b": "google/gemma-2-27b"}
SETS = {"tldr": TLDR, "hh": HH, "webgpt": WEBGPT, "apps": APPS}
UNPUBLISHED = ("tldr_llama31_70b", "tldr_gemma_2b_grpo", "tldr_gemma_2b_gspo", "tldr_gemma_2b_vapo")
EXAMPLES = [("ppo", name) for name in (*UNPUBLISHED, "apps_codegemma_2b_grpo", "apps_codegemma_2b_segments")]
OTHER_RUNS = ("gsm8k_qwen25_05b", "gsm8k_gemma2_2b", "gsm8k_qwen25_15b", "tldr_pythia_1b", "tldr_gemma_2b_as_released")
PUBLISHED = [one for one in PRESETS if one not in EXAMPLES and one[1] not in OTHER_RUNS]  # in the paper's tables


def row_of(name: str) -> tuple[str, str, str]:
    """Published model, data set, and variant of a preset by its name."""
    variant = VARIANT.search(name)
    data, family, size, *rest = VARIANT.sub("", name).split("_")
    model = MODELS["27b"] if family == "gemma2" else MODELS[size]
    if family == "codegemma":
        model = "-".join(["google/codegemma", size, *rest])
    return model, SETS[data], variant[1] if variant else ""


def settings_of(step: str, name: str) -> dict:
    """What the tables say of a preset."""
    model, data, variant = row_of(name)
    wanted = expected(step, model, data) | ({"termination_condition": "fixed"} if step == "ppo" else {})
    if variant == "vanilla":
        return wanted | {"ngram": 1, "kl_coef": VANILLA[model, data]}
    if variant == "rloo":
        wanted = {key: value for key, value in wanted.items() if key not in OF_A_CRITIC}
        return wanted | dict(zip(["samples_per_prompt", "actor_learning_rate"], RLOO[model, data], strict=True))
    return wanted | ({"termination_condition": variant} if variant in ("randomized", "ppl", "parsing") else {})


def test_every_published_row_has_a_preset_and_a_script():
    rows = {("sft", *key, "") for key in SFT} | {("reward", *key, "") for key in REWARD}
    rows |= {("dpo", *key, "") for key in DPO} | {("ppo", *key, "") for key in PPO}
    rows |= {("ppo", *key, "vanilla") for key in VANILLA} | {("ppo", *key, "rloo") for key in RLOO}
    rows |= {("ppo", MODELS["2b"], TLDR, variant) for variant in ("randomized", "ppl", "two_nodes")}
    rows |= {("ppo", MODELS["2b"], HH, "parsing"), ("ppo", "google/codegemma-2b", APPS, "parsing")}
    assert {(step, *row_of(name)) for step, name in PUBLISHED} == rows
    assert {called(script) for script in SCRIPTS if script.parent.parent.name.startswith("step")} == {*PRESETS}
    assert {called(GEMMA[step]) for step in STEPS} == {(step, "tldr_gemma_2b") for step in STEPS}


def test_scripts_hold_no_settings():
    """Three lines each, of which the last names subcommand and preset: the flags are in the presets."""
    for script in SCRIPTS:
        first, licence, last = script.read_text(encoding="utf-8").splitlines()
        assert first == "#!/usr/bin/env bash" and licence.startswith("# SPDX") and SHIM.fullmatch(last), script
        assert os.access(script, os.X_OK), script
        command, name = called(script)
        assert name in preset_names(command), script


@pytest.mark.parametrize(("step", "name"), [one for one in EXAMPLES if "70b" not in one[1]])
def test_an_unpublished_preset_is_read(step, name, tmp_path):
    """That of 70 billion weights is refused where vLLM is missing; tests/plan reads it."""
    assert preset(step, name, processes=8, PROJ_PATH=str(tmp_path)).config.plan_batches(8).global_batch > 0


@pytest.mark.parametrize(("step", "name"), PUBLISHED)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_preset_has_the_published_settings(step, name, gpus, tmp_path):
    """On any number of GPUs: the update stays the published one."""
    found = preset(step, name, processes=gpus, PROJ_PATH=str(tmp_path))
    config, settings = found.config, settings_of(step, name)
    assert {key for key, value in settings.items() if config.flat()[key] != value} == set()
    model, data, variant = row_of(name)
    assert config.data.data_path == [data] and found.preset["base"] == model
    plan = config.plan_batches(gpus)
    assert plan.global_batch == settings["global_batch_size"] == plan.micro_batch * plan.accumulation * gpus
    assert config.output.save_steps > 0
    if step == "ppo":
        assert plan.global_responses == plan.global_batch and plan.updates_per_rollout == 1
        assert config.sampling.per_device_generation_batch_size * config.rollouts.samples_per_prompt <= 32
    check_folders(step, name, config, tmp_path / "models")


def check_folders(step, name, config, models):
    """Each step finds what the one before wrote, and no two presets write to the same folder."""
    model, data, variant = row_of(name)
    models /= VARIANT.sub("", name).replace("_", "-")
    if step == "ppo":
        assert config.models.actor_model_name_or_path == str(models / "sft")
        reward = None if data == APPS else str(models / "reward")
        assert config.rewards.reward_model_name_or_path == reward
        assert config.models.critic_model_name_or_path == (reward if config.advantages.needs.critic else None)
        assert config.rewards.reward_source == ("programs" if data == APPS else None)
        own = "" if variant in ("", "two_nodes") else f"-{variant}"
        assert config.output.output_dir == str(models / f"ppo{own}")
    else:
        assert config.model.model_name_or_path == (model if step == "sft" else str(models / "sft"))
        assert config.output.output_dir == str(models / step)
