# SPDX-License-Identifier: Apache-2.0
"""The texts that a configuration gives: --help and the JSON copy."""

import ast
import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import dschat
from dschat.settings.parse import parse, to_json
from dschat.settings.parser import INERT_FLAGS
from dschat.settings.ppo import PPOConfig
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
        for name in [*(field.name for field in dataclasses.fields(config_class)), *INERT_FLAGS]:
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
        "folder for models, metrics and records (required)",
        "--no_self_checks turn --self_checks off",
    ):
        assert part in text, part


def test_the_name_of_a_flag_is_declared_once():
    """All other classes with a flag of the name take it from there (`like`), or inherit it."""
    package = Path(dschat.__file__).parent
    classes = [
        node
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    declared = Counter(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.value, ast.Call)
        and ast.unparse(field.value.func) == "flag"
    )
    assert len(declared) > 200
    assert {name for name, times in declared.items() if times > 1} == set()


def test_saved_json_holds_every_field_and_the_plan():
    required = {"data_path": ["a"], "output_dir": "o", "actor_model_name_or_path": "a"}
    config = PPOConfig(**required, ngram=math.inf, generation_batches=4)
    content = json.loads(to_json(config, config.plan_batches(1)))
    plan = content.pop("batch_plan")
    assert set(content) == {field.name for field in dataclasses.fields(PPOConfig)}
    assert (content["ngram"], content["ngram_lengths"], content["clip_reward_value"]) == ("inf", [2, 3, 5, 10], None)
    assert json.loads(to_json(dataclasses.replace(config, ngram=7), config.plan_batches(1)))["ngram"] == 7
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
