# SPDX-License-Identifier: Apache-2.0
"""What settings and commands of other trainers are called here, or why they do nothing; read from other_names.toml."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

TRAINERS = ("TRL", "LLaMA-Factory", "Axolotl")


@cache
def tables() -> Mapping[str, Any]:
    """The tables of other_names.toml, whose first lines describe them."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def suggestion(name: str, command_has: Callable[[str], bool]) -> str:
    """Our flag for a setting of another trainer, as the end of a message; empty for an unknown name.

    Args:
        name: the name, without dashes and with underscores.
        command_has: whether the command has a flag, without dashes.
    """
    for setting in tables()["setting"]:
        trainers = [trainer for trainer in TRAINERS if name in setting.get(trainer, ())]
        if not trainers:
            continue
        theirs = f"{name} of {', '.join(trainers)}"
        flags = setting.get("flags", ())
        note = f": {setting['note']}" if "note" in setting else ""
        for words in flags:
            if command_has(words.split()[0].removeprefix("--")):
                return f"did you mean {words}? ({theirs}{note})"
        return f"{theirs} is {flags[0]} in other commands" if flags else f"{theirs} has no flag here{note}"
    return ""


def command_suggestion(name: str) -> str:
    """Our command for one of another trainer, as the end of a question; empty for an unknown name."""
    for command in tables()["command"]:
        if name in command["names"]:
            note = f" ({command['note']})" if "note" in command else ""
            return f"did you mean {alternatives(command['here'])}?{note}"
    return ""


def inert_flags(command: type) -> dict[str, str]:
    """Flags that a training step accepts with a warning, and why they do nothing here; empty for other commands.

    Args:
        command: class of the flags; `own_inert_flags` of a training step are those of the step alone.
    """
    own: Mapping[str, str] | None = getattr(command, "own_inert_flags", None)
    return {} if own is None else {**tables()["inert"], **own}


def value_hint(name: str) -> str:
    """What to do with another trainer's value of a flag that is a truth value here; empty if nothing is known."""
    return str(tables()["value"].get(name, ""))


def alternatives(texts: Sequence[str]) -> str:
    """Texts as the end of a sentence: "a, b or c"."""
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} or {texts[-1]}"
