# SPDX-License-Identifier: Apache-2.0
"""Values that a configuration is made from in Python, checked by the types of their flags."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from dschat.settings.flags import Flag
from dschat.settings.other_names import suggestion
from dschat.settings.words import kind_of

NAMES_OF_TYPES = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", Path: "a path"}


def checked_arguments(command: str, flags: Mapping[str, Flag], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the flags' own names, of the types that a command line gives.

    Args:
        command: name of the configuration, for messages.
        flags: the configuration's flags by name.
        arguments: values by the names of flags, or by other spellings of them.

    Raises:
        TypeError: there is no such flag, one is given twice, or a value is of another type.
    """
    name_of_spelling: dict[str, str] = {}
    for name, flag in flags.items():
        for alias in flag.aliases:
            name_of_spelling[alias.lstrip("-").replace("-", "_")] = name
    values: dict[str, Any] = {}
    spelling_of_name: dict[str, str] = {}
    for spelling, value in arguments.items():
        name = spelling if spelling in flags else name_of_spelling.get(spelling, "")
        if not name:
            hint = suggestion(spelling, flags.__contains__)
            raise TypeError(f"{command} has no flag {spelling}{f'; {hint}' if hint else ''}")
        if name in values:
            raise TypeError(f"{command}: {spelling} is given twice, once as {spelling_of_name[name]}")
        spelling_of_name[name] = spelling
        values[name] = _checked_value(f"{command}: {spelling}", flags[name], value)
    return values


def _checked_value(where: str, flag: Flag, value: Any) -> Any:
    """The value of one flag; `where` is named in messages."""
    if value is None:
        if NoneType not in get_args(flag.type):
            raise TypeError(f"{where} needs a value, not None")
        return None
    kind, several, convert = kind_of(flag.type)
    if isinstance(value, bool) and kind is not bool and "const" in flag.options:  # True is the flag without a value
        return flag.options["const"] if value else flag.default
    if kind is float and convert.__name__ != "float" and _is_number(value):  # --ngram keeps whole numbers whole
        if math.isnan(value):
            raise TypeError(f"{where} must be a number, not nan")
        return value
    if not several:
        return _checked_item(where, kind, flag.path, value)
    if isinstance(value, str | Path | Real):
        value = [value]
    if not isinstance(value, list | tuple):
        raise TypeError(f"{where} must be a list, not {_shown(value)}")
    items = [_checked_item(where, kind, flag.path, item) for item in value]
    return tuple(items) if isinstance(value, tuple) else items


def _checked_item(where: str, kind: Any, is_path: bool, value: Any) -> Any:
    """A value of a flag that takes one, or one of several."""
    if get_origin(kind) is Literal or kind not in NAMES_OF_TYPES:  # `check_values` checks choices
        return value
    if kind in (str, Path) and isinstance(value, str | Path):
        text = os.path.expanduser(value) if is_path or kind is Path else value
        return kind(text)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and _is_number(value) and (isinstance(value, Integral) or float(value).is_integer()):
        return int(value)
    if kind is float and _is_number(value):
        with suppress(OverflowError):
            return float(value)
    raise TypeError(f"{where} must be {NAMES_OF_TYPES[kind]}, not {_shown(value)}")


def _is_number(value: Any) -> bool:
    """Whether a value is a number; True and False are not. `check_values` refuses NaN."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"
