# SPDX-License-Identifier: Apache-2.0
"""Types of flags, and the way from their values back to words of a command line."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dschat.settings.flags import Flag, flags_of
from dschat.settings.variables import escape_path

TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n")
APPEND = "+"  # `--data_path=a --data_path+=-b` gives two values, of which the second begins with a dash


def spellings(name: str) -> list[str]:
    """`num_samples` → `--num_samples`, `--num-samples`; `n` → `-n`."""
    if len(name) == 1:
        return [f"-{name}"]
    with_hyphens = name.replace("_", "-")
    return [f"--{name}"] if with_hyphens == name else [f"--{name}", f"--{with_hyphens}"]


def as_text(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else str(value)
    return str(value)


def as_words(flags: type, values: Mapping[str, Any]) -> list[str]:
    """Command line that gives flags these values.

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
            if flag.default not in (None, MISSING):
                words.append(f"{spellings(name)[0]}=none")
        elif flag.positional:
            bare_words += texts_of(flags, name, value)
        elif isinstance(value, bool):
            words += _switch_words(flags, flag, value)
        elif isinstance(value, list | tuple):
            words += words_of_several(name, texts_of(flags, name, value))
        else:
            words.append(f"{spellings(name)[0]}={texts_of(flags, name, value)[0]}")
    if bare_words:
        words += ["--", *bare_words]  # after `--` a word is not a flag, whatever it begins with
    return words


def texts_of(flags: type, name: str, value: object) -> list[str]:
    """Texts from which a flag reads the value, or each of several values, again."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [as_text(item) for item in values]
    if is_path(flags, name):
        return [escape_path(text) for text in texts]
    return texts


def is_path(flags: type, name: str) -> bool:
    """Whether `~` and variables are expanded in a flag's values."""
    return name in _path_flags(flags)


@cache
def _path_flags(flags: type) -> frozenset[str]:
    names = []
    for name, flag in flags_of(flags).items():
        if flag.path or kind_of(flag.type)[0] is Path:
            names.append(name)
    return frozenset(names)


def _switch_words(flags: type, flag: Flag, value: bool) -> list[str]:
    """The words that turn a flag on or off."""
    if value:
        return [f"--{flag.name}"]
    if flag.default is True:
        return [f"--no_{flag.name}"]
    if takes_bare_words(flags):  # then a flag takes no value, and is off unless it is given
        return []
    return [f"--{flag.name}=false"]


def words_of_several(name: str, texts: Sequence[str]) -> list[str]:
    """Words that give a flag any number of values. Values that begin with a dash need a word of their own."""
    flag = spellings(name)[0]
    if not texts:
        return [flag]
    if len(texts) > 1 and not any(text.startswith("-") for text in texts):
        return [flag, *texts]
    first, *others = texts
    return [f"{flag}={first}", *(f"{flag}{APPEND}={text}" for text in others)]


def positional_flags(flags: type) -> list[str]:
    """The flags that are words without dashes."""
    positional: list[str] = []
    for name, flag in flags_of(flags).items():
        if flag.positional:
            positional.append(name)
    return positional


def takes_bare_words(flags: type) -> bool:
    """Whether a command has words without dashes, which a flag with an optional value would swallow."""
    return bool(positional_flags(flags)) or hasattr(flags, "other_words")


def kind_of(hint: Any) -> tuple[Any, bool, Callable[[str], Any]]:
    """Type of a flag's single value, whether it takes several, and the function from a word to a value.

    Args:
        hint: annotation of the flag's field, such as ``list[int]``, ``float | None`` or ``Annotated[float, convert]``.
    """
    convert, hint = _without_annotation(hint)
    if get_origin(hint) in (Union, UnionType):
        (hint,) = [part for part in get_args(hint) if part is not NoneType]
        if convert is None and hint in (int, float):
            convert = _number_or_none(hint)
    several = get_origin(hint) in (list, tuple) or getattr(get_origin(hint), "__name__", "") == "Sequence"
    if several:
        item_convert, hint = _without_annotation(get_args(hint)[0])
        convert = item_convert or convert
    if convert is None and get_origin(hint) is Literal:
        convert = _choice(get_args(hint))
    if convert is None:
        convert = truth if hint is bool else _converter(hint)
    return hint, several, convert


def _converter(kind: Any) -> Callable[[str], Any]:
    """Function from a word to a value of a type."""
    return whole_number if kind is int else kind


def _without_annotation(hint: Any) -> tuple[Any, Any]:
    """The converter of an ``Annotated`` type, or None, and the type."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0], get_args(hint)[0]
    return None, hint


def _choice(choices: Sequence[object]) -> Callable[[str], object]:
    """Function from a word to the choice that it names; argparse refuses other words."""
    choice_of = {str(choice): choice for choice in choices}
    return lambda word: choice_of.get(word, word)


def _number_or_none(kind: type) -> Callable[[str], object]:
    """Function that reads a number, or `none`, which takes back a number from a file."""

    def convert(word: str) -> object:
        return None if word.lower() == "none" else _converter(kind)(word)

    convert.__name__ = kind.__name__  # in messages
    return convert


def whole_number(word: str) -> int:
    """`3` → 3, and `3.0` → 3, as files of other trainers write numbers of epochs."""
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"invalid int value: {word!r}; give a whole number")
    return int(number)


def truth(word: str) -> bool:
    """`yes`, `on`, `1`, … → True; `no`, `off`, `0`, … → False."""
    if word.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"invalid truth value: {word!r}; give true or false")
    return word.lower() in TRUE
