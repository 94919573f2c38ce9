# SPDX-License-Identifier: Apache-2.0
"""docs/coming-from-sheeprl.md: its commands run, and so does every flag of its tables with its section's command."""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cli_runs import ROOT, run_command, run_forked
from dschat.cli import command_name
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from test_readme import blocks, commands, known_flags
from test_readme import flags_of as flags_of_command

DOCUMENT = ROOT / "docs" / "coming-from-sheeprl.md"
SPAN = re.compile(r"`(--[^`]+)`")
# What stands for the hub's things here: a folder with a tiny model, one with comparisons.
OURS = {"facebook/opt-350m": "models/base", "hh": "data/raw"}
# The published sizes would be hours on a tiny model; a flag of a table stands before them.
QUICK = {"step3": ["--per_device_generation_batch_size", "16", "--per_device_training_batch_size", "16"]}
# These stand in the place of a flag of the command.
INSTEAD = {"--checkpoints": "--model"}
ALONE = "--resume_from_checkpoint"


@dataclass
class Section:
    """A part of the document: its commands, and what its table adds to the last of them."""

    title: str
    commands: list[list[str]]
    items: list[list[str]]

    def runs(self) -> list[list[str]]:
        """The last command with the items of the table, as many in one run as have different flags."""
        groups: list[list[list[str]]] = []
        for item in self.items:
            if item[0] == ALONE:
                continue
            flags = flags_of(item)
            group = next((g for g in groups if not flags & set().union(*map(flags_of, g))), None)
            if group is None:
                groups.append(group := [])
            group.append(item)
        resumed = [[item] for item in self.items if item[0] == ALONE]
        return [with_items(self.commands[-1], group) for group in groups + resumed]


def flags_of(words: list[str]) -> set[str]:
    """The flags among words; a mode and its options count as one."""
    found = {word for word in words if word.startswith("--")}
    modes = ("--finetune_mode", "--reward_loss", "--critic_model_name_or_path")
    return {"mode"} | found if found & set(modes) else found


def with_items(command: list[str], items: list[list[str]]) -> list[str]:
    """A command whose flags are replaced by those of the items, or joined by them."""
    words = list(command)
    for item in items:
        for flag in flags_of(item) | {INSTEAD.get(item[0], "")}:
            if flag in words:
                start = words.index(flag)
                end = next((i for i in range(start + 1, len(words)) if words[i].startswith("--")), len(words))
                del words[start:end]
        words += item
    return words


def sections() -> list[Section]:
    """The document's, in order."""
    found = []
    for part in DOCUMENT.read_text(encoding="utf-8").split("\n## ")[1:]:
        own = [words for block in blocks(part) for words in commands(block)]
        base = set(own[-1])
        cells = [line.rstrip(" |").rpartition(" | ")[2] for line in part.splitlines() if line.startswith("| ")]
        items = [words for cell in cells for span in SPAN.findall(cell) if (words := span.split())]
        named_only = [words for words in items if len(words) == 1 and words[0] in base]
        found.append(Section(part.splitlines()[0], own, [words for words in items if words not in named_only]))
    return found


SECTIONS = {section.title: section for section in sections()}


def flags_in_help(program: str) -> set[str]:
    """What a program's --help lists."""
    return known_flags(ROOT / program) if program.endswith(".py") else flags_of_command(program)


def program_of(command: list[str]) -> str:
    """The Python file that a command runs, or the subcommand of dschat."""
    if command[0] != "dschat":
        return command[1]
    name = command_name(command[1:])
    assert name is not None, command
    return name


def test_the_document_has_every_part() -> None:
    assert list(SECTIONS) == [
        *("Data", "Options of all training", "Supervised fine-tuning", "Reward model", "PPO", "DPO"),
        *("Evaluation", "Demos"),
    ]
    assert sum(len(section.items) for section in SECTIONS.values()) > 50


@pytest.mark.parametrize("title", SECTIONS)
def test_every_flag_is_known(title: str) -> None:
    section = SECTIONS[title]
    for command in section.commands:
        program = program_of(command)
        items = section.items if command == section.commands[-1] else []
        unknown = {word for words in [command[2:], *items] for word in words if word.startswith("--")}
        unknown = {f"--{word[2:].replace('-', '_')}" for word in unknown}
        assert unknown <= flags_in_help(program), f"{command}: {sorted(unknown - flags_in_help(program))}"


def run(command: list[str], folder: Path) -> None:
    """One command in a folder that holds data/raw and models/base."""
    words = [OURS.get(word, word) for word in command]
    if words[0] == "deepspeed":
        quick = next((extra for step, extra in QUICK.items() if step in words[1]), [])
        missing = [] if set(quick) & {word for word in words if word.startswith("--")} else quick
        shutil.rmtree(folder / "printed", ignore_errors=True)
        flags = [*words[2:], *missing]
        run_forked(ROOT / words[1], flags, folder / "printed", partial(os.chdir, str(folder))).expect(0)
    else:
        start = [sys.executable, "-m", "dschat"] if words[0] == "dschat" else [sys.executable]
        run_command([*start, *words[1:]], cwd=folder).expect(0)


@pytest.mark.slow
def test_every_line_of_the_right_hand_side_runs(tmp_path: Path) -> None:
    """All but the demo's pages, which have tests of their own."""
    write_corpus(tmp_path / "corpus", 8, 400, 16, seed=1)
    shutil.copytree(tmp_path / "corpus" / "comparisons", tmp_path / "data" / "raw")
    texts = row_texts(make_rows(100, 1, "demonstrations"))
    make_model(tmp_path / "models" / "base", texts, seed=1, hidden_size=32, layers=2, vocab_size=400)
    for section in SECTIONS.values():
        if section.title == "Demos":
            continue
        for command in section.commands if section.title != "Supervised fine-tuning" else []:  # the one before
            run(command, tmp_path)
        for number, command in enumerate(section.runs()):
            place = next(flag for flag in ("--output_dir", "--output") if flag in command)
            name = "again" if ALONE in command else f"{section.title.split()[0].lower()}-{number}"
            command[command.index(place) + 1] += f"-{name}"
            if ALONE in command:
                first = with_items(section.commands[-1], [["--save_steps", "2"]])
                first[first.index(place) + 1] += "-again"
                run(first, tmp_path)
            run(command, tmp_path)
