# SPDX-License-Identifier: Apache-2.0
"""docs/coming-from-sheeprl.md: its commands run, and so does every flag of its tables with its section's command."""

import re
from dataclasses import dataclass

import pytest

from cli_runs import ROOT
from dschat.cli import command_name
from test_readme import blocks, commands, known_flags
from test_readme import flags_of as flags_of_command

DOCUMENT = ROOT / "docs" / "coming-from-sheeprl.md"
SPAN = re.compile(r"`(--[^`]+)`")
# What stands for the hub's things here: a folder with a tiny model, one with comparisons.
# The published sizes would be hours on a tiny model; a flag of a table stands before them.
# These stand in the place of a flag of the command.


@dataclass
class Section:
    """A part of the document: its commands, and what its table adds to the last of them."""

    title: str
    commands: list[list[str]]
    items: list[list[str]]


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
