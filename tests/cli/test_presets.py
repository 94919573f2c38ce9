# SPDX-License-Identifier: Apache-2.0
"""The presets: every training script against the published settings, and a run of two updates with its own flags."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from cli_runs import STEPS, TRAINING, arguments, run_forked, training_rows
from data_fixtures import EVAL_SPLITS, MAKERS, write_rows
from real_size import as_large_as
from script_runs import GEMMA, SCRIPTS, Launch, parsed, recorded, run_recorded, script_id, step_of

PUBLISHED = json.loads((TRAINING / "published.json").read_text(encoding="utf-8"))
RUNS = {TRAINING / run["script"]: run for run in PUBLISHED["runs"]}
PRESETS = sorted(RUNS)
every_preset = pytest.mark.parametrize("script", PRESETS, ids=script_id)
# Run in every `make test`; slow are those that differ from one of them in numbers alone, or offload.
KINDS = ("tldr_gemma_2b", "tldr_gemma_2b_rloo", "tldr_gemma_2b_ppl", "hh_gemma_2b_parsing")


def _run_at_once_or_slow(script):
    marks = [] if any(script_id(script).endswith(f"-{kind}") for kind in KINDS) else [pytest.mark.slow]
    return pytest.param(script, marks=marks, id=script_id(script))


# The paper's tables once more, written down independently of published.json.
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
    ("google/gemma-2b", TLDR): (4, 1.5e-5),
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


def test_the_published_table():
    """Every row of the tables is in published.json, with these numbers and no others."""
    assert PUBLISHED["adam_betas"] == [0.9, 0.95]  # no flag; tests/engine shows that the optimiser has them
    seen = set()
    for run in PUBLISHED["runs"]:
        row = (run["stage"], run["model"], run["data"])
        condition = run["settings"].get("termination_condition")
        wanted = expected(*row) | ({"termination_condition": condition} if condition else {})
        if run["settings"].get("ngram") == 1:
            wanted |= {"ngram": 1, "kl_coef": VANILLA[row[1:]]}
            condition += ", vanilla"
        if run["settings"].get("advantage_estimator"):
            wanted = {name: value for name, value in wanted.items() if name not in OF_A_CRITIC}
            wanted |= dict(zip(["samples_per_prompt", "actor_learning_rate"], RLOO[row[1:]], strict=True))
            wanted |= {"advantage_estimator": "rloo"}
            condition += ", rloo"
        assert run["settings"] == wanted, row
        seen.add((*row, condition))
    rows = {("sft", *key, None) for key in SFT} | {("reward", *key, None) for key in REWARD}
    rows |= {("dpo", *key, None) for key in DPO} | {("ppo", *key, "fixed") for key in PPO}
    once = {("ppo", "google/gemma-2b", TLDR, condition) for condition in ("randomized", "ppl")}
    once |= {("ppo", "google/gemma-2b", HH, "parsing")}
    once |= {("ppo", *key, "fixed, vanilla") for key in VANILLA} | {("ppo", *key, "fixed, rloo") for key in RLOO}
    assert seen == rows | once and len(PUBLISHED["runs"]) == len(seen)


def test_the_published_results():
    """Marked as the paper's own."""
    assert "not measured with this code" in PUBLISHED["results"]["whose"]
    bands = {
        (band["stage"], band["model"], band["data"]): list(band.values())[-2:]
        for band in PUBLISHED["results"]["bands"]
    }
    assert bands == {
        ("reward", None, TLDR): [0.75, 0.80],
        ("ppo", "google/gemma-2b", TLDR): [0.84, 1.41],
        ("ppo", "google/gemma-7b", TLDR): [1.90, 2.47],
        ("ppo", "google/gemma-2b", HH): [1.31, 1.55],
        ("ppo", "google/gemma-7b", HH): [1.05, 1.24],
        ("ppo", "google/gemma-2b", WEBGPT): [-0.62, -0.60],
        ("ppo", "google/gemma-7b", WEBGPT): [-0.61, -0.56],
    }


def test_every_published_row_has_a_script():
    """Beside the presets there are only the documented defaults, variants and examples."""
    folder = STEPS["ppo"] / "training_scripts"
    variants = {folder / "run_gemma_two_nodes.sh", folder / "apps_codegemma_2b_parsing.sh"}
    variants |= {TRAINING / example["script"] for example in PUBLISHED["examples"]}
    assert set(SCRIPTS) == set(PRESETS) | {GEMMA[step] for step in STEPS} | variants


def test_bash_reads_every_branch():
    """Of what all scripts share; the presets have none of their own, and each is run below."""
    done = subprocess.run(["bash", "-n", str(TRAINING / "launch.sh")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@every_preset
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_preset_has_the_published_settings(script, gpus, tmp_path, monkeypatch):
    """Its own flags, unchanged, on any number of GPUs: the update stays the published one."""
    run, step = RUNS[script], step_of(script)
    config = parsed(recorded(script, tmp_path, NUM_GPUS=str(gpus)), step, gpus, monkeypatch)
    assert run["stage"] == step
    differing = {name for name, value in run["settings"].items() if getattr(config, name) != value}
    assert not differing
    assert config.data_path == [run["data"]]
    plan = config.plan_batches(gpus)
    assert plan.global_batch == run["settings"]["global_batch_size"]
    assert plan.micro_batch * plan.accumulation * gpus == plan.global_batch
    if step == "ppo":
        assert plan.global_responses == plan.global_batch and plan.updates_per_rollout == 1
        assert plan.global_rollout * config.samples_per_prompt == plan.global_batch
        assert config.per_device_generation_batch_size * config.samples_per_prompt <= 32
    check_folders(script, config, tmp_path / "models")
    if gpus == 8:
        check_memory(script, config)


def check_memory(script, config):
    """On 8 GPUs of 80 GB: what the weights, gradients and optimiser states of one or two models leave room for.

    tests/plan shows that it fits. Activations of a 2B model do without being computed again; where a micro-batch
    fetches weights from other GPUs or from main memory (ZeRO 3), it is larger.
    """
    run, step = RUNS[script], step_of(script)
    size = next(size for size in ("27b", "7b", "2b") if f"-{size}" in run["model"])
    stages = {"27b": 3, "7b": 3 if step == "ppo" else 2, "2b": 2}
    assert config.zero_stage == stages[size]
    assert config.offload == (size == "27b") and config.dtype == ("bf16" if size == "27b" else None)
    micro = config.per_device_training_batch_size if step == "ppo" else config.per_device_train_batch_size
    assert micro == min(8 if config.zero_stage == 3 else 4, config.plan_batches(8).update_per_rank)
    again = size != "2b"
    if step == "ppo":
        assert config.actor_gradient_checkpointing == config.critic_gradient_checkpointing == again
        assert config.offload_reference_model == (size == "27b")
    else:
        assert config.gradient_checkpointing == again


def check_folders(script, config, models):
    """Each step finds what the one before wrote, and no two presets write to the same folder."""
    step, run = step_of(script), RUNS[script]
    _, variant, _ = re.split(r"(_randomized|_ppl|_parsing|_vanilla|_rloo|$)", script.stem, maxsplit=1)
    models /= script.stem.removesuffix(variant).replace("_", "-")
    if step == "ppo":
        assert config.actor_model_name_or_path == str(models / "sft")
        reward = None if run["data"] == APPS else str(models / "reward")
        assert config.reward_model_name_or_path == reward
        assert config.critic_model_name_or_path == (reward if config.needs.critic else None)
        assert config.reward_source == ("programs" if run["data"] == APPS else None)
        assert config.output_dir == str(models / f"ppo{variant.replace('_', '-')}")
    else:
        assert config.model_name_or_path == (run["model"] if step == "sft" else str(models / "sft"))
        assert config.output_dir == str(models / step)


@every_preset
def test_gpus_that_do_not_divide_the_batch(script, tmp_path):
    settings = RUNS[script]["settings"]
    batch, samples = settings["global_batch_size"], settings.get("samples_per_prompt", 1)
    together = f", {samples} responses of a prompt together" if samples > 1 else ""
    result = run_recorded(script, tmp_path, NUM_GPUS="3").expect(2)
    (message,) = result.stderr.splitlines()
    assert message.startswith(f"error: 3 GPUs cannot share the global batch of {batch} evenly{together}: set")
    assert "is one of 1, 2, 4, 8, 16" in message and f"multiple of {3 * samples}." in message
    assert not (tmp_path / "record").exists(), "it was launched all the same"


def write_data(folder: Path, name: str) -> Path:
    """A set's own columns, of which each split leaves step 1 eight rows and the others sixteen, none of them odd."""
    rows = 42 if name == "webgpt" else 40  # two of webgpt's become the held-out ones
    write_rows(folder / "train.jsonl", [MAKERS[name](index, "train") for index in range(5, 5 + rows)])
    held_out = EVAL_SPLITS[name]
    if held_out:
        write_rows(folder / f"{held_out}.jsonl", [MAKERS[name](index, held_out) for index in range(5, 15)])
    return folder


def check_two_updates(launch: Launch, script: Path, changed: dict[str, int], tmp_path: Path) -> None:
    """Runs what a script starts, whose flags `changed` replace the published settings."""
    step = step_of(script)
    result = run_forked(step, launch.flags, tmp_path / "printed").expect(0)
    assert "Traceback" not in result.stderr
    (output,) = (file.parent for file in (tmp_path / "models").glob("*/*/run.json"))
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] is True and record["batches"]["total_updates"] == 2
    assert len(training_rows(output)) == 2
    written = json.loads((output / "train_config.json").read_text())
    settings = RUNS[script]["settings"]
    used = {name: written[name] for name in settings}
    assert used == settings | {name: value for name, value in changed.items() if name in used}


@pytest.mark.parametrize("script", [_run_at_once_or_slow(script) for script in PRESETS])
def test_two_updates(script, inputs, sft, reward, tmp_path):
    """On the small model and rows of the data set's columns, with the preset's own flags but for these three."""
    step = step_of(script)
    # Half of what each split gives the step.
    batch = 4 if step == "sft" else 16 if RUNS[script]["data"] == APPS else 8
    batch *= RUNS[script]["settings"].get("samples_per_prompt", 1)
    changed = {"global_batch_size": batch, "num_train_epochs": 1}
    changed |= {"max_answer_seq_len": 8} if step == "ppo" else {}
    changed["deepspeed_config"] = as_large_as(7e9, sft)  # for those at ZeRO 3
    variables = {
        "MODEL": str(inputs / "model" if step == "sft" else sft),
        "REWARD_MODEL": str(reward),
        "DATA": str(write_data(tmp_path / "rows", script.stem.partition("_")[0])),
    }
    variables |= {"PARSER": "chunker"} if script.stem.endswith("_parsing") else {}
    launch = recorded(script, tmp_path, *arguments(changed), **variables)
    check_two_updates(launch, script, changed, tmp_path)


def test_the_parser_is_chosen_by_variables(tmp_path):
    script = STEPS["ppo"] / "training_scripts" / "hh_gemma_2b_parsing.sh"
    words = " ".join(recorded(script, tmp_path).flags)
    assert words.endswith("/ppo-parsing --termination_condition parsing --parsing_cutoff 5 --parser benepar")
    words = " ".join(recorded(script, tmp_path, PARSER="chunker", PARSER_MODEL="a b").flags)
    assert words.endswith("--parser chunker --parser_model a b")
