# SPDX-License-Identifier: Apache-2.0
"""YAML that is no file of flags is refused with file, line and remedy; `~` and variables in paths of any origin."""

import re
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.cli import COMMANDS
from dschat.settings.flag_types import holds_paths
from dschat.settings.flags import flags_of
from dschat.settings.parse import resolve
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import SFTConfig
from flag_cases import REQUIRED

SFT = REQUIRED["sft"]


def settings_of(text: str | bytes, words: list[str] | None = None):
    Path("own.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return resolve(SFTConfig, [*(SFT if words is None else words), "--config", "own.yaml"], command="sft").config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: x\n", r"own.yaml:1: only shipped presets have the key preset; .*`extends: NAME`"),
        ("extends: [a, b]\n", "own.yaml:1: extends must be one file or preset; .*let each of them extend"),
        ("seed: 1\nextends: absent\n", "own.yaml:2: extends: absent: there is no such file; give the path .*presets"),
        ("learning_rate: 1\nlearning-rate: 2\n", "own.yaml:2: learning_rate is there twice, first at own.yaml:1"),
        ("? [a]\n: b\n", "own.yaml:1: a key must be the name of a flag"),
        ("seed: 1\n\tlora_dim: 2\n", "own.yaml cannot be read as YAML: .*own.yaml.*line 2"),
        ("seed\n", "own.yaml:1: the file must hold `flag: value` on each line"),
        (b"seed: 1\nbf16: \xff\n", "own.yaml cannot be read as YAML: .*utf-8"),
        ("data_path: [a, ~]\n", "own.yaml:1: data_path has an empty item in its list"),
        ("<<: {seed: 1}\n", "own.yaml:1: << is not a flag"),
        ("seed: ${\n", r"own.yaml:1: seed: \$\{ has no closing brace: write \$\{NAME\}, or \$\$\{"),
        (
            "seed: ${A-B}\n",
            r"own.yaml:1: seed: \$\{A-B\} is not a variable: write \$\{NAME\} or \$\{NAME:-DEFAULT\}, .*",
        ),
        ("log_dir: $NO_SUCH/x\n", r"own.yaml:1: log_dir: the variable NO_SUCH is not set; .*\$\$ for a literal"),
        ("log_dir: ~no_such_user/x\n", r"own.yaml:1: log_dir: ~no_such_user/x: there is no user .*\./~"),
        ("seed: [1, 2]\n", "own.yaml:1: argument --seed: it takes one value, not a list"),
        ("seed: {a: 1}\n", "own.yaml:1: seed must be a value or a list of values: flags are not nested"),
        ("deepspeed: ds.json\n", "own.yaml:1: .*invalid truth value.*settings goes to --deepspeed_config"),
        ("bf16: auto\n", "own.yaml:1: .*invalid truth value: 'auto'; give true or false; leave it out for bf16"),
        ("config: a.yaml\n", r"own.yaml:1: config is given on the command line; in a file, write `extends: FILE`"),
        ("print-config: true\n", "own.yaml:1: print_config is given on the command line alone"),
        ("extend: a.yaml\n", r"own.yaml:1: extend is not a flag of `dschat sft`; did you mean --extends\?"),
        ("deepspeed_config: ''\n", "own.yaml:1: argument --deepspeed_config: the path is empty"),
        ("seed: 1\nseed_: 2\nngrams: 3\n", "own.yaml:2: seed_ is not a flag .*\n.*own.yaml:3: ngrams is not a flag"),
    ],
    ids=str,
)
def test_a_file_that_is_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        settings_of(text)
    assert re.search(message, str(refused.value)), str(refused.value)


@pytest.mark.parametrize("words", [["--deepspeed_config="], ["--deepspeed_config", ""]])
def test_an_empty_path_on_the_command_line(words, capsys):
    with pytest.raises(SystemExit):
        resolve(SFTConfig, [*SFT, *words], command="sft")
    assert "argument --deepspeed_config: the path is empty" in capsys.readouterr().err


def test_one_flag_by_two_names_in_a_file(tmp_path, monkeypatch):
    """Of two files, the one that extends the other wins, whichever name it uses."""
    monkeypatch.chdir(tmp_path)
    Path("twice.yaml").write_text("kl_coef: 0.1\nkl_ctl: 0.2\n")
    with pytest.raises(UserError, match="twice.yaml:2: kl_ctl is --kl_coef, which twice.yaml:1 gives; keep one"):
        resolve(PPOConfig, [*REQUIRED["ppo"], "--config", "twice.yaml"], command="ppo")
    for name, text in {"a": "kl_coef: 0.1\n", "b": "extends: a.yaml\nkl_ctl: 0.2\n"}.items():
        Path(f"{name}.yaml").write_text(text)
    Path("c.yaml").write_text("extends: b.yaml\nkl_coef: 0.3\n")
    found = resolve(PPOConfig, [*REQUIRED["ppo"], "--config", "c.yaml"], command="ppo")
    assert (found.config.kl.kl_coef, found.origins["kl_coef"]) == (0.3, "c.yaml:2")


def test_what_yaml_writes_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_of("").optimisation.seed == settings_of("# nothing\n").optimisation.seed == 1234
    text = (
        "\ufeffseed: 010\nlearning_rate: 1e-6\nself_checks: off\nbf16: yes\nprompt_key: on\nchosen_key: 2026-11-26\n"
    )
    config = settings_of(text + "response_key: 12:30:00\nrejected_key: '--x'\nlora-module-name: [--q, -1]\n")
    wanted = {"seed": 10, "learning_rate": 1e-6, "self_checks": False, "bf16": True, "prompt_key": "on"}
    wanted |= {"chosen_key": "2026-11-26", "response_key": "12:30:00", "rejected_key": "--x"}
    wanted |= {"lora_module_name": ["--q", "-1"]}
    flat = config.flat()
    assert {name: flat[name] for name in wanted} == wanted
    Path("ppo.yaml").write_text("ngram: .inf\n")
    found = resolve(PPOConfig, [*REQUIRED["ppo"], "--config", "ppo.yaml"], command="ppo")
    assert found.config.termination.ngram == float("inf")


@pytest.mark.parametrize("origin", ["file", "flag"])
@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("~/rows", "/home/me/rows"),
        ("$HOME/rows", "/home/me/rows"),
        ("$SHORT/rows", "/home/me/work/rows"),
        ("${NONE:-/tmp}/rows", "/tmp/rows"),
        ("costs in $", "costs in $"),
        ("$5/rows", "$5/rows"),
        ("a$$b~", "a$b~"),
        ("./~/rows", "./~/rows"),
    ],
)
def test_paths_wherever_they_are_written(written, path, origin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SHORT", "~/work")
    if origin == "file":
        quoted = f'"{written}"'
        text = f"data_path: [rows, {quoted}]\noutput_dir: {quoted}\nmodel_name_or_path: {quoted}\n"
        config = settings_of(text, [])
    else:
        words = ["--data_path", "rows", written, f"--output_dir={written}", "--model_name_or_path", written]
        config = resolve(SFTConfig, words).config
    flat = config.flat()
    assert (flat["data_path"], flat["output_dir"], flat["model_name_or_path"]) == (["rows", path], path, path)


def test_every_path_is_known_as_one():
    """Flags of a text whose help speaks of a file, a folder, a path or an id of the hub."""
    speaks = re.compile(r"\b(files?|folders?|path|hub id|module\.py)\b")
    # Names of result files, of a package, and of data sets that --data_path gives.
    exempt = {"name", "dataset", "margin_key", "termination_condition", "parser"}
    for command in COMMANDS.values():
        flags = command.flags_class()
        for name, flag in flags_of(flags).items():
            if "str" in str(flag.type) and speaks.search(flag.help) and name not in exempt:
                assert holds_paths(flag), (command.summary, name)
