# SPDX-License-Identifier: Apache-2.0
"""Types of flags. A value is read from text, wherever it is given: on a command line, in a file, in the environment or
in Python.

`KINDS` says of each type how its text is read, what it is called in messages and in --help, and how files may hold it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dschat.settings.flags import Flag
from dschat.settings.other_names import value_hint

Schema = dict[str, Any]  # a JSON schema
TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n")
# Numbers that YAML 1.1 reads as text, such as 1e-5, and the words inf and none.
NUMBER_AS_TEXT = r"^([-+]?(\.?[iI]nf|([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?)|[nN]one)$"
ANY_TEXT: Schema = {"type": ["string", "number", "boolean"]}


@dataclass(frozen=True)
class Kind:
    """A type of single values.

    Attributes:
        read: makes a value of its text. Raises ValueError, which says what a text should be, or UserError.
        name: what a value is, in messages about values of Python.
        metavar: what stands for a value in --help.
        python: types of Python that a value may have.
        schemas: how YAML files may hold a value, but for texts that name variables.
    """

    read: Callable[[str], Any]
    name: str
    metavar: str
    python: tuple[Any, ...]
    schemas: tuple[Schema, ...]


def read_truth(text: str) -> bool:
    """`yes`, `on`, `1`, … → True; `no`, `off`, `0`, … → False."""
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"invalid truth value: {text!r}; give true or false")
    return text.lower() in TRUE


def read_whole_number(text: str) -> int:
    """`3` → 3, and `3.0` → 3, as files of other trainers write numbers of epochs."""
    try:
        number = Decimal(text)
        if number == int(number):
            return int(number)
    except (ArithmeticError, ValueError):  # no number; infinity; NaN
        pass
    raise ValueError(f"invalid int value: {text!r}; give a whole number")


def read_number(text: str) -> float:
    """`1e-5` → 0.00001, and `.inf`, as YAML writes it, → infinity."""
    try:
        return float(text.lower().replace(".inf", "inf"))
    except ValueError:
        raise ValueError(f"invalid float value: {text!r}") from None


KINDS: dict[Any, Kind] = {
    bool: Kind(read_truth, "True or False", "BOOL", (bool,), ({"type": "boolean"}, {"enum": [*TRUE, *FALSE, 1, 0]})),
    int: Kind(
        read_whole_number,
        "a whole number",
        "INT",
        (Real,),
        ({"type": "integer"}, {"type": "string", "pattern": NUMBER_AS_TEXT}),
    ),
    float: Kind(
        read_number, "a number", "FLOAT", (Real,), ({"type": "number"}, {"type": "string", "pattern": NUMBER_AS_TEXT})
    ),
    str: Kind(str, "a text", "TEXT", (str, Path), (ANY_TEXT,)),
    Path: Kind(Path, "a path", "PATH", (str, Path), (ANY_TEXT,)),
}


def _kind_of_choices(choices: Sequence[Any]) -> Kind:
    """The kind of a Literal. Another text stays as it is, so that it is refused as other choices are."""
    choice_of = {str(choice): choice for choice in choices}
    return Kind(lambda text: choice_of.get(text, text), "a text", "TEXT", (str, Path, Real), ())


@dataclass(frozen=True)
class FlagType:
    """What the values of a flag are.

    Attributes:
        kind: the kind of a single value.
        several: the flag takes a list of them.
        has_none: None is a value, too.
        read: reads a single value from its text, see `Kind`.
    """

    kind: Kind
    several: bool
    has_none: bool
    read: Callable[[str], Any]


@cache
def type_of(hint: Any) -> FlagType:
    """The type of a flag with an annotation like ``list[int]``, ``float | None`` or ``Annotated[float, read]``."""
    own_reader, hint = _without_annotation(hint)
    has_none = get_origin(hint) in (Union, UnionType)
    if has_none:
        (hint,) = [part for part in get_args(hint) if part is not NoneType]
    several = get_origin(hint) in (list, tuple) or getattr(get_origin(hint), "__name__", "") == "Sequence"
    if several:
        item_reader, hint = _without_annotation(get_args(hint)[0])
        own_reader = item_reader or own_reader
    kind = _kind_of_choices(get_args(hint)) if get_origin(hint) is Literal else KINDS[hint]
    reader = kind.read
    if hint in (int, float) and has_none and not several:
        reader = _number_or_none(reader)
    return FlagType(kind, several, has_none, own_reader or reader)


def _without_annotation(hint: Any) -> tuple[Any, Any]:
    """The reader of an ``Annotated`` type, or None, and the type."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0], get_args(hint)[0]
    return None, hint


def _number_or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader for which `none` takes a number back that a file gives."""
    return lambda text: None if text.lower() == "none" else read(text)


def holds_paths(flag: Flag) -> bool:
    """Whether a flag's value, or each of several, may be a path, in which `~` and variables are expanded."""
    return flag.path or type_of(flag.type).kind is KINDS[Path]


def read_value(flag: Flag, text: str | Sequence[str]) -> Any:
    """The value of a flag, from its text or the texts of several values.

    Raises:
        ValueError: the flag cannot have this value; says why.
        UserError: as well, from the reader of a single flag.
    """
    several = type_of(flag.type).several
    if isinstance(text, str):
        value = _read_item(flag, text)
        return [value] if several else value
    if not several:
        raise ValueError("it takes one value, not a list")
    if not text and not flag.may_be_empty:
        raise ValueError("expected at least one argument")
    return [_read_item(flag, item) for item in text]


def _read_item(flag: Flag, text: str) -> Any:
    if not text and holds_paths(flag):
        raise ValueError("the path is empty (is a shell variable not set?): give one, or leave it out")
    try:
        value = type_of(flag.type).read(text)
    except ValueError as error:
        hint = value_hint(flag.name)
        raise ValueError(f"{error}; {hint}" if hint else str(error)) from error
    if flag.choices and value is not None and value not in flag.choices:
        raise ValueError(f"invalid choice: {value!r} (choose from {', '.join(map(repr, flag.choices))})")
    return value


def as_text(value: object) -> str:
    """The text from which a value is read again."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else str(value)
    return str(value)
