# SPDX-License-Identifier: Apache-2.0
"""Rows of .csv files, whose first line names the columns."""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dschat.common.jsonl import opened
from dschat.errors import UserError


def csv_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the rows of a file hold, each with its place "file:line", the line where it begins.

    Cells are text; an empty one counts as absent (None). Quoted cells may hold commas, line ends and doubled quotes.

    Raises:
        OSError: the file cannot be read.
        UserError: no UTF-8, a broken quote, a column without a name or with another's, or a row of another length.
    """
    csv.field_size_limit(sys.maxsize)
    with opened(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        line = 0
        columns: list[str] | None = None
        try:
            for cells in reader:
                origin, line = f"{file}:{line + 1}", reader.line_num
                if not cells:
                    continue
                if columns is None:
                    columns = _columns(cells, origin)
                elif len(cells) != len(columns):
                    raise UserError(
                        f"{origin}: {len(cells)} cells where the first line names {len(columns)} columns; put texts "
                        "that hold commas, quotes or line ends between double quotes, and double the quotes in them."
                    )
                else:
                    yield origin, {name: cell or None for name, cell in zip(columns, cells, strict=True)}
        except csv.Error as error:
            raise UserError(
                f"{file}:{line + 1}: not readable as CSV ({error}); correct the quotes of that row."
            ) from error
        except UnicodeDecodeError as error:
            with opened(file) as again:  # the reader decodes many lines at a time
                bad = next(n for n, one in enumerate(again, start=1) if one.decode("utf-8", "ignore").encode() != one)
            raise UserError(
                f"{file}:{bad}: not readable as UTF-8 ({error.reason}); save the file as UTF-8."
            ) from error


def _columns(cells: list[str], origin: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len(set(names)) < len(names):
        raise UserError(
            f"{origin}: the first line must name the columns, each by a name of its own, not "
            f"{', '.join(map(repr, names))}; add or correct it."
        )
    return names
