# SPDX-License-Identifier: Apache-2.0
"""Flags as declared, and the way from their values back to words of a command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dschat.settings.rules import Notes
from dschat.settings.variables import escape_path

TRUE, FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
APPEND = "+"  # `--data_path=a --data_path+=-b` gives two values, of which the second begins with a dash


def notes_of(field: "Field[Any]") -> Notes:
    """What is declared of a flag beside name, default and help."""
    notes: Notes = field.metadata["notes"]
    return notes


def default_value(field: "Field[Any]") -> Any:
    """The default of a flag; MISSING where it must be given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


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
    """A command line that gives the fields of a dataclass these values.

    Args:
        flags: the dataclass.
        values: values by field; fields that are not in it are left out.
    """
    words: list[str] = []
    bare_words: list[str] = []
    for one in fields(flags):
        if one.name not in values:
            continue
        value = values[one.name]
        if value is None:
            words += [] if default_value(one) in (None, MISSING) else [f"{spellings(one.name)[0]}=none"]
        elif notes_of(one).positional:
            bare_words += texts_of(flags, one.name, value)
        elif isinstance(value, bool):
            words += _switch_words(flags, one, value)
        elif isinstance(value, list | tuple):
            words += words_of_several(one.name, texts_of(flags, one.name, value))
        else:
            words.append(f"{spellings(one.name)[0]}={texts_of(flags, one.name, value)[0]}")
    # Behind `--` a word is no flag, whatever it begins with.
    return [*words, "--", *bare_words] if bare_words else words


def texts_of(flags: type, name: str, value: object) -> list[str]:
    """A value, or each of several, as text that reads as the same value again; see `is_path`."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [as_text(one) for one in values]
    return [escape_path(text) for text in texts] if is_path(flags, name) else texts


def is_path(flags: type, name: str) -> bool:
    """Whether `~` and variables are expanded in a field's values."""
    return name in _path_fields(flags)


@lru_cache
def _path_fields(flags: type) -> frozenset[str]:
    hints = get_type_hints(flags, include_extras=True)
    return frozenset(one.name for one in fields(flags) if notes_of(one).path or kind_of(hints[one.name])[0] is Path)


def _switch_words(flags: type, field: "Field[Any]", value: bool) -> list[str]:
    """The words that turn a flag on or off."""
    if value:
        return [f"--{field.name}"]
    if default_value(field) is True:
        return [f"--no_{field.name}"]
    # Beside words without dashes a flag takes no value, and is off unless it is given.
    return [] if takes_bare_words(flags) else [f"--{field.name}=false"]


def words_of_several(name: str, texts: Sequence[str]) -> list[str]:
    """The words that give a flag several values, also such as begin with a dash, or none."""
    flag = spellings(name)[0]
    if not texts:
        return [flag]
    if len(texts) == 1 or any(text.startswith("-") for text in texts):
        return [f"{flag}={texts[0]}", *(f"{flag}{APPEND}={text}" for text in texts[1:])]
    return [flag, *texts]


def positional_fields(flags: type) -> list[str]:
    return [one.name for one in fields(flags) if notes_of(one).positional]


def takes_bare_words(flags: type) -> bool:
    """Whether a command has words without dashes, which a flag with an optional value would swallow."""
    return bool(positional_fields(flags)) or hasattr(flags, "rest")


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
