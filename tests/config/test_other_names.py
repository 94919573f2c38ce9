# SPDX-License-Identifier: Apache-2.0
"""Names of TRL, LLaMA-Factory and Axolotl: what is suggested, all of a file at once, and the page of them."""

import ast
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from cli_runs import ROOT
from dschat import PPOConfig
from dschat.cli import COMMANDS, main
from dschat.reference import names_page
from dschat.settings.flags import default_of
from dschat.settings.other_names import alternatives, commands, settings
from dschat.settings.parse import parse
from dschat.settings.parser import FlagParser
from flag_cases import FAMILIES, config_of

PAGE = ROOT / "docs" / "coming-from-trl.md"


@pytest.mark.parametrize(
    ("step", "name", "said"),
    [
        ("sft", "eval_steps", "did you mean --eval_interval? (eval_steps of TRL, LLaMA-Factory, Axolotl)"),
        ("sft", "fp16", "did you mean --dtype fp16? (fp16 of"),
        ("ppo", "micro_batch_size", "did you mean --per_device_training_batch_size? (micro_batch_size of Axolotl)"),
        ("ppo", "beta", "did you mean --kl_ctl? (beta of TRL: TRL's default for GRPO is 0, that of --kl_ctl is 0.05)"),
        ("sft", "cutoff-len", "did you mean --max_seq_len? (cutoff_len of LLaMA-Factory: prompt and response"),
        ("sft", "optim", "optim of TRL, LLaMA-Factory has no flag here: the optimiser is AdamW"),
        ("sft", "num_generations", "num_generations of TRL is --samples_per_prompt in other commands"),
        ("sft", "max_tool_calling_iterations", "of TRL is --max_turns in other commands: in replies"),
    ],
)
def test_a_name_of_another_trainer(step, name, said, capsys):
    with pytest.raises(SystemExit) as stop:
        config_of(step, f"--{name} 1")
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_every_suggestion_is_a_flag():
    """Of some command, and what a name means is not a flag of that very name there."""
    flags = {option for command in COMMANDS.values() for option in options_of(command.flags_class())}
    assert len(settings()) >= 40
    rows_of_name = Counter()
    for setting in settings():
        rows_of_name.update(set().union(*setting.names.values()))
        assert setting.names and setting.names.keys() <= {"TRL", "LLaMA-Factory", "Axolotl"}, setting
        assert setting.flags or setting.note, setting
        assert {words.split()[0] for words in setting.flags} <= flags, setting
    assert set(rows_of_name.values()) == {1}, "a name stands in one row"


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


@pytest.mark.parametrize("theirs", commands(), ids=lambda theirs: theirs.names[0])
def test_commands_of_other_trainers_work(theirs, capsys):
    """Each command exists and accepts the flags named for it together."""
    for command in theirs.here:
        step, _, words = command.removeprefix("dschat ").partition(" --")
        assert step in COMMANDS
        if step in FAMILIES:
            config_of(step, f"--{words}" if words else "")
    for name in theirs.names:
        assert main([name]) == 2
        assert alternatives(theirs.here) in capsys.readouterr().err


def test_the_page_has_the_table():
    """Made anew by `python -m dschat.reference names`, between the lines that say so."""
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- made by python -m dschat.reference names -->\n\n", "\n<!-- end -->"
    assert text.partition(begin)[2].partition(end)[0] == "\n".join(names_page()) + "\n"
    assert "coming-from-trl.md" in Path(ROOT / "mkdocs.yml").read_text("utf-8")


def defaults_of_page() -> list[tuple[str, str, str]]:
    """Command, flag and default of each flag in the table "Defaults that differ", "off" for one without a value."""
    table = PAGE.read_text("utf-8").partition("Defaults that differ from TRL's")[2].partition("## Names")[0]
    defaults = []
    for row in table.splitlines():
        if not row.startswith("| "):
            continue
        for part in row.split(" | ")[2].split("; "):
            named = re.match(r"((?:sft|reward|dpo|ppo)(?:, \w+)*): ", part)
            commands = named[1].split(", ") if named else ["ppo"]
            for flag, value in re.findall(r"`--(\w+)(?: ([^`]+))?`", part):
                defaults += [(command, flag, value or "off") for command in commands]
    return defaults


def test_defaults_of_the_page():
    """Every default that the page calls different from TRL's is the default of the command."""
    defaults = defaults_of_page()
    assert len(defaults) == 30
    for command, flag, text in defaults:
        field = {"kl_ctl": "kl_coef"}.get(flag, flag)
        default = default_of(FAMILIES[command], field)
        if text == "off":
            assert default is False, (command, flag)
        else:
            assert default == type(default)(text), (command, flag)


def test_the_python_example_is_the_run_of_the_command():
    text = PAGE.read_text("utf-8").partition("## PPO, side by side")[2].partition("## GRPO")[0]
    command = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["dschat", "ppo"]
    place = words.index("--num_gpus")  # `train` runs in the calling process
    example = ast.parse(re.search(r"```python\n(from dschat .*?)```", text, re.DOTALL)[1])
    call = next(node for node in ast.walk(example) if isinstance(node, ast.Call) and node.func.id == "PPOConfig")
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert PPOConfig(**fields) == parse(PPOConfig, [*words[2:place], *words[place + 2 :]])
