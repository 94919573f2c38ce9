# SPDX-License-Identifier: Apache-2.0
"""Names of TRL, LLaMA-Factory and Axolotl: what is suggested, all of a file at once, and the page of them."""

from collections import Counter
from pathlib import Path

import pytest

from cli_runs import ROOT
from dschat.base.errors import UserError
from dschat.cli import COMMANDS, main
from dschat.reference import names_page
from dschat.settings.other_names import TRAINERS, alternatives, tables
from dschat.settings.parse import resolve
from dschat.settings.parser import FlagParser
from flag_cases import FAMILIES, REQUIRED, config_of

PAGE = ROOT / "docs" / "coming-from-trl.md"
AXOLOTL = """\
base_model: google/gemma-2b
datasets:
  - path: rows.jsonl
    type: alpaca
sequence_len: 2048
micro_batch_size: 2
learning_rate: 1e-5
fp16: true
"""


@pytest.mark.parametrize(
    ("step", "name", "said"),
    [
        ("sft", "eval_steps", "did you mean --eval_interval? (eval_steps of TRL, LLaMA-Factory, Axolotl)"),
        ("sft", "fp16", "did you mean --dtype fp16? (fp16 of"),
        ("ppo", "micro_batch_size", "did you mean --per_device_training_batch_size? (micro_batch_size of Axolotl)"),
        ("ppo", "beta", "did you mean --kl_ctl? (beta of TRL: TRL's default for GRPO is 0, here it is 0.05)"),
        ("ppo", "learning_rate", "did you mean --actor_learning_rate?"),
        ("sft", "optim", "optim of TRL, LLaMA-Factory has no flag here: the optimiser is AdamW"),
        ("sft", "num_generations", "num_generations of TRL is --samples_per_prompt in other commands"),
    ],
)
def test_a_name_of_another_trainer(step, name, said, capsys):
    with pytest.raises(SystemExit) as stop:
        config_of(step, f"--{name} 1")
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_all_of_a_file_at_once(tmp_path):
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL)
    with pytest.raises(UserError) as refused:
        resolve(FAMILIES["sft"], [*REQUIRED["sft"], "--config", str(file)], command="sft")
    lines = str(refused.value).splitlines()
    wanted = ["model_name_or_path", "data_path", "max_seq_len", "per_device_train_batch_size", "dtype fp16"]
    assert len(lines) == len(wanted)
    for line, flag, number in zip(lines, wanted, (1, 2, 5, 6, 8), strict=True):
        assert line.startswith(f"{file}:{number}: ") and f"did you mean --{flag}?" in line, line


def test_every_suggestion_is_a_flag():
    """Of some command, and what a name means is not a flag of that very name there."""
    flags = {option for command in COMMANDS.values() for option in options_of(command.flags_class())}
    assert len(tables()["setting"]) >= 40
    for setting in tables()["setting"]:
        assert setting.keys() & set(TRAINERS) and setting.keys() <= {*TRAINERS, "flags", "note"}, setting
        assert setting.get("flags") or setting.get("note"), setting
        assert {words.split()[0] for words in setting.get("flags", ())} <= flags, setting


def test_a_name_stands_in_one_row():
    rows_of_name = Counter()
    for setting in tables()["setting"]:
        rows_of_name.update({name for trainer in TRAINERS for name in setting.get(trainer, ())})
    assert set(rows_of_name.values()) == {1}


def options_of(flags: type) -> set[str]:
    return {option for action in FlagParser(flags)._actions for option in action.option_strings}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rm", "; did you mean dschat reward?\n"),
        ("eval", "; did you mean dschat evaluate or dschat text?\n"),
        ("train", "; did you mean dschat sft, dschat reward, dschat dpo or dschat ppo?\n"),
        ("kto", "; did you mean dschat dpo? (KTO is not offered; DPO is the nearest and needs pairs)\n"),
        ("judg", "; did you mean judge?\n"),
        ("zzzzzz", "there is no command zzzzzz\n"),
    ],
)
def test_a_command_of_another_trainer(name, said, capsys):
    assert main([name]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("row", tables()["command"], ids=lambda row: row["names"][0])
def test_commands_of_other_trainers_work(row, capsys):
    """Each command exists and accepts the flags named for it together."""
    for command in row["here"]:
        step, _, words = command.removeprefix("dschat ").partition(" --")
        assert step in COMMANDS
        if step in FAMILIES:
            config_of(step, f"--{words}" if words else "")
    for name in row["names"]:
        assert main([name]) == 2
        assert alternatives(row["here"]) in capsys.readouterr().err


def test_the_page_has_the_table():
    """Made anew by `python -m dschat.reference names`, between the lines that say so."""
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- made by python -m dschat.reference names -->\n\n", "\n<!-- end -->"
    assert text.partition(begin)[2].partition(end)[0] == "\n".join(names_page()) + "\n"
    assert "coming-from-trl.md" in Path(ROOT / "mkdocs.yml").read_text("utf-8")
