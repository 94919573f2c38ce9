# SPDX-License-Identifier: Apache-2.0
"""Types of flags, and the way from texts to values and back; the only reader of the annotations of flags.

A value is read from its text, wherever it comes from: the command line, a file, the environment or Python.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dschat.settings.flags import Flag, flags_of
from dschat.settings.variables import escape_path

TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n")
# Type of a value → what it is called where another one is given in Python.
NAMES_OF_TYPES = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path"}


@dataclass(frozen=True)
class FlagType:
    """What the values of a flag are.

    Attributes:
        kind: type of a single value.
        several: the flag takes a list of them.
        has_none: None is a value, too.
        convert: reads a single value from a text. Raises ArgumentTypeError, ValueError or UserError.
    """

    kind: Any
    several: bool
    has_none: bool
    convert: Callable[[str], Any]

    @property
    def name(self) -> str:
        """What a value is, for messages."""
        return NAMES_OF_TYPES.get(self.kind, "a text")


@cache
def type_of(hint: Any) -> FlagType:
    """The type of a flag with an annotation like ``list[int]``, ``float | None`` or ``Annotated[float, convert]``."""
    convert, hint = _without_annotation(hint)
    has_none = get_origin(hint) in (Union, UnionType)
    if has_none:
        (hint,) = [part for part in get_args(hint) if part is not NoneType]
    several = get_origin(hint) in (list, tuple) or getattr(get_origin(hint), "__name__", "") == "Sequence"
    if several:
        item_convert, hint = _without_annotation(get_args(hint)[0])
        convert = item_convert or convert
    return FlagType(hint, several, has_none, convert or _converter(hint, has_none and not several))


def _without_annotation(hint: Any) -> tuple[Any, Any]:
    """The converter of an ``Annotated`` type, or None, and the type."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0], get_args(hint)[0]
    return None, hint


def _converter(kind: Any, has_none: bool) -> Callable[[str], Any]:
    """Function from a text to a value; of a number, `none` takes back what a file gives."""
    if get_origin(kind) is Literal:
        choice_of = {str(choice): choice for choice in get_args(kind)}
        return lambda text: choice_of.get(text, text)  # other texts are refused as other choices are
    if kind is bool:
        return truth
    number_of: Any = whole_number if kind is int else kind
    if kind not in (int, float) or not has_none:
        converter: Callable[[str], Any] = number_of
        return converter

    def number_or_none(text: str) -> object:
        return None if text.lower() == "none" else number_of(text)

    number_or_none.__name__ = kind.__name__  # in messages of argparse
    return number_or_none


def whole_number(text: str) -> int:
    """`3` → 3, and `3.0` → 3, as files of other trainers write numbers of epochs."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}; give a whole number")
    return int(number)


def truth(text: str) -> bool:
    """`yes`, `on`, `1`, … → True; `no`, `off`, `0`, … → False."""
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"invalid truth value: {text!r}; give true or false")
    return text.lower() in TRUE


def spellings(name: str) -> list[str]:
    """`num_samples` → `--num_samples`, `--num-samples`; `n` → `-n`."""
    if len(name) == 1:
        return [f"-{name}"]
    with_hyphens = name.replace("_", "-")
    return [f"--{name}"] if with_hyphens == name else [f"--{name}", f"--{with_hyphens}"]


def as_text(value: object) -> str:
    """The text from which a value is read again."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else str(value)
    return str(value)


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
    return frozenset(name for name, flag in flags_of(flags).items() if holds_paths(flag))


def holds_paths(flag: Flag) -> bool:
    """Whether a flag's value, or each of several, may be a path."""
    return flag.path or type_of(flag.type).kind is Path


def positional_flags(flags: type) -> list[str]:
    """The flags that are words without dashes."""
    return [name for name, flag in flags_of(flags).items() if flag.positional]


def takes_bare_words(flags: type) -> bool:
    """Whether a command has words without dashes, which a flag with an optional value would swallow."""
    return bool(positional_flags(flags)) or hasattr(flags, "other_words")
