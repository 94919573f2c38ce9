# SPDX-License-Identifier: Apache-2.0
"""What differs between two mappings from names to values, such as the settings that made a file and those of now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed_names(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Names whose values differ, those of `current` first; a name that is missing counts as None."""
    names = dict.fromkeys([*current, *saved])
    return [name for name in names if saved.get(name) != current.get(name)]


def first_change(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The first changed flag, as in "--seed 1, now it is 2"; empty if there is none."""
    for name in changed_names(saved, current):
        flag = name.replace("-", "_")
        return f"--{flag} {saved.get(name)}, now it is {current.get(name)}"
    return ""
