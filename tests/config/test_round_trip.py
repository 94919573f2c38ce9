# SPDX-License-Identifier: Apache-2.0
"""Values of flags → a file → the same values, for every command; and what a launcher tells its processes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

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


NUMBERS = [0.0, 1e-6, 1.5e-5, -1e-6, 0.1, 1 / 3, math.inf, -math.inf, 1e22]
PLAIN: dict[type, list[Any]] = {
    str: NASTY,
    Path: [Path(text) for text in NASTY],
    int: [0, -1, 7, 2**40],
    float: NUMBERS,
    bool: [True, False],
}


def values_of(flag: Flag) -> list[Any]:
    """Values that a command line can give a flag."""
    flag_type = type_of(flag.type)
    (kind,) = [kind for kind, form in KINDS.items() if form.metavar == flag_type.kind.metavar]
    values = list(flag.choices or PLAIN[kind])
    if kind is float and flag_type.read is read_ngram:
        values = [1, 7, math.inf]
    if holds_paths(flag):
        values = [value for value in values if value]
    if flag_type.several:
        return [values[begin : begin + 4] for begin in range(0, len(values), 4)]
    return values


def comparable(flags: type, values: dict[str, Any]) -> dict[str, Any]:
    """Lists as lists, and without what says None where that is the default: it need not be said."""
    unset = {name for name, flag in flags_of(flags).items() if flag.default is None}
    given_values = {name: value for name, value in values.items() if not (value is None and name in unset)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given_values.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_says_any_values(command, tmp_path):
    flags = COMMANDS[command].flags_class()
    path, parser = tmp_path / "flags.yaml", FlagParser(flags)
    options = {flag.name: values_of(flag) for flag in flags_of(flags).values() if not flag.positional}
    for first in (0, 17, 34):
        values = {name: given[(first + place) % len(given)] for place, (name, given) in enumerate(options.items())}
        path.write_text(as_yaml(flags, values, dict.fromkeys(values, "here")), encoding="utf-8")
        assert len(path.read_text("utf-8").split("\n")) == len(values) + 1  # a line for each
        found, _ = read_values(flags, parser, {}, read_file(str(path), command, {}), {})
        assert comparable(flags, found) == comparable(flags, values)


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
        ("--lora_dim 8", "--lora_dim 64", {"actor_lora_dim": 64}),
        ("", "--zero_stage 2 --offload", {"actor_zero_stage": 2, "critic_zero_stage": 2}),
        ("", "--reward_function r.py:f", {"reward_model_name_or_path": None}),
        ("", "--critic_model_name_or_path c2", {"reward_model_name_or_path": "c2"}),
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
