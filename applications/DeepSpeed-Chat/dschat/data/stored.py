# SPDX-License-Identifier: Apache-2.0
"""Examples in Arrow tables, from which each is made when it is asked for: 4 bytes a token, and files that are mapped.

A table has a column for every field of the example's dataclass and one of the examples' lengths in tokens. Fields of
other types than those of TYPES (log-probs that are computed later) are left at their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_type_hints, overload

import pyarrow as pa

from dschat.data.rows import Row

LENGTH = "tokens"  # the column of the lengths
TYPES: dict[object, pa.DataType] = {
    list[int]: pa.list_(pa.int32()),
    list[bool]: pa.list_(pa.bool_()),
    list[float]: pa.list_(pa.float64()),
    str: pa.large_string(),
    int: pa.int64(),
    bool: pa.bool_(),
    float: pa.float64(),
    Row: pa.large_string(),  # as JSON
}

E = TypeVar("E")  # a dataclass


class NotStorable(Exception):
    """A row holds what JSON would change: a date, bytes, a key that is no text."""


def schema_of(kind: type[E]) -> pa.Schema:
    """The columns of a table of such examples.

    Raises:
        NotStorable: a field without default has a type that is not in TYPES.
    """
    hints = get_type_hints(kind)
    columns = [pa.field(LENGTH, pa.int64())]
    for field in fields(kind):  # type: ignore[arg-type]
        kind_of_field = _without_none(hints[field.name])
        if kind_of_field in TYPES:
            note = {"holds": "row"} if kind_of_field is Row else None
            columns.append(pa.field(field.name, TYPES[kind_of_field], metadata=note))
        elif field.default is MISSING:
            raise NotStorable(f"{kind.__name__}.{field.name}")
    return pa.schema(columns)


def _without_none(hint: object) -> object:
    """X of `X | None`; other types as they are."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in get_args(hint) else hint


def to_batch(kind: type[E], examples: Sequence[E], start: int = 0) -> pa.RecordBatch:
    """Examples as a part of a table; `start` is added to their field `index`, if they have one.

    Raises:
        NotStorable: a row cannot be kept.
    """
    schema = schema_of(kind)
    columns = []
    for column in schema:
        if column.name == LENGTH:
            values: list[Any] = [len(example) for example in examples]  # type: ignore[arg-type]
        else:
            values = [getattr(example, column.name) for example in examples]
        if column.metadata:
            values = [row_text(row) for row in values]
        elif column.name == "index":
            values = [start + value for value in values]
        columns.append(pa.array(values, column.type))
    return pa.record_batch(columns, schema)


def row_text(row: Row) -> str:
    """A row as JSON, from which `row_of` makes an equal one.

    Raises:
        NotStorable: it holds what JSON would change.
    """
    if not is_plain(row.extra) or not is_plain(row.messages):
        raise NotStorable(row.origin)
    return json.dumps(vars(row), check_circular=False)


def row_of(text: str) -> Row:
    """The row that `row_text` wrote."""
    return Row(**json.loads(text))


def is_plain(value: object) -> bool:
    """Whether JSON keeps a value as it is."""
    if value is None or type(value) in (str, bool, int, float):
        return True
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) is dict and all(type(name) is str and is_plain(item) for name, item in value.items())


class StoredExamples(Sequence[E], Generic[E]):
    """The examples of a table; each is made when it is asked for."""

    def __init__(self, kind: type[E], table: pa.Table) -> None:
        self._kind, self._table = kind, table
        self._columns = [column for column in table.schema if column.name != LENGTH]

    def __len__(self) -> int:
        """Number of examples."""
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> E: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[E]: ...

    def __getitem__(self, place: int | slice) -> E | Sequence[E]:
        """An example, or those of a slice."""
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            if step != 1:
                return [self[i] for i in range(first, last, step)]
            return StoredExamples(self._kind, self._table.slice(first, max(0, last - first)))
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place += len(self) if place < 0 else 0
        return self._kind(**{column.name: self._value(column, place) for column in self._columns})

    def _value(self, column: pa.Field, place: int) -> Any:
        scalar = self._table[column.name][place]
        if not scalar.is_valid:
            return None
        if column.metadata:
            return row_of(scalar.as_py())
        if not pa.types.is_list(column.type):
            return scalar.as_py()
        return scalar.values.to_numpy(zero_copy_only=False).tolist()

    @property
    def lengths(self) -> list[int]:
        """Tokens of every example, without making it."""
        return list(self._table[LENGTH].to_numpy().tolist())


def lengths_of(examples: Sequence[Any]) -> list[int]:
    """Tokens of every example."""
    return examples.lengths if isinstance(examples, StoredExamples) else [len(example) for example in examples]


def table_of(kind: type[E], batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """A table in memory."""
    return pa.Table.from_batches(batches, schema_of(kind))
