# SPDX-License-Identifier: Apache-2.0
"""Our names for other trainers' settings and commands, and DeepSpeed-Chat flags without effect: other_names.toml."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OtherSetting:
    """A setting of other trainers.

    Attributes:
        names: trainer (TRL, LLaMA-Factory, Axolotl) → its names for the setting.
        flags: our flags for it, some with a value; may be empty.
        note: an explanation; may be empty where there are flags.
    """

    names: Mapping[str, Sequence[str]]
    flags: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class OtherCommand:
    """A command or an algorithm of other trainers.

    Attributes:
        names: its names.
        here: our commands for it.
        note: an explanation; may be empty.
    """

    names: Sequence[str]
    here: Sequence[str]
    note: str = ""


@cache
def settings() -> Sequence[OtherSetting]:
    """The settings of other trainers."""
    return [OtherSetting(**row) for row in _tables()["setting"]]


@cache
def commands() -> Sequence[OtherCommand]:
    """The commands of other trainers."""
    return [OtherCommand(**row) for row in _tables()["command"]]


@cache
def _tables() -> Mapping[str, Any]:
    """The tables of other_names.toml, whose first lines describe them."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def suggestion(name: str, command_has: Callable[[str], bool]) -> str:
    """Our flag for a setting of another trainer, as the end of a message; empty for an unknown name.

    Args:
        name: the name, without dashes and with underscores.
        command_has: whether the command has a flag, without dashes.
    """
    for setting in settings():
        trainers = [trainer for trainer, names in setting.names.items() if name in names]
        if not trainers:
            continue
        theirs = f"{name} of {', '.join(trainers)}"
        note = f": {setting.note}" if setting.note else ""
        for words in setting.flags:
            if command_has(words.split()[0].removeprefix("--")):
                return f"did you mean {words}? ({theirs}{note})"
        if setting.flags:
            return f"{theirs} is {setting.flags[0]} in other commands{note}"
        return f"{theirs} has no flag here{note}"
    return ""


def command_suggestion(name: str) -> str:
    """Our command for one of another trainer, as the end of a question; empty for an unknown name."""
    for command in commands():
        if name in command.names:
            note = f" ({command.note})" if command.note else ""
            return f"did you mean {alternatives(command.here)}?{note}"
    return ""


def inert_flags(command: type) -> dict[str, str]:
    """Flags that a training step accepts with a warning, and why they do nothing here; empty for other commands.

    Args:
        command: class of the flags; `own_inert_flags` of a training step are those of the step alone.
    """
    own: Mapping[str, str] | None = getattr(command, "own_inert_flags", None)
    return {} if own is None else {**_tables()["inert"], **own}


def value_hint(name: str) -> str:
    """What to do with another trainer's value of a flag that is a truth value here; empty if nothing is known."""
    return str(_tables()["value"].get(name, ""))


def alternatives(texts: Sequence[str]) -> str:
    """Join alternatives: "a", "a or b", "a, b or c". At least one text."""
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} or {texts[-1]}"
