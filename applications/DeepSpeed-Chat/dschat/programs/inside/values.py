# SPDX-License-Identifier: Apache-2.0
"""Converts a function's result to JSON, for the parent to compare.

Tuples, generators, ranges, dict views and other iterables become lists in the order of their iteration, fractions and
decimals numbers. A set, which has no order, and anything else that JSON does not support become an object with the
single key `UNKNOWN`, which equals no expected value. The parent gives no key a meaning: who forges this JSON
achieves no more than by returning the value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

UNKNOWN = "\0type"  # no text of a test contains a zero byte


def json_of(value: object) -> bytes:
    """JSON of a value. Raises any exception of the value's own iterators."""
    return json.dumps(plain(value)).encode()


def plain(value: object) -> object:
    """The value as lists, dictionaries, texts, numbers, booleans and None.

    Example:
        >>> plain({"a": (1, 2), "b": range(2), "c": Fraction(1, 2)})
        {'a': [1, 2], 'b': [0, 1], 'c': 0.5}
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(element) for key, element in value.items()}
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        return {UNKNOWN: type(value).__name__}
    if isinstance(value, Iterable):
        return [plain(element) for element in value]
    return _number(value)


def _number(value: object) -> object:
    from decimal import Decimal  # imported late, so that programs without function start sooner
    from fractions import Fraction

    if not isinstance(value, Fraction | Decimal):
        return {UNKNOWN: type(value).__name__}
    is_whole = math.isfinite(value) and value == int(value)
    return int(value) if is_whole else float(value)


def _key(key: object) -> str | int | float | None:
    if key is None or isinstance(key, str | int | float):
        return key
    return str(key)
