# SPDX-License-Identifier: Apache-2.0
"""Which columns rows have and what types they hold."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_COLUMNS = 60  # lines of a description


def describe_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines "name  type number, type number", nested columns as "info.post" and "summaries[].text".

    Args:
        rows: rows as they were read.

    Returns:
        One line per column, in the order of their first appearance, at most MAX_COLUMNS and one that says how many
        were left out. Types: text, text (empty), number, true/false, null, list, object, or the name of another.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for name, kind in _flatten("", row):
            found.setdefault(name, Counter())[kind] += 1
    width = max((len(name) for name in list(found)[:MAX_COLUMNS]), default=0)
    lines = [
        f"{name:{width}}  {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}"
        for name, kinds in list(found.items())[:MAX_COLUMNS]
    ]
    if len(found) > MAX_COLUMNS:
        lines.append(f"... and {len(found) - MAX_COLUMNS} more")
    return lines


def prompt_identity(prompt: str | None, messages: Any) -> str:
    """What two rows with the same prompt share, whether it is a text or a conversation."""
    return prompt if prompt is not None else json.dumps(messages, sort_keys=True)


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
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, str):
        return "text" if value else "text (empty)"
    if isinstance(value, int | float):
        return "number"
    return "list" if isinstance(value, list) else "object" if isinstance(value, Mapping) else type(value).__name__
