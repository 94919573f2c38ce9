# SPDX-License-Identifier: Apache-2.0
"""The texts that a configuration gives: --help and the JSON copy."""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import dschat
from dschat.settings.flags import flags_of, groups_of
from dschat.settings.parse import parse, to_json
from dschat.settings.parser import INERT_FLAGS
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import DPOFlags, RewardConfig, SFTConfig, SFTFlags
from flag_cases import FAMILIES


def test_help_is_complete_and_loads_neither_torch_nor_deepspeed():
    names = [(config_class.__module__, config_class.__name__) for config_class in FAMILIES.values()]
    code = (
        "import importlib, sys\n"
        "from dschat.settings.parse import parse\n"
        f"for module, name in {names}:\n"
        "    print('HELP OF', name)\n"
        "    try: parse(getattr(importlib.import_module(module), name), ['--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "print('LOADED', [name for name in ('torch', 'deepspeed', 'datasets') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("LOADED []")
    _, *helps = done.stdout.split("HELP OF ")
    for config_class, text in zip(FAMILIES.values(), helps, strict=True):
        assert text.startswith(config_class.__name__)
        for name in [*flags_of(config_class), *INERT_FLAGS]:
            assert f"  --{name}" in text, name
        assert "None" not in text
        assert "--data-path" not in text  # each flag is listed once, by its documented name


def test_help_shows_sections_defaults_and_aliases(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(PPOConfig, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for part in (
        "macro actions:",
        "rollouts and batches:",
        "--kl_coef, --kl_ctl FLOAT",
        "--parsing_cutoff, --parser_cutoff INT",
        "--data_path TEXT [TEXT ...]",
        "(default: 2 3 5 10)",
        "folder for models, checkpoints, metrics and run records (required)",
        "--no_self_checks turn --self_checks off",
    ):
        assert part in text, part


def test_groups_inherit_nothing_and_no_class_has_two_bases():
    """A group is held, not inherited, so that what a function reads is the group itself."""
    package = Path(dschat.__file__).parent
    for file in (*(package / "settings").glob("*.py"), *package.glob("*/*settings.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert len(node.bases) <= 1, f"{file.name}: {node.name}"
    groups = {group.type for config_class in FAMILIES.values() for group in groups_of(config_class)}
    assert len(groups) > 25
    assert [group.__name__ for group in groups if group.__mro__[1:] != (object,)] == []


def test_two_groups_of_a_command_cannot_have_a_flag_of_one_name():
    class Twice(RewardConfig):
        dpo: DPOFlags
        sft: SFTFlags

    with pytest.raises(TypeError, match="two groups have a flag label_smoothing"):
        flags_of(Twice)


def test_a_command_changes_only_flags_that_it_has():
    class Typo(RewardConfig):
        defaults = {"learning_rat": 1e-5}

    with pytest.raises(TypeError, match="there is no flag learning_rat"):
        flags_of(Typo)


def test_a_configuration_made_in_code_takes_flags_alone():
    with pytest.raises(TypeError, match="SFTConfig has no flag learning_rat"):
        SFTConfig(learning_rat=1.0)
    with pytest.raises(TypeError, match="output_dir"):
        SFTConfig(data_path=["a"], model_name_or_path="m")


def test_a_configuration_does_not_change():
    config = SFTConfig(data_path=["a"], output_dir="o", model_name_or_path="m")
    with pytest.raises(AttributeError, match="cannot assign to field 'seed'"):
        config.optimisation.seed = 3
    with pytest.raises(AttributeError, match="SFTConfig does not change: make another one with changed"):
        config.seed = 3
    other = config.changed(seed=3)
    assert (other.optimisation.seed, config.optimisation.seed) == (3, 1234)


def test_derived_values_follow_a_flag_that_is_changed_in_code():
    sft = SFTConfig(data_path=["a"], output_dir="o", model_name_or_path="m")
    assert sft.changed(bf16=True).engine.dtype == "bf16" and sft.changed(bf16=True).changed(bf16=False) == sft
    assert sft.changed(output_dir="p").output.tensorboard_path == "p/tensorboard"
    assert sft.changed(finetune_mode="lora").lora_ranks == [8]

    ppo = PPOConfig(data_path=["a"], output_dir="o", actor_model_name_or_path="a", critic_model_name_or_path="c")
    assert ppo.changed(zero_stage=2).zero_stages == [2, 2]
    assert ppo.changed(zero_stage=2, critic_zero_stage=3).zero_stages == [2, 3]
    assert ppo.changed(gradient_checkpointing=True).recomputes
    assert ppo.changed(critic_model_name_or_path="d").rewards.reward_model_name_or_path == "d"
    assert ppo.changed(advantage_estimator="rloo").changed(advantage_estimator="gae") == ppo
    assert ppo.changed(eval_iters=1).num_eval_prompts(1) == 16 and ppo.num_eval_prompts(1) == 512


def test_saved_json_holds_every_field_and_the_plan():
    required = {"data_path": ["a"], "output_dir": "o", "actor_model_name_or_path": "a"}
    config = PPOConfig(**required, ngram=math.inf, generation_batches=4)
    content = json.loads(to_json(config, config.plan_batches(1)))
    plan = content.pop("batch_plan")
    assert set(content) == flags_of(PPOConfig).keys()
    assert (content["ngram"], content["ngram_lengths"], content["clip_reward_value"]) == ("inf", [2, 3, 5, 10], None)
    assert json.loads(to_json(config.changed(ngram=7), config.plan_batches(1)))["ngram"] == 7
    assert plan == {
        "world_size": 1,
        "micro_batch": 16,
        "accumulation": 1,
        "update_per_rank": 16,
        "global_batch": 16,
        "rollout_per_rank": 64,
        "updates_per_rollout": 4,
        "samples_per_prompt": 1,
        "max_tokens": None,
    }
