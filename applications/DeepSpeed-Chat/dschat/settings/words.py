# SPDX-License-Identifier: Apache-2.0
"""Flags as declared, and the way from their values back to words of a command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dschat.settings.flags import Flag, flags_of
from dschat.settings.variables import escape_path

TRUE, FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
APPEND = "+"  # `--data_path=a --data_path+=-b` gives two values, of which the second begins with a dash


def spellings(name: str) -> list[str]:
    """`num_samples` → `--num_samples`, `--num_samples`; `n` → `-n`."""
    if len(name) == 1:
        return [f"-{name}"]
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def as_text(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def as_words(flags: type, values: Mapping[str, Any]) -> list[str]:
    """A command line that gives flags these values.

    Args:
        flags: the command.
        values: values by name; flags that are not in it are left out.
    """
    words: list[str] = []
    bare_words: list[str] = []
    for name, flag in flags_of(flags).items():
        if name not in values:
            continue
        value = values[name]
        if value is None:
            words += [] if flag.default in (None, MISSING) else [f"{spellings(name)[0]}=none"]
        elif flag.positional:
            bare_words += texts_of(flags, name, value)
        elif isinstance(value, bool):
            words += _switch_words(flags, flag, value)
        elif isinstance(value, list | tuple):
            words += words_of_several(name, texts_of(flags, name, value))
        else:
            words.append(f"{spellings(name)[0]}={texts_of(flags, name, value)[0]}")
    # Behind `--` a word is no flag, whatever it begins with.
    return [*words, "--", *bare_words] if bare_words else words


def texts_of(flags: type, name: str, value: object) -> list[str]:
    """A value, or each of several, as text that reads as the same value again; see `is_path`."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [as_text(item) for item in values]
    return [escape_path(text) for text in texts] if is_path(flags, name) else texts


def is_path(flags: type, name: str) -> bool:
    """Whether `~` and variables are expanded in a flag's values."""
    return name in _path_flags(flags)


@cache
def _path_flags(flags: type) -> frozenset[str]:
    return frozenset(name for name, flag in flags_of(flags).items() if flag.path or kind_of(flag.type)[0] is Path)


def _switch_words(flags: type, flag: Flag, value: bool) -> list[str]:
    """The words that turn a flag on or off."""
    if value:
        return [f"--{flag.name}"]
    if flag.default is True:
        return [f"--no_{flag.name}"]
    # Beside words without dashes a flag takes no value, and is off unless it is given.
    return [] if takes_bare_words(flags) else [f"--{flag.name}=false"]


def words_of_several(name: str, texts: Sequence[str]) -> list[str]:
    """The words that give a flag several values, also such as begin with a dash, or none."""
    flag = spellings(name)[0]
    if not texts:
        return [flag]
    if len(texts) == 1 or any(text.startswith("-") for text in texts):
        return [f"{flag}={texts[0]}", *(f"{flag}{APPEND}={text}" for text in texts[1:])]
    return [flag, *texts]


def positional_flags(flags: type) -> list[str]:
    """The flags that are words without dashes."""
    return [name for name, flag in flags_of(flags).items() if flag.positional]


def takes_bare_words(flags: type) -> bool:
    """Whether a command has words without dashes, which a flag with an optional value would swallow."""
    return bool(positional_flags(flags)) or hasattr(flags, "rest")


def kind_of(hint: Any) -> tuple[Any, bool, Callable[[str], Any]]:
    """Of a type: what one value is, whether there are several, and what turns a word into one."""
    convert = None
    if get_origin(hint) is Annotated:
        convert, hint = hint.__metadata__[0], get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
        if convert is None and hint in (int, float):
            convert = _number_or_none(hint)
    several = get_origin(hint) in (list, tuple) or getattr(get_origin(hint), "__name__", "") == "Sequence"
    if several:
        hint = get_args(hint)[0]
    if get_origin(hint) is Annotated:
        convert, hint = hint.__metadata__[0], get_args(hint)[0]
    if convert is None and get_origin(hint) is Literal:
        convert = _one_of(get_args(hint))
    return hint, several, convert or (truth if hint is bool else hint)


def _one_of(choices: Sequence[object]) -> Callable[[str], object]:
    known = {str(choice): choice for choice in choices}
    return lambda word: known.get(word, word)


def _number_or_none(kind: type) -> Callable[[str], object]:
    """What reads a number, or none: the default again, where a file gives a number."""

    def convert(word: str) -> object:
        return None if word.lower() == "none" else kind(word)

    convert.__name__ = kind.__name__  # in messages
    return convert


def truth(word: str) -> bool:
    if word.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"invalid truth value: {word!r}; give true or false")
    return word.lower() in TRUE
