# SPDX-License-Identifier: Apache-2.0
"""Files of flags: what wins, variables, presets' folders, the batch for a number of processes, and what is refused."""

from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.settings.parse import resolve, to_yaml
from dschat.settings.ppo import PPOConfig
from dschat.settings.presets import find_preset, preset_names, variables
from dschat.settings.supervised import SFTConfig
from flag_cases import FAMILIES, REQUIRED, config_of
from script_runs import FEW_ROWS, METHODS, preset

PRESET = {"run": "tldr-gemma-2b", "model": "google/gemma-2b", "data": "tldr/set"}
LATER = PRESET | {"model": "sft"}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_flags_win_over_the_file_and_that_over_what_it_extends(monkeypatch):
    monkeypatch.setenv("NUM_GPUS", "3")
    write("base.yaml", "seed: 5\nkl_ctl: 0.2\nngram: inf\ndecode_graphs: on\nactor_learning_rate: 1e-5\n")
    file = write("own.yaml", "extends: base.yaml\nngram: 7\ngamma: 0.5\ndata_path: [a, b]\nlora_module_name: null\n")
    words = [*REQUIRED["ppo"][2:], "--gamma", "0.9", "--config", file]
    found = resolve(PPOConfig, words, command="ppo")
    given = {"seed": 5, "kl_coef": 0.2, "ngram": 7, "gamma": 0.9, "decode_graphs": "on", "data_path": ["a", "b"]}
    given |= {"actor_learning_rate": 1e-5}
    flat = found.config.flat()
    assert {name: flat[name] for name in given} == given
    names = ("seed", "kl_coef", "ngram", "gamma", "data_path", "num_gpus")
    places = ["base.yaml:1", "base.yaml:2", "own.yaml:2", "--gamma", "own.yaml:4", "$NUM_GPUS"]
    assert [found.origins[name] for name in names] == places and "lam" not in found.origins
    assert "gamma: 0.9" in found.yaml and "# own.yaml:2" in found.yaml and "# default" in found.yaml
    assert PPOConfig(**found.given()) == found.config


def test_variables_stand_in_values(monkeypatch):
    monkeypatch.setenv("ROWS", "/data")
    monkeypatch.setenv("EMPTY", "")
    file = write("v.yaml", "data_path: ['${ROWS}/a', b]\nseed: ${SEED:-7}\nlora_alpha: ${EMPTY:-}\n")
    config = resolve(SFTConfig, [*REQUIRED["sft"][2:], "--config", file], command="sft").config
    flat = config.flat()
    assert (flat["data_path"], flat["seed"], flat["lora_alpha"]) == (["/data/a", "b"], 7, None)


def test_every_value_is_shown_with_its_origin(capsys):
    with pytest.raises(SystemExit) as stop:
        resolve(SFTConfig, ["--config", "tldr_gemma_2b", "--print_config", "--seed", "8"], command="sft", processes=8)
    assert stop.value.code == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["seed"].split() == ["8", "#", "--seed"] and lines["learning_rate"].split()[0] == "5e-05"
    assert lines["per_device_train_batch_size"].endswith("# preset, 8 processes")
    assert lines["packing"].split() == ["false", "#", "default"]
    assert lines["max_seq_len"].endswith("_published.yaml:5")


@pytest.mark.parametrize("step", FAMILIES)
def test_the_file_of_a_run_says_all_of_its_flags(step):
    """Read again it gives the same configuration, and with another output folder all but that."""
    config = config_of(step, "--enable_tensorboard --report_to wandb")
    file = write("config.yaml", to_yaml(config))
    assert resolve(FAMILIES[step], ["--config", file], command=step, runs_here=False).config == config
    moved = resolve(FAMILIES[step], ["--config", file, "--output_dir", "new"], command=step, runs_here=False).config
    assert moved.output.tensorboard_path == "new/tensorboard"


def test_a_list_that_needs_a_value_is_not_empty():
    empty = write("empty.yaml", "ngram_lengths: []\n")
    with pytest.raises(UserError, match="empty.yaml:1: argument --ngram_lengths"):
        resolve(PPOConfig, ["--config", empty], command="ppo")


@pytest.mark.parametrize(
    ("settings", "model", "data", "folder"),
    [
        (PRESET, "google/gemma-2b", "tldr", "tldr-gemma-2b"),
        (PRESET, "Qwen/Qwen2.5-0.5B", "", "tldr-Qwen2.5-0.5B"),
        (PRESET, "/mnt/my model/", "/mnt/mine/train.parquet", "mine-train-my-model"),
        (LATER, "/p/models/tldr-gemma-2b/sft", "data/rows", "rows-tldr-gemma-2b"),
        (LATER, "/p/models/rows-Qwen2.5-0.5B/sft/", "rows.csv", "rows-Qwen2.5-0.5B"),
        (LATER, "/p/models/train-Qwen2.5-0.5B/sft", "train.jsonl", "train-Qwen2.5-0.5B"),
        (LATER, "/p/models/hh-gemma-2b/ppo/actor", "", "tldr-hh-gemma-2b-ppo-actor"),
        (PRESET | {"run": "-llama"}, "/p/models/llama/refuel", "", "llama-refuel"),
    ],
)
def test_another_model_or_data_set_has_a_folder_of_its_own(settings, model, data, folder):
    """Named like the published run's, data set and model; what step 1 wrote keeps its name in steps 2 and 3."""
    found = variables(settings, {"PROJ_PATH": "/p", "MODEL": model, "DATA": data})
    assert found["RUN"] == f"/p/models/{folder}" and found["REWARD_MODEL"] == f"/p/models/{folder}/reward"


def test_the_steps_of_one_data_set_find_each_other():
    """With the same DATA and nothing else given, and so do the variants of a preset."""
    given = {"DATA": "rows.jsonl", "PROJ_PATH": "/p"}
    run = "/p/models/rows-gemma-2b"
    sft = preset("sft", "tldr_gemma_2b", **given).config
    reward = preset("reward", "tldr_gemma_2b", **given).config
    assert (sft.model.model_name_or_path, sft.output.output_dir) == ("google/gemma-2b", f"{run}/sft")
    assert (reward.model.model_name_or_path, reward.output.output_dir) == (f"{run}/sft", f"{run}/reward")
    for variant in ("vanilla", "ppl", "randomized", "rloo", "grpo", "gspo", "vapo"):
        ppo = preset("ppo", f"tldr_gemma_2b_{variant}", **given).config
        assert ppo.models.actor_model_name_or_path == f"{run}/sft" and ppo.output.output_dir == f"{run}/ppo-{variant}"
        assert ppo.rewards.reward_model_name_or_path == f"{run}/reward"


def test_presets_are_found_by_name():
    assert find_preset("ppo", "tldr_gemma_2b.yaml") == find_preset("ppo", "tldr_gemma_2b")
    assert find_preset("ppo", "nothing") is None and find_preset("sft", "../ppo/tldr_gemma_2b") is None
    assert not any(name.startswith("_") for name in preset_names("ppo"))


@pytest.mark.parametrize(("name", "responses"), list(zip(METHODS, (32, 2), strict=True)))
def test_a_method_is_added_to_any_run(name, responses):
    """By --config with the run's own flags, which win."""
    sizes = f"--per_device_training_batch_size 2 --global_batch_size {responses} --critic_learning_rate 3e-6"
    given = [*REQUIRED["ppo"], "--per_device_generation_batch_size", "2", *sizes.split()]
    config = preset("ppo", name, given).config
    config.plan_batches(1)
    assert config.optimizers.critic_learning_rate == 3e-6
    wanted = {
        "easyppo": (4, None, "critic_only", "all", 30, None, 16),
        "sao": (1, 2, "train", "mlp", 10, [0.2, 4.0], 1),
    }
    critic = config.critic
    assert wanted[name] == (
        *(critic.critic_minibatches, critic.critic_epochs, critic.cut_answers, critic.critic_trains),
        *(config.optimizers.critic_warmup_updates, config.loss.rollout_is_mask, config.rollouts.samples_per_prompt),
    )


@pytest.mark.parametrize("step", ["sft", "reward", "dpo", "ppo"])
def test_few_rows_make_small_batches(step):
    config = preset(step, FEW_ROWS, REQUIRED[step]).config
    plan = config.plan_batches(1)
    rows = plan.rollout_per_rank if step == "ppo" else plan.global_batch
    assert (rows, config.data.eval_share) == (2, 0.2)


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        (1, "", (32, 8, 256)),
        (1, "--per_device_generation_batch_size 64", (64, 4, 256)),
        (2, "--global_batch_size 80", (20, 2, 80)),  # 40 for each, of which 20 is the largest part up to 32
        (1, "--global_batch_size 8 --per_device_generation_batch_size 16", (16, 1, 16)),  # two updates per rollout
    ],
)
def test_a_rollout_is_the_batch_of_one_update(gpus, flags, expected):
    """However many GPUs there are and however many prompts each generates at once."""
    config = preset("ppo", "tldr_gemma_2b", flags.split(), gpus).config
    rollout = config.plan_batches(gpus).rollout_per_rank * gpus
    assert (config.sampling.per_device_generation_batch_size, config.rollouts.generation_batches, rollout) == expected
