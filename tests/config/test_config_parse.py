# SPDX-License-Identifier: Apache-2.0
"""Flags: the table of their names, defaults and values, inert flags, malformed command lines.

A line of flags.txt is a flag as some steps have it:

    name: default, further spellings (steps) | words that a command line gives it, with the flags it needs | its value

A change of a default there is a change for every user.
"""

import dataclasses
import logging
import re
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.settings.flags import flags_of, seconds_of
from dschat.settings.other_names import inert_flags
from dschat.settings.parse import parse, resolve
from dschat.settings.ppo import PPOConfig
from flag_cases import FAMILIES, REQUIRED, config_of

LINE = re.compile(r"([\w.]+): (.+) \(([a-z ]+)\)(?: \| (.*) \| (.*))?")
LINES = [LINE.fullmatch(line) for line in (Path(__file__).parent / "flags.txt").read_text("utf-8").splitlines()]
TABLE = {(step, line[1]): line.group(2, 4, 5) for line in LINES for step in line[3].split()}
EXAMPLES = [(line[3].split()[0], line[1]) for line in LINES if line[2] != "inert"]  # the first step of each line
ALL_STEPS = pytest.mark.parametrize("step", FAMILIES)


def declared(flag) -> str:
    """A flag's default and further spellings."""
    shown = "required" if flag.default is dataclasses.MISSING else repr(flag.default)
    return " ".join([shown, *flag.aliases])


@ALL_STEPS
def test_the_table_of_flags_and_defaults(step):
    flags = flags_of(FAMILIES[step])
    shown = {name: declared(flag) for name, flag in flags.items()}
    shown |= dict.fromkeys(inert_flags(FAMILIES[step]), "inert")
    assert shown == {name: line[0] for (of, name), line in TABLE.items() if of == step}
    assert all(len(flag.help) > 10 for flag in flags.values())


@pytest.mark.parametrize(("step", "name"), EXAMPLES)
def test_each_flag_sets_its_field_by_each_spelling(step, name, monkeypatch):
    monkeypatch.setattr("dschat.settings.rollouts.find_spec", lambda name: object())  # as if vLLM were installed
    shown, words, value = TABLE[step, name]
    # A function stands in the place of the online form's reward model.
    required = REQUIRED[step][:-2] if (step, name) == ("online", "reward_function") else None
    for flag in [f"--{name}", *re.findall(r"--[\w.]+", shown)]:
        assert repr(config_of(step, f"{flag} {words}", required).flat()[name]) == value, flag


@pytest.mark.parametrize(
    ("step", "words", "remedy"),
    [
        ("sft", "--data_path a b --data-path=a", "--data_path a b"),
        ("online", "--task.query_dataset a --data_path b", "--data_path a b"),
        ("ppo", "--vllm_url http://a --vllm_url http://b", "--vllm_url http://a http://b --rollout_engine vllm"),
    ],
)
def test_a_flag_with_several_values_is_given_once(step, words, remedy, capsys):
    """argparse would drop the first values without a word."""
    with pytest.raises(SystemExit):
        config_of(step, words)
    message = capsys.readouterr().err
    assert f"argument {remedy.split()[0]}: it is given twice" in message
    assert "give it once, followed by all of its values" in message
    config_of(step, remedy)


def test_files_build_on_each_other_by_extends(capsys, tmp_path):
    files = [tmp_path / name for name in ("first.yaml", "second.yaml")]
    files[0].write_text("seed: 5\nmax_seq_len: 64\n")
    files[1].write_text("seed: 7\n")
    with pytest.raises(SystemExit):
        config_of("sft", f"--config {files[0]} --config={files[1]}")
    message = capsys.readouterr().err
    assert "argument --config: it is given twice" in message and "`extends: FILE`" in message
    files[1].write_text("extends: first.yaml\nseed: 7\n")
    config = config_of("sft", f"--config {files[1]}")
    assert (config.optimisation.seed, config.model.max_seq_len) == (7, 64)


def test_other_spellings():
    config = config_of("ppo", "--kl-coef=0.3 --no-self-checks --local_rank=0")
    assert (config.kl.kl_coef, config.engine.self_checks, config.engine.local_rank) == (0.3, False, 0)


@ALL_STEPS
@pytest.mark.parametrize("form", ["--{}", "--{} 0.5", "--{}=-1", "--{} 1 --{} 2"])
def test_inert_flags_warn_once_and_take_an_optional_value(step, form, caplog):
    inert = inert_flags(FAMILIES[step])
    words = [word for name in inert for word in form.replace("{}", name).split()]
    assert parse(FAMILIES[step], [*words, *REQUIRED[step]]) == config_of(step)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [(logging.WARNING, f"--{name} does nothing here: {why}.") for name, why in inert.items()]


@pytest.mark.parametrize(
    ("step", "words", "parts"),
    [
        ("ppo", "--kl_cof 1", ["--kl_cof", "did you mean --kl_coef?"]),
        ("ppo", "--learning_rate 1", ["unrecognized arguments: --learning_rate", "mean --actor_learning_rate?"]),
        ("ppo", "--ppo_epochs 1.5", ["--ppo_epochs", "invalid int value: '1.5'; give a whole number"]),
        ("ppo", "--dtype int8", ["--dtype", "invalid choice: 'int8'"]),
        ("sft", "--dropout 0.1 b", ["unrecognized arguments: b"]),  # an inert flag does not join its neighbours
    ],
)
def test_malformed_command_lines_give_one_line_and_status_2(step, words, parts, capsys):
    with pytest.raises(SystemExit) as stop:
        config_of(step, words)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error


def test_a_whole_number_may_have_a_point():
    """As the example files of LLaMA-Factory write `num_train_epochs: 3.0`."""
    flat = config_of("sft", "--num_train_epochs 3.0 --max_seq_len 1e3 --max_steps 20.0").flat()
    assert (flat["num_train_epochs"], flat["max_seq_len"], flat["max_steps"]) == (3, 1000, 20)


def test_missing_flags_are_named(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(FAMILIES["ppo"], [])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert all(flag in error for flag in ("--data_path", "--output_dir", "--actor_model_name_or_path"))


def test_none_takes_a_number_of_a_preset_away():
    """VAPO's λ goes by length: none gives the flag its default again, so that --lam can take its place."""
    environ = {"PROJ_PATH": "/p"}
    words = ["--config", "tldr_gemma_2b_vapo", "--output_dir", "out", "--lam", "0.99"]
    with pytest.raises(UserError, match="--lam_alpha none removes the value of a preset"):
        resolve(PPOConfig, words, command="ppo", processes=8, environ=environ)
    config = resolve(PPOConfig, [*words, "--lam_alpha", "none"], command="ppo", processes=8, environ=environ).config
    assert (config.estimator.lam, config.estimator.lam_alpha) == (0.99, None)


def test_what_is_printed_is_checked(capsys):
    words = ["--config", "tldr_gemma_2b_vapo", "--lam", "0.99", "--print_config"]
    with pytest.raises(UserError, match="--lam 0.99 and --lam_alpha 1"):
        resolve(PPOConfig, words, command="ppo", processes=8, environ={"PROJ_PATH": "/p"})
    assert "\nlam_alpha: 1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("00:00:01", 1),
        ("01:02:03", 3723),
        ("48:00:00", 2 * 86_400),
        ("2-00:00:10", 2 * 86_400 + 10),
        ("10:00", 0),
        ("-1:00:00", 0),
    ],
)
def test_times_of_slurm(time, seconds):
    """Hours may exceed a day. Other forms, which Slurm reads in another way, count as none."""
    assert seconds_of(time) == seconds
