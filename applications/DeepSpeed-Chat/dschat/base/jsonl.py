# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files, compressed or not: read row by row with their line numbers, written completely or not at all."""

import codecs
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, writing, writing_once
from dschat.base.errors import UserError
from dschat.base.lfs import refuse_pointer


class CutLine(UserError):
    """The last line of a file is not JSON and has no line end: the file may still be being written."""


@contextmanager
def opened(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Opens a file to read, decompressed if its name ends in .gz. Raises OSError, also if it is damaged."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        try:
            yield stream
        except (EOFError, zlib.error) as error:
            raise OSError(f"the packed file is damaged or cut off: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values in the lines of a file, each with "file:line"; reads line by line, so files may be large.

    Blank lines are skipped, but counted.

    Raises:
        OSError: the file cannot be read.
        UserError: a line is not JSON; names file and line. `CutLine` if it is the last one and has no line end.
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
    """The value of a JSON text in UTF-8, with or without a byte-order mark.

    Raises:
        UserError: it is not JSON, or an object has a key twice; the message begins with `origin`.
    """
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=without_repeats)
    except UnicodeDecodeError as error:
        raise UserError(f"{origin}: not readable as UTF-8 ({error.reason}); save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # as in "Invalid control character at"
        position = f"column {error.colno}"
        if error.lineno > 1:
            position = f"line {error.lineno} {position}"
        raise UserError(f"{origin}: not valid JSON ({problem} at {position}); correct or remove it.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not readable as JSON ({error}); correct or remove it.") from error


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file that holds JSON Lines, see `json_lines`, or one list of rows: each with "file row number"."""
    if not _is_list(path):
        yield from json_lines(path)
        return
    with opened(path) as stream:
        rows = parse_json(stream.read(), str(path))
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _is_list(path: Path) -> bool:
    """Whether a file holds a list, by its first character."""
    with opened(path) as lines:
        for line in lines:
            content = line.removeprefix(codecs.BOM_UTF8).strip()
            if content:
                return content.startswith(b"[")
    return False


def read_rows(path: Path, flag: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file that a command-line flag named, each with "file:line"; see `iterate_rows`."""
    return list(iterate_rows(path, flag))


def iterate_rows(path: Path, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON Lines or of a list, each with its origin, read one by one.

    Raises:
        UserError: the file is missing, empty or not readable, or a line is not a JSON object; names file and line.
    """
    refuse_pointer(path, flag)
    is_empty = True
    try:
        for origin, row in json_rows(path):
            if not isinstance(row, dict):
                raise UserError(f"{origin}: {type(row).__name__} instead of an object with columns; correct the row.")
            is_empty = False
            yield origin, row
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(f"{flag} {path}: {reason}. Give a .jsonl file.") from error
    if is_empty:
        raise UserError(f"{flag} {path}: the file is empty; give one with at least one row.")


def text_of(row: Mapping[str, Any], column: str, origin: str) -> str:
    """Text of a column. Raises UserError if it is missing or not text."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    problem = f"column {column!r} holds {type(value).__name__}" if column in row else f"no column {column!r}"
    columns = ", ".join(map(repr, row)) or "none"
    raise UserError(f"{origin}: {problem}, text is needed; its columns are {columns}; rename or add one.")


def json_value(value: Any) -> Any:
    """A value for JSON: numbers that are not finite become None, dataclasses objects of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return json_value(vars(value))
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dump_row(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON, with its line end; characters are not escaped."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8") + "\n"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole file, even if other processes write it at the same time. Raises UserError if it cannot."""
    with reporting(str(path)), writing(path, shared=True) as temporary:
        _write(temporary, rows, path)


def write_rows_once(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole file unless there is one; of several processes, the first one's stays. Raises UserError."""
    with reporting(str(path)), writing_once(path) as temporary:
        _write(temporary, rows, path)


def _write(temporary: Path, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes a file that will be called `path`, compressed if that name ends in .gz."""
    with gzip.open(temporary, "wb") if path.suffix == ".gz" else open(temporary, "wb") as file:
        for row in rows:
            file.write(dump_row(row).encode())


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class RepeatedKey(ValueError):
    """A JSON object with a key that occurs twice. The message names the key."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as a hook of `json.loads`; raises RepeatedKey for a repeated key, as TOML does."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RepeatedKey(f"the key {repeated!r} occurs twice")
    return content
