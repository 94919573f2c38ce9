# SPDX-License-Identifier: Apache-2.0
"""Which columns rows have and what types they hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

MAX_COLUMNS = 60  # lines of a description


def describe_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines "name  type number, type number", nested columns as "info.post" and "summaries[].text".

    One line per column, in the order of their first appearance, at most MAX_COLUMNS and one that says how many were
    left out. Types: text, text (empty), number, true/false, null, list, object, or the name of another.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for name, kind in _flatten("", row):
            found.setdefault(name, Counter())[kind] += 1
    shown = dict(islice(found.items(), MAX_COLUMNS))
    width = max(map(len, shown), default=0)
    lines = [
        f"{name:{width}}  {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}"
        for name, kinds in shown.items()
    ]
    if len(found) > MAX_COLUMNS:
        lines.append(f"... and {len(found) - MAX_COLUMNS} more")
    return lines


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(column, type) of a value and of everything in it; the row itself has no name."""
    if name:
        yield name, _type(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list):
        for item in value:
            yield from _flatten(f"{name}[]", item)


def _type(value: Any) -> str:
    if isinstance(value, str):
        return "text" if value else "text (empty)"
    names = {type(None): "null", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)
