# SPDX-License-Identifier: Apache-2.0
"""Values that a configuration is made from in Python. Each is read from its text, as on a command line."""

import argparse
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from dschat.settings.flag_types import as_text, holds_paths, type_of
from dschat.settings.flags import Flag
from dschat.settings.other_names import suggestion


def checked_arguments(command: str, flags: Mapping[str, Flag], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the flags' own names, of the types that a command line gives.

    Args:
        command: name of the configuration, for messages.
        flags: the configuration's flags by name.
        arguments: values by the names of flags, or by other spellings of them.

    Raises:
        TypeError: there is no such flag, one is given twice, or a value is of another type.
    """
    name_of_spelling = {name: name for name in flags}
    for name, flag in flags.items():
        for alias in flag.aliases:
            name_of_spelling[alias.lstrip("-").replace("-", "_")] = name
    values: dict[str, Any] = {}
    for spelling, value in arguments.items():
        if spelling not in name_of_spelling:
            hint = suggestion(spelling, flags.__contains__)
            raise TypeError(f"{command} has no flag {spelling}{f'; {hint}' if hint else ''}")
        name = name_of_spelling[spelling]
        if name in values:
            raise TypeError(f"{command}: {spelling} is given twice, under two of its names")
        values[name] = _checked_value(f"{command}: {spelling}", flags[name], value)
    return values


def _checked_value(where: str, flag: Flag, value: Any) -> Any:
    """The value of one flag; `where` is named in messages."""
    flag_type = type_of(flag.type)
    if value is None:
        if not flag_type.has_none:
            raise TypeError(f"{where} needs a value, not None")
        return None
    # True is a flag that needs no value, as `--resume_from_checkpoint` alone.
    if isinstance(value, bool) and flag_type.kind is not bool and "const" in flag.options:
        return flag.options["const"] if value else flag.default
    if not flag_type.several:
        return _checked_item(where, flag, value)
    if isinstance(value, list | tuple):
        return type(value)([_checked_item(where, flag, item) for item in value])
    return [_checked_item(where, flag, value)]


def _checked_item(where: str, flag: Flag, value: Any) -> Any:
    """A value of a flag that takes one, or one of several."""
    flag_type = type_of(flag.type)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_text = isinstance(value, str | Path) and flag_type.kind not in (int, float, bool)
    is_truth = isinstance(value, bool) and flag_type.kind is bool
    if is_text or is_truth or (is_number and flag_type.kind not in (str, Path, bool)):
        text = as_text(value)
        try:
            return flag_type.convert(os.path.expanduser(text) if holds_paths(flag) else text)
        except (ValueError, argparse.ArgumentTypeError):
            pass
    raise TypeError(f"{where} must be {flag_type.name}, not {value!r} of type {type(value).__name__}")
