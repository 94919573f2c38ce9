# SPDX-License-Identifier: Apache-2.0
"""Values that a configuration is made from in Python. Each is read from its text, as on a command line."""

import os
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from dschat.settings.flag_types import as_text, holds_paths, type_of
from dschat.settings.flags import Flag, flags_by_spelling
from dschat.settings.other_names import suggestion


def checked_arguments(command: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the flags' own names, of the types that a command line gives.

    Args:
        command: the class of the configuration.
        arguments: values by the names of flags, or by other spellings of them.

    Raises:
        TypeError: there is no such flag, one is given twice, or a value is of another type.
    """
    flags = flags_by_spelling(command)
    values: dict[str, Any] = {}
    for spelling, value in arguments.items():
        where = f"{command.__name__}: {spelling}"
        if spelling not in flags:
            hint = suggestion(spelling, flags.__contains__)
            raise TypeError(f"{command.__name__} has no flag {spelling}{f'; {hint}' if hint else ''}")
        name = flags[spelling].name
        if name in values:
            raise TypeError(f"{where} is given twice, under two of its names")
        values[name] = _checked_value(where, flags[spelling], value)
    return values


def _checked_value(where: str, flag: Flag, value: Any) -> Any:
    """The value of one flag; `where` is named in messages."""
    flag_type = type_of(flag.type)
    if value is None:
        if not flag_type.has_none:
            raise TypeError(f"{where} needs a value, not None")
        return None
    # True is a flag that needs no value, as `--resume_from_checkpoint` alone.
    if isinstance(value, bool) and flag.alone is not MISSING:
        return flag.alone if value else flag.default
    if not flag_type.several:
        return _checked_item(where, flag, value)
    if isinstance(value, list | tuple):
        return type(value)([_checked_item(where, flag, item) for item in value])
    return [_checked_item(where, flag, value)]


def _checked_item(where: str, flag: Flag, value: Any) -> Any:
    """A value of a flag that takes one, or one of several."""
    flag_type = type_of(flag.type)
    kind = flag_type.kind
    if isinstance(value, kind.python) and isinstance(value, bool) == (bool in kind.python):
        text = as_text(value)
        try:
            return flag_type.read(os.path.expanduser(text) if holds_paths(flag) else text)
        except ValueError:
            pass
    raise TypeError(f"{where} must be {kind.name}, not {value!r} of type {type(value).__name__}")
