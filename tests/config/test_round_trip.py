# SPDX-License-Identifier: Apache-2.0
"""Values of flags → a file → the same values, for every command; and what a launcher tells its processes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dschat.cli import COMMANDS
from dschat.settings.conditions import read_ngram
from dschat.settings.files import read_file
from dschat.settings.flag_types import KINDS, holds_paths, type_of
from dschat.settings.flags import Flag, flags_of
from dschat.settings.parse import as_yaml, read_values, resolve, to_yaml
from dschat.settings.parser import FlagParser
from flag_cases import FAMILIES, REQUIRED, config_of

NASTY = ["", " ", "-", "--seed=3", "a: b", "'", '"', "\\", "a #b", "@a", "two\nlines", "tab\t", "\r\n"]
NASTY += ["null", "~", "none"]
NASTY += ["true", "010", "1e-6", ".inf", "[a]", "{a: b}", "!!x", "${HOME}", "$$", "$${x}", "${a ${HOME}", "~/x", "Ω→é"]
NASTY += ["\U0001f600", "\u2028", "%h %n", "<|im_end|>", "&x", "*x", "| x", "...", "---", "x\n...\ny"]
TEXTS = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]))
EXAMPLES = 8  # of each command
NUMBERS = st.sampled_from([0.0, 1e-6, 1.5e-5, -1e-6, 0.1, 1 / 3, math.inf, -math.inf, 1e22]) | st.floats(
    allow_nan=False
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    Path: TEXTS.map(Path),
    int: st.integers(),
    float: NUMBERS,
    bool: st.booleans(),
}


def values_of(flag: Flag) -> st.SearchStrategy[Any]:
    """Values that a command line can give a flag."""
    flag_type = type_of(flag.type)
    (kind,) = [kind for kind, form in KINDS.items() if form.metavar == flag_type.kind.metavar]
    if flag.choices:
        values = st.sampled_from(list(flag.choices))
    elif kind is float and flag_type.read is read_ngram:
        values = st.sampled_from([1, 7, math.inf])
    else:
        values = PLAIN[kind]
    if holds_paths(flag):
        values = values.filter(bool)
    if flag_type.several:
        return st.lists(values, min_size=0 if flag.may_be_empty else 1, max_size=4)
    return values


def all_values(flags: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the flags of a command, each with a value."""
    values = {flag.name: values_of(flag) for flag in flags_of(flags).values() if not flag.positional}
    if not values:
        return st.just({})
    names = st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=6)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: values[name] for name in some}))


def comparable(flags: type, values: dict[str, Any]) -> dict[str, Any]:
    """Lists as lists, and without what says None where that is the default: it need not be said."""
    unset = {name for name, flag in flags_of(flags).items() if flag.default is None}
    given_values = {name: value for name, value in values.items() if not (value is None and name in unset)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given_values.items()}


def checked(flags: type, values: st.SearchStrategy[dict[str, Any]], check: Callable[[dict[str, Any]], None]) -> None:
    slow = [HealthCheck.too_slow]  # on a busy machine
    options = settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=slow
    )
    options(given(values)(check))()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_says_any_values(command, tmp_path):
    flags = COMMANDS[command].flags_class()
    path, parser = tmp_path / "flags.yaml", FlagParser(flags)

    def check(values):
        path.write_text(as_yaml(flags, values, dict.fromkeys(values, "here")), encoding="utf-8")
        assert len(path.read_text("utf-8").split("\n")) == len(values) + 1  # a line for each
        found, _ = read_values(flags, parser, {}, read_file(str(path), command, {}), {})
        assert comparable(flags, found) == comparable(flags, values)

    checked(flags, all_values(flags), check)


@pytest.mark.parametrize("step", FAMILIES)
def test_what_a_launcher_tells_its_processes(step, tmp_path, monkeypatch):
    """The values as JSON, read from the file that a run left: odd texts, infinity and `none`."""
    monkeypatch.chdir(tmp_path)
    config = config_of(step, ["--end_of_conversation_token=<|im_end|>", "--no_self_checks", "--prompt_key= "])
    config = config.changed(data_path=["-rows.jsonl", "--seed", "a b.jsonl", "$x", 'l\'é "x"\nb'])
    Path("config.yaml").write_text(to_yaml(config), encoding="utf-8")
    told = resolve(FAMILIES[step], ["--config", "config.yaml"], runs_here=False)
    assert told.config == config and "report_to" in told.given()
    assert FAMILIES[step](**json.loads(json.dumps(told.given(), default=str))) == config


VLLM = "--rollout_engine vllm --vllm_url http://localhost:1"


@pytest.mark.parametrize(
    ("begun", "added", "expected"),
    [
        ("", "--lora_dim 16", {"actor_lora_dim": 16, "critic_lora_dim": 16}),
        ("--lora_dim 8", "--lora_dim 64", {"actor_lora_dim": 64}),
        ("", "--zero_stage 2 --offload", {"actor_zero_stage": 2, "critic_zero_stage": 2}),
        ("", "--gradient_checkpointing --gradient_checkpointing_every 2", {"critic_gradient_checkpointing": True}),
        ("", "--reward_function r.py:f", {"reward_model_name_or_path": None}),
        ("", "--critic_model_name_or_path c2", {"reward_model_name_or_path": "c2"}),
        ("", "--eval_iters 4", {"eval_prompts": None}),
        (f"{VLLM} --rollouts_ahead 1", "--rollouts_ahead 0", {"rollout_is_clip": None}),
        ("--overwrite_output_dir --push_to_hub me/first", "", {"overwrite_output_dir": False, "push_to_hub": None}),
        ("--resume_from_checkpoint latest", "", {"resume_from_checkpoint": None}),
    ],
)
def test_flags_beside_a_runs_file_decide_what_follows_from_them(begun, added, expected, tmp_path, monkeypatch):
    """What a run derived from its flags is derived anew; what it was told to do to a folder is not done again."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(to_yaml(config_of("ppo", begun)), encoding="utf-8")
    Path("r.py").write_text("def f(prompts, responses, rows): ...\n")
    words = ["--config", "config.yaml", *added.split()]
    found = resolve(FAMILIES["ppo"], words, command="ppo", runs_here=False).config.flat()
    assert {name: found[name] for name in expected} == expected


def test_a_default_that_a_file_takes_back():
    """64000 pairs unless a file says otherwise: none is not a number of pairs, and not the default."""
    config = config_of("refuel", "--total_episodes none")
    assert config.regression.total_episodes is None and "total_episodes: none\n" in to_yaml(config)
    told = resolve(FAMILIES["refuel"], [*REQUIRED["refuel"], "--total_episodes", "none"])
    assert FAMILIES["refuel"](**json.loads(json.dumps(told.given()))) == told.config
