# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files of responses and verdicts: read with the place of every row, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dschat.errors import UserError


def read_rows(path: Path, flag: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place "file:line".

    Args:
        path: a JSON Lines file; blank lines are passed over but counted.
        flag: the command-line flag that named it, for messages.

    Raises:
        UserError: the file is missing, empty or not readable, or a line is no JSON object; names file and line.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(f"{flag} {path}: {reason}. Give a .jsonl file.") from error
    rows = []
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            origin = f"{path}:{number}"
            rows.append((origin, _parse(line, origin)))
    if not rows:
        raise UserError(f"{flag} {path}: the file is empty; give one with at least one row.")
    return rows


def text_of(row: Mapping[str, Any], column: str, origin: str) -> str:
    """Text of a column.

    Raises:
        UserError: it is missing or no text.
    """
    value = row.get(column)
    if not isinstance(value, str):
        found = f"column {column!r} holds {type(value).__name__}" if column in row else f"no column {column!r}"
        raise UserError(f"{origin}: {found}, text is needed; its columns are {', '.join(map(repr, row)) or 'none'}.")
    return value


def dump_row(row: Mapping[str, Any]) -> str:
    """One line, with its end; characters as they are."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8") + "\n"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file at once: whoever reads it sees the old content or the new, never a part.

    Raises:
        UserError: the place cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(map(dump_row, rows))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error}") from error


def _parse(line: bytes, origin: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{origin}: not valid JSON ({reason}); correct or remove the line.") from error
    if not isinstance(row, dict):
        raise UserError(f"{origin}: {type(row).__name__} instead of an object with columns; correct the line.")
    return row
