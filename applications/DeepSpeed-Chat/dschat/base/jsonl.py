# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files, also packed: read row by row with the place of each, written whole or not at all."""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, writing
from dschat.base.errors import UserError


class CutLine(UserError):
    """The last line of a file is no JSON and has no line end: whoever writes the file may not be done."""


@contextmanager
def opened(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """A file to read, unpacked where its name ends in .gz. Raises OSError, also where a packed file is damaged."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        try:
            yield stream
        except (EOFError, zlib.error) as error:
            raise OSError(f"the packed file is damaged or cut off: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """What the lines of a file hold, each with its place "file:line"; reads line by line, so files may be large.

    Blank lines are passed over but counted.

    Raises:
        OSError: the file cannot be read.
        UserError: a line is no JSON; names file and line. `CutLine` if it is the last one, without a line end.
    """
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                value = parse_json(line.rstrip(), origin)
            except UserError as error:
                if line.endswith(b"\n"):
                    raise
                raise CutLine(str(error)) from error
            yield origin, value


def parse_json(content: bytes, origin: str) -> Any:
    """What JSON text in UTF-8 holds, with or without a byte-order mark.

    Raises:
        UserError: it is none; the message begins with `origin`.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as in "Invalid control character at"
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{origin}: not valid JSON ({what} at {place}); correct or remove the row.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not readable as JSON in UTF-8 ({error}); correct or remove the row.") from error


def read_rows(
    path: Path,
    flag: str,
) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file that a command-line flag named, each with its place "file:line"; see `iterate_rows`."""
    return list(iterate_rows(path, flag))


def iterate_rows(
    path: Path,
    flag: str,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same row by row, for large files.

    Raises:
        UserError: the file is missing, empty or not readable, or a line is no JSON object; names file and line.
    """
    empty = True
    try:
        for origin, row in json_lines(path):
            if not isinstance(row, dict):
                raise UserError(f"{origin}: {type(row).__name__} instead of an object with columns; correct the line.")
            empty = False
            yield origin, row
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(f"{flag} {path}: {reason}. Give a .jsonl file.") from error
    if empty:
        raise UserError(f"{flag} {path}: the file is empty; give one with at least one row.")


def text_of(
    row: Mapping[str, Any],
    column: str,
    origin: str,
) -> str:
    """Text of a column. Raises UserError where it is missing or no text."""
    value = row.get(column)
    if not isinstance(value, str):
        found = f"column {column!r} holds {type(value).__name__}" if column in row else f"no column {column!r}"
        raise UserError(f"{origin}: {found}, text is needed; its columns are {', '.join(map(repr, row)) or 'none'}.")
    return value


def dump_row(row: Mapping[str, Any]) -> str:
    """One line, with its end; characters as they are."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8") + "\n"


def write_rows(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
) -> None:
    """Writes a file at once, whoever else writes it at the same time; raises UserError where it cannot be written."""
    with reporting(str(path)), writing(path, shared=True) as beside, open(beside, "w", encoding="utf-8") as file:
        file.writelines(map(dump_row, rows))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file; {} where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
