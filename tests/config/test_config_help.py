# SPDX-License-Identifier: Apache-2.0
"""The texts that a configuration gives: --help and the JSON copy."""

import json
import math
import subprocess
import sys

import pytest

from dschat.settings.flags import flags_of
from dschat.settings.other_names import inert_flags
from dschat.settings.parse import parse, to_json
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
        for name in [*flags_of(config_class), *inert_flags(config_class)]:
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


def test_a_configuration_made_in_code_needs_what_a_command_needs():
    with pytest.raises(TypeError, match="SFTConfig needs a value for output_dir"):
        SFTConfig(data_path=["a"], model_name_or_path="m")


def test_a_configuration_does_not_change():
    config = SFTConfig(data_path=["a"], output_dir="o", model_name_or_path="m")
    with pytest.raises(AttributeError, match="cannot assign to field 'seed'"):
        config.optimisation.seed = 3
    with pytest.raises(AttributeError, match="SFTConfig does not change: make another one with changed"):
        config.seed = 3
    other = config.changed(seed=3)
    assert (other.optimisation.seed, config.optimisation.seed) == (3, 1234)


def test_saved_json_holds_every_field_and_the_plan():
    required = {"data_path": ["a"], "output_dir": "o", "actor_model_name_or_path": "a"}
    config = PPOConfig(**required, ngram=math.inf, generation_batches=4)
    content = json.loads(to_json(config, config.plan_batches(1)))
    plan = content.pop("batch_plan")
    assert set(content) == flags_of(PPOConfig).keys()
    assert (content["ngram"], content["ngram_lengths"], content["clip_reward_value"]) == ("inf", [2, 3, 5, 10], None)
    assert (plan["global_batch"], plan["rollout_per_rank"], plan["updates_per_rollout"]) == (16, 64, 4)
